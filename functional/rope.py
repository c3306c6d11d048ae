"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

A pair of channels i turns by the angle `position * f_i`, f_i = rope_theta^(-2i/R). Pairs are (i, i + R/2) in the
half-split order of llama checkpoints, (2i, 2i + 1) in the interleaved order of GPT-J and DeepSeek.
`llama3` scales the low frequencies down for contexts longer than the original one (Llama 3.1, transformers'
`modeling_rope_utils`). Angles are computed in fp32, as every published model was trained.

Letters: B batch, S tokens, H heads, E width of a head, R rotary width (even).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .primitive import primitive
from .shapes import ShapeError, check_shapes

__all__ = ["RopeConfig", "apply_rope", "frequencies", "rope_tables"]

ROPE_TYPES = ("default", "llama3")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Names and meanings of transformers' `rope_parameters`; interleaved: pairs are neighbours."""

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f'rope_type="{self.rope_type}" is unknown\n    known: {", ".join(ROPE_TYPES)}')
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0")
        missing = [n for n in _LLAMA3 if getattr(self, n) is None]
        if self.rope_type == "llama3" and missing:
            raise ValueError(f'rope_type="llama3" needs {", ".join(missing)}')
        extra = [n for n in _LLAMA3 if getattr(self, n) is not None]
        if self.rope_type == "default" and extra:
            raise ValueError(f'rope_type="default" has no {", ".join(extra)}\n    fix: rope_type="llama3"')


def frequencies(cfg: RopeConfig, width: int, device: torch.device | None = None) -> Tensor:
    """-> `R/2` in fp32, radians a position."""
    if width % 2:
        raise ShapeError(f"rope: the rotary width R={width} must be even")
    inverse = 1.0 / cfg.rope_theta ** (torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width)
    if cfg.rope_type == "default":
        return inverse
    factor, low, high, context = (getattr(cfg, name) for name in _LLAMA3)
    # Wavelengths that fit the original context many times stay, those longer than it are stretched by `factor`,
    # and those between are blended.
    turns = context * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - keep) * inverse / factor + keep * inverse
    return scaled


def rope_tables(
    positions: Tensor, cfg: RopeConfig, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """positions `B S` (integers; a row its own) -> cos and sin, `B S R/2` each, in `dtype`."""
    check_shapes("rope_tables", positions=(positions, "B S"))
    angles = positions[..., None].float() * frequencies(cfg, width, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@primitive
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x `B S H R`, cos and sin `B S R/2` -> x turned, same shape and dtype.

    Raises `ShapeError` where R is not twice the tables' width.
    """
    check_shapes("apply_rope", x=(x, "B S H R"), cos=(cos, "B? S Q"), sin=(sin, "B? S Q"))
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ShapeError(f"apply_rope(x=...): R is {x.shape[-1]} in x but {2 * cos.shape[-1]} in cos and sin")
    cos, sin = (table[:, :, None].to(x.dtype) for table in (cos, sin))
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
