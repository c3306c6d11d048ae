"""How many launches a call of a lowered graph is on a GPU, as far as that is known before the compiler has run.

Each kernel of the table is one launch. What lies between them the compiler makes launches of, at most one a node; views
are none.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .dynamo import region_of
from .graph import Graph, live_nodes
from .kernel import Kernel
from .sizes import Target

__all__ = ["launch_notes"]

_VIEWS = frozenset(
    {"chunk", "expand", "flatten", "getitem", "narrow", "permute", "size", "split", "squeeze", "transpose", "unbind"}
    | {"unflatten", "unsqueeze", "view"}
)


def launch_notes(graph: Graph, target: Target, kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """A line for a plan, of a graph with its kernels in place; none on a CPU, where all is one function. Layers of one
    kind are told apart where there are several."""
    if target.device != "cuda":
        return ()
    ops: set[object] = {kernel.op for kernel in kernels}
    layers: dict[tuple[int, int], int] = {}
    for body, calls in graph.regions().items():
        found = _launches(body, ops)
        layers[found] = layers.get(found, 0) + len(calls)
    beside = _launches(graph.module, ops)
    total = beside[0] + sum(count * each for (each, _), count in layers.items())
    parts = [*(f"{count} layers of {_text(*each)}" for each, count in layers.items()), f"{_text(*beside)} beside them"]
    return (f"launches: {', '.join(parts)}; {total} kernels a step",)


def _launches(module: fx.GraphModule, ops: set[object]) -> tuple[int, int]:
    """How many nodes of a graph are kernels, and how many are left to the compiler."""
    nodes = [n for n in live_nodes(module) if n.op in ("call_function", "call_method") and region_of(n) is None]
    chosen = [node.target in ops for node in nodes]
    left = [node for node, kernel in zip(nodes, chosen, strict=True) if not kernel and not _is_view(node)]
    return sum(chosen), len(left)


def _is_view(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _VIEWS


def _text(kernels: int, left: int) -> str:
    counted = ((kernels, "kernel", ""), (left, "node", " of the compiler"))
    return " and ".join(f"{n} {what}{'' if n == 1 else 's'}{whose}" for n, what, whose in counted if n) or "nothing"
