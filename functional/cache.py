"""Key/value caches as values: a function takes one and returns one.

A cache has a slot for each position; slots may lie unwritten and hold anything.

Letters: B batch, S new tokens, T slots, K key/value heads, E key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import tree
from .shapes import ShapeError
from .tree import Tree, dim, pytree

__all__ = ["KVCache", "cache_update", "empty_caches"]


@pytree
class KVCache(Tree):
    """Keys (rotated) and values of one layer."""

    k: Tensor = dim("B T (K/tp) E", initial=0.0)
    v: Tensor = dim("B T (K/tp) V", initial=0.0)


def cache_update(
    cache: KVCache, k: Tensor, v: Tensor, positions: Tensor, read: Tensor | None = None
) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    """Write k `B S K E` and v `B S K V` at `positions` (`B S`: consecutive within a row; -1, anywhere, writes nothing).

    read: `0 .. n-1`, the slots that a query may see; all unless given.
    -> the new cache, and what there is to read: k `B n K E`, v `B n K V`, their positions `B n` (-1 where a slot holds
    no token of this row). Raises `ShapeError` where the cache has fewer than S slots.
    """
    slots = cache.k.shape[1]
    if positions.shape[1] > slots:
        raise ShapeError(f"cache: {slots} slots are too few for {positions.shape[1]} new tokens")
    if read is None:
        read = torch.arange(slots, device=positions.device)
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    write = _slots_of(positions, slots)
    padding = (positions < 0)[..., None, None]
    k_new = torch.where(padding, cache.k[rows, write], k.to(cache.k.dtype))
    v_new = torch.where(padding, cache.v[rows, write], v.to(cache.v.dtype))
    k_cache = cache.k.index_put((rows, write), k_new)
    v_cache = cache.v.index_put((rows, write), v_new)
    k_positions = torch.where(read <= _last(positions), read, -1)
    n = read.shape[0]
    return KVCache(k=k_cache, v=v_cache), k_cache.narrow(1, 0, n), v_cache.narrow(1, 0, n), k_positions


def _slots_of(positions: Tensor, slots: int) -> Tensor:
    """The slot of each token, all different within a row: padding, which rewrites what its slot holds, takes those
    behind the last token."""
    padding = positions < 0
    behind = padding.long().cumsum(-1) if positions.shape[1] > 1 else 1
    return torch.where(padding, (_last(positions) + behind) % slots, positions)


def _last(positions: Tensor) -> Tensor:
    """`B S` -> `B 1`, the highest of each row; -1 for a row without a token."""
    if positions.shape[1] == 0:
        return positions.new_full((positions.shape[0], 1), -1)
    return positions.amax(-1, keepdim=True)


def empty_caches(
    cfgs: Iterable[Any], batch: int, slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[KVCache, ...]:
    """One cache a layer, for the attention configs of a stack, uninitialised: an unwritten slot never matters."""

    def allocate(leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    return tuple(tree.map(allocate, KVCache.abstract(c, dtype=dtype, B=batch, T=slots)) for c in cfgs)
