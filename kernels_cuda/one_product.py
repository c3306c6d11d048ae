"""More tokens than `gemv` takes through several weights: one product of the library, where the weights lie side by side
in memory, else one for each.

Letters: N tokens, D width, F_i output width of the i-th weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional.shapes import check_shapes
from .gemv import MOST_WEIGHTS
from .ops import composite, define_composed
from .rules import arch_rule, as_rows, by_rows, check_absent, check_same

__all__ = ["as_one", "norm_linear", "supports"]


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """Weights `F_i D` as one `F D`, in the same memory; None where they do not follow one another in one storage."""
    weights = [w for w in weights if w.numel()] or weights  # an empty one lies nowhere
    width, begin = weights[0].shape[1], weights[0].data_ptr()
    end = begin
    for w in weights:
        if w.stride() != (width, 1) or w.data_ptr() != end:
            return None
        end += w.numel() * w.element_size()
    rows = sum(w.shape[0] for w in weights)
    for w in weights:  # of handles on one memory, one alone has a storage that spans it
        storage = w.untyped_storage()
        if storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes():
            return w.as_strided((rows, width), (width, 1), (begin - storage.data_ptr()) // w.element_size())
    return None


def _reference(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None, w4: Tensor | None, w5: Tensor | None
) -> Tensor:
    """x `N D`, w_i `F_i D` -> `N F`, the results side by side."""
    return torch.cat([x @ w.t() for w in (w0, w1, w2, w3, w4, w5) if w is not None], -1)


def _product(x: Tensor, *given: Tensor | None) -> Tensor:
    out, weights = _outputs(x, *given), [w for w in given if w is not None]
    joined = as_one(weights)
    if joined is not None:
        return torch.mm(x, joined.t(), out=out)
    for w, part in zip(weights, out.split([w.shape[0] for w in weights], -1), strict=True):
        torch.mm(x, w.t(), out=part)
    return out


def _outputs(x: Tensor, *given: Tensor | None) -> Tensor:
    weights = {f"w{i}": w for i, w in enumerate(given) if w is not None}
    check_same("one_product", x.dtype, **weights)
    width = check_shapes("one_product", x=(x, "N D"))["D"]
    widths = [check_shapes("one_product", {"D": width}, **{name: (w, "F D")})["F"] for name, w in weights.items()]
    return x.new_empty(x.shape[0], sum(widths))


_one_product = define_composed("one_product", _reference, _outputs, _product)


def _norm_linear(
    x: Tensor, norm_weight: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], **norm: Any
) -> list[Tensor]:
    check_absent("one_product", norm_weight=norm_weight)
    out = _one_product(as_rows(x), *weights, *[None] * (MOST_WEIGHTS - len(weights)))
    out = out.view(*x.shape[:-1], out.shape[-1])
    parts = out.split([w.shape[0] for w in weights], -1)
    return [part if b is None else part + b for part, b in zip(parts, biases, strict=True)]


norm_linear = composite("norm_linear", _norm_linear, "products")


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `norm_linear`: None where it is several products and nothing else, else the reason why not."""
    weights, biases = arguments["weights"], arguments["biases"]
    if (reason := arch_rule(arch)) is not None:
        return reason
    if not 1 < len(weights) <= MOST_WEIGHTS:
        return f"{len(weights)} weight{'s' if len(weights) != 1 else ''}, only 2 to {MOST_WEIGHTS}"
    if arguments["norm_weight"] is not None:
        return "a norm in front"
    tensors = [*weights, *(b for b in biases if b is not None)]
    other = next((t.dtype for t in tensors if t.dtype != arguments["x"].dtype), None)
    if other is not None:
        return f"weights of {str(other).removeprefix('torch.')}"
    return by_rows(weights=weights)
