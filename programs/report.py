"""The plan of a program: what will run, node by node, before anything does.

Computed from the Dynamo graphs of abstract parameters, so it needs neither weights nor the device.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from ..functional.mla import is_absorbed
from ..kernels_cuda import sample_options
from . import dynamo
from .beside import beside_text
from .captured import launch_steps
from .generate import CHECK_EVERY, turns_of
from .graph import Graph, LeafPaths, shape_text
from .kernel import Kernel
from .launches import launch_notes
from .lower import join_all, lower
from .model import Model, count_text
from .replay import replay_of
from .rows import PlanBlock, PlanRow, Reader, bytes_of, ranges, size_text
from .sizes import Sizes, Target
from .steps import make_steps, packed
from .weights import computed_dtype

__all__ = [
    "PhasePlan",
    "Plan",
    "PlanRow",
    "abstract_params",
    "beside_note",
    "launch_lines",
    "make_plan",
    "phase_plan",
    "titled",
]


@dataclass(frozen=True)
class PhasePlan:
    """notes: which way layers of latent attention are computed; on a GPU how many launches there are. left: a line for
    each primitive that has no kernel. graph: with the kernels in place."""

    name: str
    header: str
    notes: tuple[str, ...]
    blocks: tuple[PlanBlock, ...]
    left: list[str]
    graph: Graph

    def _total(self, what: str) -> int:
        return sum(block.repeats * block.total(what) for block in self.blocks)

    def lines(self, who: str | None = None) -> list[str]:
        """A line a node, under one a block. who: computes all of them, if it is no kernel."""
        table = [row for block in self.blocks for row in block.rows]
        widths = [max(len(getattr(r, a)) for r in table) for a in ("names", "op", "shape")]
        found = []
        for block in self.blocks:
            found.append(f"  {block}")
            for r in block.rows:
                cells = [r.names.ljust(widths[0]), r.op.ljust(widths[1]), r.shape.ljust(widths[2])]
                moved = f"writes   {size_text(r.writes):>10}" if r.writes else r.all_reads
                found.append(f"    {'  '.join(cells)}  {moved:19}  {who or r.kernel}".rstrip())
        return found

    @property
    def reads(self) -> int:
        """Bytes of parameters that one call reads."""
        return self._total("reads")

    @property
    def state(self) -> int:
        """Bytes of states that one call reads, whatever the context."""
        return self._total("state")

    @property
    def context(self) -> int:
        """Bytes of a full cache that one call reads."""
        return self._total("context")

    @property
    def writes(self) -> int:
        """Bytes of cache that one call writes, with every row active."""
        return self._total("writes")


@dataclass(frozen=True)
class Plan:
    """print(plan) is its text. Sizes are bytes unless they say otherwise. copies: the leaves of which converted copies
    are kept, a line for each conversion. steps: how decode steps are launched, in lines."""

    model: str
    target: Target
    sizes: Sizes
    compiled: bool
    num_parameters: int
    weights: int
    converted: int
    cache: int
    cache_text: str
    dropout: str
    copies: tuple[str, ...]
    steps: tuple[str, ...]
    phases: Mapping[str, PhasePlan]

    def __str__(self) -> str:
        s = self.sizes
        whose = (
            f"{size_text(self.converted)} of it converted copies, refreshed in place before each call"
            if self.converted
            else "read where the model keeps them"
        )
        decode = self.phases["decode"]
        how = "" if self.compiled else " eager"
        logits = torch.empty(1, 1, dtype=self.target.dtype, device="meta")
        choice = "eagerly" if sample_options.supports(logits, self.target.compiled_for) else "by one kernel"
        lines = [
            f"program {self.model}   {self.target}{how}   batch {s.batch}   max_len {s.max_len}   chunk {s.chunk}",
            f"  weights  {count_text(self.num_parameters)} parameters, {size_text(self.weights)}, {whose}",
            *titled("copies", self.copies),
            f"  cache    {size_text(self.cache)}, {self.cache_text}, "
            + ("written in place" if self.compiled else "copied whole by each call"),
            *([f"  dropout  {self.dropout}, which inference leaves out"] if self.dropout else []),
            f"  choice   the most likely token, at the end of a step; with sampling options after it, {choice}",
            *titled("steps", self.steps),
        ]
        for phase in self.phases.values():
            lines += ["", f"{phase.name}   {phase.header}", *(f"  {note}" for note in phase.notes)]
            lines += phase.lines(None if self.compiled else "eager")
        read = [f"{size_text(decode.reads)} of weights"]
        read += [f"{size_text(decode.state)} of states"] if decode.state else []
        read += [f"at most {size_text(decode.context)} of cache"] if decode.context else []
        text = " and ".join([*([", ".join(read[:-1])] if read[1:] else []), read[-1]])
        always = decode.reads + decode.state + decode.writes
        bound = f"bound: {_rate(always + decode.context)} steps a second for each GB/s of memory bandwidth"
        return "\n".join(
            [
                *lines,
                "",
                f"a decode step reads {text}, and writes {size_text(decode.writes)}",
                bound + (f", cache full; {_rate(always)}, cache empty" if decode.context else ", at any context"),
            ]
        )

    __repr__ = __str__


def make_plan(model: Model, target: Target, sizes: Sizes, kernels: Sequence[Kernel], compiled: bool) -> Plan:
    """Trace prefill and decode of the model on the meta device and read the plan from the graphs."""
    params, moved = abstract_params(model, target)
    steps = make_steps(model.config)
    caches = sizes.caches(model.config, target.dtype, "meta")
    phases = {}
    for name in ("prefill", "decode"):
        inputs = sizes.idle(name, model.config, target.dtype, "meta")
        found = phase_plan(name, steps[name], params, caches, inputs, sizes, target, kernels, in_place=compiled)
        ways = _ways(model.config, sizes, sizes.chunk if name == "prefill" else 1, target.dtype)
        phases[name] = dataclasses.replace(found, notes=(*ways, *found.notes, *beside_note(found, model.params, moved)))
    return Plan(
        model=model.name,
        target=target,
        sizes=sizes,
        compiled=compiled,
        num_parameters=model.num_parameters,
        weights=sum(bytes_of(leaf) for leaf in tree.leaves(params)),
        converted=sum(bytes_of(leaf) for path, leaf in tree.paths(params).items() if path in moved),
        cache=sum(bytes_of(leaf) for cache in caches for leaf in tree.leaves(cache)),
        cache_text=cache_text(caches),
        dropout=_dropout_text(model.config),
        copies=_copies(model.params, params, moved, target),
        steps=launch_lines(target, sizes, compiled, bool(turns_of(model.config))),
        phases=phases,
    )


def abstract_params(model: Model, target: Target) -> tuple[F.Decoder, set[str]]:
    """The parameters as a program reads them, on the meta device, and the paths of those that are converted copies."""
    # Strides too are the model's own: a kernel may decline a weight for how it lies.
    leaves, fp32 = tree.paths(model.params), tree.fp32_paths(model.params)
    dtypes = {path: computed_dtype(leaf.dtype, target.dtype, path in fp32) for path, leaf in leaves.items()}
    kept = (target.device, "meta")
    moved = {path for path, p in leaves.items() if p.dtype != dtypes[path] or p.device.type not in kept}
    abstract = {
        path: torch.empty_like(leaf, dtype=dtypes[path], device="meta")
        if path in moved
        else torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        for path, leaf in leaves.items()
    }
    return tree.replace(model.params, abstract), moved


def phase_plan(
    name: str,
    step: Callable[..., Any],
    params: F.Decoder,
    caches: Sequence[Cache],
    inputs: Sequence[Any],
    sizes: Sizes,
    target: Target,
    kernels: Sequence[Kernel],
    *,
    in_place: bool = True,
) -> PhasePlan:
    """Of one function of a program. inputs: as `Sizes.idle` gives them. in_place: whether it writes so, and copies no
    cache."""
    graph = Graph(name, dynamo.capture(step, *packed(params, caches), *inputs), LeafPaths.of(params, caches))
    header = f"B={sizes.batch} S={sizes.chunk if name == 'prefill' else 1} T<={sizes.slots - 1}"
    join_all(graph.module, target, tuple(kernels))
    blocks = tuple(Reader(graph, target, tuple(kernels), in_place).blocks())
    left = lower(graph.module, target, tuple(kernels))
    return PhasePlan(name, header, launch_notes(graph, target, kernels), blocks, left, graph)


def beside_note(phase: PhasePlan, params: F.Decoder, moved: set[str]) -> tuple[str, ...]:
    """A line where some products with several weights may be one."""
    here = any(row.kernel.partition(" ")[0] == "one_product" for block in phase.blocks for row in block.rows)
    return (beside_text(params, moved),) if here else ()


def titled(title: str, lines: Iterable[str]) -> list[str]:
    return [f"  {'' if i else title:9}{line}" for i, line in enumerate(lines)]


def _copies(given: F.Decoder, params: F.Decoder, moved: set[str], target: Target) -> tuple[str, ...]:
    """A line for each conversion: of the leaves of `moved`, what is given and what is computed with."""
    olds, news = tree.paths(given), tree.paths(params)
    found: dict[str, dict[str, int]] = {}
    for path in (path for path in olds if path in moved):
        old, new = olds[path], news[path]
        source, into = (str(leaf.dtype).removeprefix("torch.") for leaf in (old, new))
        if old.device.type not in (target.device, "meta"):
            source, into = f"{source} on {old.device.type}", f"{into} on {target.device}"
        each = found.setdefault(f"{source} to {into}", {})
        folded = re.sub(r"layers\[\d+\]", "layers[*]", path).removeprefix(".")
        each[folded] = each.get(folded, 0) + bytes_of(new)
    lines = []
    for what, each in found.items():
        names = "every leaf" if len(moved) == len(olds) and len(found) == 1 else ", ".join(each)
        lines += textwrap.wrap(f"{what}, {size_text(sum(each.values()))}: {names}", 108)
    return tuple(lines)


def launch_lines(target: Target, sizes: Sizes, compiled: bool, turns: bool) -> tuple[str, ...]:
    """How decode steps are launched, what of them advances without the host, and how often it looks."""
    looks = f"the end is looked for every {CHECK_EVERY}"
    if replay_of(torch.device(target.device), compiled) is None:
        return (f"one call each, over the slots that rows fill, nothing captured; {looks}",)
    n = launch_steps(sizes.max_len)
    fewer = f"; 1 for program.decode, a streamer, {'where longrope turns, ' if turns else ''}and where fewer are left"
    return (
        f"one graph over {sizes.slots - 1} slots, {f'{n} steps a launch{fewer}' if n > 1 else '1 step a launch'}",
        "inside advance tokens, log-probabilities, positions, finished flags, counts, and draws by seed and position",
        f"captured when built, for options at their first use, again where a leaf moved; {looks}",
    )


def cache_text(caches: Sequence[Cache]) -> str:
    """Equal caches folded: `30 x k 1 1025 3 64, v 1 1025 3 64`."""
    kinds: dict[str, int] = {}
    for cache in caches:
        text = ", ".join(f"{path[1:]} {shape_text(leaf)}" for path, leaf in tree.paths(cache).items())
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{count} x ({text})" for text, count in kinds.items()) or "no layers"


def _ways(cfg: F.DecoderConfig, sizes: Sizes, queries: int, dtype: torch.dtype) -> tuple[str, ...]:
    """A line for each kind of latent attention: which way it is computed in a phase, and what both ways cost."""
    lines = []
    for kind in dict.fromkeys(each.attention for each in cfg.layers if isinstance(each.attention, F.MLAConfig)):
        layers = ranges([i for i, each in enumerate(cfg.layers) if each.attention == kind])
        slots = sizes.slots_of(kind.window)
        ring = kind.window is not None and queries > 1  # read as it was before, with the new tokens after it
        costs = F.mla_costs(kind, queries, slots - 1 + (queries if ring else 0))
        taken = "absorbed" if is_absorbed(kind, queries, slots) else "expanded"
        other = "expanded" if taken == "absorbed" else "absorbed"
        texts = {
            way: f"{count_text(cost.multiplications * sizes.batch)} products, "
            f"{size_text(cost.elements * sizes.batch * dtype.itemsize)}"
            for way, cost in costs.items()
        }
        lines.append(
            f"layers[{layers}] latent attention {taken}: at most {texts[taken]} a layer ({other}: {texts[other]})"
        )
    return tuple(lines)


def _dropout_text(cfg: F.DecoderConfig) -> str:
    """The rates of the config that are not 0, by name."""
    rates = {"embd_pdrop": {cfg.embd_pdrop}}
    rates["resid_pdrop"] = {each.resid_pdrop for each in cfg.layers}
    rates["attention_dropout"] = {each.attention.attention_dropout for each in cfg.layers}
    return ", ".join(f"{name} {rate}" for name, found in rates.items() for rate in sorted(found) if rate)


def _rate(moved: int) -> str:
    """How often a second so many bytes are read or written at 1 GB/s, to three digits at least."""
    rate = 1e9 / max(moved, 1)
    return f"{rate:.2f}" if rate >= 1 else f"{rate:.3g}"
