"""The exchanges in a graph: all ranks must make them in one order, and a compiler is free to change that where they do
not depend on each other. So each that does not is made to read what the one before it gave.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .dynamo import region_of, value_of

__all__ = ["in_order", "is_exchange"]


def is_exchange(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (
        torch.ops.meshfn_wire.exchange,
        torch.ops.meshfn_wire.exchange.default,
    )


def in_order(module: fx.GraphModule) -> bool:
    """Tie the exchanges of a graph, and of the regions that it calls, to the order in which they stand -> whether it
    has any."""
    last: fx.Node | None = None
    behind: set[fx.Node] = set()  # what depends on the last one
    known: dict[fx.GraphModule, bool] = {}
    for node in list(module.graph.nodes):
        called = region_of(node)
        if called is not None and called[0] not in known:
            known[called[0]] = in_order(called[0])
        waits = any(each is last or each in behind for each in node.all_input_nodes)
        if is_exchange(node) or (called is not None and known[called[0]]):
            if last is not None and not waits:
                assert called is None, "a region with exchanges that depends on none before it"
                node.kwargs = {**node.kwargs, "after": _tensor_of(last)}
            last, behind = node, set()
        elif waits:
            behind.add(node)
    module.graph.lint()
    module.recompile()
    return last is not None


def _tensor_of(node: fx.Node) -> fx.Node:
    """The first result of a call that has several."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 0:
            return user
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["example_value"] = value_of(node)[0]
    return first
