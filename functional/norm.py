"""RMSNorm, and the projections that follow a norm.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * w            (Zhang and Sennrich 2019, arXiv:1910.07467)

The mean is taken in fp32 (fp64 for fp64 inputs). Families round at different places, and each is followed to the bit:

    llama      w * round(x / rms)
    olmo2      round(w * (x / rms))            scale_in_fp32
    gemma      round((1 + w) * (x / rms))      scale_in_fp32, zero_centered

Letters: D width, F_i output width of the i-th projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .primitive import primitive
from .shapes import ShapeError, check_shapes
from .tree import Tree, dim, pytree

__all__ = ["Norm", "NormConfig", "linear", "norm_linear", "rms_norm"]


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """eps: added to the mean square. zero_centered: the stored weight is w of 1 + w. scale_in_fp32: round after the
    weight is applied, not before."""

    eps: float = 1e-5
    zero_centered: bool = False
    scale_in_fp32: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `rms_norm` and of every primitive with a norm in front."""
        return {"eps": self.eps, "zero_centered": self.zero_centered, "scale_in_fp32": self.scale_in_fp32}


@pytree
class Norm(Tree):
    weight: Tensor = dim("D", initial=lambda cfg: 0.0 if cfg.zero_centered else 1.0)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, zero_centered: bool = False, scale_in_fp32: bool = False
) -> Tensor:
    """x `... D`, weight `D` -> `... D` in x's dtype; see the module's docstring for the options."""
    check_shapes("rms_norm", x=(x, "... D"), weight=(weight, "D"))
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if not scale_in_fp32:
        return ((1 + weight if zero_centered else weight) * normed.to(x.dtype)).to(x.dtype)
    scale = weight.to(wide)
    return ((1 + scale if zero_centered else scale) * normed).to(x.dtype)


@primitive
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> list[Tensor]:
    """Normalise once, project several times: x `... D`, weights `F_i D`, biases `F_i` or None -> `... F_i` each.

    norm_weight: `D`; None leaves x as it is.
    """
    if len(weights) != len(biases):
        raise ShapeError(f"norm_linear: {len(weights)} weights and {len(biases)} biases")
    for weight, bias in zip(weights, biases, strict=True):
        given = {
            "x": (x, "... D"),
            "norm_weight": (norm_weight, "D"),
            "weights": (weight, "F D"),
            "biases": (bias, "F"),
        }
        check_shapes("norm_linear", **given)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps=eps, zero_centered=zero_centered, scale_in_fp32=scale_in_fp32)
    return [tnf.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `... D`, weight `F D`, bias `F` -> `... F`: one projection without a norm."""
    return norm_linear(x, None, [weight], [bias])[0]
