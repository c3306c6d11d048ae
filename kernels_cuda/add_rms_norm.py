"""A residual added and the sum normalised, in one pass: `add_rms_norm.cu`.

Letters: N rows, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import functional as F
from ..functional.shapes import ShapeError, check_shapes
from .launch import Launch
from .ops import Op, composite, define, vector_length
from .rules import CPP_TYPES, arch_rule, as_rows, by_rows, check_dtype, check_norm, check_rows, dtype_rule

__all__ = ["add_norm", "supports"]

_MOST_THREADS, _MOST_KEPT = 256, 4


def _reference(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, zero_centered: bool, scale_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """x, residual `N D`, weight `D` -> rms_norm(x + residual) and x + residual, `N D`."""
    return F.add_norm(x, residual, weight, eps=eps, zero_centered=zero_centered, scale_in_fp32=scale_in_fp32)


def _outputs(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    check_dtype("add_rms_norm", x=x, residual=residual, weight=weight)
    check_rows("add_rms_norm", x=x, residual=residual, weight=weight)
    check_shapes("add_rms_norm", x=(x, "N D"), residual=(residual, "N D"), weight=(weight, "D"))
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _launches(
    out: tuple[Tensor, Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    scale_in_fp32: bool,
) -> list[Launch]:
    rows, width = x.shape
    vector = vector_length(width, x, residual, weight, *out)
    threads, kept = _shape(width // vector)
    integer, long = ctypes.c_int, ctypes.c_longlong
    normed, total = out
    launch = Launch(
        source="add_rms_norm.cu",
        name=f"add_rms_norm<{CPP_TYPES[x.dtype]}, {vector}, {kept}, {threads}>",
        grid=(rows, 1, 1),
        block=(threads, 1, 1),
        args=(
            *(x, long(x.stride(0)), residual, long(residual.stride(0)), weight, total, normed),
            *(integer(width), ctypes.c_float(eps), integer(zero_centered), integer(scale_in_fp32)),
        ),
        programmatic=True,
    )
    return [launch]


def _shape(vectors: int) -> tuple[int, int]:
    """Threads of a block, and vectors that each keeps in registers."""
    threads, kept = 128, 1
    while threads < vectors and threads < _MOST_THREADS:
        threads *= 2
    while threads * kept < vectors and kept < _MOST_KEPT:
        kept *= 2
    return threads, kept


_add_rms_norm = define(Op("add_rms_norm", _reference, _outputs, _launches))


def _add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    check_norm("add_rms_norm", norm_type, bias=bias)
    if x.shape != residual.shape:
        raise ShapeError(
            f"add_rms_norm(residual=...): it is {tuple(residual.shape)}, and x {tuple(x.shape)}\n"
            "    fix: torch.broadcast_tensors(x, residual)"
        )
    rows = (as_rows(x), as_rows(residual))
    normed, total = _add_rms_norm(*rows, weight, eps=eps, zero_centered=zero_centered, scale_in_fp32=scale_in_fp32)
    return normed.view(x.shape), total.view(x.shape)


add_norm = composite("add_norm", _add_norm)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `add_norm`: None where the kernel computes it, else the reason why not."""
    x, residual, weight = (arguments[name] for name in ("x", "residual", "weight"))
    if (reason := arch_rule(arch) or dtype_rule(x, residual, weight)) is not None:
        return reason
    if arguments["norm_type"] != "rms_norm":
        return f"a {arguments['norm_type']}"
    if x.shape != residual.shape:
        return "x and residual of different shapes"
    return by_rows(x=[x], residual=[residual], weight=[weight])
