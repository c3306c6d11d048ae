"""A step of a gated delta net between its projections, in one launch: `gdn_decode.cu`.

Letters: B rows, K key heads, H = K G value heads, E key width, V value width, W convolution width, U = W-1.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..functional import recurrence
from ..functional.norm import GATES
from ..functional.shapes import ShapeError, check_shapes
from .device import COUNTERS, counters
from .in_place import region_rule
from .launch import Launch
from .ops import Op, in_place, vector_length
from .rules import (
    CPP_TYPES,
    arch_rule,
    by_rows,
    check_contiguous,
    check_dtype,
    check_most,
    check_rows,
    check_same,
    check_written,
    dtype_rule,
)

__all__ = ["STATES", "gdn_step", "supports"]

# Arguments of the primitive that are written in place of its further results.
STATES = ("cache_q", "cache_k", "cache_v", "cache_state")
# Of a row of a state, and of a convolution: what threads keep in registers.
MOST_COLUMNS, MOST_TAPS = 512, 8
_TOKENS = ("q", "k", "v", "z", "b", "a")
_WEIGHTS = ("q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "o_norm")
_THREADS = 128
_ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh", "relu2")
# With so many blocks and more, a thread takes four rows of V and not two.
_ENOUGH_BLOCKS = 512


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    q_conv: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    cache_q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_state: Tensor,
    positions: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_act: str = "silu",
    eps: float = 1e-6,
    scale_in_fp32: bool = False,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """As `gdn_step`, which returns what is written in place here."""
    o, *states = recurrence.gdn_step(
        q, k, v, z, b, a, q_conv, k_conv, v_conv, a_log, dt_bias, o_norm, cache_q, cache_k, cache_v, cache_state,
        positions, activation=activation, gate_act=gate_act, eps=eps, scale_in_fp32=scale_in_fp32,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    for old, new in zip((cache_q, cache_k, cache_v, cache_state), states, strict=True):
        old.copy_(new)
    return o


def _outputs(*args: Any, **options: Any) -> Tensor:
    bound = inspect.signature(_reference).bind(*args, **options)
    bound.apply_defaults()
    _check(bound.arguments)
    v: Tensor = bound.arguments["v"]
    return v.new_empty(v.shape)


def _check(given: Mapping[str, Any]) -> None:
    """Raise where the kernel would read or write something else than the plain function does."""
    leading = {"q": "B S K E", "v": "B S H V", "q_conv": "F I W"}
    check_shapes("gdn_decode", **{name: (given[name], spec) for name, spec in leading.items()})
    plain = ("v", "q", "k", "z", "b", "a", "q_conv", "k_conv", "v_conv", "o_norm", *STATES[:-1])
    check_dtype("gdn_decode", **{name: given[name] for name in plain})
    check_dtype("gdn_decode", a_log=given["a_log"], dt_bias=given["dt_bias"])
    check_same("gdn_decode", torch.float32, cache_state=given["cache_state"])
    check_same("gdn_decode", torch.int64, positions=given["positions"])
    check_written("gdn_decode", **{name: given[name] for name in STATES})
    decay = "B S H E" if given["a"].dim() == 4 else "B S H"
    specs = {
        **{"q": "B S K E", "k": "B S K E", "v": "B S H V", "z": "B S H V", "b": "B S H", "a": decay},
        **{"q_conv": "F I W", "k_conv": "F I W", "v_conv": "J I W", "a_log": "H", "o_norm": "V"},
        **{"cache_q": "B F U", "cache_k": "B F U", "cache_v": "B J U", "cache_state": "B H V E", "positions": "B? S"},
    }
    (heads, width), (key_heads, key_width) = given["v"].shape[2:], given["q"].shape[2:]
    sizes = {"F": key_heads * key_width, "J": heads * width, "I": 1, "U": given["q_conv"].shape[-1] - 1}
    check_shapes("gdn_decode", sizes, **{name: (given[name], spec) for name, spec in specs.items()})
    check_most("gdn_decode", "v", "S", given["v"].shape[1], 1)
    check_most("gdn_decode", "q", "K", key_heads, COUNTERS)
    check_most("gdn_decode", "q", "B K", max(1, given["q"].shape[0] * key_heads), COUNTERS)
    check_most("gdn_decode", "q", "E", key_width, MOST_COLUMNS)
    check_most("gdn_decode", "v", "V", width, 1 << 16)
    check_most("gdn_decode", "q_conv", "W", given["q_conv"].shape[-1], MOST_TAPS)
    if heads % key_heads:
        raise ShapeError(f"gdn_decode(v=...): H={heads} value heads do not divide over K={key_heads} key heads")
    decays = heads * (key_width if given["a"].dim() == 4 else 1)
    if (count := given["dt_bias"].numel()) != decays:
        raise ShapeError(f"gdn_decode(dt_bias=...): {count} numbers, where a has {decays} decays")
    known = {"activation": _ACTIVATIONS[1:], "gate_act": tuple(GATES)}
    for name, names in known.items():
        if given[name] not in names:
            raise ValueError(f"gdn_decode({name}={given[name]!r}): it is none of {', '.join(map(repr, names))}")
    check_contiguous("gdn_decode", **{name: given[name] for name in (*_WEIGHTS, "cache_state")})
    check_rows("gdn_decode", **{name: given[name] for name in _TOKENS if name not in "ba" or given[name].dim() == 4})
    if given["cache_q"].stride() != given["cache_k"].stride():
        raise ValueError(
            f"gdn_decode(cache_k=...): its strides are {given['cache_k'].stride()}, those of cache_q "
            f"{given['cache_q'].stride()}\n    fix: torch.empty_like(cache_q).copy_(cache_k)"
        )
    if (reason := region_rule()) is not None:
        raise RuntimeError(f"gdn_decode: {reason}\n    fix: functional.recurrence.gdn_step, the plain function")


def _launches(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    q_conv: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    cache_q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_state: Tensor,
    positions: Tensor | None,
    *,
    activation: str,
    gate_act: str,
    eps: float,
    scale_in_fp32: bool,
    allow_neg_eigval: bool,
) -> list[Launch]:
    (rows, _, heads, V), (key_heads, E), taps = v.shape, q.shape[2:], q_conv.shape[-1]
    vector = vector_length(E, cache_state)
    lanes, per = _shape(E // vector, 16 // vector)
    side = _THREADS // lanes
    kept = 4 if vector == 4 and rows * heads * -(-V // (2 * side)) >= _ENOUGH_BLOCKS else 2
    integer, long, real = ctypes.c_int, ctypes.c_longlong, ctypes.c_float
    by_heads = [(x, long(x.stride(0)), long(x.stride(2))) for x in (q, k, v, z, b, a)]
    types = f"{CPP_TYPES[v.dtype]}, {CPP_TYPES[a_log.dtype]}"
    launch = Launch(
        source="gdn_decode.cu",
        name=f"gdn_decode<{types}, {taps}, {vector}, {per}, {lanes}, {kept}>",
        grid=(-(-V // (kept * side)), heads, rows),
        block=(_THREADS, 1, 1),
        args=(
            *(each for three in by_heads for each in three),
            *(q_conv, k_conv, v_conv, a_log, dt_bias, o_norm, cache_q, cache_k, *_strides(cache_k)),
            *(cache_v, *_strides(cache_v), cache_state),
            *(positions, long(0 if positions is None or len(positions) == 1 else positions.stride(0)), out),
            *(counters(out.device), integer(heads // key_heads), integer(E), integer(V)),
            *(integer(a.dim() == 4), integer(_ACTIVATIONS.index(activation)), integer(gate_act == "silu")),
            *(real(eps), integer(scale_in_fp32), real(2.0 if allow_neg_eigval else 1.0), real(E**-0.5)),
        ),
        programmatic=True,
    )
    return [launch]


def _strides(cache: Tensor) -> tuple[ctypes.c_longlong, ctypes.c_int, ctypes.c_int]:
    row, channel, tap = cache.stride()
    return ctypes.c_longlong(row), ctypes.c_int(channel), ctypes.c_int(tap)


def _shape(vectors: int, most: int) -> tuple[int, int]:
    """Threads that share a row of a state, and vectors of each, `most` at most; powers of two."""
    lanes, per = 8, 1
    while lanes * most < vectors and lanes < 32:
        lanes *= 2
    while lanes * per < vectors:
        per *= 2
    return lanes, per


gdn_step = in_place("gdn_step", Op("gdn_decode", _reference, _outputs, _launches, mutates=STATES))


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `gdn_step` in a graph: None where the kernel computes it, else the reason why not."""
    tokens, weights = ({name: arguments[name] for name in names} for names in (_TOKENS, _WEIGHTS))
    states = {name: arguments[name] for name in STATES}
    plain = [weights[name] for name in ("q_conv", "k_conv", "v_conv", "o_norm")]
    reason = (
        arch_rule(arch)
        or region_rule()
        or dtype_rule(arguments["v"], *tokens.values(), *plain, *list(states.values())[:-1])
    )
    reason = reason or dtype_rule(weights["a_log"], weights["dt_bias"])
    if reason is not None:
        return reason
    if (count := arguments["v"].shape[1]) != 1:
        return f"{count} tokens a row, not 1"
    if (positions := arguments["positions"]) is not None and positions.dtype != torch.int64:
        return f"positions in {str(positions.dtype).removeprefix('torch.')}"
    if (kept := arguments["cache_state"].dtype) != torch.float32:
        return f"a state in {str(kept).removeprefix('torch.')}"
    if (width := arguments["q"].shape[-1]) > MOST_COLUMNS:
        return f"E={width}, at most {MOST_COLUMNS}"
    batch, _, key_heads, _ = arguments["q"].shape
    if batch * key_heads > COUNTERS:
        return f"{batch} rows of {key_heads} key heads, at most {COUNTERS} together"
    if (taps := arguments["q_conv"].shape[-1]) > MOST_TAPS:
        return f"W={taps}, at most {MOST_TAPS}"
    if (activation := arguments["activation"]) not in _ACTIVATIONS:
        return f"no {activation}"
    if (gate := arguments["gate_act"]) not in GATES:
        return f"no gate of {gate}"
    for name, each in {**weights, "cache_state": states["cache_state"]}.items():
        if not each.is_contiguous():
            return f"{name} is not contiguous"
    if states["cache_q"].stride() != states["cache_k"].stride():
        return "cache_q lies otherwise than cache_k"
    return by_rows(**{name: [each] for name, each in tokens.items() if name not in "ba" or each.dim() == 4})
