"""The plan of a program: what will run, node by node, before anything does.

Computed from the Dynamo graphs of abstract parameters, so it needs neither weights nor the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from ..functional.mla import is_absorbed
from . import dynamo
from .graph import Graph, LeafPaths, live_nodes, results_of, shape_text
from .join import args_of
from .kernel import Kernel
from .launches import launch_notes
from .lower import choose, join_all, lower, primitive_name, share_read, writer_of
from .model import Model, count_text
from .sizes import Sizes, Target
from .steps import make_steps, packed
from .weights import computed_dtype

__all__ = ["Plan", "PlanRow", "make_plan"]


@dataclass(frozen=True)
class PlanRow:
    """One node. reads: bytes of parameters that it reads; state: of what does not grow with context, all of it;
    context: of a full cache. writes: bytes of cache. kernel: its name, or why there is none. at_most: whether `reads`
    depends on what tokens choose."""

    names: str
    op: str
    shape: str
    kernel: str
    chosen: bool
    reads: int = 0
    state: int = 0
    context: int = 0
    writes: int = 0
    at_most: bool = False

    @property
    def all_reads(self) -> str:
        return _reads_text(self.reads + self.state + self.context, bool(self.context) or self.at_most)


@dataclass(frozen=True)
class PlanBlock:
    """What runs once, or once for each of the layers of its title."""

    title: str
    repeats: int
    rows: tuple[PlanRow, ...]

    def total(self, what: str) -> int:
        """Of a field of its rows, for one layer."""
        return sum(getattr(row, what) for row in self.rows)

    def __str__(self) -> str:
        if not self.title.startswith("layers["):
            return self.title
        read = sum(map(self.total, ("reads", "state", "context")))
        text = _reads_text(read, any(row.context or row.at_most for row in self.rows))
        each = ", each" if self.repeats > 1 else ","
        return f"{self.title}{each} {' '.join(text.split())} and writes {size_text(self.total('writes'))}"


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
    """print(plan) is its text. Sizes are bytes unless they say otherwise."""

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
        lines = [
            f"program {self.model}   {self.target}{how}   batch {s.batch}   max_len {s.max_len}   chunk {s.chunk}",
            f"  weights  {count_text(self.num_parameters)} parameters, {size_text(self.weights)}, {whose}",
            f"  cache    {size_text(self.cache)}, {self.cache_text}, "
            + ("written in place" if self.compiled else "copied whole by each call"),
            *([f"  dropout  {self.dropout}, which inference leaves out"] if self.dropout else []),
            "  choice   the most likely token, at the end of a step; with sampling options after it, eagerly",
        ]
        for phase in self.phases.values():
            lines += ["", f"{phase.name}   {phase.header}", *(f"  {note}" for note in phase.notes)]
            table = [row for block in phase.blocks for row in block.rows]
            widths = [max(len(getattr(r, a)) for r in table) for a in ("names", "op", "shape")]
            for block in phase.blocks:
                lines.append(f"  {block}")
                for r in block.rows:
                    cells = [r.names.ljust(widths[0]), r.op.ljust(widths[1]), r.shape.ljust(widths[2])]
                    moved = f"writes   {size_text(r.writes):>10}" if r.writes else r.all_reads
                    kernel = r.kernel if self.compiled else "eager"
                    lines.append(f"    {'  '.join(cells)}  {moved:19}  {kernel}".rstrip())
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
    params = tree.replace(model.params, abstract)
    steps = make_steps(model.config)
    caches = sizes.caches(model.config, target.dtype, "meta")
    paths = LeafPaths.of(params, caches)
    phases = {}
    for name in ("prefill", "decode"):
        inputs = sizes.idle(name, model.config, target.dtype, "meta")
        graph = Graph(name, dynamo.capture(steps[name], *packed(params, caches), *inputs), paths)
        length = sizes.chunk if name == "prefill" else 1
        header = f"B={sizes.batch} S={length} T<={sizes.slots - 1}"
        join_all(graph.module, target, tuple(kernels))
        blocks = tuple(_Reader(graph, target, tuple(kernels), compiled).blocks())
        left = lower(graph.module, target, tuple(kernels))
        notes = *_ways(model.config, sizes, length, target.dtype), *launch_notes(graph, target, kernels)
        phases[name] = PhasePlan(name, header, notes, blocks, left, graph)
    return Plan(
        model=model.name,
        target=target,
        sizes=sizes,
        compiled=compiled,
        num_parameters=model.num_parameters,
        weights=sum(_bytes(leaf) for leaf in tree.leaves(params)),
        converted=sum(_bytes(abstract[path]) for path in moved),
        cache=sum(_bytes(leaf) for cache in caches for leaf in tree.leaves(cache)),
        cache_text=_cache_text(caches),
        dropout=_dropout_text(model.config),
        phases=phases,
    )


def _cache_text(caches: Sequence[Cache]) -> str:
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
        layers = _ranges([i for i, each in enumerate(cfg.layers) if each.attention == kind])
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


class _Reader:
    """Reads rows and blocks from a graph."""

    def __init__(self, graph: Graph, target: Target, kernels: tuple[Kernel, ...], in_place: bool) -> None:
        self.graph, self.target, self.kernels, self.in_place = graph, target, kernels, in_place

    def blocks(self) -> list[PlanBlock]:
        """Nodes before, in and after the layers; layers of one kind are one block. A kind of a single layer is no
        region: Dynamo writes it out, and its nodes are told by the layer whose leaves they read."""
        names = self.graph.input_names()
        found: dict[Any, tuple[list[int], list[PlanRow]]] = {}
        here: Any = "before"
        for node in live_nodes(self.graph.module):
            called = dynamo.region_of(node)
            if called is not None:
                here, (body, arguments) = "after", called
                if body not in found:
                    found[body] = [], self.rows(body, self.graph.region_names(body))
                found[body][0].append(_layer_index(arguments, names) or 0)
            elif node.op not in ("placeholder", "output"):
                layer = _layer_index(node.all_input_nodes, names)
                read_otherwise = any(names.get(n, "").startswith("params.") for n in node.all_input_nodes)
                here = layer if layer is not None else "after" if read_otherwise and here != "before" else here
                if (row := self.row(node, names)) is not None:
                    found.setdefault(here, ([] if isinstance(here, str) else [here], []))[1].append(row)
        titles = {"before": "before the layers", "after": "after the layers"}
        blocks = []
        for key, (layers, rows) in found.items():
            count = len(layers)
            title = titles.get(key) or f"layers[{_ranges(layers)}]" + (f" x{count}" if count > 1 else "")
            blocks.append(PlanBlock(title, max(count, 1), tuple(rows)))
        return sorted(blocks, key=lambda block: block.title == titles["after"])

    def rows(self, body: fx.GraphModule, names: Mapping[fx.Node, str]) -> list[PlanRow]:
        return [row for node in live_nodes(body) if (row := self.row(node, names)) is not None]

    def row(self, node: fx.Node, inputs: Mapping[fx.Node, str]) -> PlanRow | None:
        """A primitive, a cache write or what else reads a parameter; None for what the compiler fuses with them."""
        name = primitive_name(node)
        results = results_of(node)
        value = dynamo.value_of(results[0])
        names = " ".join(_plain(r.name) for r in results)
        if name in _OF_CACHES:
            return None
        if name is not None:
            kernel, text = choose(node, self.target, self.kernels)
            weights = [n for n in node.all_input_nodes if inputs.get(n, "").startswith(("params", "layer"))]
            read = int(sum(_bytes(dynamo.value_of(n)) for n in weights) * share_read(node))
            cached = sum(_bytes(dynamo.value_of(n)) for n in node.all_input_nodes if _of_cache(n, inputs))
            kept = {"state" if name in _OF_STATES else "context": cached}
            if name == "qkv_rope_cache":  # it writes what it takes of a cache
                kept = {"writes": sum(_bytes(dynamo.value_of(n)) for n in args_of(node)[1:3])}
            at_most = name == "expert_mlp" and value.shape[:-1].numel() > 1
            chosen = kernel is not None
            return PlanRow(names, name, shape_text(value), text, chosen, reads=read, at_most=at_most, **kept)
        if node.target is torch.nn.functional.embedding:
            return PlanRow(names, "embedding", shape_text(value), "compiler", True, reads=_bytes(value))
        if node.op == "call_method" and node.target == "copy_":
            into, source = node.args
            assert isinstance(into, fx.Node)
            assert isinstance(source, fx.Node)
            written = source.args[1] if primitive_name(source) == "write_tokens" else source
            assert isinstance(written, fx.Node)
            new, whose = dynamo.value_of(written), re.sub(r"^cache\[\d+\]", "cache", inputs[into])
            writes = _bytes(new if self.in_place else dynamo.value_of(into))
            writer = writer_of(source, self.target, self.kernels)
            return PlanRow(whose, "write", shape_text(new), writer, True, writes=writes)
        weights = [n for n in node.all_input_nodes if inputs.get(n, "").startswith(("params", "layer"))]
        if weights and dynamo.region_of(node) is None and node.op != "output":
            op = node.target if isinstance(node.target, str) else node.target.__name__
            read = sum(_bytes(dynamo.value_of(n)) for n in weights)
            return PlanRow(names, op, shape_text(value), "compiler", True, reads=read)
        return None


# Primitives that carry a state, of which they read all, whatever the context.
_OF_STATES = ("short_conv", "gated_delta_rule", "gdn_step")
# Primitives whose row is that of the write itself, and of what reads the cache.
_OF_CACHES = ("write_tokens", "slot_positions")
# Operations that read nothing, or a cache for what reads their result.
_VIEWS = ("narrow", "split", "write_tokens", "masked_fill", "unsqueeze", "getitem", "cat")


def _of_cache(node: fx.Node, inputs: Mapping[fx.Node, str]) -> bool:
    """Whether what a node holds lies in a cache, or will when its new tokens have been written."""
    name = inputs.get(node)
    if name is not None:
        return name.startswith("cache")
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    first = next(iter(node.all_input_nodes), None)
    return called in _VIEWS and first is not None and _of_cache(first, inputs)


def _layer_index(nodes: Iterable[Any], names: Mapping[fx.Node, str]) -> int | None:
    """The layer whose parameters or cache are among graph inputs; None where none is."""
    for node in nodes:
        match = re.match(r"(?:params\.layers|cache)\[(\d+)\]", names.get(node, ""))
        if match is not None:
            return int(match[1])
    return None


def _ranges(indices: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0..2,5`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _bytes(value: Any) -> int:
    """Bytes of a tensor, where a size is dynamic at its largest; 0 for what is none."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(dynamo.largest, value.shape)) * value.element_size()


def _reads_text(read: int, at_most: bool) -> str:
    """`reads       1.3 MiB`, in the width of a column; nothing where nothing is read."""
    return f"reads {'<=' if at_most else '  '} {size_text(read):>10}" if read else ""


def _rate(moved: int) -> str:
    """How often a second so many bytes are read or written at 1 GB/s, to three digits at least."""
    rate = 1e9 / max(moved, 1)
    return f"{rate:.2f}" if rate >= 1 else f"{rate:.3g}"


def size_text(n: int) -> str:
    """`513.1 MiB`: bytes, with one decimal."""
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{n} B"


def _plain(name: str) -> str:
    """A node's name without the number that Dynamo adds to tell it from its namesakes."""
    return re.sub(r"_\d+$", "", name)
