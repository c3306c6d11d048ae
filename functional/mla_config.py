"""Multi-head latent attention: its config and its parameters. Letters as in `mla`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .cache import LatentCache
from .dropout import check_rate
from .norm import Norm, NormConfig
from .rope import RopeConfig
from .shapes import ShapeError, check_positive, check_scale
from .tree import Tree, dim, pytree

__all__ = ["MLA", "MLAConfig"]


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Names as in transformers' `DeepseekV3Config`.

    q_lora_rank: None where queries are projected from x at once. latent_norm: of both latents, whose eps is not the
    model's (1e-6 in DeepSeek's own code). attention_bias: of `q_a` and `kv_a`. o_bias: of `o`. output_gate: heads are
    multiplied by the sigmoid of a projection of x. rope: None for a layer without positions (NoPE), whose rotary key
    stays as it is. softmax_scale: of the scores; (N + R)^-0.5 with YaRN's correction unless given, see `scale`. norm,
    post_norm, causal, window, attention_dropout: as in `AttentionConfig`.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    attention_bias: bool = False
    o_bias: bool = False
    output_gate: bool = False
    norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    latent_norm: NormConfig = field(default_factory=lambda: NormConfig(eps=1e-6))
    rope: RopeConfig | None = None
    causal: bool = True
    window: int | None = None
    softmax_scale: float | None = None
    attention_dropout: float = 0.0
    initializer_range: float = 0.02

    cache_class: ClassVar[type[LatentCache]] = LatentCache

    def __post_init__(self) -> None:
        needed = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        optional = [name for name in ("q_lora_rank", "window") if getattr(self, name) is not None]
        check_positive("MLAConfig", **{name: getattr(self, name) for name in (*needed, "v_head_dim", *optional)})
        check_rate("MLAConfig", attention_dropout=self.attention_dropout)
        check_scale("MLAConfig", self.softmax_scale)
        if self.latent_norm.norm_type != "rms_norm":
            raise ValueError(f'MLAConfig(latent_norm=...): an RMSNorm is needed, not "{self.latent_norm.norm_type}"')
        if self.rope is not None:
            if self.qk_rope_head_dim % 2:
                raise ShapeError(
                    f"MLAConfig(qk_rope_head_dim={self.qk_rope_head_dim}): channels turn in pairs, so an even width is "
                    "needed\n    fix: rope=None for a layer without positions"
                )
            if self.rope.rotary_width(self.qk_rope_head_dim) != self.qk_rope_head_dim:
                raise ValueError(
                    f"MLAConfig(rope=...): partial_rotary_factor={self.rope.partial_rotary_factor}, but all "
                    f"qk_rope_head_dim={self.qk_rope_head_dim} channels turn\n    fix: a smaller qk_rope_head_dim"
                )

    # Which leaves there are, by their names in `MLA`.
    @property
    def direct_q(self) -> bool:
        return self.q_lora_rank is None

    @property
    def q_a_bias(self) -> bool:
        return self.attention_bias and not self.direct_q

    @property
    def qk_head_dim(self) -> int:
        """E, the width of a head's scores."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        """How wide a head is where it turns."""
        return self.qk_rope_head_dim

    @property
    def interleaved(self) -> bool:
        return self.rope is not None and self.rope.interleaved

    @property
    def scale(self) -> float:
        """What scores are multiplied by. YaRN has two corrections: `mscale` belongs to the tables (see `RopeConfig`),
        `mscale_all_dim` here, squared, once for the query and once for the key."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        correction = 1.0 if self.rope is None else self.rope.score_scaling
        return correction / math.sqrt(self.qk_head_dim)

    @property
    def sizes(self) -> dict[str, int]:
        N, R, V, L = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.kv_lora_rank
        widths = {"N": N, "R": R, "E": N + R, "V": V, "L": L, "NV": N + V, "LR": L + R}
        rank = {} if self.q_lora_rank is None else {"Q": self.q_lora_rank}
        return {"D": self.hidden_size, "H": self.num_attention_heads, **rank, **widths}


def _one(cfg: MLAConfig) -> float:
    """The weight of a latent's norm that changes no scale."""
    return 0.0 if cfg.latent_norm.zero_centered else 1.0


@pytree
class MLA(Tree):
    """`q_a`, `q_norm` and `q_b`, or `q` alone. The rows of a head in `kv_b` are its keys, then its values."""

    config: ClassVar[type] = MLAConfig

    norm: Norm | None = None
    q: Tensor | None = dim("(H/tp E) D/dp", when="direct_q")
    q_a: Tensor | None = dim("Q D/dp", when="q_lora_rank")
    q_norm: Tensor | None = dim("Q", when="q_lora_rank", initial=_one)
    q_b: Tensor | None = dim("(H/tp E) Q", when="q_lora_rank")
    kv_a: Tensor = dim("LR D/dp")
    kv_norm: Tensor = dim("L", initial=_one)
    kv_b: Tensor = dim("(H/tp NV) L")
    gate: Tensor | None = dim("(H/tp V) D/dp", when="output_gate")
    o: Tensor = dim("D/dp (H/tp V)")
    q_a_bias: Tensor | None = dim("Q", when="q_a_bias", initial=0.0)
    kv_a_bias: Tensor | None = dim("LR", when="attention_bias", initial=0.0)
    o_bias: Tensor | None = dim("D", when="o_bias", initial=0.0)
    post_norm: Norm | None = None
