"""What a decode step does between its projections and attention, as one primitive that writes the cache.

    q = apply_rope(normalize(q));  k = apply_rope(normalize(k))
    attend(q, write_tokens(cache.k, k), write_tokens(cache.v, v), slot_positions(..))
    cache.k.copy_(..);  cache.v.copy_(..)
    ->
    q, k_positions = qkv_rope_cache(q, k, v, cache.k, cache.v, ..);  attend(q, cache.k, cache.v, k_positions)

Every norm and every turn may be absent. What stands between two of these nodes, such as an edge of a layout, keeps them
apart.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .dynamo import value_of
from .join import Taken, args_of, call_before, first_alone, is_primitive

__all__ = ["join_cache"]

_NORM_OPTIONS = ("eps", "zero_centered", "scale_in_fp32")


def join_cache(graph: fx.Graph, taken: Taken) -> bool:
    """Join the first such nodes of a graph that a kernel takes; whether there were any."""
    attends = [node for node in graph.nodes if is_primitive(node, "decode_attention")]
    return any(_join(node, taken) for node in attends)


@dataclass(frozen=True)
class _Heads:
    """A projection's heads, and what is done to them, by which nodes, the last first."""

    x: fx.Node
    nodes: tuple[fx.Node, ...] = ()
    tables: tuple[Any, Any] = (None, None)
    norm: fx.Node | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _join(attend: fx.Node, taken: Taken) -> bool:
    reads = [node for node in args_of(attend)[1:3] if _is_method(node, "narrow")]
    writes = [args_of(node)[0] for node in reads]
    held: Any = attend.kwargs["k_positions"]
    copies = [_copy_back(node) for node in writes]
    if len(reads) != 2 or None in copies or not is_primitive(held, "slot_positions"):
        return False
    (k_cache, k, *where), (v_cache, v, *v_where) = (args_of(node) for node in writes)
    slots, *held_where = args_of(held)
    ring = held.kwargs.get("ring")
    if not where == v_where == held_where or any(node.kwargs.get("ring") != ring for node in writes):
        return False
    queries, keys = _heads(args_of(attend)[0]), _heads(k)
    alike = queries.tables == keys.tables and queries.options == keys.options
    if not alike or (queries.norm is None) != (keys.norm is None):
        return False
    norms, caches = (queries.norm, keys.norm), (k_cache, v_cache)
    args = (queries.x, keys.x, v, *queries.tables, *norms, *caches, *where, slots)
    first = min(writes)
    if any(node >= first for node in args if isinstance(node, fx.Node)):
        return False
    values = (value_of(args_of(attend)[0]), value_of(held))
    new = call_before(first, "qkv_rope_cache", args, values, {**queries.options, "ring": ring})
    if taken(new) is None or first_alone(taken, (*queries.nodes, *keys.nodes, *writes, held), new):
        attend.graph.erase_node(new)
        return False
    results: list[tuple[fx.Node, str]] = []
    for i, old in enumerate((args_of(attend)[0], held)):
        with attend.graph.inserting_before(first):
            result = attend.graph.call_function(operator.getitem, (new, i))
        result.meta["example_value"] = values[i]
        attend.replace_input_with(old, result)
        results.append((result, old.name))
    for read, cache, copy in zip(reads, caches, copies, strict=True):
        read.replace_input_with(args_of(read)[0], cache)
        assert copy is not None
        attend.graph.erase_node(copy)
    for node in (*writes, held, *queries.nodes, *keys.nodes):
        if not node.users:
            attend.graph.erase_node(node)
    names = {node.name for node in attend.graph.nodes}
    for result, name in results:  # heads without a norm and a rotation are still there, under their name
        if name not in names:
            result.name = name
    return True


def _heads(node: fx.Node) -> _Heads:
    """What is turned and normalised, where that is what a node comes from."""
    found: dict[str, Any] = {"options": {}, "nodes": ()}
    if is_primitive(node, "apply_rope"):
        found["tables"] = tuple(args_of(node)[1:])
        found["options"] |= {"interleaved": node.kwargs.get("interleaved", False)}
        found["nodes"] += (node,)
        node = args_of(node)[0]
    if is_primitive(node, "normalize") and node.kwargs.get("norm_type", "rms_norm") == "rms_norm":
        found["norm"] = args_of(node)[1]
        found["options"] |= {name: node.kwargs[name] for name in _NORM_OPTIONS if name in node.kwargs}
        found["nodes"] += (node,)
        node = args_of(node)[0]
    return _Heads(node, **found)


def _copy_back(write: Any) -> fx.Node | None:
    """The copy into the cache's own buffer, where that and one read are all that becomes of a write."""
    if not is_primitive(write, "write_tokens") or len(write.users) != 2:
        return None
    copies = [user for user in write.users if _is_method(user, "copy_") and user.args == (args_of(write)[0], write)]
    return copies[0] if copies and not copies[0].users else None


def _is_method(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name
