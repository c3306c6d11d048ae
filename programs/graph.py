"""A Dynamo graph as text that a person reads: our names, pytree paths, one line a step, regions once.

A node that Dynamo named by itself and that one other node uses is written where it is used; a node that carries a
name of the source keeps its line. Nothing here depends on the torch version, the machine or the time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from .dynamo import op_name, region_of, source_of, value_of
from .exchanges import is_exchange
from .lower import primitive_name

__all__ = ["Graph", "LeafPaths", "live_nodes", "results_of", "shape_text"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "mod": "%", "pow": "**", "and_": "&", "or_": "|",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip


@dataclass(frozen=True)
class LeafPaths:
    """The pytree path of each leaf of each layer and of each cache, which the steps take as tuples (`steps.packed`)."""

    layers: tuple[tuple[str, ...], ...]
    caches: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, params: F.Decoder, caches: Sequence[Cache]) -> LeafPaths:
        return cls(tuple(tuple(tree.paths(p)) for p in params.layers), tuple(tuple(tree.paths(c)) for c in caches))


class Graph:
    """str(graph) is the text; `module` the graph itself."""

    def __init__(self, name: str, module: fx.GraphModule, paths: LeafPaths) -> None:
        self.name, self.module, self._paths = name, module, paths

    def __str__(self) -> str:
        names = self.input_names()
        bodies = self.regions()
        region_names = {body: f"layer_{i}" for i, body in enumerate(bodies)}
        lines = [f"graph {self.name}", *_body(self.module, names, region_names)]
        for body, calls in bodies.items():
            count = f"called {len(calls)} times" if len(calls) > 1 else "called once"
            lines += ["", f"{region_names[body]}   {count}", *_body(body, self.region_names(body), {})]
        return "\n".join(lines)

    __repr__ = __str__

    def regions(self) -> dict[fx.GraphModule, list[Sequence[Any]]]:
        """The bodies of regions, each with the arguments of its calls."""
        found: dict[fx.GraphModule, list[Sequence[Any]]] = {}
        for node in self.module.graph.nodes:
            if (called := region_of(node)) is not None:
                found.setdefault(called[0], []).append(called[1])
        return found

    def input_names(self) -> dict[fx.Node, str]:
        """What each graph input is: its path from the arguments of the step."""
        return {n: self._input_name(n) for n in self.module.graph.find_nodes(op="placeholder")}

    def region_names(self, body: fx.GraphModule) -> dict[fx.Node, str]:
        """The same for the inputs of a region; a leaf is `layer`'s or `cache`'s, whichever layer calls."""
        names = self.input_names()
        texts = [_text(a, names, {}) for a in self.regions()[body][0]]
        anyone = [re.sub(r"^(?:params\.(layer)s|(cache))\[\d+\]", r"\1\2", t) for t in texts]
        return dict(zip(body.graph.find_nodes(op="placeholder"), anyone, strict=True))

    def _input_name(self, node: fx.Node) -> str:
        source = source_of(node)
        if source is None:
            return "n" if isinstance(value_of(node), torch.SymInt) else node.name
        match = re.fullmatch(r"(params\.layers|cache)\[(\d+)\]\[(\d+)\]", source)
        if match is None:
            return source
        table = self._paths.layers if match[1] == "params.layers" else self._paths.caches
        return f"{match[1]}[{match[2]}]{table[int(match[2])][int(match[3])]}"


def shape_text(value: Any) -> str:
    """`1 256 576`; a dynamic size is `n`."""
    if not isinstance(value, torch.Tensor):
        return ""
    return " ".join(str(n) if isinstance(n, int) else "n" for n in value.shape)


def live_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the result or a write depends on, in order."""
    live: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        writes = node.op == "call_method" and str(node.target).endswith("_")
        if node.op == "output" or writes or region_of(node) is not None or any(u in live for u in node.users):
            live.add(node)
    return [n for n in module.graph.nodes if n in live]


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that take the results of a call apart, where all its users do that; else the call itself."""
    users = list(node.users)
    apart = users and all(u.target is operator.getitem and isinstance(u.args[1], int) for u in users)
    several = isinstance(value_of(node), (list, tuple)) or region_of(node) is not None
    return users if apart and several else [node]


def _auto_named(node: fx.Node) -> bool:
    """Whether the name is Dynamo's own, made from what is called, and no variable of the source."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return re.fullmatch(re.escape(target.strip("_")) + r"_?(_\d+)?", node.name.strip("_")) is not None


def _body(module: fx.GraphModule, inputs: Mapping[fx.Node, str], regions: Mapping[fx.GraphModule, str]) -> list[str]:
    names = dict(inputs)
    rows: list[tuple[str, str, str]] = []
    for node in live_nodes(module):
        if node.op == "output":
            rows.append(("return", "", _text(node.args[0], names, regions)))
        if node.op in ("placeholder", "get_attr", "output") or node in names:
            continue
        text = _call(node, names, regions)
        results = results_of(node)
        names |= {r: r.name for r in results}
        inline = _auto_named(node) and len(node.users) == 1 and results == [node] and primitive_name(node) is None
        if inline:
            names[node] = text
        elif node.op == "call_method" and str(node.target).endswith("_"):
            rows.append(("", "", text))
        else:
            shape = shape_text(value_of(results[0]))
            rows.append((" ".join(r.name for r in results), shape, text))
    widths = [max((len(r[i]) for r in rows), default=0) for i in (0, 1)]
    return [f"  {r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]}" for r in rows]


def _call(node: fx.Node, names: Mapping[fx.Node, str], regions: Mapping[fx.GraphModule, str]) -> str:
    called = region_of(node)
    if called is not None:
        # All leaves of one layer and its cache go in: each is named once.
        whole = [re.sub(r"^((params\.layers|cache)\[\d+\]).*", r"\1", _text(a, names, regions)) for a in called[1]]
        return f"{regions[called[0]]}({', '.join(dict.fromkeys(whole))})"
    args = [_text(a, names, regions) for a in node.args]
    unset = (None, False)
    options = [f"{k}={_text(v, names, regions)}" for k, v in sorted(node.kwargs.items()) if v not in unset]
    options = [o for o in options if not o.startswith("device=")]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + options)})"
    if is_exchange(node):  # not who makes it, nor by which moves, which its specs tell a reader
        return f"exchange({args[0][1:-1]}, {args[2].partition(' #')[0]})"
    name = op_name(node).replace("::", ".") or str(getattr(node.target, "__name__", node.target))
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return f"{args[0]}[{', '.join(_index(i, names, regions) for i in index)}]"
    if name in _INFIX and len(args) == 2:
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    return f"{name}({', '.join(args + options)})"


def _index(i: Any, names: Mapping[fx.Node, str], regions: Mapping[fx.GraphModule, str]) -> str:
    return ":" if i == slice(None) else "..." if i is Ellipsis else _text(i, names, regions)


def _text(value: Any, names: Mapping[fx.Node, str], regions: Mapping[fx.GraphModule, str]) -> str:
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(v, names, regions) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{value:g}" if isinstance(value, float) else str(value)
