"""The plan of a program over ranks: who has what, and what a step sends, before a byte moves.

The steps themselves are run on tensors without memory, behind a transport that sends nothing; so a plan cannot differ
from what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..sharding import Event, Mesh, Trace
from ..sharding.classes import Dry
from .handover import Handover
from .model import Model, count_text
from .ranks import Ranks
from .report import cache_text
from .rows import size_text
from .sizes import Sizes
from .steps import State, make_steps, packed
from .weights import computed_dtype

__all__ = ["RankPlan", "make_rank_plan"]


@dataclass(frozen=True)
class RankPlan:
    """print(plan) is its text. weights, cache: bytes of this rank. phases: what a call of each sends, as a trace has
    it, by name; none where experts are dealt out, of which only the router says who sends what.

    reading: where prompts are read by a layout of their own, what is said of it: its name, bytes of weights and of
    caches; "hand-over" is then a phase, once for prompts of max_len tokens.
    """

    model: str
    mesh: str
    rank: int
    layout: str
    facts: tuple[str, ...]
    num_parameters: int
    weights: int
    cache: int
    cache_text: str
    phases: Mapping[str, tuple[Event, ...]]
    reading: tuple[str, int, int] | None = None

    def bytes(self, phase: str) -> tuple[int, int]:
        """That a call of a phase sends and receives."""
        events = self.phases[phase]
        return sum(e.sent for e in events), sum(e.received for e in events)

    def __str__(self) -> str:
        lines = [
            f"program {self.model}   {'   '.join(self.facts)}",
            f"  mesh     {self.mesh}, rank {self.rank}",
            f"  layout   {self.layout}",
            f"  weights  {count_text(self.num_parameters)} parameters, {size_text(self.weights)} on this rank",
            f"  cache    {size_text(self.cache)} on this rank, {self.cache_text}",
            *self._reading_lines(),
            "  runs     eagerly",
            "  choice   the most likely token, of three numbers a rank; with sampling options 3 top_k + 1 more",
        ]
        lines += (
            [] if self.phases else ["  sends    what the choice of experts says, step by step; sharding.trace has it"]
        )
        for name, events in self.phases.items():
            found: dict[tuple[str, ...], list[int]] = {}
            for e in events:
                if e.what == "launch":
                    row = found.setdefault((e.kind, "/".join(e.axes), e.call.title), [0, 0, 0])
                    row[:] = [row[0] + 1, row[1] + e.sent, row[2] + e.received]
            count, (sent, received) = sum(n for n, _, _ in found.values()), self.bytes(name)
            lines += ["", f"{name}   {count} exchanges, sends {size_text(sent)}, receives {size_text(received)}"]
            table = [
                (kind, f"over {axes}", what, f"x{n}", size_text(s)) for (kind, axes, what), (n, s, _) in found.items()
            ]
            widths = [max(len(line[i]) for line in table) for i in range(5)] if table else []
            for line in table:
                cells = [
                    cell.rjust(w) if i > 2 else cell.ljust(w)
                    for i, (cell, w) in enumerate(zip(line, widths, strict=True))
                ]
                lines.append("  " + "  ".join(cells))
        return "\n".join(lines)

    def _reading_lines(self) -> list[str]:
        if self.reading is None:
            return []
        layout, weights, cache = self.reading
        others = f"with {size_text(weights)} of weights, parts of the model that was given" if weights else ""
        return [
            f"  prompts  {layout}",
            f"           {others or 'with the same weights'}; caches of {size_text(cache)} more while they are read",
        ]

    __repr__ = __str__


def make_rank_plan(
    model: Model, ranks: Ranks, reading: Ranks, read: F.Decoder, sizes: Sizes, dtype: torch.dtype
) -> RankPlan:
    """model: the rank's own. reading, read: by which prompts are read, and the parameters for that; those of `ranks`
    and `model` where these do. sizes: of all ranks."""
    axes, rank, meta = ranks.mesh.axes, ranks.mesh.rank, torch.device("meta")
    trace = Trace(Mesh(**dict(axes)).at(rank, Dry(axes, rank)))
    dry, dry_read = (Ranks(each.config, trace.mesh, each.layout, meta) for each in (ranks, reading))
    params, params_read = (_like(each, dtype) for each in (model.params, read))
    caches, caches_read = dry.caches(sizes, dtype), dry_read.caches(sizes, dtype)
    phases: dict[str, tuple[Event, ...]] = {}
    plans = {"prefill": (dry_read, params_read, caches_read), "decode": (dry, params, caches)}
    with torch.no_grad():
        for name, (each, weights, kept) in plans.items() if not ranks.deals else ():
            trace.clear()
            own = each.sizes(sizes)
            _, *rest = own.idle(name, model.config, dtype, meta)
            steps = make_steps(model.config, each.seam(tree.structure(weights), tree.structure(kept)))
            steps[name](*packed(weights, kept), _idle(each, own, dtype), *rest)
            phases[name] = tuple(trace)
        if reading is not ranks:
            trace.clear()
            over, rows = Handover(dry_read, dry, sizes), dry_read.sizes(sizes).batch
            over.caches(packed(params_read, caches_read)[1], caches, [sizes.max_len] * rows)
            begun, state = (_idle(each, each.sizes(sizes), dtype) for each in (dry_read, dry))
            over.state(begun, state, [sizes.max_len] * rows)
            phases["hand-over"] = tuple(trace)
    kept_read = sum(_bytes(leaf) for each in caches_read for leaf in tree.leaves(each))
    apart = sum(map(_bytes, tree.leaves(params_read))) if read is not model.params else 0
    return RankPlan(
        model=model.name,
        mesh=str(ranks.mesh),
        rank=rank,
        layout=ranks.layout.name,
        facts=(
            str(dtype).removeprefix("torch."),
            f"batch {sizes.batch}",
            f"max_len {sizes.max_len}",
            f"chunk {sizes.chunk}",
        ),
        num_parameters=sum(leaf.numel() for leaf in tree.leaves(params)),
        weights=sum(map(_bytes, tree.leaves(params))),
        cache=sum(_bytes(leaf) for each in caches for leaf in tree.leaves(each)),
        cache_text=cache_text(caches),
        phases=phases,
        reading=None if reading is ranks else (reading.layout.name, apart, kept_read),
    )


def _like(params: F.Decoder, dtype: torch.dtype) -> F.Decoder:
    """Parameters as they are computed with, without memory."""
    fp32 = tree.fp32_paths(params)
    leaves = {
        path: torch.empty_like(leaf, dtype=computed_dtype(leaf.dtype, dtype, path in fp32), device="meta")
        for path, leaf in tree.paths(params).items()
    }
    found: F.Decoder = tree.replace(params, leaves)
    return found


def _idle(ranks: Ranks, own: Sizes, dtype: torch.dtype) -> State:
    part = ranks.vocabulary
    return State.empty(own.batch, part.stop - part.start, dtype, "meta")


def _bytes(leaf: Tensor) -> int:
    return leaf.numel() * leaf.itemsize
