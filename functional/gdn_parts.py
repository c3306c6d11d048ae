"""A gated delta net of which each rank has some of the tokens: what those do to a state, and what a state does to them.

A token changes the state by a product and a sum, so that what all of a rank's tokens do is S -> S A + B. Both are found
at once, as what becomes of E more values a head that begin with one, of which no token has any. A token's output is
that from no state, and what the state before all of them adds.

Letters: B batch, S tokens of a rank, H value heads, K key heads, E key width, V value width, N = V + E, P parts of the
sequence, C channels of a key head's convolution, U tokens that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import GDNCache
from .core import wide
from .recurrence import gated_delta_rule

__all__ = ["Part", "joined", "part_of"]


class Part(NamedTuple):
    """o `B S H N`: V values from no state, and what of a state before adds to them. summary `1 B H N E`: the sum and
    the product. tail `1 B (K C) U`: what the convolution keeps behind these tokens; rows `1 B`: 0 without a token
    here, 1 with some, 2 where one of them begins the row; None without a cache."""

    o: Tensor
    summary: Tensor
    tail: Tensor | None
    rows: Tensor | None


def part_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    begins: Tensor | None,
    positions: Tensor | None,
    segment_ids: Tensor | None,
    ends: Sequence[Tensor] | None,
) -> Part:
    """Arguments as those of `gated_delta_rule`, of a rank's own tokens. begins: `B`, whether a document begins with
    them, which then have nothing of the state before. ends: of q, k and v, what each convolution keeps, for a cache."""
    (batch, tokens, heads, V), E, dtype = v.shape, q.shape[-1], wide(v).dtype
    one_BHEE = torch.eye(E, dtype=dtype, device=v.device).expand(batch, heads, E, E)
    if begins is not None:
        one_BHEE = one_BHEE.masked_fill(begins[:, None, None, None], 0)
    state_BHNE = torch.cat((one_BHEE.new_zeros(batch, heads, V, E), one_BHEE), 2)
    v_BSHN = torch.nn.functional.pad(v.to(dtype), (0, E))
    # Positions say what is padding, and not which rows begin.
    there = None if positions is None else torch.where(positions < 0, -1, 1)
    o_BSHN, state_BHNE = gated_delta_rule(q, k, v_BSHN, g, beta, state_BHNE, positions=there, segment_ids=segment_ids)
    if not tokens:  # a rank without tokens takes part in backward too
        state_BHNE = state_BHNE + v_BSHN.sum()
    if ends is None:
        return Part(o_BSHN, state_BHNE[None], None, None)
    rows_B = state_BHNE.new_full((batch,), min(tokens, 1))
    if positions is not None:
        rows_B = (
            ((positions >= 0).any(1).long() + (positions == 0).any(1)).to(dtype).expand(batch)
        )  # one may be for all
    return Part(o_BSHN, state_BHNE[None], _by_key_head(ends, q.shape[2]).to(dtype)[None], rows_B[None])


def joined(
    o: Tensor, summary: Tensor, tail: Tensor | None, rows: Tensor | None, *, place: int, cache: GDNCache | None,
    heads: int,
) -> tuple[Tensor, GDNCache | None]:  # fmt: skip
    """o `B S H V` of a rank's tokens, and the cache behind all of them.

    o: as a `Part` has it. summary, tail, rows: those of all parts, `P ...`. place: which of them this rank's is. heads:
    K, of the cache. Its convolution is that of the last part with a token of the row.
    """
    (_, batch, count, _, E), V = summary.shape, o.shape[-1] - summary.shape[-1]
    # Nothing is before the first rank, whose backward must send what others wait for all the same.
    before_BHVE = summary.new_zeros(batch, count, V, E) + summary[:, :, :, :0].sum()
    if cache is not None and rows is not None:
        unread_B = (rows == 2).any(0) | (rows == 0).all(0)
        before_BHVE = before_BHVE + cache.state.masked_fill(unread_B[:, None, None, None], 0)
    before_BHVE = _behind(before_BHVE, summary[:place])
    o_BSHV = o[..., :V] + torch.einsum("bhve,bshe->bshv", before_BHVE, o[..., V:])
    if cache is not None and tail is not None and rows is not None:
        cache = _kept(cache, _behind(before_BHVE, summary[place:]), tail, rows, heads)
    return o_BSHV, cache


def _behind(state: Tensor, parts: Tensor) -> Tensor:
    """The state `B H V E` behind parts `P B H V+E E`, each a sum and a product."""
    for part_BHNE in parts:
        V = state.shape[2]
        state = state @ part_BHNE[:, :, V:] + part_BHNE[:, :, :V]
    return state


def _kept(cache: GDNCache, state: Tensor, tails: Tensor, rows: Tensor, heads: int) -> GDNCache:
    """The cache behind all tokens: state `B H V E`, and of tails `P B (K C) U` that of the last part with a token of
    the row; what it was in rows without any. rows: `P B`, above 0 where there are some. heads: K."""
    tail_BCU = _by_key_head((cache.q, cache.k, cache.v), heads)
    for part_BCU, some_B in zip(tails.to(tail_BCU.dtype), rows > 0, strict=True):
        tail_BCU = torch.where(some_B[:, None, None], part_BCU, tail_BCU)
    widths = [each.shape[1] // heads for each in (cache.q, cache.k, cache.v)]
    q, k, v = (each.flatten(1, 2) for each in tail_BCU.unflatten(1, (heads, -1)).split(widths, 2))
    new = (rows > 0).any(0)[:, None, None, None]
    return GDNCache(q=q, k=k, v=v, state=torch.where(new, state, cache.state))


def _by_key_head(states: Sequence[Tensor], heads: int) -> Tensor:
    """The states of q, k and v, `B (K ...) U` each, side by side within each key head: `B (K C) U`."""
    return torch.cat([each.unflatten(1, (heads, -1)) for each in states], 2).flatten(1, 2)
