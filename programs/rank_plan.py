"""The plan of a program over ranks: who has what, and what a step sends, before a byte moves.

The steps themselves are run on tensors without memory, behind a transport that sends nothing; and where they are
compiled, their graphs are read. So a plan cannot differ from what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..functional import tree
from ..sharding import Event, Mesh, Trace
from ..sharding.classes import Dry
from ..sharding.opaque import Port
from .agreement import COLUMNS
from .copies import Copies
from .kernel import Kernel
from .model import Model, count_text
from .pair_sums import PairSums
from .rank_steps import compiled_seam
from .ranks import Ranks
from .report import PhasePlan, abstract_params, cache_text, phase_plan
from .rows import size_text
from .sizes import Sizes, Target
from .steps import make_steps, packed

__all__ = ["RankPlan", "make_rank_plan"]


@dataclass(frozen=True)
class RankPlan:
    """print(plan) is its text. weights, cache: bytes of this rank. shared: of weights that other ranks hold too, which
    are read when these are compared. phases: what a call of each sends, as a trace has it, by name, with the agreement
    before it, which `generate` has once; none where experts are dealt out, of which only the router says who sends
    what. why_eager: None where steps are compiled; then `steps` has a plan of each, node by node, which is traced when
    it is asked for."""

    model: str
    mesh: str
    rank: int
    layout: str
    facts: tuple[str, ...]
    num_parameters: int
    weights: int
    cache: int
    cache_text: str
    shared: int
    phases: Mapping[str, tuple[Event, ...]]
    # Who adds up over tp, None where nobody does; and by what, sum by sum of a phase.
    sums: str | None
    summed_by: Mapping[str, tuple[str, ...]]
    why_eager: str | None
    trace: Callable[[], Mapping[str, PhasePlan]] = field(compare=False)

    @functools.cached_property
    def steps(self) -> Mapping[str, PhasePlan]:
        return self.trace() if self.why_eager is None else {}

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
            "  runs     " + ("compiled, one graph a step" if self.why_eager is None else f"eagerly: {self.why_eager}"),
            f"  agrees   once a call; on {size_text(self.shared)} of weights, which other ranks hold too, when these "
            "may have changed",
            "  choice   the most likely token, of three numbers a rank; with sampling options 3 top_k + 1 more",
        ]
        lines += [] if self.sums is None else [f"  sums     {self.sums}"]
        lines += (
            [] if self.phases else ["  sends    what the choice of experts says, step by step; sharding.trace has it"]
        )
        for name, events in self.phases.items():
            found: dict[tuple[str, ...], list[int]] = {}
            by = iter(self.summed_by[name])
            for e in events:
                if e.what == "launch":
                    kind = next(by) if e.kind == "all-reduce" else e.kind
                    row = found.setdefault((kind, "/".join(e.axes), e.call.title), [0, 0, 0])
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
            if name in self.steps:
                step = self.steps[name]
                lines += ["", f"{name} of this rank   {step.header}"]
                lines += [*(f"  {note}" for note in step.notes), *step.lines()]
        return "\n".join(lines)

    __repr__ = __str__


def make_rank_plan(
    model: Model,
    ranks: Ranks,
    sizes: Sizes,
    target: Target,
    kernels: Sequence[Kernel],
    why_eager: str | None,
    sums: PairSums,
) -> RankPlan:
    """model: the rank's own. sizes: of all ranks."""
    axes, rank, dtype = ranks.mesh.axes, ranks.mesh.rank, target.dtype
    transport = sums.dry(Dry(axes, rank))
    trace = Trace(Mesh(**dict(axes)).at(rank, transport))
    dry, own = Ranks(ranks.given, trace.mesh, ranks.layout, torch.device("meta")), ranks.sizes(sizes)
    params, _ = abstract_params(model, target)
    caches = dry.caches(sizes, dtype)
    inputs = {name: dry.idle(own.idle(name, model.config, dtype, "meta"), dtype) for name in ("prefill", "decode")}
    eager = make_steps(model.config, dry.seam(tree.structure(params), tree.structure(caches)))
    phases, summed_by = {}, {}
    for name in inputs if not ranks.deals else ():
        trace.clear()
        with torch.no_grad():
            dry.agreement.exchange([0] * COLUMNS)
            eager[name](*packed(params, caches), *inputs[name])
        phases[name] = tuple(trace)
        summed_by[name] = transport.taken()

    def traced() -> dict[str, PhasePlan]:
        port = Port(trace.mesh)
        compiled = make_steps(model.config, compiled_seam(dry, port.mesh, own.chunk))
        found = {
            name: phase_plan(name, compiled[name], params, caches, given, own, target, kernels)
            for name, given in inputs.items()
        }
        port.close()
        return found

    leaves = tree.leaves(params)
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
        num_parameters=sum(leaf.numel() for leaf in leaves),
        weights=sum(leaf.numel() * leaf.itemsize for leaf in leaves),
        cache=sum(leaf.numel() * leaf.itemsize for each in caches for leaf in tree.leaves(each)),
        cache_text=cache_text(caches),
        shared=Copies(ranks.lies(params), tree.paths(params), ranks.agreement).bytes,
        phases=phases,
        sums=str(sums) if sums.summed else None,
        summed_by=summed_by,
        why_eager=why_eager,
        trace=traced,
    )
