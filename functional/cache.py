"""Key/value caches as values: a function takes one and returns one.

A cache has a slot for each position, or, in a layer that sees a `window` of tokens, as many slots as the window: a
ring, in which a token takes the place of the one that the window has left behind. Slots may lie unwritten and hold
anything.

Letters: B batch, S new tokens, T slots, K key/value heads, E key width, V value width, LR latent and rotary key; of a
gated delta net K key heads, K G value heads, U = W - 1 tokens of its convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from .primitive import primitive
from .shapes import ShapeError
from .tree import Tree, dim, pytree

__all__ = [
    "Cache", "GDNCache", "KVCache", "LatentCache", "cache_update", "empty_caches", "latent_cache_update",
    "slot_positions", "write_tokens",
]  # fmt: skip


@pytree
class KVCache(Tree):
    """Keys (rotated) and values of one layer."""

    k: Tensor = dim("B T (K/tp) E", initial=0.0)
    v: Tensor = dim("B T (K/tp) V", initial=0.0)


@pytree
class LatentCache(Tree):
    """The latent (normalised) and the rotary key (turned) of one layer of latent attention, side by side."""

    latent: Tensor = dim("B T LR", initial=0.0)


@pytree
class GDNCache(Tree):
    """The state of one gated delta net, value-major and never below fp32, and the last W-1 tokens that its convolution
    saw of queries, keys and values, the latest last. Other caches grow with T; this one does not."""

    q: Tensor = dim("B (K/tp E) U", initial=0.0)
    k: Tensor = dim("B (K/tp E) U", initial=0.0)
    v: Tensor = dim("B ((K/tp G) V) U", initial=0.0)
    state: Tensor = dim("B (K/tp G) V E", initial=0.0, keep_fp32=True)


Cache = KVCache | LatentCache | GDNCache
# What a cache holds of each token, `B T ...` each.
Parts = tuple[Tensor, ...]


def cache_update(
    cache: KVCache,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    read: Tensor | None = None,
    *,
    window: int | None = None,
) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    """Write k `B S K E` and v `B S K V` at `positions` (`B S`: consecutive within a row; -1, anywhere, writes nothing).

    read: `0 .. n-1`, the slots that a query may see; all unless given.
    window: as the layer's; a cache of at least so many slots is a ring of the first `window` of them.
    -> the new cache, and what there is to read: k `B n K E`, v `B n K V`, their positions `B n` (-1 where a slot holds
    no token of this row). A ring that takes several tokens at once is read as it was before, with the new ones after
    it (n is then n + S), since the last of them take the place of what the first still see.
    Raises `ShapeError` where a cache that is no ring has fewer than S slots.
    """
    (k_cache, v_cache), (k_read, v_read), k_positions = _update((cache.k, cache.v), (k, v), positions, read, window)
    return KVCache(k=k_cache, v=v_cache), k_read, v_read, k_positions


def latent_cache_update(
    cache: LatentCache, latent: Tensor, positions: Tensor, read: Tensor | None = None, *, window: int | None = None
) -> tuple[LatentCache, Tensor, Tensor]:
    """`cache_update` for latent `B S LR` -> the new cache, and what there is to read: latent `B n LR`, positions."""
    (new,), (found,), k_positions = _update((cache.latent,), (latent,), positions, read, window)
    return LatentCache(latent=new), found, k_positions


def _update(
    cache: Parts, new: Parts, positions: Tensor, read: Tensor | None, window: int | None
) -> tuple[Parts, Parts, Tensor]:
    """The parts of the new cache, what there is to read of each, and the positions of that."""
    slots = cache[0].shape[1]
    ring = window if window is not None and window <= slots else None
    if ring is not None and positions.shape[1] != 1:
        return _rewrite_ring(cache, new, positions, read, ring)
    if positions.shape[1] > slots:
        raise ShapeError(f"cache: {slots} slots are too few for {positions.shape[1]} new tokens")
    if read is None:
        read = torch.arange(ring or slots, device=positions.device)
    # One token of a row is written to a ring first, since all that it sees is still there.
    parts = tuple([write_tokens(old, x, positions, ring=ring) for old, x in zip(cache, new, strict=True)])
    return parts, _first(parts, read.shape[0]), slot_positions(read, positions, ring=ring)


@primitive
def write_tokens(cache: Tensor, new: Tensor, positions: Tensor, *, ring: int | None = None) -> Tensor:
    """cache `B T ...`, new `B S ...` -> the cache with each token in the slot of its position, `B S` (-1: in none).

    ring: how many slots are one, in which a token's is its position modulo `ring`; then S is 1.
    """
    slots = _slots_of(positions, cache.shape[1]) if ring is None else positions % ring
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    padding = (positions < 0)[(..., *[None] * (new.dim() - 2))]
    # Padding rewrites what its slot holds, which is nobody else's.
    token = torch.where(padding, cache[rows, slots], new.to(cache.dtype))
    return cache.index_put((rows, slots), token)


@primitive
def slot_positions(slots: Tensor, positions: Tensor, *, ring: int | None = None) -> Tensor:
    """slots `n`, positions `B S` -> `B n`: the position of the token that each slot holds once those at `positions` are
    written; -1 where it holds none of this row. ring: as in `write_tokens`."""
    last = _last(positions)
    return torch.where(slots <= last, slots, -1) if ring is None else _in_ring(slots, last, ring)


def _first(parts: Parts, slots: int) -> Parts:
    return tuple([part.narrow(1, 0, slots) for part in parts])


def _rewrite_ring(
    cache: Parts, new: Parts, positions: Tensor, read: Tensor | None, window: int
) -> tuple[Parts, Parts, Tensor]:
    """Several tokens a row, of which only the last `window` are kept."""
    tokens = positions.shape[1]
    new = tuple([x.to(old.dtype) for old, x in zip(cache, new, strict=True)])
    last = _last(positions)
    before = last - (positions >= 0).sum(-1, keepdim=True)
    slots = torch.arange(window, device=positions.device) if read is None else read
    there = tuple([torch.cat(pair, 1) for pair in zip(_first(cache, slots.shape[0]), new, strict=True)])
    k_positions = torch.cat((_in_ring(slots, before, window), positions), 1)
    if tokens == 0:
        return cache, there, k_positions
    # For each slot the token that it takes, if any; tokens that take none meet in a slot behind the ring.
    kept = (positions >= 0) & (positions > last - window)
    slot = torch.where(kept, positions % window, window)
    order = torch.arange(tokens, device=positions.device).expand_as(positions)
    none = torch.full((positions.shape[0], window + 1), -1, dtype=order.dtype, device=positions.device)
    source = none.scatter(1, slot.long(), order)[:, :window]

    def write(old: Tensor, new: Tensor) -> Tensor:
        each = (..., *[None] * (new.dim() - 2))
        taken = new.gather(1, source.clamp_min(0)[each].expand(-1, -1, *new.shape[2:]))
        return torch.cat((torch.where((source < 0)[each], old[:, :window], taken), old[:, window:]), 1)

    return tuple([write(old, x) for old, x in zip(cache, new, strict=True)]), there, k_positions


def _in_ring(slots: Tensor, last: Tensor, window: int) -> Tensor:
    """The position that each slot `n` of a ring holds when `last` `B 1` is the latest; -1 where it holds none."""
    held = last - (last - slots) % window
    return torch.where((held >= 0) & (last >= 0), held, -1)


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
    cfgs: Iterable[Any],
    batch: int,
    slots: int | Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Cache, ...]:
    """One cache a layer, for the attention configs of a stack, uninitialised: an unwritten slot never matters. The
    states of gated delta nets are zeros.

    slots: as many as the longest row has tokens; a layer with a smaller window gets a ring of `window` slots. A
    sequence says the slots of each layer.
    """
    if hasattr(cfgs, "cache_class") or hasattr(cfgs, "layers"):
        fix = "[cfg]" if hasattr(cfgs, "cache_class") else "[layer.attention for layer in cfg.layers]"
        raise TypeError(
            f"empty_caches(cfgs=...): one config a layer is needed, in a sequence, not {type(cfgs).__name__}\n"
            f"    fix: {fix}"
        )
    kinds = list(cfgs)
    if any(not hasattr(each, "cache_class") for each in kinds):
        raise TypeError(
            f"empty_caches(cfgs=...): configs of attention are needed, not {type(kinds[0]).__name__}\n"
            "    fix: [layer.attention for layer in cfg.layers]"
        )
    if isinstance(slots, int):
        slots = [slots if each.window is None else min(slots, each.window) for each in kinds]
    sizes = zip(kinds, slots, strict=True)
    found = []
    for each, n in sizes:
        make = torch.zeros if each.cache_class is GDNCache else torch.empty
        abstract = each.cache_class.abstract(each, dtype=dtype, B=batch, T=n)
        found.append(tree.map(functools.partial(_allocate, make, device), abstract))
    return tuple(found)


def _allocate(make: Callable[..., Tensor], device: torch.device | str, leaf: Tensor) -> Tensor:
    return make(leaf.shape, dtype=leaf.dtype, device=device)
