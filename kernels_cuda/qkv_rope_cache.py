"""Queries and keys normalised and turned, keys and values written to their cache where it lies: `qkv_rope_cache.cu`.

The primitive is declared here and not in `functional`, where nothing is written in place: a program's graph gets it in
place of the functions it is made of and of the copy into the cache's buffers (`programs/join_cache`).

Letters: B batch, S tokens, T slots, n slots that attention reads, H query heads, K key/value heads, E key width, V
value width, R rotary width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional.cache import slot_positions, write_tokens
from ..functional.primitive import primitive
from ..functional.shapes import ShapeError, check_positive, check_shapes
from .in_place import region_rule
from .launch import Launch
from .ops import Op, in_place
from .rules import (
    CPP_TYPES,
    NORMS,
    arch_rule,
    by_rows,
    check_dtype,
    check_most,
    check_rows,
    check_same,
    check_written,
    dtype_rule,
)

__all__ = ["fused_qkv_rope_cache", "qkv_rope_cache", "supports"]

MOST_WIDTH = 256
# With more, it is a prefill, whose tokens the compiler turns as fast.
MOST_TOKENS = 8
_THREADS, _SLOTS = 128, 512


def qkv_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    ring: int | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """q `B S H E`, k `B S K E`, v `B S K V`, tables `B|1 S R/2` or None, norm weights `E`, both or none of them,
    positions `B S`, slots `n` -> q `B S H E`, normalised and turned, and the positions that the slots hold, `B n`.

    k_cache `B T K E` and v_cache `B T K V` are written. ring: as in `functional.cache.write_tokens`.
    """
    if q_norm is not None and k_norm is not None:
        options: dict[str, Any] = {"eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
        q, k = F.normalize(q, q_norm, **options), F.normalize(k, k_norm, **options)
    if cos is not None and sin is not None:
        q, k = (F.apply_rope(x, cos, sin, interleaved=interleaved) for x in (q, k))
    k_cache.copy_(write_tokens(k_cache, k, positions, ring=ring))
    v_cache.copy_(write_tokens(v_cache, v, positions, ring=ring))
    return q.clone(), slot_positions(slots, positions, ring=ring)


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    ring: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    given = {"cos": (cos, "B? S Q"), "sin": (sin, "B? S Q"), "q_norm": (q_norm, "E"), "k_norm": (k_norm, "E")}
    caches = {"k_cache": (k_cache, "B T K E"), "v_cache": (v_cache, "B T K V"), "slots": (slots, "N")}
    heads = {"q": (q, "B S H E"), "k": (k, "B S K E"), "v": (v, "B S K V"), "positions": (positions, "B S")}
    numbers = {name: x for name, (x, _) in (heads | given | caches).items() if name not in ("positions", "slots")}
    check_dtype("qkv_rope_cache", **numbers)
    check_same("qkv_rope_cache", torch.int64, positions=positions, slots=slots)
    check_rows("qkv_rope_cache", **numbers, slots=slots)
    check_written("qkv_rope_cache", k_cache=k_cache, v_cache=v_cache)
    sizes = check_shapes("qkv_rope_cache", **heads, **given, **caches)
    for pair in ({"cos": cos, "sin": sin}, {"q_norm": q_norm, "k_norm": k_norm}):
        if len(none := [name for name, x in pair.items() if x is None]) == 1:
            raise TypeError(
                f"qkv_rope_cache({none[0]}=None): {' and '.join(pair)} are needed together\n"
                "    fix: pass both, or neither"
            )
    if cos is not None and 2 * sizes["Q"] > sizes["E"]:
        raise ShapeError(f"qkv_rope_cache(cos=...): R is {2 * sizes['Q']}, more than E={sizes['E']} in q")
    check_most("qkv_rope_cache", "q", "E", sizes["E"], MOST_WIDTH)
    check_most("qkv_rope_cache", "v", "V", sizes["V"], MOST_WIDTH)
    if ring is not None:
        check_positive("qkv_rope_cache", ring=ring)
        if ring > sizes["T"]:
            raise ShapeError(
                f"qkv_rope_cache(ring={ring}): k_cache has {sizes['T']} slots\n    fix: a ring of so many at most"
            )
    return q.new_empty(q.shape), positions.new_empty(positions.shape[0], slots.shape[0])


def _launches(
    out: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    interleaved: bool,
    ring: int | None,
    eps: float,
    zero_centered: bool,
    scale_in_fp32: bool,
) -> list[Launch]:
    (batch, tokens, heads, k_width), (kv_heads, v_width), asked = q.shape, v.shape[2:], slots.shape[0]
    norm = "NO_NORM" if q_norm is None else NORMS[zero_centered, scale_in_fp32]
    each = -(-max(k_width, v_width) // 32)
    integer, long = ctypes.c_int, ctypes.c_longlong
    blocks = -(-(heads + 2 * kv_heads) // (_THREADS // 32)) + -(-asked // _SLOTS)

    def steps(x: Tensor | None, dims: int) -> tuple[Tensor | None, *tuple[ctypes.c_longlong, ...]]:
        """A tensor and its strides, none from row to row where one row is that of all."""
        strides = (0,) * dims if x is None else x.stride()[:dims]
        shared = x is not None and x.shape[0] == 1
        return x, *(long(0 if shared and i == 0 else stride) for i, stride in enumerate(strides))

    launch = Launch(
        source="qkv_rope_cache.cu",
        name=f"qkv_rope_cache<{CPP_TYPES[q.dtype]}, {each}, {norm}>",
        grid=(blocks, tokens, batch),
        block=(_THREADS, 1, 1),
        args=(
            *(part for x in (q, k, v, k_cache, v_cache) for part in steps(x, 3)),
            *(part for x in (cos, sin, positions) for part in steps(x, 2)),
            *(q_norm, k_norm, slots, *out),
            *map(integer, (heads, kv_heads, k_width, v_width, 0 if cos is None else 2 * cos.shape[-1], interleaved)),
            *map(integer, (k_cache.shape[1], ring or 0, asked)),
            ctypes.c_float(eps),
        ),
        programmatic=True,
    )
    return [launch]


primitive(qkv_rope_cache, mutates=("k_cache", "v_cache"))
_op = Op("qkv_rope_write", qkv_rope_cache, _outputs, _launches, mutates=("k_cache", "v_cache"))
fused_qkv_rope_cache = in_place("qkv_rope_cache", _op)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `qkv_rope_cache`: None where the kernel computes it, else the reason why not."""
    names = ("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "k_cache", "v_cache")
    q, k, v, *beside = (arguments[name] for name in names)
    if (reason := arch_rule(arch) or region_rule() or dtype_rule(q, k, v, *beside)) is not None:
        return reason
    if any(arguments[name].dtype != torch.int64 for name in ("positions", "slots")):
        return "positions that are no int64"
    if q.shape[1] > MOST_TOKENS:
        return f"{q.shape[1]} tokens a row, at most {MOST_TOKENS}"
    if (width := max(q.shape[3], v.shape[3])) > MOST_WIDTH:
        return f"heads of {width}, at most {MOST_WIDTH}"
    return by_rows(**{name: [arguments[name]] for name in (*names, "slots")})
