"""The stages of a layer without its arithmetic: what they hand to the wire and keep, on tensors without memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rules
from .mesh import Mesh
from .schedules import Schedule
from .spec import parse
from .wires import LayoutWire

__all__ = ["forward"]

Note = Callable[[str, bool], None]  # of what is computed, and whether in backward


def forward(
    wire: LayoutWire, schedule: Schedule, mesh: Mesh, rank: int, sizes: Mapping[str, int], here: dict[str, Tensor],
    note: Note, around: Sequence[str],
) -> tuple[Tensor, int | None, int, int | None]:  # fmt: skip
    """What ends the layer, how many heads keys have of their own, multiplications of a token in what is projected on
    the way, and of how many tokens, None where it is those that are seen.

    here: what comes in; it is left empty, so that backward finds what autograd keeps and no more. around: of `x` and
    `out`, what moves.
    """
    sent: dict[tuple[str, ...], Any] = {}
    meanwhile: list[Tensor] = []
    project: Any = None
    projection, tokens = 0, None

    def local(name: str) -> tuple[int, ...]:
        return parse(wire.edges[name][0]).local(sizes, mesh, rank)

    if "x" in here:
        x = wire.pass_(x=here.pop("x"))
        here |= {name: _Stage.apply(local(name), x.dtype, None, x) for name in schedule.inputs}
        del x
    for step in schedule.steps:
        given = {name: here[name] for name in step.edges if name in here}
        if step.what == "send":
            sent[step.edges] = wire.send(**given)
        elif step.what == "receive":
            found = wire.receive(*(sent.pop(group) for group in [*sent] if {*group} <= {*step.of}), **given)
            here |= dict(zip((*step.edges, *step.of), found, strict=True))
        elif step.what == "pass":
            here[step.edges[0]] = wire.pass_(**given)
        elif step.what == "project":
            project = wire.projection(here[step.edges[0]])
        elif step.what == "meanwhile":
            said = functools.partial(note, f"project {','.join(step.edges)}")
            meanwhile.append(_Meanwhile.apply(said, here[schedule.inputs[0]]))
        else:
            (name, *more), of = step.edges, [here[each] for each in step.of]
            if step.what == "make":
                keys = of[0].shape[rules.place(wire.edges[step.of[0]][-1], "S")]
                sizes = {**sizes, "T": keys}
                whole = any(atom.name == "T" for atom in parse(wire.edges[name][0]).atoms)
                tokens = None if whole else keys
                projection = of[1].shape[0] * of[1].shape[1]
                here[name] = project(of[0]).unflatten(-1, local(name)[-2:])
            else:
                what: Callable[[bool], None] | None
                what = functools.partial(note, "states" if "summary" in step.of else "core")
                for each in (name, *more):
                    wide = each in schedule.wide
                    dtype = torch.promote_types(of[0].dtype, torch.float32) if wide else of[0].dtype
                    here[each], what = _Stage.apply(local(each), dtype, what, *of), None
        given.clear()
    end = here["o"]
    if "out" in around:
        end = wire.pass_(out=_Stage.apply(local("out"), end.dtype, None, end))
    kv_heads = here["k"].shape[rules.place(wire.edges["k"][-1], "K")] if "k" in here else None
    here.clear()
    return _Stage.apply((0,), end.dtype, None, end, *meanwhile), kv_heads, projection, tokens


class _Stage(torch.autograd.Function):
    """What stands between the exchanges, and behind the last: a result of the right shape, and gradients of everything.
    What it reads is kept until then. said: notes that it is computed, and in backward its gradients."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, said: Callable[[bool], None] | None, *xs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*xs)
        ctx.said = said
        if said is not None:
            said(False)
        return xs[0].new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.said is not None:
            ctx.said(True)
        return None, None, None, *map(torch.empty_like, ctx.saved_tensors)


class _Meanwhile(torch.autograd.Function):
    """A projection of activations which no edge waits for: that it is made, and its gradients. It holds nothing."""

    @staticmethod
    def forward(ctx: Any, said: Callable[[bool], None], x: Tensor) -> Tensor:
        ctx.said = said
        said(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        ctx.said(True)
        return None, None
