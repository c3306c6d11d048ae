"""The plan of a program over ranks: who has what, and what a step sends, before a byte moves.

The steps themselves are run on tensors without memory, behind a transport that sends nothing; so a plan cannot differ
from what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import functional as F
from ..functional import tree
from ..sharding import Event, Mesh, Trace
from ..sharding.classes import Dry
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
    it, by name; none where experts are dealt out, of which only the router says who sends what."""

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

    __repr__ = __str__


def make_rank_plan(model: Model, ranks: Ranks, sizes: Sizes, dtype: torch.dtype) -> RankPlan:
    """model: the rank's own. sizes: of all ranks."""
    axes, rank, meta = ranks.mesh.axes, ranks.mesh.rank, torch.device("meta")
    trace = Trace(Mesh(**dict(axes)).at(rank, Dry(axes, rank)))
    dry, own = Ranks(ranks.config, trace.mesh, ranks.layout, meta), ranks.sizes(sizes)
    fp32 = tree.fp32_paths(model.params)
    leaves = {
        path: torch.empty_like(leaf, dtype=computed_dtype(leaf.dtype, dtype, path in fp32), device=meta)
        for path, leaf in tree.paths(model.params).items()
    }
    params: F.Decoder = tree.replace(model.params, leaves)
    caches = dry.caches(sizes, dtype)
    steps = make_steps(model.config, dry.seam(tree.structure(params), tree.structure(caches)))
    part, phases = dry.vocabulary, {}
    for name in ("prefill", "decode") if not ranks.deals else ():
        trace.clear()
        _, *rest = own.idle(name, model.config, dtype, meta)
        state = State.empty(own.batch, part.stop - part.start, dtype, meta)
        with torch.no_grad():
            steps[name](*packed(params, caches), state, *rest)
        phases[name] = tuple(trace)
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
        num_parameters=sum(leaf.numel() for leaf in leaves.values()),
        weights=sum(leaf.numel() * leaf.itemsize for leaf in leaves.values()),
        cache=sum(leaf.numel() * leaf.itemsize for each in caches for leaf in tree.leaves(each)),
        cache_text=cache_text(caches),
        phases=phases,
    )
