"""Gated delta net: its config, its parameters and its cache. Letters as in `gdn`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .cache import GDNCache
from .mlp import check_activation
from .norm import GATES, Norm, NormConfig
from .rope import RopeConfig
from .shapes import ShapeError, check_positive
from .tree import Tree, dim, pytree

__all__ = ["GDN", "GDNConfig"]


@dataclass(frozen=True, kw_only=True)
class GDNConfig:
    """Names as in transformers' `Qwen3NextConfig`, without `linear_`.

    channel_decay: a decay for each channel of the key (Kimi's delta attention, KDA). decay_rank, gate_rank: of the
    projections of the decay and of the output gate where they are products of two. interleaved: the rows of `qkvz` and
    `ba` lie together by key head (Qwen3-Next). allow_neg_eigval: beta goes up to 2. hidden_act: behind the
    convolution. gate_act, gated_norm: of what leaves the heads, see `gated_rms_norm`. norm: in front, or None.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int = 4
    channel_decay: bool = False
    decay_rank: int | None = None
    gate_rank: int | None = None
    interleaved: bool = False
    allow_neg_eigval: bool = False
    hidden_act: str = "silu"
    gate_act: str = "silu"
    gated_norm: NormConfig = field(default_factory=lambda: NormConfig(eps=1e-6))
    norm: NormConfig | None = None
    initializer_range: float = 0.02

    cache_class: ClassVar[type[GDNCache]] = GDNCache
    # What other attentions have: no positions, every token before, nothing dropped.
    rope: ClassVar[RopeConfig | None] = None
    rope_dim: ClassVar[int] = 0
    window: ClassVar[int | None] = None
    attention_dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        counts = ("hidden_size", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        optional = [name for name in ("decay_rank", "gate_rank") if getattr(self, name) is not None]
        check_positive("GDNConfig", **{name: getattr(self, name) for name in (*counts, *optional)})
        if self.conv_kernel_dim < 2:
            raise ValueError(
                f"GDNConfig(conv_kernel_dim={self.conv_kernel_dim}): at least 2, this token and one before"
            )
        if self.num_value_heads % self.num_key_heads:
            raise ShapeError(
                f"GDNConfig: num_value_heads={self.num_value_heads} is no multiple of num_key_heads="
                f"{self.num_key_heads}\n    fix: value head h reads key head h // G, so H = K G"
            )
        check_activation("GDNConfig", "hidden_act", self.hidden_act)
        if self.gate_act not in GATES:
            raise ValueError(f'GDNConfig(gate_act="{self.gate_act}") is unknown\n    known: {", ".join(GATES)}')
        if self.gated_norm.norm_type != "rms_norm" or self.gated_norm.zero_centered:
            raise ValueError(f"GDNConfig(gated_norm=...): a plain RMSNorm is needed, not {self.gated_norm}")
        for name in ("channel_decay", "decay_rank", "gate_rank"):
            if self.interleaved and getattr(self, name):
                raise ValueError(f"GDNConfig(interleaved=True, {name}={getattr(self, name)}): no family has both")

    # Which leaves there are, by their names in `GDN`.
    @property
    def apart(self) -> bool:
        return not self.interleaved

    @property
    def plain_a(self) -> bool:
        return self.apart and self.decay_rank is None

    @property
    def plain_z(self) -> bool:
        return self.apart and self.gate_rank is None

    @property
    def sizes(self) -> dict[str, int]:
        K, H, E, V = self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        G = H // K
        ranks = {"Q": self.decay_rank, "L": self.gate_rank}
        return {
            "D": self.hidden_size, "K": K, "H": H, "G": G, "E": E, "V": V, "W": self.conv_kernel_dim,
            "U": self.conv_kernel_dim - 1, "Y": E if self.channel_decay else 1, "M": 2 * E + 2 * G * V, "J": 2 * G,
            "I": 1, **{letter: n for letter, n in ranks.items() if n is not None},
        }  # fmt: skip


@pytree
class GDN(Tree):
    """`qkvz` and `ba`, or each projection by itself; `a_down` and `a_up` for `a`, and so of `z`."""

    config: ClassVar[type] = GDNConfig

    norm: Norm | None = None
    qkvz: Tensor | None = dim("(K/tp M) D/dp", when="interleaved")
    ba: Tensor | None = dim("(K/tp J) D/dp", when="interleaved")
    q: Tensor | None = dim("(K/tp E) D/dp", when="apart")
    k: Tensor | None = dim("(K/tp E) D/dp", when="apart")
    v: Tensor | None = dim("((K/tp G) V) D/dp", when="apart")
    z_down: Tensor | None = dim("L D/dp", when="gate_rank")
    z_up: Tensor | None = dim("((K/tp G) V) L", when="gate_rank")
    z: Tensor | None = dim("((K/tp G) V) D/dp", when="plain_z")
    b: Tensor | None = dim("(K/tp G) D/dp", when="apart")
    a_down: Tensor | None = dim("Q D/dp", when="decay_rank")
    a_up: Tensor | None = dim("((K/tp G) Y) Q", when="decay_rank")
    a: Tensor | None = dim("((K/tp G) Y) D/dp", when="plain_a")
    a_log: Tensor = dim("(K/tp G)", initial=0.0, keep_fp32=True)
    dt_bias: Tensor = dim("((K/tp G) Y)", initial=1.0, keep_fp32=True)
    q_conv: Tensor = dim("(K/tp E) I W")
    k_conv: Tensor = dim("(K/tp E) I W")
    v_conv: Tensor = dim("((K/tp G) V) I W")
    o_norm: Tensor = dim("V", initial=1.0)
    o: Tensor = dim("D/dp ((K/tp G) V)")
