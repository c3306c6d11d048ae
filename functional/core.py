"""The attention core: scores, mask, softmax, values.

    o[s] = sum_t softmax_t(softmax_scale * q[s].k[t]) v[t]          (Vaswani et al. 2017, arXiv:1706.03762)

A core computes on the shards of one rank, so it is told what a shard cannot know: the positions of its queries and
keys, which packed document each belongs to, and which key/value head each query head reads. A position below 0 says
"no token": such a query sees nothing and gives zeros, such a key is never seen, whatever its slot holds (NaN too).

Letters: B batch, S query tokens, T key tokens, H query heads, K key/value heads, G query heads per key/value head
(H = K G), E key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .primitive import primitive
from .shapes import ShapeError, check_shapes
from .wire import edges

__all__ = [
    "as_dtype", "check_rules", "core_attention", "decode_attention", "dot_product_attention", "full_precision",
    "masked_softmax", "present", "visible", "wide",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


@edges(
    q="B S (K G) E",
    k="B T K E",
    v="B T K V",
    q_positions="B S",
    k_positions="B T",
    q_segment_ids="B S",
    k_segment_ids="B T",
    mask="B (K G) S T",
    sinks="(K G)",
    o="B S (K G) V",
)
def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kv_index: Tensor | None = None,
    head_offset: int | None = None,
    local_heads: int | None = None,
) -> Tensor:
    """q `B S H E`, k `B T K E`, v `B T K V` -> `B S H V`.

    causal: a query sees keys at its own position and before.
    mask: boolean, true where a query may see a key, `S T` or `B|1 H|1 S T`.
    window: a query sees the `window` tokens that end at its own (without `causal` also as many that begin there).
    softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
    sinks: `H`, a score of each head that takes part in the softmax and has no value (gpt_oss).
    softmax_scale: E^-0.5 unless given.
    segment_ids: `B S`, or a pair `B S`, `B T`; a query sees keys of its own id.
    q_positions, k_positions: `B|1 S`, `B|1 T`; needed by `causal` and `window` where S and T differ.
    kv_index: `H`, the key/value head of each query head; without it head h reads `h // G`.
    head_offset, local_heads: which heads these are of all, for cores that treat them differently; this one does not.
    Computed in fp32 at least, returned in v's dtype. Raises `ShapeError` before any work.
    """
    q_ids, k_ids = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    _check(
        "dot_product_attention", q, k, v, mask, sinks, window, softcap, q_ids, k_ids, q_positions, k_positions, kv_index
    )
    q_positions, k_positions = _default_positions(q, k, causal or window is not None, q_positions, k_positions)
    return core_attention(
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        window=window,
        softcap=softcap,
        sinks=sinks,
        softmax_scale=softmax_scale,
        q_segment_ids=q_ids,
        k_segment_ids=k_ids,
        q_positions=q_positions,
        k_positions=k_positions,
        kv_index=kv_index,
    )


@primitive
def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kv_index: Tensor | None = None,
) -> Tensor:
    """`dot_product_attention` after its checks, with every position and id as a tensor."""
    see = visible(
        causal=causal,
        mask=mask,
        window=window,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    q, k, v = present(q, q_positions), present(k, k_positions), present(v, k_positions)
    k, v, groups = grouped(q, k, v, kv_index)
    q_BSKGE = q.unflatten(2, (k.shape[2], groups))
    # Products in fp32 too: scores and weights rounded to half precision would double the error.
    scores = torch.einsum("bskge,btke->bkgst", wide(q_BSKGE), wide(k))
    weights = masked_softmax(scores, q.shape[-1], softmax_scale, see, softcap, sinks)
    o = torch.einsum("bkgst,btkv->bskgv", weights, wide(v)).flatten(2, 3).to(v.dtype)
    return o if see is None else o.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0)


@primitive
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Tensor,
    k_positions: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    kv_index: Tensor | None = None,
    head_offset: int | None = None,
    local_heads: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """`dot_product_attention` for a few queries against a long cache: positions are always given, documents are not
    packed, all else is the same. gate: `B S H V`, whose sigmoid multiplies the result; a program's graph has it where
    nothing stands between the two (`programs/join`).

    Written as products and sums over the cache as it lies, which a compiler fuses: nothing is copied, neither to group
    heads nor to hide empty slots. `programs/cpu.py` has a form that reads the cache once.
    """
    _check("decode_attention", q, k, v, mask, sinks, window, softcap, None, None, q_positions, k_positions, kv_index)
    see = visible(causal=causal, mask=mask, window=window, q_positions=q_positions, k_positions=k_positions)
    assert see is not None
    q, k, v = present(q, q_positions), present(k, k_positions), present(v, k_positions)
    k, v, groups = grouped(q, k, v, kv_index)
    q_BSKGE = q.unflatten(2, (k.shape[2], groups))
    scores = (wide(q_BSKGE)[:, :, None] * wide(k)[:, None, :, :, None]).sum(-1).permute(0, 3, 4, 1, 2)
    weights = masked_softmax(scores, q.shape[-1], softmax_scale, see, softcap, sinks)
    o = (weights.permute(0, 3, 4, 1, 2)[..., None] * wide(v)[:, None, :, :, None]).sum(2).flatten(2, 3)
    o = o.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0).to(v.dtype)
    return o if gate is None else o * gate.sigmoid()


def visible(
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Tensor | None:
    """Which keys a query sees: boolean, broadcastable to `B H S T` (`B|1 1|H S|1 T`); None where it sees them all."""
    if (causal or window is not None) and (q_positions is None or k_positions is None):
        raise ValueError("visible: causal and window need q_positions and k_positions")
    rules: list[Tensor] = []
    if q_positions is not None and k_positions is not None:
        back = q_positions[:, None, :, None] - k_positions[:, None, None, :]
        rules.append((q_positions >= 0)[:, None, :, None] & (k_positions >= 0)[:, None, None, :])
        if causal:
            rules.append(back >= 0)
        if window is not None:
            rules.append(back < window if causal else back.abs() < window)
    if q_segment_ids is not None and k_segment_ids is not None:
        rules.append(q_segment_ids[:, None, :, None] == k_segment_ids[:, None, None, :])
    if mask is not None:
        rules.append(mask if mask.dim() == 4 else mask[None, None])
    see = None
    for rule in rules:
        see = rule if see is None else see & rule
    return see


def masked_softmax(
    scores: Tensor,
    width: int,
    softmax_scale: float | None,
    see: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """scores `B K G S T`, in fp32 at least, of keys of a width -> weights. A query that sees nothing gets weights
    without meaning."""
    scores = scores * (width**-0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if see is not None:
        # The lowest finite number and not -inf, whose softmax and gradient are NaN where a query sees nothing.
        hidden = ~_by_group(see, scores)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).unflatten(0, scores.shape[1:3])[None, :, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _by_group(see: Tensor, scores: Tensor) -> Tensor:
    """`B|1 H|1 S T` -> broadcastable to `B K G S T`."""
    return see[:, :, None] if see.shape[1] == 1 else see.unflatten(1, scores.shape[1:3])


def grouped(q: Tensor, k: Tensor, v: Tensor, kv_index: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Keys and values as the query heads read them, and how many neighbouring query heads share one."""
    if kv_index is not None:
        return k.index_select(2, kv_index), v.index_select(2, kv_index), 1
    return k, v, q.shape[2] // max(k.shape[2], 1)


def wide(x: Tensor) -> Tensor:
    """x in fp32 at least."""
    return as_dtype(x, torch.promote_types(x.dtype, torch.float32))


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself where it has the dtype, which `Tensor.to` would leave a node of in a graph."""
    return x if x.dtype == dtype else x.to(dtype)


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """fn without autocast: for what is computed in fp32 at least, and says so."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "meta")
        if device == "meta" or not torch.is_autocast_enabled(device):
            return fn(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return fn(*args, **kwargs)

    return call


def present(x: Tensor, positions: Tensor | None) -> Tensor:
    """x `B S ...` with what is no token zeroed: a weight or a gradient of 0 times a NaN is NaN."""
    return x if positions is None else x.masked_fill((positions < 0)[..., None, None], 0)


def _default_positions(
    q: Tensor, k: Tensor, needed: bool, q_positions: Tensor | None, k_positions: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if (q_positions is None) != (k_positions is None):
        given, absent = ("k", "q") if q_positions is None else ("q", "k")
        raise ShapeError(
            f"dot_product_attention: {given}_positions is given without {absent}_positions\n"
            "    fix: pass both, or neither"
        )
    if q_positions is not None or not needed:
        return q_positions, k_positions
    if q.shape[1] != k.shape[1]:
        raise ShapeError(
            f"dot_product_attention: causal or window with S={q.shape[1]} queries and T={k.shape[1]} keys does not say "
            "which key each query stands at\n    fix: pass q_positions (B S) and k_positions (B T)"
        )
    positions = torch.arange(q.shape[1], device=q.device)[None]
    return positions, positions


def _check(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    softcap: float | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    kv_index: Tensor | None,
) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{function}(softcap={softcap}): must be above 0")
    _check_values(function, mask, window, q_ids, k_ids)
    bound = check_shapes(
        function,
        q=(q, "B S H E"),
        k=(k, "B T K E"),
        v=(v, "B T K V"),
        sinks=(sinks, "H"),
        kv_index=(kv_index, "H"),
        **_rules(mask, q_ids, k_ids, q_positions, k_positions),
    )
    if kv_index is None and (bound["K"] == 0 or bound["H"] % bound["K"]):
        raise ShapeError(
            f"{function}(k=...): H={bound['H']} query heads do not divide over K={bound['K']} key/value heads\n"
            "    fix: pass kv_index (H), the key/value head of each query head"
        )


def check_rules(
    function: str,
    q: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    window: int | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> None:
    """What says which keys a query sees, for q `B S H E` and keys `B T LR` that no head owns."""
    _check_values(function, mask, window, q_ids, k_ids)
    if (q_positions is None) != (k_positions is None):
        raise ShapeError(f"{function}: q_positions and k_positions are needed together")
    rules = _rules(mask, q_ids, k_ids, q_positions, k_positions)
    check_shapes(function, q=(q, "B S H E"), latent=(latent, "B T LR"), **rules)


def _check_values(
    function: str, mask: Tensor | None, window: int | None, q_ids: Tensor | None, k_ids: Tensor | None
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"{function}(window={window}): at least 1 token, the query's own")
    if (q_ids is None) != (k_ids is None):
        raise ValueError(f"{function}(segment_ids=...): ids of both sides are needed, B S and B T")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"{function}(mask=...): a boolean mask is needed, true where a query may see a key, not {mask.dtype}\n"
            "    fix: pass mask == 0 if it is additive"
        )


def _rules(
    mask: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> dict[str, tuple[Tensor | None, str]]:
    """Arguments of `check_shapes`."""
    return {
        "mask": (mask, "S T" if mask is not None and mask.dim() == 2 else "B? H? S T"),
        "segment_ids": (q_ids, "B S"),
        "k_segment_ids": (k_ids, "B T"),
        "q_positions": (q_positions, "B? S"),
        "k_positions": (k_positions, "B? T"),
    }
