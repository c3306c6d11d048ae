"""A step of a gated delta net out of its primitives, where a kernel computes it.

    3 short_conv, gdn_gates, gated_delta_rule, gated_rms_norm   ->   gdn_step

Joined are nodes that stand directly behind one another, for one token a row, whose new states go nowhere but back into
the cache: a kernel may write them in place. An edge of a layout that moves something is a node between them, so nothing
is ever joined across it. A step heeds no row without a token, so that nothing in front of it need zero those rows.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..functional.primitive import PRIMITIVES
from .dynamo import value_of, writes_to
from .join import Taken, call_before, first_alone, is_primitive

__all__ = ["join_gdn"]


def join_gdn(graph: fx.Graph, taken: Taken) -> None:
    """Join every step within one graph."""
    for norm in [node for node in graph.nodes if is_primitive(node, "gated_rms_norm")]:
        _join_step(norm, taken)


def _join_step(norm: fx.Node, taken: Taken) -> None:
    end = _given(norm, "gated_rms_norm")
    rule = _made_by(end["x"], "gated_delta_rule")
    if rule is None:
        return
    said = _given(rule, "gated_delta_rule")
    beta, doubled = _halved(said["beta"])
    gates = _made_by(said["g"], "gdn_gates")
    convs = [conv for name in "qkv" if (conv := _made_by(said[name], "short_conv")) is not None]
    if gates is None or _made_by(beta, "gdn_gates") is not gates or len(convs) < 3:
        return
    begin = [_given(conv, "short_conv") for conv in convs]
    between = [end["x"], *(said[name] for name in ("q", "k", "v", "g", "beta")), beta]
    caches = [each["state"] for each in (*begin, said)]
    states = [state for call in (*convs, rule) if (state := _second(call)) is not None]
    if not (
        len(states) == len(caches)
        and value_of(end["z"]).shape[1] == 1
        and all(len(each.users) == 1 for each in between)
        and all(map(_goes_back, states, caches))
        and all(each["positions"] is said["positions"] and each["segment_ids"] is None for each in (*begin, said))
        and len({each["activation"] for each in begin}) == 1
    ):
        return
    gate = _given(gates, "gdn_gates")
    args = (
        *(each["x"] for each in begin),
        *(end["z"], gate["b"], gate["a"]),
        *(each["weight"] for each in begin),
        *(gate["a_log"], _whole(gate["dt_bias"]), end["weight"], *caches, said["positions"]),
    )
    options = {
        **{"activation": begin[0]["activation"], "gate_act": end["activation"], "eps": end["eps"]},
        **{"scale_in_fp32": end["scale_in_fp32"], "allow_neg_eigval": doubled},
    }
    new = call_before(norm, "gdn_step", args, tuple(map(value_of, (norm, *states))), options)
    if first_alone(taken, (*convs, gates, rule, norm), new):
        norm.graph.erase_node(new)
        return
    old = [norm, *states]
    for i, result in enumerate(old):
        with norm.graph.inserting_before(norm):
            item = norm.graph.call_function(operator.getitem, (new, i))
        item.meta["example_value"], item.name = value_of(result), result.name
        result.replace_all_uses_with(item)
    _erase_unused(norm.graph, [*old, *between, rule, gates, *convs, gate["dt_bias"]])
    _unmask(new, said["positions"])


def _given(node: fx.Node, name: str) -> dict[str, Any]:
    """The arguments of a primitive's node, by name."""
    bound = inspect.signature(PRIMITIVES[name]).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _made_by(result: Any, name: str) -> fx.Node | None:
    """The primitive's node that `result` is taken from."""
    if not isinstance(result, fx.Node) or result.target is not operator.getitem:
        return None
    call = result.args[0]
    return call if isinstance(call, fx.Node) and is_primitive(call, name) else None


def _second(call: fx.Node) -> fx.Node | None:
    return next((user for user in call.users if user.target is operator.getitem and user.args[1] == 1), None)


def _halved(beta: fx.Node) -> tuple[fx.Node, bool]:
    """Of 2 * beta, beta and True; else what is given, and False."""
    double = beta.target is operator.mul and beta.args[0] == 2
    return (beta.args[1], True) if double else (beta, False)  # type: ignore[return-value]


def _goes_back(state: fx.Node, cache: Any) -> bool:
    """Whether a new state is copied into the one it was made of, and neither is used otherwise."""
    if not isinstance(cache, fx.Node) or len(state.users) != 1:
        return False
    # Dynamo leaves behind attributes that nobody reads, as views or as they are.
    users = [user for user in cache.users if user.users or writes_to(user)]
    if len(users) != 2:
        return False
    (copy,) = state.users
    return copy.op == "call_method" and copy.target == "copy_" and copy.args == (cache, state)


def _whole(view: fx.Node) -> fx.Node:
    """What is viewed, where it is one dimension of as many numbers."""
    if view.op != "call_method" or view.target != "view":
        return view
    base = view.args[0]
    assert isinstance(base, fx.Node)
    return base if value_of(base).dim() == 1 else view


def _unmask(step: fx.Node, positions: fx.Node | None) -> None:
    """Take away what zeroes the rows of x without a token, where all that is made of x is rows of the step's
    arguments."""
    for mask in [node for node in step.graph.nodes if node.op == "call_method" and node.target == "masked_fill"]:
        chain, x = _absent(mask, positions), mask.args[0]
        if chain and isinstance(x, fx.Node) and _rows_end_in(mask, value_of(mask).shape[:2], step):
            mask.replace_all_uses_with(x)
            _erase_unused(step.graph, chain)


def _absent(mask: fx.Node, positions: fx.Node | None) -> list[fx.Node]:
    """The nodes of x.masked_fill(~(positions >= 0)[..., None], 0), the last first; none where it is another mask."""
    _, condition, value = mask.args
    chain = [mask]
    for target in (operator.invert, operator.getitem, operator.ge):
        if not isinstance(condition, fx.Node) or condition.target is not target:
            return []
        chain.append(condition)
        condition = condition.args[0]
    same = condition is positions and value == 0 and chain[-1].args[1] == 0
    return chain if same and chain[-2].args[1] == (Ellipsis, None) else []


def _rows_end_in(node: fx.Node, rows: torch.Size, step: fx.Node) -> bool:
    """Whether every row of a node goes into the same row of the step's arguments, and nowhere else. rows: `B 1`."""
    for user in node.users:
        if user is step:
            continue
        projects = is_primitive(user, "norm_linear") and user.args[0] is node
        views = user.op == "call_method" and user.target in ("unflatten", "flatten", "split")
        if not (projects or views or user.target is operator.getitem):
            return False
        made = value_of(user)
        parts = made if isinstance(made, (list, tuple)) else [made]
        if any(not isinstance(part, torch.Tensor) or part.shape[:2] != rows for part in parts):
            return False
        if not _rows_end_in(user, rows, step):
            return False
    return True


def _erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of the nodes that nothing uses, the last first."""
    some = set(nodes)
    for node in reversed(graph.nodes):
        if node in some and not node.users and node.op != "placeholder":
            graph.erase_node(node)
