"""The plan of a program over ranks: who has what, and what a step sends, before a byte moves.

The steps themselves are run on tensors without memory, behind a transport that sends nothing; and where they are
compiled, their graphs are read. So a plan cannot differ from what runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import functional as F
from ..functional import tree
from ..sharding import Event, Mesh, Trace
from ..sharding.classes import Dry
from ..sharding.opaque import Port
from .agreement import COLUMNS
from .captured import KINDS
from .copies import Copies
from .generate import turns_of
from .handover import Handover, all_held
from .kernel import Kernel
from .model import Model, count_text
from .pair_sums import PairSums
from .rank_steps import compiled_seam, eager_seam
from .ranks import Ranks
from .report import PhasePlan, abstract_params, beside_note, cache_text, launch_lines, phase_plan, titled
from .rows import size_text
from .sizes import Sizes, Target
from .steps import make_steps, packed

__all__ = ["RankPlan", "make_rank_plan"]

# How a token is chosen, where ranks have parts of the vocabulary, and where each has all of it.
_OF_PARTS = "the most likely token, of three numbers a rank; with sampling options 3 top_k + 1 more"
_OF_WHOLE = "the most likely token, or what sampling options ask for, of logits that a rank has whole"


class Reading(NamedTuple):
    """How prompts are read. weights: bytes of those that are not decoded with; converted: of copies among them. cache:
    bytes, held while prompts are read."""

    layout: str
    weights: int
    converted: int
    cache: int

    def lines(self) -> tuple[str, str]:
        whose = "parts of the model that was given"
        if self.converted:
            whose = f"{size_text(self.converted)} of it converted copies"
        weights = f"{size_text(self.weights)} of weights, {whose}" if self.weights else "the same weights"
        return self.layout, f"with {weights}; caches of {size_text(self.cache)} more while they are read"


@dataclass(frozen=True)
class RankPlan:
    """print(plan) is its text. weights, cache: bytes of this rank; converted: of weights, those of converted copies.
    shared: of weights that other ranks hold too, which are read when these are compared. phases: what a call of each
    sends, as a trace has it, by name, with the agreement before it, which `generate` has once; none where experts are
    dealt out, of which only the router says who sends what. why_eager: None where steps are compiled; then `steps` has
    a plan of each, node by node, which is traced when it is asked for. launches: how decode steps are, in lines, but on
    a CPU. reading: where prompts are read by a layout of their own; "hand-over" is then a phase, once for prompts of
    max_len tokens."""

    model: str
    mesh: str
    rank: int
    layout: str
    facts: tuple[str, ...]
    num_parameters: int
    weights: int
    converted: int
    cache: int
    cache_text: str
    shared: int
    choice: str
    phases: Mapping[str, tuple[Event, ...]]
    # Who adds up over tp, None where nobody does; and by what, sum by sum of a phase.
    sums: str | None
    summed_by: Mapping[str, tuple[str, ...]]
    why_eager: str | None
    launches: tuple[str, ...]
    reading: Reading | None
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
            f"  weights  {count_text(self.num_parameters)} parameters, {size_text(self.weights)} on this rank"
            + (f", {size_text(self.converted)} of it converted copies" if self.converted else ""),
            f"  cache    {size_text(self.cache)} on this rank, {self.cache_text}",
            *(titled("prompts", self.reading.lines()) if self.reading else ()),
            "  runs     " + ("compiled, one graph a step" if self.why_eager is None else f"eagerly: {self.why_eager}"),
            f"  agrees   once a call; on {size_text(self.shared)} of weights, which other ranks hold too, when these "
            "may have changed",
            f"  choice   {self.choice}",
        ]
        lines += titled("steps", self.launches)
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
    by: tuple[tuple[Ranks, F.Decoder], tuple[Ranks, F.Decoder]],
    sizes: Sizes,
    target: Target,
    kernels: Sequence[Kernel],
    how: tuple[str | None, str | None],
    sums: PairSums,
) -> RankPlan:
    """model: the rank's own. by: what a rank decodes by, and with which parameters; and what prompts are read by, which
    may be the same. sizes: of all ranks. how: why steps are not compiled, and why not captured on a device that could,
    or None."""
    (ranks, params), (reading, params_read) = by
    why_eager, _ = how
    apart = params_read is not params
    held = Copies(*all_held(*by), ranks.agreement).bytes
    axes, rank, dtype = ranks.mesh.axes, ranks.mesh.rank, target.dtype
    transport = sums.dry(Dry(axes, rank))
    trace = Trace(Mesh(**dict(axes)).at(rank, transport))
    dry, dry_read = (Ranks(each.config, trace.mesh, each.layout, torch.device("meta")) for each in (ranks, reading))
    own_params = params
    (params, moved), (params_read, moved_read) = (
        abstract_params(dataclasses.replace(model, params=each), target) for each in (params, params_read)
    )
    caches, caches_read = dry.caches(sizes, dtype), dry_read.caches(sizes, dtype)
    used = {"prefill": (dry_read, params_read, caches_read), "decode": (dry, params, caches)}
    inputs = {
        name: each.idle(each.sizes(sizes).idle(name, model.config, dtype, "meta"), dtype)
        for name, (each, _, _) in used.items()
    }
    phases: dict[str, tuple[Event, ...]] = {}
    summed_by: dict[str, tuple[str, ...]] = {}
    for name, (each, weights, kept) in used.items() if not ranks.deals else ():
        trace.clear()
        steps = make_steps(model.config, eager_seam(each, tree.structure(weights), tree.structure(kept)))
        with torch.no_grad():
            dry.agreement.exchange([0] * COLUMNS)
            steps[name](*packed(weights, kept), *inputs[name])
        phases[name], summed_by[name] = tuple(trace), transport.taken()
    if reading is not ranks and not ranks.deals:
        trace.clear()
        over, rows = Handover(dry_read, dry, sizes), dry_read.sizes(sizes).batch
        over.caches(packed(params_read, caches_read)[1], caches, [sizes.max_len] * rows)
        over.state(dry_read.state(rows, dtype), dry.state(dry.sizes(sizes).batch, dtype), [sizes.max_len] * rows)
        phases["hand-over"], summed_by["hand-over"] = tuple(trace), transport.taken()

    def traced() -> dict[str, PhasePlan]:
        port, own = Port(trace.mesh), ranks.sizes(sizes)
        compiled = make_steps(model.config, compiled_seam(dry, port.mesh, own.chunk))
        found = {
            name: phase_plan(name, compiled[name], params, caches, given, own, target, kernels)
            for name, given in inputs.items()
        }
        port.close()
        return {
            name: dataclasses.replace(each, notes=(*each.notes, *beside_note(each, own_params, moved)))
            for name, each in found.items()
        }

    def bytes_of(of: Any) -> int:
        return sum(leaf.numel() * leaf.itemsize for leaf in tree.leaves(of))

    def converted(of: F.Decoder, moved: set[str]) -> int:
        return bytes_of({path: leaf for path, leaf in tree.paths(of).items() if path in moved})

    read = Reading(
        layout=reading.layout.name,
        weights=bytes_of(params_read) if apart else 0,
        converted=converted(params_read, moved_read) if apart else 0,
        cache=bytes_of(caches_read),
    )
    split = ranks.choice.own("Z") is not None
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
        weights=bytes_of(params),
        converted=converted(params, moved),
        cache=bytes_of(caches),
        cache_text=cache_text(caches),
        shared=held,
        choice=_OF_PARTS if split else _OF_WHOLE,
        phases=phases,
        sums=str(sums) if sums.summed else None,
        summed_by=summed_by,
        why_eager=why_eager,
        launches=_launches(model, sizes, target, how, sums.limit_s, split),
        reading=None if reading is ranks else read,
        trace=traced,
    )


def _launches(
    model: Model, sizes: Sizes, target: Target, how: tuple[str | None, str | None], limit_s: float, split: bool
) -> tuple[str, ...]:
    why_eager, why_calls = how
    if why_eager is not None or target.device == "cpu":
        return ()
    if why_calls is not None:
        return (f"one call each, nothing captured: {why_calls}",)
    lines = launch_lines(target, sizes, True, bool(turns_of(model.config)))
    kinds = (f"options have a graph for each top_k; after {KINDS} of these all are captured again",) if split else ()
    inside = f"exchanges and choice are inside; the host waits for each launch, {limit_s:g} s at most"
    return (*lines, *kinds, inside)
