"""The plan of a program: what will run, node by node, before anything does.

Computed from the Dynamo graphs of abstract parameters, so it needs neither weights nor the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import functional as F
from ..functional import tree
from . import dynamo
from .graph import Graph, live_nodes, results_of, shape_text
from .lower import Kernel, choose, primitive_name
from .model import Model
from .sizes import Sizes, Target
from .steps import make_steps, packed

__all__ = ["Plan", "PlanRow", "make_plan"]


@dataclass(frozen=True)
class PlanRow:
    """One node. reads: bytes of parameters that it reads; context: bytes of cache, at most. kernel: its name, or why
    there is none."""

    names: str
    op: str
    shape: str
    reads: int
    context: int
    kernel: str
    chosen: bool


@dataclass(frozen=True)
class PlanBlock:
    """What runs once, or once for each of `layers`."""

    title: str
    repeats: int
    rows: tuple[PlanRow, ...]


@dataclass(frozen=True)
class PhasePlan:
    name: str
    header: str
    blocks: tuple[PlanBlock, ...]
    graph: Graph

    @property
    def reads(self) -> int:
        """Bytes of parameters that one call reads."""
        return sum(block.repeats * row.reads for block in self.blocks for row in block.rows)

    @property
    def without_kernel(self) -> list[str]:
        """A line for each primitive that has none."""
        return [
            f"{block.title}: {row.names} ({row.op}): {row.kernel}"
            for block in self.blocks
            for row in block.rows
            if not row.chosen
        ]


@dataclass(frozen=True)
class Plan:
    """print(plan) is its text. Sizes are bytes unless they say otherwise."""

    model: str
    target: Target
    sizes: Sizes
    num_parameters: int
    weights: int
    converted: int
    cache: int
    cache_text: str
    phases: Mapping[str, PhasePlan]

    @property
    def decode_reads(self) -> int:
        """Bytes of weights and full cache that one decode step reads."""
        return self.phases["decode"].reads + self.cache

    def __str__(self) -> str:
        s = self.sizes
        whose = (
            f"{size_text(self.converted)} of it converted copies"
            if self.converted
            else "read where the model keeps them"
        )
        decode = self.phases["decode"].reads
        lines = [
            f"program {self.model}   {self.target}   batch {s.batch}   max_len {s.max_len}   chunk {s.chunk}",
            f"  weights  {self.num_parameters / 1e6:.1f} M parameters, {size_text(self.weights)}, {whose}",
            f"  cache    {size_text(self.cache)}, {self.cache_text}, written in place",
        ]
        for phase in self.phases.values():
            lines += ["", f"{phase.name}   {phase.header}"]
            table = [row for block in phase.blocks for row in block.rows]
            widths = [max(len(getattr(r, a)) for r in table) for a in ("names", "op", "shape")]
            for block in phase.blocks:
                lines.append(f"  {block.title}")
                for r in block.rows:
                    cells = [r.names.ljust(widths[0]), r.op.ljust(widths[1]), r.shape.ljust(widths[2])]
                    read = f"reads    {size_text(r.reads):>10}" if r.reads else " " * 19
                    read = f"reads <= {size_text(r.context):>10}" if r.context else read
                    lines.append(f"    {'  '.join(cells)}  {read}  {r.kernel}".rstrip())
        return "\n".join(
            [
                *lines,
                "",
                f"a decode step reads {size_text(decode)} of weights and at most {size_text(self.cache)} of cache",
                f"bound: {1e9 / self.decode_reads:.2f} steps a second for each GB/s of memory bandwidth, cache full; "
                f"{1e9 / max(decode, 1):.2f}, cache empty",
            ]
        )

    __repr__ = __str__


def make_plan(model: Model, target: Target, sizes: Sizes, kernels: Sequence[Kernel]) -> Plan:
    """Trace prefill and decode of the model's config on the meta device and read the plan from the graphs."""
    params = F.Decoder.abstract(model.config, dtype=target.dtype)
    steps = make_steps(model.config)
    caches = sizes.caches(model.config, target.dtype, "meta")
    phases = {}
    for name in ("prefill", "decode"):
        inputs = sizes.idle(name, model.config, target.dtype, "meta")
        module = dynamo.capture(steps[name], packed(params), caches, *inputs)
        graph = Graph(name, module, [list(tree.paths(each)) for each in params.layers])
        length = sizes.chunk if name == "prefill" else 1
        header = f"B={sizes.batch} S={length} T<={sizes.slots - 1}"
        phases[name] = PhasePlan(name, header, tuple(_blocks(graph, target, tuple(kernels), sizes.slots - 1)), graph)
    weights = sum(_bytes(leaf) for leaf in tree.leaves(params))
    moved = [
        p for p in tree.leaves(model.params) if p.dtype != target.dtype or p.device.type not in (target.device, "meta")
    ]
    return Plan(
        model=model.name,
        target=target,
        sizes=sizes,
        num_parameters=model.num_parameters,
        weights=weights,
        converted=sum(p.numel() for p in moved) * target.dtype.itemsize,
        cache=sum(_bytes(leaf) for cache in caches for leaf in tree.leaves(cache)),
        cache_text=_cache_text(caches),
        phases=phases,
    )


def _cache_text(caches: Sequence[F.KVCache]) -> str:
    """Equal caches folded: `30 x k 1 1025 3 64, v 1 1025 3 64`."""
    kinds: dict[str, int] = {}
    for cache in caches:
        text = ", ".join(f"{path[1:]} {shape_text(leaf)}" for path, leaf in tree.paths(cache).items())
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{count} x ({text})" for text, count in kinds.items()) or "no layers"


def _blocks(graph: Graph, target: Target, kernels: tuple[Kernel, ...], slots: int) -> list[PlanBlock]:
    """Nodes before, in and after the layers; neighbouring calls of one region are one block."""
    blocks: list[PlanBlock] = []
    rows: list[PlanRow] = []
    calls: list[fx.GraphModule] = []
    for node in live_nodes(graph.module):
        called = dynamo.region_of(node)
        if called is None:
            row = _row(node, target, kernels, slots)
            if row is not None and calls:
                blocks += _layer_blocks(calls, target, kernels, slots)
                calls = []
            rows += [row] if row is not None else []
        else:
            if rows:
                blocks.append(PlanBlock("before the layers", 1, tuple(rows)))
                rows = []
            calls.append(called[0])
    blocks += _layer_blocks(calls, target, kernels, slots)
    return [*blocks, PlanBlock("after the layers", 1, tuple(rows))] if rows else blocks


def _layer_blocks(
    calls: list[fx.GraphModule], target: Target, kernels: tuple[Kernel, ...], slots: int
) -> list[PlanBlock]:
    found = []
    for body in dict.fromkeys(calls):
        rows = [row for node in live_nodes(body) if (row := _row(node, target, kernels, slots)) is not None]
        where = _ranges([i for i, each in enumerate(calls) if each is body])
        count = calls.count(body)
        found.append(PlanBlock(f"layers[{where}] x{count}" if count > 1 else f"layers[{where}]", count, tuple(rows)))
    return found


def _ranges(indices: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0..2,5`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _row(node: fx.Node, target: Target, kernels: tuple[Kernel, ...], slots: int) -> PlanRow | None:
    name = primitive_name(node)
    results = results_of(node)
    value = results[0].meta.get("example_value")
    names = " ".join(_plain(r.name) for r in results)
    if name is not None:
        kernel, text = choose(node, target, kernels)
        read = sum(_bytes(n.meta["example_value"]) for n in node.all_input_nodes if _is_parameter(n))
        context = sum(_dynamic_bytes(n.meta.get("example_value"), slots) for n in node.all_input_nodes)
        return PlanRow(names, name, shape_text(value), read, context, text, kernel is not None)
    if node.target is torch.nn.functional.embedding:
        return PlanRow(names, "embedding", shape_text(value), _bytes(value), 0, "compiler", True)
    if node.op == "call_method" and node.target == "copy_":
        source = node.args[1]
        written = source.args[2] if isinstance(source, fx.Node) and source.target == "index_put" else source
        shape = shape_text(written.meta.get("example_value")) if isinstance(written, fx.Node) else ""
        assert isinstance(node.args[0], fx.Node)
        into = re.sub(r"^cache\[\d+\]", "cache", dynamo.source_of(node.args[0]) or "cache." + node.args[0].name[-1])
        return PlanRow(into, "write", shape, 0, 0, "compiler, in place", True)
    return None


def _is_parameter(node: fx.Node) -> bool:
    if node.op != "placeholder":
        return False
    return "params" in (dynamo.source_of(node) or node.name)


def _bytes(value: Any) -> int:
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _dynamic_bytes(value: Any, n: int) -> int:
    """Bytes of a tensor with a dynamic size, at its largest; 0 for another."""
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return 0
    return math.prod(size if isinstance(size, int) else n for size in value.shape) * value.element_size()


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
