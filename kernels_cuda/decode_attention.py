"""A few queries a row against a long cache: `decode_attention.cu`.

Letters: B batch, S query tokens, T slots, H query heads, K key/value heads, G query heads per key/value head (H = K G),
E key width, V value width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional.shapes import ShapeError, check_positive, check_scale, check_shapes
from .device import counters
from .launch import Launch
from .ops import Op, composite, define, vector_length
from .rules import (
    CPP_TYPES,
    arch_rule,
    by_rows,
    check_absent,
    check_dtype,
    check_most,
    check_rows,
    check_same,
    dtype_rule,
)

__all__ = ["decode_attention", "supports"]

# Of a query and of a value, that a thread's registers hold its part of.
MOST_WIDTH = 256
# Of a row and a key/value head: with more, keys are read again for each so many of them.
MOST_QUERIES = 8
# With more, it is a prefill, whose products tensor cores take.
MOST_TOKENS = 8
_THREADS, _TILE, _MOST_SPLITS = 128, 32, 128
# Blocks share a row's slots while there would be fewer than this many.
_ENOUGH_BLOCKS = 1024


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    sinks: Tensor | None,
    gate: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    softmax_scale: float | None,
) -> Tensor:
    """q `B S H E`, k `B T K E`, v `B T K V`, positions `B|1 S` and `B|1 T`, sinks `H`, gate `B S H V` ->
    `B S H V`."""
    return F.decode_attention(
        q,
        k,
        v,
        q_positions=q_positions,
        k_positions=k_positions,
        sinks=sinks,
        causal=causal,
        window=window,
        softcap=softcap,
        softmax_scale=softmax_scale,
        gate=gate,
    )


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    sinks: Tensor | None,
    gate: Tensor | None,
    *,
    window: int | None,
    softcap: float | None,
    softmax_scale: float | None,
    **options: Any,
) -> Tensor:
    check_dtype("decode_attention", q=q, k=k, v=v, sinks=sinks, gate=gate)
    check_same("decode_attention", torch.int64, q_positions=q_positions, k_positions=k_positions)
    check_rows("decode_attention", q=q, k=k, v=v, sinks=sinks, gate=gate)
    sizes = check_shapes(
        "decode_attention",
        q=(q, "B S H E"),
        k=(k, "B T K E"),
        v=(v, "B T K V"),
        q_positions=(q_positions, "B? S"),
        k_positions=(k_positions, "B? T"),
        sinks=(sinks, "H"),
        gate=(gate, "B S H V"),
    )
    if sizes["K"] == 0 or sizes["H"] % sizes["K"]:
        raise ShapeError(
            f"decode_attention(k=...): H={sizes['H']} query heads do not divide over K={sizes['K']} key/value heads"
        )
    check_most("decode_attention", "q", "E", sizes["E"], MOST_WIDTH)
    check_most("decode_attention", "v", "V", sizes["V"], MOST_WIDTH)
    if window is not None:
        check_positive("decode_attention", window=window)
    check_scale("decode_attention", softcap, "softcap")
    check_scale("decode_attention", softmax_scale)
    return v.new_empty(*q.shape[:3], v.shape[3])


def _launches(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    sinks: Tensor | None,
    gate: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    softmax_scale: float | None,
) -> list[Launch]:
    (batch, tokens, heads, k_width), (slots, kv_heads), v_width = q.shape, k.shape[1:3], v.shape[3]
    groups = heads // kv_heads
    vector = vector_length(math.gcd(k_width, v_width), q, k, v)
    queries = min(MOST_QUERIES, 1 << (groups * tokens - 1).bit_length())
    chunks = -(-groups * tokens // queries)
    tiles = -(-slots // _TILE)
    rows = batch * kv_heads * chunks
    splits = max(1, min(_MOST_SPLITS, _ENOUGH_BLOCKS // max(1, rows), -(-tiles // (_THREADS // 32))))
    softmaxes = partial = arrived = None
    if splits > 1:
        softmaxes = q.new_empty(rows * splits * queries * 2, dtype=torch.float32)
        partial = q.new_empty(rows * splits * queries * v_width, dtype=torch.float32)
        arrived = counters(q.device)
    integer, real = ctypes.c_int, ctypes.c_float
    lanes = (*_lanes(k_width, vector), *_lanes(v_width, vector))
    launch = Launch(
        source="decode_attention.cu",
        name=f"decode_attention<{CPP_TYPES[q.dtype]}, {vector}, {queries}, {', '.join(map(str, lanes))}>",
        grid=(splits if tokens else 0, kv_heads * chunks, batch),
        block=(_THREADS, 1, 1),
        args=(
            q,
            *_strides(q),
            k,
            *_strides(k),
            v,
            *_strides(v),
            q_positions,
            *_steps(q_positions),
            k_positions,
            *_steps(k_positions),
            gate,
            *_strides(gate),
            *(sinks, out, softmaxes, partial, arrived),
            *map(integer, (slots, tokens, groups, k_width, v_width, causal, window or 0)),
            real(k_width**-0.5 if softmax_scale is None else softmax_scale),
            real(softcap or 0.0),
        ),
        shared_bytes=_THREADS // 32 * queries * v_width * 4,
        programmatic=True,
    )
    return [launch]


def _lanes(width: int, vector: int) -> tuple[int, int]:
    """How many lanes share a key of this width, and how many loads each of them makes."""
    vectors = width // vector
    lanes = min(32, 1 << (vectors - 1).bit_length())
    return lanes, -(-vectors // lanes)


def _strides(x: Tensor | None) -> tuple[ctypes.c_longlong, ...]:
    """Of all but the last dimension; zeros without a tensor."""
    return tuple(map(ctypes.c_longlong, (0, 0, 0) if x is None else x.stride()[:3]))


def _steps(positions: Tensor) -> tuple[ctypes.c_longlong, ctypes.c_longlong]:
    """From row to row, none where one is that of all, and from token to token."""
    row, token = positions.stride()
    return ctypes.c_longlong(row if positions.shape[0] > 1 else 0), ctypes.c_longlong(token)


_decode_attention = define(Op("decode_attention_split", _reference, _outputs, _launches))


def _call(
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
    check_absent("decode_attention", mask=mask, kv_index=kv_index)
    out: Tensor = _decode_attention(
        q,
        k,
        v,
        q_positions,
        k_positions,
        sinks,
        gate,
        causal=causal,
        window=window,
        softcap=softcap,
        softmax_scale=softmax_scale,
    )
    return out


decode_attention = composite("decode_attention", _call)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `decode_attention`: None where the kernel computes it, else the reason why not."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    positions = [arguments[name] for name in ("q_positions", "k_positions")]
    if (reason := arch_rule(arch) or dtype_rule(q, k, v, arguments["sinks"], arguments["gate"])) is not None:
        return reason
    for name in ("mask", "kv_index"):
        if arguments[name] is not None:
            return f"a {name}"
    if any(p.dtype != torch.int64 for p in positions):
        return "positions that are no int64"
    if q.shape[1] > MOST_TOKENS:
        return f"{q.shape[1]} queries a row, at most {MOST_TOKENS}"
    if (width := max(q.shape[3], v.shape[3])) > MOST_WIDTH:
        return f"heads of {width}, at most {MOST_WIDTH}"
    return by_rows(q=[q], k=[k], v=[v], sinks=[arguments["sinks"]], gate=[arguments["gate"]])
