"""A few tokens through one to six weights: `gemv.cu`, and the primitives it serves.

Letters: N tokens, D width, F_i output width of the i-th weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional.shapes import ShapeError, check_shapes
from .device import COUNTERS, counters
from .launch import Launch
from .ops import Op, composite, define, vector_length
from .rules import (
    CPP_TYPES,
    NORMS,
    arch_rule,
    as_rows,
    by_rows,
    check_dtype,
    check_norm,
    check_rows,
    dtype_rule,
    tokens_of,
)

__all__ = ["MOST_TOKENS", "MOST_WEIGHTS", "gated_mlp", "linear_add", "norm_linear", "plain_mlp", "supports"]

# With more, a product by tensor cores reads a weight as fast.
MOST_TOKENS = 8
MOST_WEIGHTS = 6
# As gemv.cu has them.
_THREADS = 128
# In the order of End in gemv.cu, and of Activation in common.cuh.
_ENDS = ("plain", "act", "gated", "residual")
_ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh", "relu2")
# Blocks share the columns of a weight of so few rows that there would be fewer than this many of them.
_ENOUGH_BLOCKS = 256


def _reference(
    x: Tensor,
    norm_weight: Tensor | None,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    w3: Tensor | None,
    w4: Tensor | None,
    w5: Tensor | None,
    b0: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    b3: Tensor | None,
    b4: Tensor | None,
    b5: Tensor | None,
    residual: Tensor | None,
    *,
    end: str,
    activation: str | None,
    eps: float,
    zero_centered: bool,
    scale_in_fp32: bool,
) -> Tensor:
    """x `N D`, norm_weight `D`, w_i `F_i D`, b_i `F_i`, residual `N F_0` -> `N F`, the results side by side.

    end: "plain", "act" (act(y)), "gated" (act(y_0) y_1, of two equally wide weights) or "residual" (residual + y).
    """
    norm: dict[str, Any] = {"eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
    if end == "gated":
        assert w1 is not None
        assert activation is not None
        return F.gated_mlp(x, norm_weight, w0, w1, b0, b1, activation=activation, **norm)
    if end == "act":
        assert activation is not None
        return F.plain_mlp(x, norm_weight, w0, b0, activation=activation, **norm)
    if end == "residual":
        assert residual is not None
        return F.linear_add(x, w0, residual, b0)
    pairs = zip((w0, w1, w2, w3, w4, w5), (b0, b1, b2, b3, b4, b5), strict=True)
    there = [(w, b) for w, b in pairs if w is not None]
    found = F.norm_linear(x, norm_weight, [w for w, _ in there], [b for _, b in there], **norm)
    return torch.cat(found, -1)


def _outputs(
    x: Tensor,
    norm_weight: Tensor | None,
    *rest: Tensor | None,
    end: str,
    activation: str | None,
    **options: Any,
) -> Tensor:
    weights, biases, residual = rest[:MOST_WEIGHTS], rest[MOST_WEIGHTS:-1], rest[-1]
    _check_end(end, activation, norm_weight, weights, biases, residual)
    named = {f"w{i}": w for i, w in enumerate(weights)} | {f"b{i}": b for i, b in enumerate(biases)}
    check_dtype("gemv", x=x, norm_weight=norm_weight, **named, residual=residual)
    check_rows("gemv", x=x, norm_weight=norm_weight, **named, residual=residual)
    sizes = check_shapes("gemv", x=(x, "N D"), norm_weight=(norm_weight, "D"))
    if sizes["N"] > MOST_TOKENS:
        raise ShapeError(
            f"gemv(x=...): it has {sizes['N']} tokens, and the kernel takes at most {MOST_TOKENS}\n"
            f"    fix: x.split({MOST_TOKENS}), or the plain function"
        )
    widths = []
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        given = {f"w{i}": (w, "F D"), f"b{i}": (b, "F")}
        widths.append(check_shapes("gemv", {"D": sizes["D"]}, **given).get("F", 0))
    if end == "gated" and (widths[0] != widths[1] or any(widths[2:])):
        raise ShapeError(f"gemv(end='gated'): two weights of one width are needed, not of {widths}")
    out = x.new_empty(x.shape[0], widths[0] if end == "gated" else sum(widths))
    check_shapes("gemv", {"N": x.shape[0], "F": out.shape[1]}, residual=(residual, "N F"))
    return out


def _check_end(
    end: str,
    activation: str | None,
    norm_weight: Tensor | None,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
) -> None:
    """Raise `ValueError` where an end lacks what it reads, or is given what it does not."""
    for name, value, known in (("end", end, _ENDS), ("activation", activation, _ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"gemv({name}={value!r}): it is none of {', '.join(map(repr, known))}")
    given = [i for i, w in enumerate(weights) if w is not None]
    needed = {"plain": given, "gated": [0, 1]}.get(end, [0])
    if given != needed:
        raise ValueError(f"gemv(end={end!r}): it reads the weights {_numbered(needed)}, given are {_numbered(given)}")
    lost = next((i for i, b in enumerate(biases) if b is not None and i not in given), None)
    if lost is not None:
        raise ValueError(f"gemv(b{lost}=...): there is no w{lost} that it belongs to\n    fix: b{lost}=None")
    if (activation is None) != (end in ("plain", "residual")):
        told = "needs an activation" if activation is None else "has no activation"
        raise ValueError(f"gemv(activation={activation!r}): end={end!r} {told}")
    if end == "residual" and norm_weight is not None:
        raise ValueError("gemv(norm_weight=...): end='residual' has none")
    if (residual is None) != (end != "residual"):
        raise ValueError(f"gemv(residual=...): end={end!r} {'needs one' if residual is None else 'has none'}")


def _numbered(weights: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in weights)


def _launches(
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    w3: Tensor | None,
    w4: Tensor | None,
    w5: Tensor | None,
    b0: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    b3: Tensor | None,
    b4: Tensor | None,
    b5: Tensor | None,
    residual: Tensor | None,
    *,
    end: str,
    activation: str | None,
    eps: float,
    zero_centered: bool,
    scale_in_fp32: bool,
) -> list[Launch]:
    weights = [w0, w1, w2, w3, w4, w5]
    (tokens, width), outputs = x.shape, out.shape[1]
    vector = vector_length(None, x, norm_weight, *weights)
    # As many rows a block as keep their sums and a few loads in registers.
    rows = 2 if tokens <= 2 else 4
    taken = rows // 2 if end == "gated" else rows
    blocks = -(-outputs // taken)
    # By the weight's shape alone, so that a sum is the same whatever the number of tokens.
    shares = max(1, min(8, _ENOUGH_BLOCKS // max(1, -(-outputs // 2)), width // (_THREADS * vector)))
    norm = "NO_NORM" if norm_weight is None else NORMS[zero_centered, scale_in_fp32]
    room = 1 << max(0, tokens - 1).bit_length()
    partial = arrived = None
    if shares > 1:
        assert blocks <= COUNTERS
        partial = out.new_empty(blocks * shares * room * rows, dtype=torch.float32)
        arrived = counters(out.device)
    integer, long = ctypes.c_int, ctypes.c_longlong
    launch = Launch(
        source="gemv.cu",
        name=f"gemv<{CPP_TYPES[x.dtype]}, {vector}, {room}, {rows}, {norm}>",
        grid=(blocks if tokens else 0, shares, 1),
        block=(_THREADS, 1, 1),
        args=(
            *(x, long(x.stride(0)), norm_weight, *weights, b0, b1, b2, b3, b4, b5),
            *(integer(0 if w is None else w.shape[0]) for w in weights),
            *(long(0 if w is None else w.stride(0)) for w in weights),
            *(residual, long(0 if residual is None else residual.stride(0)), out, partial, arrived),
            *(integer(tokens), integer(width), integer(_ENDS.index(end)), integer(_ACTIVATIONS.index(activation))),
            ctypes.c_float(eps),
        ),
        programmatic=True,
    )
    return [launch]


_gemv = define(Op("gemv", _reference, _outputs, _launches))


def _call(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None = None,
    *,
    end: str,
    activation: str | None = None,
    norm_bias: Tensor | None = None,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> Tensor:
    """The op on tokens of any shape `... D` -> `... F`."""
    check_norm("gemv", norm_type, norm_bias=norm_bias)
    if len(biases) != len(weights):
        raise ShapeError(f"gemv(biases=...): {len(biases)} for {len(weights)} weights\n    fix: None for each without")
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise ShapeError(f"gemv(weights=...): it takes 1 to {MOST_WEIGHTS} weights, not {len(weights)}")
    empty = [None] * (MOST_WEIGHTS - len(weights))
    rows = None if residual is None else as_rows(residual)
    norm = {"eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
    args = (as_rows(x), norm_weight, *weights, *empty, *biases, *empty, rows)
    out: Tensor = _gemv(*args, end=end, activation=activation, **norm)
    return out.view(*x.shape[:-1], out.shape[-1])


def _norm_linear(
    x: Tensor, norm_weight: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], **norm: Any
) -> list[Tensor]:
    found = _call(x, norm_weight, weights, biases, end="plain", **norm)
    return list(found.split([w.shape[0] for w in weights], -1))


def _gated_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return _call(x, norm_weight, [gate, up], [gate_bias, up_bias], end="gated", **{"activation": "silu", **options})


def _plain_mlp(
    x: Tensor, norm_weight: Tensor | None, up: Tensor, up_bias: Tensor | None = None, **options: Any
) -> Tensor:
    return _call(x, norm_weight, [up], [up_bias], end="act", **{"activation": "gelu", **options})


def _linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return _call(x, None, [weight], [bias], residual, end="residual")


norm_linear = composite("norm_linear", _norm_linear)
gated_mlp = composite("gated_mlp", _gated_mlp)
plain_mlp = composite("plain_mlp", _plain_mlp)
linear_add = composite("linear_add", _linear_add)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of one of the four primitives: None where the kernel computes it, else the reason why not."""
    x = arguments["x"]
    several = "weights" in arguments
    weights = arguments["weights"] if several else [arguments[n] for n in ("gate", "up", "weight") if n in arguments]
    biases = arguments["biases"] if several else [b for name, b in arguments.items() if name.endswith("bias")]
    beside = [arguments.get("norm_weight"), arguments.get("residual"), *biases]
    if not weights:
        return "no weights"
    if (reason := arch_rule(arch) or dtype_rule(x, *weights, *beside)) is not None:
        return reason
    if arguments.get("norm_weight") is not None and arguments["norm_type"] != "rms_norm":
        return f"a {arguments['norm_type']} in front"
    if (tokens := tokens_of(x)) > MOST_TOKENS:
        return f"{tokens} tokens, at most {MOST_TOKENS}"
    if len(weights) > MOST_WEIGHTS:
        return f"{len(weights)} weights, at most {MOST_WEIGHTS}"
    if len({w.shape for w in weights}) > 1 and "gate" in arguments:
        return "gate and up of different widths"
    if (activation := arguments.get("activation")) not in _ACTIVATIONS:
        return f"no {activation}"
    return by_rows(weights=weights, x=[x], residual=beside[1:2], norm_weight=beside[:1], biases=biases)
