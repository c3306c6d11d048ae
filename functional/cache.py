"""Key/value caches as values: a function takes one and returns one.

A cache has a slot for each position; slots may lie unwritten and hold anything. `Slots` says, once for all layers of
a call, where the tokens go and how far it is worth reading.

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

__all__ = ["KVCache", "Slots", "cache_update"]


@pytree
class KVCache(Tree):
    """Keys (rotated) and values of one layer."""

    k: Tensor = dim("B T (K/tp) E", initial=0.0)
    v: Tensor = dim("B T (K/tp) V", initial=0.0)


@pytree
class Slots(Tree):
    """write: for each token its slot, all different within a row, tokens that are padding included (their slot keeps
    its content). read: `0 .. n-1`, the slots that a query may see."""

    write: Tensor = dim("B S")
    read: Tensor = dim("n")

    @classmethod
    def of(cls, positions: Tensor, slots: int, read: Tensor | None = None) -> Slots:
        """positions `B S`: consecutive within a row, -1 for padding, which may stand anywhere; slots: how many the
        cache has, at least S. Raises `ShapeError`."""
        if positions.shape[1] > slots:
            raise ShapeError(f"cache: {slots} slots are too few for {positions.shape[1]} new tokens")
        padding = positions < 0
        behind = last_position(positions) + padding.long().cumsum(-1)
        write = torch.where(padding, behind % slots, positions)
        return cls(write=write, read=torch.arange(slots, device=positions.device) if read is None else read)


def cache_update(
    cache: KVCache, k: Tensor, v: Tensor, positions: Tensor, slots: Slots | None = None
) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    """Write k `B S K E` and v `B S K V` at `positions` (`B S`; -1 writes nothing).

    -> the new cache, and what there is to read: k `B n K E`, v `B n K V`, their positions `B n` (-1 where a slot holds
    no token of this row).
    """
    if slots is None:
        slots = Slots.of(positions, cache.k.shape[1])
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    padding = (positions < 0)[..., None, None]
    k_new = torch.where(padding, cache.k[rows, slots.write], k.to(cache.k.dtype))
    v_new = torch.where(padding, cache.v[rows, slots.write], v.to(cache.v.dtype))
    k_cache = cache.k.index_put((rows, slots.write), k_new)
    v_cache = cache.v.index_put((rows, slots.write), v_new)
    n = slots.read.shape[0]
    k_positions = torch.where(slots.read <= last_position(positions), slots.read, -1)
    return KVCache(k=k_cache, v=v_cache), k_cache.narrow(1, 0, n), v_cache.narrow(1, 0, n), k_positions


def last_position(positions: Tensor) -> Tensor:
    """`B S` -> `B 1`, the highest of each row; -1 for a row without a token."""
    if positions.shape[1] == 0:
        return positions.new_full((positions.shape[0], 1), -1)
    return positions.amax(-1, keepdim=True)


def empty_caches(
    cfgs: Iterable[Any], batch: int, slots: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[KVCache, ...]:
    """One cache a layer, for the attention configs of a stack, uninitialised: an unwritten slot never matters."""

    def allocate(leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    return tuple(tree.map(allocate, KVCache.abstract(c, dtype=dtype, B=batch, T=slots)) for c in cfgs)
