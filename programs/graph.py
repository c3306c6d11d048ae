"""A Dynamo graph as text that a person reads: our names, pytree paths, one line a step, regions once.

A node that Dynamo named by itself and that one other node uses is written where it is used; a node that carries a
name of the source keeps its line. Nothing here depends on the torch version, the machine or the time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .dynamo import region_of, source_of
from .lower import primitive_name

__all__ = ["Graph", "live_nodes", "results_of", "shape_text"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "mod": "%", "pow": "**", "and_": "&", "or_": "|",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip


class Graph:
    """str(graph) is the text; `module` the graph itself. layer_paths: the pytree paths of each layer's leaves."""

    def __init__(self, name: str, module: fx.GraphModule, layer_paths: Sequence[Sequence[str]]) -> None:
        self.name, self.module, self._layer_paths = name, module, layer_paths

    def of(self, module: fx.GraphModule) -> Graph:
        """The same names for another trace of the same step."""
        return Graph(self.name, module, self._layer_paths)

    def __str__(self) -> str:
        regions: dict[fx.GraphModule, list[Sequence[Any]]] = {}
        for node in self.module.graph.nodes:
            if (called := region_of(node)) is not None:
                regions.setdefault(called[0], []).append(called[1])
        names = {n: self.input_name(n) for n in self.module.graph.find_nodes(op="placeholder")}
        region_names = {body: f"layer_{i}" for i, body in enumerate(regions)}
        lines = [f"graph {self.name}", *_body(self.module, names, region_names)]
        for body, calls in regions.items():
            # Within a region a leaf is its layer's, whichever that is.
            first = [re.sub(r"^(?:params\.(layer)s|(cache))\[\d+\]", r"\1\2", _text(a, names, {})) for a in calls[0]]
            inner = dict(zip(body.graph.find_nodes(op="placeholder"), first, strict=True))
            count = f"called {len(calls)} times" if len(calls) > 1 else "called once"
            lines += ["", f"{region_names[body]}   {count}", *_body(body, inner, {})]
        return "\n".join(lines)

    __repr__ = __str__

    def input_name(self, node: fx.Node) -> str:
        """What a graph input is: its path from the arguments of the step."""
        source = source_of(node)
        if source is None:
            return "n" if isinstance(node.meta.get("example_value"), torch.SymInt) else node.name
        match = re.fullmatch(r"params\.layers\[(\d+)\]\[(\d+)\]", source)
        if match is None:
            return source
        layer, leaf = int(match[1]), int(match[2])
        return f"params.layers[{layer}]{self._layer_paths[layer][leaf]}"


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
    several = isinstance(node.meta.get("example_value"), (list, tuple)) or region_of(node) is not None
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
            shape = shape_text(results[0].meta.get("example_value"))
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
    primitive = primitive_name(node)
    name = f"meshfn.{primitive}" if primitive else str(getattr(node.target, "__name__", node.target))
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
