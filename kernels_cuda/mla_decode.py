"""A decode step of latent attention, absorbed: `latent_heads.cu`, `mla_decode.cu`, and the primitive they serve.

Three launches: the queries of all heads into the latent, attention over the latents, what it gives out of the latent.
The products with kv_b are kernels of their own, since no product of torch has one matrix a head, rows of a part of it,
and fp32 on one side. The new token is in the cache before: that write is the compiler's.

Letters: B batch, T key tokens, H heads, L latent, N non-rotary and R rotary key width, E = N + R, V value width; NV =
N + V and LR = L + R, one beside the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..functional import absorbed
from ..functional.shapes import ShapeError, check_positive, check_scale, check_shapes
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

__all__ = ["absorbed_core", "supports"]

# Columns that the eight warps of a block keep in registers, 16 a step each.
_STEP, _MOST_STEPS = 8 * 16, 5
# Slots of a row are shared by blocks where there would be fewer than this many of them, 64 slots a block at least.
_ENOUGH_BLOCKS, _MOST_SHARES, _LEAST_SLOTS = 128, 32, 64
_MOST_TOKENS = 8
_THREADS, _WARPS, _SLOTS = 256, 8, 16


def _reference(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """q `B H E`, latent `B T LR`, kv_b `(H NV) L`, q_positions `B`, k_positions `B T` -> `B H V`."""
    rules = {"causal": causal, "window": window, "q_positions": q_positions[:, None], "k_positions": k_positions}
    told: dict[str, Any] = {"nope_dim": nope_dim, "softmax_scale": softmax_scale, **rules}
    return absorbed.absorbed_core(q[:, None], latent, kv_b, **told)[:, 0]


def _outputs(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    window: int | None,
    **options: Any,
) -> Tensor:
    check_dtype("mla_decode", q=q, latent=latent, kv_b=kv_b)
    check_same("mla_decode", torch.int64, q_positions=q_positions, k_positions=k_positions)
    check_rows("mla_decode", q=q, latent=latent, kv_b=kv_b, k_positions=k_positions)
    sizes = check_shapes(
        "mla_decode",
        q=(q, "B H E"),
        latent=(latent, "B T LR"),
        kv_b=(kv_b, "HNV L"),
        q_positions=(q_positions, "B"),
        k_positions=(k_positions, "B T"),
    )
    rows = sizes["HNV"] // max(sizes["H"], 1)
    rotary = sizes["E"] - nope_dim
    if rows * sizes["H"] != sizes["HNV"] or not 0 < nope_dim < rows or rotary < 0:
        raise ShapeError(
            f"mla_decode(kv_b=...): {sizes['HNV']} rows are not N + V of each of {sizes['H']} heads, with N={nope_dim} "
            f"of E={sizes['E']} and V above 0"
        )
    if sizes["L"] + rotary != sizes["LR"]:
        raise ShapeError(
            f"mla_decode(latent=...): it is {sizes['LR']} wide, not the L={sizes['L']} of kv_b and the R={rotary} of q"
        )
    check_most("mla_decode", "latent", "LR", sizes["LR"], _STEP * _MOST_STEPS)
    check_most("mla_decode", "kv_b", "L", sizes["L"], _STEP * _MOST_STEPS)
    if window is not None:
        check_positive("mla_decode", window=window)
    check_scale("mla_decode", softmax_scale)
    return q.new_empty(sizes["B"], sizes["H"], rows - nope_dim)


def _launches(
    out: Tensor,
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    causal: bool,
    window: int | None,
) -> list[Launch]:
    (batch, heads, width_of_v), (slots, width), values = out.shape, latent.shape[1:], kv_b.shape[1]
    rows, rotary = nope_dim + width_of_v, width - values
    dtype, wide = CPP_TYPES[q.dtype], q.element_size() == 4
    integer, long = ctypes.c_int, ctypes.c_longlong

    tiles = 1 if wide or heads <= 16 else 2
    groups = -(-heads // (16 * tiles))
    # By the batch too: a row of a large one would leave more behind than it read.
    shares = max(1, min(_MOST_SHARES, _ENOUGH_BLOCKS // max(1, groups * batch), slots // _LEAST_SLOTS))
    share = -(-slots // shares // _SLOTS) * _SLOTS
    shares = -(-slots // share) if slots else 0
    steps = -(-width // _STEP)
    shared = 4 * _WARPS * 16 * tiles * (_SLOTS + 8) + 2 * 4 * 16 * tiles
    shared += q.element_size() * ((1 if wide else 2) * 16 * tiles * (_SLOTS + 8) + _WARPS * _SLOTS * (16 * steps + 8))

    room = min(_MOST_TOKENS, 1 << max(0, batch - 1).bit_length())
    rounds, vector = -(-batch // room), vector_length(None, kv_b)
    in_latent = out.new_empty(batch, heads, width, dtype=torch.float32)
    partial = out.new_empty(batch, heads, shares, values, dtype=torch.float32)
    stats = out.new_empty(batch, heads, shares, 2, dtype=torch.float32)
    queries_in = Launch(
        source="latent_heads.cu",
        name=f"queries_in<{dtype}, {vector}, {room}>",
        grid=(heads, -(-values // (16 * vector)), rounds),
        block=(_THREADS, 1, 1),
        args=(
            *(q, long(q.stride(0)), long(q.stride(1)), kv_b, long(kv_b.stride(0)), in_latent, integer(batch)),
            *map(integer, (nope_dim, rows, rotary, values)),
        ),
        programmatic=True,
    )
    attention = Launch(
        source="mla_decode.cu",
        name=f"mla_decode<{dtype}, {vector_length(width, latent)}, {tiles}, {steps}>",
        grid=(groups, shares, batch),
        block=(_THREADS, 1, 1),
        shared_bytes=shared,
        args=(
            *(in_latent, latent, long(latent.stride(0)), long(latent.stride(1)), q_positions),
            *(long(q_positions.stride(0)), k_positions, long(k_positions.stride(0)), partial, stats),
            *map(integer, (heads, slots, width, values, share, causal, window or 0)),
            ctypes.c_float(softmax_scale),
        ),
        programmatic=True,
    )
    values_out = Launch(
        source="latent_heads.cu",
        name=f"values_out<{dtype}, {vector}, {room}>",
        grid=(heads, -(-width_of_v // (8 * _WARPS)), rounds),
        block=(_THREADS, 1, 1),
        shared_bytes=4 * room * values,
        args=(
            *(partial, stats, kv_b, long(kv_b.stride(0)), out),
            *map(integer, (batch, nope_dim, rows, values, shares)),
        ),
        programmatic=True,
    )
    return [queries_in, attention, values_out]


_mla_decode = define(Op("mla_decode", _reference, _outputs, _launches))


def _absorbed_core(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    **absent: Tensor | None,
) -> Tensor:
    check_absent("mla_decode", **absent)
    if q_positions is None or k_positions is None:
        name = "q_positions" if q_positions is None else "k_positions"
        raise ValueError(f"mla_decode({name}=None): the kernel needs both positions\n    fix: the plain function")
    tokens = {"q": (q, "B S H E"), "latent": (latent, "B T LR"), "q_positions": (q_positions, "B? S")}
    batch = check_shapes("mla_decode", {"S": 1}, **tokens)["B"]
    check_shapes("mla_decode", {"B": batch}, k_positions=(k_positions, "B? T"))
    positions = q_positions.expand(batch, 1)[:, 0].contiguous(), k_positions.expand(batch, -1)
    told = {"nope_dim": nope_dim, "softmax_scale": softmax_scale, "causal": causal, "window": window}
    out: Tensor = _mla_decode(q[:, 0], latent, kv_b, *positions, **told)
    return out[:, None]


absorbed_core = composite("absorbed_core", _absorbed_core)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `absorbed_core`: None where the kernel computes it, else the reason why not."""
    q, latent, kv_b = (arguments[name] for name in ("q", "latent", "kv_b"))
    if (reason := arch_rule(arch) or dtype_rule(latent, q, kv_b)) is not None:
        return reason
    if q.shape[1] != 1:
        return f"{q.shape[1]} tokens a row, only 1"
    if arguments["mask"] is not None:
        return "a mask"
    if arguments["q_segment_ids"] is not None:
        return "documents"
    if arguments["q_positions"] is None:
        return "no positions"
    if any(arguments[name].dtype != torch.int64 for name in ("q_positions", "k_positions")):
        return "positions that are no int64"
    if latent.shape[2] > _STEP * _MOST_STEPS:
        return f"latents {latent.shape[2]} wide, at most {_STEP * _MOST_STEPS}"
    return by_rows(q=[q], latent=[latent], kv_b=[kv_b], k_positions=[arguments["k_positions"]])
