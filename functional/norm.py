"""RMSNorm and LayerNorm, and the projections that follow a norm.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * w                      (Zhang and Sennrich 2019, arXiv:1910.07467)
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * w + b       (Ba et al. 2016, arXiv:1607.06450)

Means are taken in fp32 (fp64 for fp64 inputs). Families of RMSNorm round at different places, and each is followed to
the bit:

    llama      w * round(x / rms)
    olmo2      round(w * (x / rms))            scale_in_fp32
    gemma      round((1 + w) * (x / rms))      scale_in_fp32, zero_centered

Letters: D width, F_i output width of the i-th projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .primitive import primitive
from .shapes import ShapeError, check_shapes
from .tree import Tree, check_presence, dim, pytree

__all__ = [
    "HeadNorm",
    "Norm",
    "NormConfig",
    "add_norm",
    "apply_norm",
    "gated_rms_norm",
    "layer_norm",
    "linear",
    "linear_add",
    "norm_in_front",
    "norm_linear",
    "normalize",
    "rms_norm",
]

NORM_TYPES = ("rms_norm", "layer_norm")
GATES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"silu": tnf.silu, "sigmoid": torch.sigmoid})


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """norm_type: "rms_norm" or "layer_norm". eps: added to the mean square. zero_centered: the stored weight is w of
    1 + w. scale_in_fp32: round after the weight is applied, not before (a LayerNorm always does). bias: of a LayerNorm.
    """

    norm_type: str = "rms_norm"
    eps: float = 1e-5
    zero_centered: bool = False
    scale_in_fp32: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        _check_type("NormConfig", self.norm_type)
        if self.bias and self.norm_type == "rms_norm":
            raise ValueError('NormConfig(bias=True): an RMSNorm has no bias\n    fix: norm_type="layer_norm"')

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `normalize` and of every primitive with a norm in front, `norm_type` only where it
        is not the usual one."""
        options = {"eps": self.eps, "zero_centered": self.zero_centered, "scale_in_fp32": self.scale_in_fp32}
        return options if self.norm_type == "rms_norm" else {"norm_type": self.norm_type, **options}


@pytree
class Norm(Tree):
    weight: Tensor = dim("D", initial=lambda cfg: 0.0 if cfg.zero_centered else 1.0)
    bias: Tensor | None = dim("D", when="bias", initial=0.0)


@pytree
class HeadNorm(Tree):
    """A norm of each head, the same for all."""

    weight: Tensor = dim("E", initial=lambda cfg: 0.0 if cfg.zero_centered else 1.0)
    bias: Tensor | None = dim("E", when="bias", initial=0.0)


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


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, zero_centered: bool = False
) -> Tensor:
    """x `... D`, weight `D`, bias `D` -> `... D` in x's dtype."""
    check_shapes("layer_norm", x=(x, "... D"), weight=(weight, "D"), bias=(bias, "D"))
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    centered = x_wide - x_wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    scale = weight.to(wide)
    scaled = (1 + scale if zero_centered else scale) * normed
    return (scaled if bias is None else scaled + bias.to(wide)).to(x.dtype)


@primitive
def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    scale_in_fp32: bool = False,
) -> Tensor:
    """x and z `... V`, weight `V` -> rms_norm(x) * act(z) `... V` in x's dtype: what leaves a gated delta net.

    activation: "silu" (Qwen3-Next, Olmo) or "sigmoid" (Kimi) of the gate, in fp32 at least. scale_in_fp32: as in
    `rms_norm` (Kimi); without it the norm is rounded before its weight is applied, and the result once more.
    """
    check_shapes("gated_rms_norm", x=(x, "... V"), weight=(weight, "V"), z=(z, "... V"))
    if x.shape != z.shape:
        raise ShapeError(f"gated_rms_norm(z=...): x is {tuple(x.shape)} and its gate {tuple(z.shape)}")
    if activation not in GATES:
        raise ValueError(f'gated_rms_norm(activation="{activation}") is unknown\n    known: {", ".join(GATES)}')
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    scaled = weight.to(wide) * normed if scale_in_fp32 else weight * normed.to(x.dtype)
    return (scaled * GATES[activation](z.to(wide))).to(x.dtype)


@primitive
def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> Tensor:
    """x `... D`, weight and bias `D` -> `... D`, by a `NormConfig`: `normalize(x, weight, bias, **cfg.options)`."""
    _check_type("normalize", norm_type)
    if norm_type == "layer_norm":
        return layer_norm(x, weight, bias, eps=eps, zero_centered=zero_centered)
    if bias is not None:
        raise ValueError('normalize(bias=...): an RMSNorm has no bias\n    fix: norm_type="layer_norm"')
    return rms_norm(x, weight, eps=eps, zero_centered=zero_centered, scale_in_fp32=scale_in_fp32)


@primitive
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    *,
    norm_bias: Tensor | None = None,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> list[Tensor]:
    """Normalise once, project several times: x `... D`, weights `F_i D`, biases `F_i` or None -> `... F_i` each.

    norm_weight, norm_bias: `D`; without a weight x is left as it is.
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
        options = {"norm_type": norm_type, "eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
        x = normalize(x, norm_weight, norm_bias, **options)  # type: ignore[arg-type]
    return [tnf.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


@primitive
def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `... D`, weight `F D`, residual `... F`, bias `F` -> residual + (x W^T + bias), `... F`.

    What ends a block, as one node: a program's graph has it where nothing stands between the three (`programs/join`).
    The bias is added by itself, since a sum over ranks may come in front of it.
    """
    check_shapes("linear_add", x=(x, "... D"), weight=(weight, "F D"), residual=(residual, "... F"), bias=(bias, "F"))
    y = tnf.linear(x, weight)
    return residual + (y if bias is None else y + bias)


@primitive
def add_norm(
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
    """x and residual `... D`, weight and bias `D` -> the sum, normalised as by `normalize`, and the sum, `... D`."""
    check_shapes("add_norm", x=(x, "... D"), residual=(residual, "... D"), weight=(weight, "D"), bias=(bias, "D"))
    total = x + residual
    options = {"norm_type": norm_type, "eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
    return normalize(total, weight, bias, **options), total  # type: ignore[arg-type]


def apply_norm(x: Tensor, params: Norm | HeadNorm | None, cfg: NormConfig | None) -> Tensor:
    """x `... D` normalised as its params and config say; x itself without them."""
    if params is None or cfg is None:
        return x
    check_presence("norm", params, cfg)
    return normalize(x, params.weight, params.bias, **cfg.options)


def norm_in_front(params: Norm | None, cfg: NormConfig | None) -> tuple[Tensor | None, dict[str, Any]]:
    """The weight and the keyword arguments of a primitive with this norm in front; None and nothing without one."""
    if params is None or cfg is None:
        return None, {}
    check_presence("norm", params, cfg)
    return params.weight, {"norm_bias": params.bias, **cfg.options} if cfg.bias else cfg.options


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `... D`, weight `F D`, bias `F` -> `... F`: one projection without a norm."""
    return norm_linear(x, None, [weight], [bias])[0]


def _check_type(function: str, norm_type: str) -> None:
    if norm_type not in NORM_TYPES:
        raise ValueError(f'{function}(norm_type="{norm_type}") is unknown\n    known: {", ".join(NORM_TYPES)}')
