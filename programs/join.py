"""Larger primitives out of smaller ones, where a kernel computes the larger one.

    residual + (linear(x, w) + bias)   ->   linear_add
    normalised(x + residual)           ->   add_norm, and the sum
    decode_attention(..) * sigmoid(z)  ->   decode_attention(.., gate=z)

`programs/join_cache.py` joins what stands in front of attention.

Only nodes that stand directly behind one another are joined. An edge of a layout that moves something (a sum over
ranks after the last projection) is a node between them, so nothing is ever joined across it. A node that is joined
moves to where the sum stands, so nothing is joined whose arguments are written in place in between, or come later.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..functional.primitive import NAMESPACE, PRIMITIVES
from .dynamo import op_name, same_memory, value_of, writes_to

__all__ = [
    "NORM_OPTIONS", "Taken", "args_of", "arguments_of", "call_before", "first_alone", "free_name", "is_primitive",
    "join",
]  # fmt: skip

# The place in the table of the kernel that takes a primitive's node, None without one.
Taken = Callable[[fx.Node], int | None]

# `x += y` is none of them: whoever else holds x sees the sum.
_ADDS = (operator.add, torch.add)
NORM_OPTIONS = ("norm_type", "eps", "zero_centered", "scale_in_fp32")


def join(graph: fx.Graph, taken: Taken) -> bool:
    """Join what can be joined within one graph; whether anything was."""
    adds = [node for node in graph.nodes if _is_add(node)]
    products = [node for node in graph.nodes if node.op == "call_function" and node.target is operator.mul]
    joined = any(_linear_add(node, taken) or _add_norm(node, taken) for node in adds)
    return joined or any(_gate(node, taken) for node in products)


def arguments_of(node: fx.Node) -> Mapping[str, Any]:
    """The arguments of a primitive's node, by name, without those that it leaves to their defaults."""
    return _signature(node).bind(*node.args, **node.kwargs).arguments


def _signature(node: fx.Node) -> inspect.Signature:
    return inspect.signature(PRIMITIVES[op_name(node).partition("::")[2]])


def _is_add(node: fx.Node) -> bool:
    """A sum of two tensors of one dtype."""
    if node.op != "call_function" or node.target not in _ADDS or node.kwargs or len(node.args) != 2:
        return False
    terms = node.all_input_nodes  # one, of a sum of a tensor with itself or with a number
    tensors = [v for term in terms if isinstance(v := value_of(term), torch.Tensor)]
    return len(tensors) == 2 and tensors[0].dtype == tensors[1].dtype


def _linear_add(add: fx.Node, taken: Taken) -> bool:
    first, second = add.all_input_nodes
    for y, residual in ((first, second), (second, first)):
        product, bias = _with_bias(y)
        linear = _single_product(product)
        if linear is None or not _shape(product) == _shape(residual) == _shape(add):
            continue
        if _written(linear, add, [*linear.all_input_nodes, *y.all_input_nodes]):
            continue
        given = arguments_of(linear)
        new = call_before(add, "linear_add", (given["x"], given["weights"][0], residual, bias), value_of(add))
        if taken(new) is None or first_alone(taken, [linear], new):
            add.graph.erase_node(new)
            continue
        new.name = add.name
        add.replace_all_uses_with(new)
        for node in dict.fromkeys((add, y, product, linear)):
            node.graph.erase_node(node)
        return True
    return False


def first_alone(taken: Taken, parts: Iterable[fx.Node], new: fx.Node) -> bool:
    """Whether a kernel that takes one of the parts, such as a user's, stands in the table in front of the one that has
    them joined: what comes first is asked first."""
    alone, joined = [i for part in parts if (i := taken(part)) is not None], taken(new)
    return bool(alone) and (joined is None or min(alone) < joined)


def _with_bias(y: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """y, or the two terms of y where it is a product and a bias that nobody else uses."""
    if _is_add(y) and len(y.users) == 1:
        product, bias = y.all_input_nodes
        if _shape(bias) == _shape(product)[-1:]:
            return product, bias
    return y, None


def _single_product(node: fx.Node) -> fx.Node | None:
    """The `norm_linear` of one weight, without a norm or a bias, whose one result is `node`, used once."""
    if node.target is not operator.getitem or len(node.users) != 1:
        return None
    call = node.args[0]
    if not isinstance(call, fx.Node) or not is_primitive(call, "norm_linear") or len(call.users) != 1:
        return None
    given = arguments_of(call)
    plain = given["norm_weight"] is None and given.get("norm_bias") is None
    return call if plain and len(given["weights"]) == 1 and given["biases"] == [None] else None


def _add_norm(add: fx.Node, taken: Taken) -> bool:
    """The sum, normalised in front of a primitive that no kernel takes with its norm."""
    users = [u for u in add.users if _normalises(u, add) and taken(u) is None]
    if not users or not _same_shapes(add):
        return False
    user = users[0]
    plain = is_primitive(user, "normalize")
    given = dict(arguments_of(user))
    weight, bias = given["weight" if plain else "norm_weight"], given.get("bias" if plain else "norm_bias")
    norm = [node for node in (weight, bias) if node is not None]
    if not all(node < add for node in norm) or _written(add, user, [add, *norm]):
        return False
    options = {name: given[name] for name in NORM_OPTIONS if name in given}
    values = (value_of(add), value_of(add))
    new = call_before(add, "add_norm", (*add.args, weight, bias), values, options)
    if taken(new) is None:
        add.graph.erase_node(new)
        return False
    with add.graph.inserting_before(add):
        normed = add.graph.call_function(operator.getitem, (new, 0))
        total = add.graph.call_function(operator.getitem, (new, 1))
    normed.meta["example_value"] = total.meta["example_value"] = value_of(add)
    normed.name = free_name(add.graph, "normed")
    total.name = add.name
    add.replace_all_uses_with(total)
    if plain:
        user.replace_all_uses_with(normed)
        user.graph.erase_node(user)
    else:
        left = {name: given[name] for name in given if name not in (*NORM_OPTIONS, "norm_bias")}
        bound = _signature(user).bind(**{**left, "x": normed, "norm_weight": None})
        user.args, user.kwargs = bound.args, bound.kwargs
    add.graph.erase_node(add)
    return True


def free_name(graph: fx.Graph, name: str) -> str:
    """The name, with a number where another node has it."""
    names = {node.name for node in graph.nodes}
    return next(free for i in itertools.count() if (free := f"{name}_{i}" if i else name) not in names)


def _normalises(user: fx.Node, x: fx.Node) -> bool:
    """Whether a primitive normalises x, with a weight, as the first thing it does."""
    if is_primitive(user, "normalize"):
        return arguments_of(user)["x"] is x
    known = any(is_primitive(user, name) for name in ("norm_linear", "gated_mlp", "plain_mlp"))
    return known and arguments_of(user)["x"] is x and arguments_of(user)["norm_weight"] is not None


def _written(first: fx.Node, last: fx.Node, read: list[fx.Node]) -> bool:
    """Whether a node between the two writes to the memory of one of those read."""
    values = [value_of(node) for node in read]
    into = [value_of(node) for between in _between(first, last) for node in writes_to(between)]
    return any(same_memory(a, b) for a in into for b in values)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    while (first := first.next) is not last:
        yield first


def _gate(product: fx.Node, taken: Taken) -> bool:
    """Attention and the sigmoid that multiplies it, both of nobody else's use."""
    attend, opened = terms = args_of(product)
    if not all(isinstance(node, fx.Node) and len(node.users) == 1 for node in terms):
        return False
    if not is_primitive(attend, "decode_attention") or (opened.op, opened.target) != ("call_method", "sigmoid"):
        return False
    gate = opened.args[0]
    if _shape(gate) != _shape(product) or attend.kwargs.get("gate") is not None:
        return False
    new = call_before(product, "decode_attention", attend.args, value_of(product), {**attend.kwargs, "gate": gate})
    if taken(new) is None or first_alone(taken, [attend], new):
        product.graph.erase_node(new)
        return False
    new.name = attend.name
    product.replace_all_uses_with(new)
    for node in (product, attend, opened):
        product.graph.erase_node(node)
    return True


def _same_shapes(add: fx.Node) -> bool:
    return all(isinstance(a, fx.Node) and _shape(a) == _shape(add) for a in add.args)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(value_of(node).shape)


def is_primitive(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and node.target is _op(name)


def _op(name: str) -> Any:
    assert name in PRIMITIVES
    return getattr(getattr(torch.ops, NAMESPACE), name)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Its arguments, of whatever type they are."""
    args: Any = node.args
    return tuple(args)


def call_before(
    node: fx.Node, name: str, args: tuple[Any, ...], value: Any, options: dict[str, Any] | None = None
) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(_op(name), args, options)
    new.meta["example_value"] = value
    return new
