"""A primitive in parts, where a kernel computes one of them:

norm_linear(x, norm, [w, ..])  ->  normalize(x, norm), norm_linear(.., None, [w, ..])
gated_mlp(x, norm, gate, up)   ->  normalize(x, norm), norm_linear(.., None, [gate, up]), act(gate) * up
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..functional.mlp import check_activation
from .dynamo import value_of
from .join import NORM_OPTIONS, Taken, arguments_of, call_before, free_name, is_primitive

__all__ = ["part"]


def part(graph: fx.Graph, taken: Taken) -> None:
    """Part what no kernel takes as a whole, within one graph."""
    for node in list(graph.nodes):
        if is_primitive(node, "norm_linear") and arguments_of(node)["norm_weight"] is not None:
            _part_norm_linear(node, taken)
        elif is_primitive(node, "gated_mlp"):
            _part_gated_mlp(node, taken)


def _part_norm_linear(node: fx.Node, taken: Taken) -> None:
    given = arguments_of(node)
    products = _products(node, given["weights"], given["biases"], value_of(node), taken)
    if products is not None:
        node.replace_all_uses_with(products)
        node.graph.erase_node(node)


def _part_gated_mlp(node: fx.Node, taken: Taken) -> None:
    given, value = arguments_of(node), value_of(node)
    biases = [given.get("gate_bias"), given.get("up_bias")]
    products = _products(node, [given["gate"], given["up"]], biases, [value, value], taken)
    if products is None:
        return
    act: Any = check_activation("gated_mlp", "activation", given.get("activation", "silu"))
    with node.graph.inserting_before(node):
        gate, up = (node.graph.call_function(operator.getitem, (products, i)) for i in range(2))
        gate.name, up.name = (free_name(node.graph, name) for name in ("gate", "up"))
        product = (act(fx.Proxy(gate)) * fx.Proxy(up)).node
    new = products.next
    while new is not node:
        new.meta["example_value"] = value
        new = new.next
    name = node.name
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)
    product.name = name


def _products(
    node: fx.Node, weights: list[fx.Node], biases: list[fx.Node | None], value: Any, taken: Taken
) -> fx.Node | None:
    """The projections of a node without the norm in front, which becomes a node of its own; None, and the graph as it
    was, where a kernel takes the node as it is, or does not take them either."""
    if taken(node) is not None:
        return None
    given = arguments_of(node)
    x = normed = given["x"]
    if given["norm_weight"] is not None:
        options = {name: given[name] for name in NORM_OPTIONS if name in given}
        norm = (given["norm_weight"], given.get("norm_bias"))
        normed = call_before(node, "normalize", (x, *norm), value_of(x), options)
    products = call_before(node, "norm_linear", (normed, None, weights, biases), value)
    if taken(products) is not None:
        return products
    node.graph.erase_node(products)
    if normed is not x:
        node.graph.erase_node(normed)
    return None
