"""The rows of a plan, read from a graph: what each node is, reads and writes, and who computes it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import dynamo
from .graph import Graph, live_nodes, results_of, shape_text
from .join import args_of
from .kernel import Kernel
from .lower import choose, primitive_name, share_read, writer_of
from .sizes import Target

__all__ = ["PlanBlock", "PlanRow", "Reader", "bytes_of", "ranges", "reads_text", "size_text"]


@dataclass(frozen=True)
class PlanRow:
    """One node. reads: bytes of parameters that it reads; state: of what does not grow with context, all of it;
    context: of a full cache. writes: bytes of cache. kernel: see `lower.choose`. at_most: whether `reads`
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
        return reads_text(self.reads + self.state + self.context, bool(self.context) or self.at_most)


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
        text = reads_text(read, any(row.context or row.at_most for row in self.rows))
        each = ", each" if self.repeats > 1 else ","
        return f"{self.title}{each} {' '.join(text.split())} and writes {size_text(self.total('writes'))}"


class Reader:
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
            title = titles.get(key) or f"layers[{ranges(layers)}]" + (f" x{count}" if count > 1 else "")
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
            read = int(sum(bytes_of(dynamo.value_of(n)) for n in weights) * share_read(node))
            cached = sum(bytes_of(dynamo.value_of(n)) for n in node.all_input_nodes if _of_cache(n, inputs))
            kept = {"state" if name in _OF_STATES else "context": cached}
            if name == "qkv_rope_cache":  # it writes what it takes of a cache
                kept = {"writes": sum(bytes_of(dynamo.value_of(n)) for n in args_of(node)[1:3])}
            at_most = name == "expert_mlp" and value.shape[:-1].numel() > 1
            chosen = kernel is not None
            return PlanRow(names, name, shape_text(value), text, chosen, reads=read, at_most=at_most, **kept)
        if node.target is torch.nn.functional.embedding:
            return PlanRow(names, "embedding", shape_text(value), "compiler", True, reads=bytes_of(value))
        if node.op == "call_method" and node.target == "copy_":
            into, source = node.args
            assert isinstance(into, fx.Node)
            assert isinstance(source, fx.Node)
            written = source.args[1] if primitive_name(source) == "write_tokens" else source
            assert isinstance(written, fx.Node)
            new, whose = dynamo.value_of(written), re.sub(r"^cache\[\d+\]", "cache", inputs[into])
            writes = bytes_of(new if self.in_place else dynamo.value_of(into))
            writer = writer_of(source, self.target, self.kernels)
            return PlanRow(whose, "write", shape_text(new), writer, True, writes=writes)
        weights = [n for n in node.all_input_nodes if inputs.get(n, "").startswith(("params", "layer"))]
        if weights and dynamo.region_of(node) is None and node.op != "output":
            op = node.target if isinstance(node.target, str) else node.target.__name__
            read = sum(bytes_of(dynamo.value_of(n)) for n in weights)
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


def ranges(indices: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0..2,5`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, where a size is dynamic at its largest; 0 for what is none."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(dynamo.largest, value.shape)) * value.element_size()


def reads_text(read: int, at_most: bool) -> str:
    """`reads       1.3 MiB`, in the width of a column; nothing where nothing is read."""
    return f"reads {'<=' if at_most else '  '} {size_text(read):>10}" if read else ""


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
