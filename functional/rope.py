"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings for longer contexts.

A pair of channels i turns by the angle `position * f_i`, f_i = rope_theta^(-2i/R). Pairs are (i, i + R/2) in the
half-split order of llama checkpoints, (2i, 2i + 1) in the interleaved order of GPT-J and Cohere. The first R channels
of a head turn, the others pass. Scalings are those of transformers' `modeling_rope_utils`:

    linear     f_i / factor                                               (kaiokendev 2023)
    dynamic    rope_theta grows with the row's length                     (NTK-aware, bloc97 and emozilla 2023)
    yarn       low f_i / factor, high f_i stay, a ramp between            (Peng et al. 2023, arXiv:2309.00071)
    longrope   f_i / short_factor_i or long_factor_i, by the row's length (Ding et al. 2024, arXiv:2402.13753)
    llama3     wavelengths beyond the original context are stretched      (Llama 3.1)

Angles are computed in fp32, as every published model was trained.

Letters: B batch, S tokens, H heads, E width of a head, R rotary width (even), M axes of a position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from .primitive import primitive
from .shapes import ShapeError, check_shapes

__all__ = ["ROPE_TYPES", "RopeConfig", "apply_rope", "frequencies", "rope_tables"]

# rope_type -> the fields it needs, and those it may have beside them
ROPE_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "default": ((), ()),
        "linear": (("factor",), ()),
        "dynamic": (("factor", "max_position_embeddings"), ()),
        "yarn": (
            ("factor", "original_max_position_embeddings"),
            ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ),
        "longrope": (
            ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
            ("attention_factor",),
        ),
        "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    }
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Names and meanings of transformers' `rope_parameters`.

    max_position_embeddings: the length up to which dynamic leaves the angles alone. interleaved: pairs are neighbours.
    mrope_section: how many of the R/2 pairs turn by each axis of a position (time, height, width); mrope_interleaved:
    the axes take turns (Qwen3-VL) instead of standing in blocks (Qwen2-VL).
    """

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f'rope_type="{self.rope_type}" is unknown\n    known: {", ".join(ROPE_TYPES)}')
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor} must be above 0 and at most 1")
        needs, may = ROPE_TYPES[self.rope_type]
        every = dict.fromkeys(name for pair in ROPE_TYPES.values() for names in pair for name in names)
        given = [name for name in every if getattr(self, name) is not None]
        missing = [name for name in needs if name not in given]
        if missing:
            raise ValueError(f'rope_type="{self.rope_type}" needs {", ".join(missing)}')
        extra = [name for name in given if name not in (*needs, *may)]
        if extra:
            fits = [t for t, (needs, may) in ROPE_TYPES.items() if set(needs) <= set(given) <= {*needs, *may}]
            fix = f'\n    fix: rope_type="{fits[0]}"' if fits else ""
            raise ValueError(f'rope_type="{self.rope_type}" has no {", ".join(extra)}{fix}')
        for name in given:
            value = getattr(self, name)
            if name != "truncate" and not all(v > 0 for v in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name}={value}: must be above 0")
        if self.mrope_section is not None and len(self.mrope_section) != 3:
            raise ValueError(f"mrope_section={self.mrope_section}: one number each for time, height and width")

    def rotary_width(self, head_dim: int) -> int:
        """R, how many channels of a head turn. Raises `ShapeError` where it is odd or does not fit the factors."""
        width = int(head_dim * self.partial_rotary_factor)
        if width % 2 or width == 0:
            raise ShapeError(f"rope: the rotary width R={width} must be even and above 0")
        if self.rope_type == "dynamic" and width == 2:
            raise ShapeError('rope: rope_type="dynamic" needs a rotary width above R=2')
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != width // 2:
                raise ShapeError(f"rope: {name} has {len(factors)} numbers, R/2={width // 2} are needed")
        if self.mrope_section is not None and sum(self.mrope_section) != width // 2:
            raise ShapeError(f"rope: mrope_section={self.mrope_section} must sum to R/2={width // 2}")
        return width

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on how long the row is."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def score_scaling(self) -> float:
        """What the scores of latent attention are multiplied by beside their scale: `mscale_all_dim` for the query
        and for the key."""
        return 1.0 if self.factor is None else _mscale(self.factor, self.mscale_all_dim or 0.0) ** 2

    @property
    def scaling(self) -> float:
        """What cos and sin are multiplied by (yarn and longrope)."""
        if self.attention_factor is not None:
            return self.attention_factor
        factor, context = self.factor or 1.0, self.original_max_position_embeddings or 1
        if self.rope_type == "yarn" and self.mscale and self.mscale_all_dim:
            return _mscale(factor, self.mscale) / _mscale(factor, self.mscale_all_dim)
        if self.rope_type == "yarn":
            return _mscale(factor)
        if self.rope_type == "longrope" and factor > 1:
            return math.sqrt(1 + math.log(factor) / math.log(context))
        return 1.0


def frequencies(
    cfg: RopeConfig, head_dim: int, device: torch.device | None = None, *, length: Tensor | None = None
) -> Tensor:
    """-> `R/2` in fp32, radians a position; `B 1 R/2` where they depend on `length`, `B`, the tokens of each row."""
    width = cfg.rotary_width(head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    if cfg.by_length and length is None:
        raise ValueError(f'rope: rope_type="{cfg.rope_type}" needs the length of each row')
    factor, context = cfg.factor or 1.0, cfg.original_max_position_embeddings or 1
    # Operation by operation as transformers does: at position 100,000 the last bit of a frequency is an angle of 0.01.
    powers = cfg.rope_theta**exponents
    match cfg.rope_type:
        case "linear":
            return 1.0 / powers / factor
        case "dynamic" if length is not None:
            most = cfg.max_position_embeddings or 1
            growth = (factor * length.clamp_min(most) / most - (factor - 1)) ** (width / (width - 2))
            return 1.0 / (cfg.rope_theta * growth[:, None, None]) ** exponents
        case "longrope" if length is not None:
            long, short = (_constant(f or (), device, torch.float32) for f in (cfg.long_factor, cfg.short_factor))
            return 1.0 / (torch.where((length > context)[:, None, None], long, short) * powers)
        case "yarn":
            keep = 1 - _yarn_ramp(cfg, context, width, device)
            return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
        case "llama3":
            # Wavelengths that fit the original context many times stay, those longer than it are stretched by `factor`,
            # and those between are blended.
            inverse = 1.0 / powers
            low, high = cfg.low_freq_factor or 0.0, cfg.high_freq_factor or 0.0
            keep = ((context / (2 * math.pi / inverse) - low) / (high - low)).clamp(0, 1)
            return (1 - keep) * inverse / factor + keep * inverse
        case _:
            return 1.0 / powers


def _yarn_ramp(cfg: RopeConfig, context: int, width: int, device: torch.device | None) -> Tensor:
    """`R/2`: 0 where a pair turns often within the original context, 1 where it does not complete a turn."""

    def pair_of(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = pair_of(cfg.beta_fast or 32), pair_of(cfg.beta_slow or 1)
    if cfg.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(width // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(
    positions: Tensor,
    cfg: RopeConfig,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """positions `B S` (integers; a row its own), or `M B S` with M=3 for mrope -> cos and sin, `B S R/2`, in `dtype`.

    length: `B`, how many tokens each row has in all, which dynamic and longrope look at; up to its highest position
    unless given. A prompt read in chunks has one length, whichever chunk is read.
    """
    mrope = positions.dim() == 3
    if mrope and (cfg.mrope_section is None or positions.shape[0] != 3):
        raise ShapeError(f"rope_tables(positions=...): M B S = {tuple(positions.shape)} needs mrope_section and M=3")
    check_shapes("rope_tables", positions=(positions, "M B S" if mrope else "B S"), length=(length, "B?"))
    if cfg.by_length and length is None:
        flat = positions if not mrope else positions.amax(0)
        length = flat.amax(-1) + 1 if flat.shape[1] else flat.new_zeros(flat.shape[0])
    turns = frequencies(cfg, head_dim, positions.device, length=length if cfg.by_length else None)
    where = positions[_axis_of_pair(cfg, positions.device)].movedim(0, -1) if mrope else positions[..., None]
    angles = where.float() * turns
    cos, sin = angles.cos(), angles.sin()
    if cfg.scaling != 1:
        cos, sin = cos * cfg.scaling, sin * cfg.scaling
    return cos.to(dtype), sin.to(dtype)


def _axis_of_pair(cfg: RopeConfig, device: torch.device) -> Tensor:
    """`R/2`: which axis of a position (0 time, 1 height, 2 width) each pair turns by."""
    section = cfg.mrope_section or ()
    if cfg.mrope_interleaved:
        # height and width each take every third pair until they have theirs; time has the rest
        axes = [i % 3 if i % 3 and i < 3 * section[i % 3] else 0 for i in range(sum(section))]
    else:
        axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    return _constant(axes, device, torch.int64)


def _constant(values: Sequence[float], device: torch.device | None, dtype: torch.dtype) -> Tensor:
    # A graph that is traced without its device has shapes alone, and Dynamo no place for a constant in it.
    if device is not None and device.type == "meta":
        return torch.empty(len(values), dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device=device)


@primitive
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x `B S H E`, cos and sin `B S R/2` -> x with its first R channels turned, same shape and dtype.

    Raises `ShapeError` where R is above E.
    """
    check_shapes("apply_rope", x=(x, "B S H E"), cos=(cos, "B? S Q"), sin=(sin, "B? S Q"))
    width = 2 * cos.shape[-1]
    if x.shape[-1] < width:
        raise ShapeError(f"apply_rope(x=...): R is {width} in cos and sin, more than E={x.shape[-1]} in x")
    if x.shape[-1] > width:
        turned, passed = x.split((width, x.shape[-1] - width), -1)
        return torch.cat((_turn(turned, cos, sin, interleaved), passed), -1)
    return _turn(x, cos, sin, interleaved)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = (table[:, :, None].to(x.dtype) for table in (cos, sin))
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
