"""Layouts of whole models: experts dealt out over ranks, and parameters kept in parts.

Which rows go where is known when a router has chosen, and no sooner: so the ranks tell each other how many each expert
gets from whom, and then send as many. Nothing is padded, and nothing left out.

Letters: M rows, D model width, X experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import shards
from .errors import SpecError
from .layouts import Layout
from .mesh import Axes, Mesh, ranks_of, size_of
from .moves import Move, Side, adjoint
from .reshard import call_of, check_transport, exchanged, noted, reshard
from .spec import Spec, parse

__all__ = ["deal", "spread"]


def spread(layout: Layout, *, experts: str | None = None, parameters: str | None = None) -> Layout:
    """A layout for a whole model, which needs no rank to hold all of it: `spread(hybrid(tp="tp", dp="dp"),
    experts="ep", parameters="dp")`.

    experts: an axis over which experts are dealt out, as their fields say `X/ep`; it splits the rows of the batch as
    well, within what splits them already, and a row's tokens go to the ranks of their experts and back. parameters: an
    axis that splits rows, over which the parameters whose fields say `D/dp` are kept in parts: each block gathers its
    own when it begins, and their gradients come back scattered. What it gathered lives until its gradients are there;
    recomputed (`torch.utils.checkpoint` around the `layer` that `decoder` is given), until it ends.

    Raises `SpecError` for axes that do not do that.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"spread(layout): a Layout is needed, not {type(layout).__name__}")
    chains, said = dict(layout.chains), []
    if experts is not None:
        if experts in layout.axes:
            raise SpecError(
                f'spread(experts="{experts}"): {layout.name} has that axis for something else',
                fix='an axis of its own, such as "ep"',
            )
        chains = {edge: tuple(_rows(text, experts, edge) for text in chain) for edge, chain in chains.items()}
        chains["experts"] = (f"X/{experts}",)
        said.append(f'experts="{experts}"')
    if parameters is not None:
        over = next((a.axes for a in parse(chains["x" if "x" in chains else "q"][0]).atoms if a.name == "B"), ())
        if parameters not in over:
            rows = "/".join(("B", *over))
            raise SpecError(
                f'spread(parameters="{parameters}"): {layout.name} splits rows as {rows}, and ranks that share rows '
                "need no parts of parameters to be gathered",
                fix=f'dp="{parameters}" in the layout, or another axis',
            )  # fmt: skip
        chains["parameters"] = (f"D/{parameters}", "D")
        said.append(f'parameters="{parameters}"')
    name = f"{layout.name} spread({', '.join(said)})"
    return replace(layout, name=name, edges=tuple(chains.items()))


def _rows(text: str, axis: str, edge: str) -> str:
    """A spec with an axis more that splits the rows of the batch; of a loss, over which it is a pending sum."""
    spec = parse(text)
    dims = tuple(tuple(replace(a, axes=(*a.axes, axis)) if a.name == "B" else a for a in dim) for dim in spec.dims)
    partial = (*spec.partial, axis) if edge.rpartition(".")[2] == "loss" else spec.partial
    return str(Spec(dims, tuple(sorted(partial))))


def deal(
    rows: Tensor, counts: Tensor, over: tuple[str, ...], axes: Axes, mesh: Mesh
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """`Wire.deal`. over: the axes that split experts."""
    if torch.compiler.is_compiling():
        raise RuntimeError("how many rows an expert gets is known when it gets them, which cannot be compiled")
    over = tuple(axis for axis in over if size_of(axes, axis) > 1)
    group = ranks_of(axes, over, mesh.rank)
    size, me = counts.shape[0], group.index(mesh.rank)
    first = f"P/{'/'.join(over)} X"
    by_expert = reshard(counts[None], f"{first} -> P X", mesh, P=len(group))
    bounds = [shards.balanced(size, len(group), i) for i in range(len(group))]
    traffic = [[sum(of_rank[a:b]) for a, b in bounds] for of_rank in by_expert.tolist()]
    move = _exchange(traffic[me], [of_rank[me] for of_rank in traffic], over, me)
    there, back = partial(_sent, move, mesh), partial(_sent, adjoint(move), mesh)
    a, b = bounds[me]
    return there(rows, "rows to experts"), by_expert[:, a:b], lambda y: back(y, "rows from experts")


def _sent(move: Move, mesh: Mesh, rows: Tensor, what: str) -> Tensor:
    check_transport(mesh)
    call = call_of((rows,), what, (what,))
    return noted(exchanged((rows,), (move,), (adjoint(move),), call, mesh), mesh)[0]


def _exchange(sends: Sequence[int], receives: Sequence[int], over: tuple[str, ...], me: int) -> Move:
    """Rows that lie by the member that they go to, exchanged for rows by the member that they come from."""
    return Move("all-to-all", over, len(sends), me, source=_side(receives), target=_side(sends))


def _side(lengths: Sequence[int]) -> Side:
    parts, at = [], 0
    for n in lengths:
        parts.append(((at, at + n),) if n else ())
        at += n
    layout = "even" if len(set(lengths)) == 1 else "tiles"
    return Side(0, at, tuple(parts), tuple(parts), False, tuple(lengths), layout, True)
