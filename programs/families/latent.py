"""What families with latent attention share: DeepSeek's decoder, whose later layers have experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...functional import DecoderConfig, MLAConfig, MLPConfig, MoEConfig, NormConfig, RopeConfig
from . import Leaves, mixture, parts

__all__ = ["decoder", "feeds", "mla", "sigmoid_routing"]

_ATTENTION = {
    "self_attn.q_proj": "attention.q",
    "self_attn.q_a_proj": "attention.q_a",
    "self_attn.q_b_proj": "attention.q_b",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_a",
    "self_attn.kv_b_proj": "attention.kv_b",
    "self_attn.o_proj": "attention.o",
}
NAMES: dict[str, str | Leaves] = {
    **parts.names(_ATTENTION, mixture.DENSE, mixture.SHARED, parts.PRE_NORMS),
    f"{parts.LAYER}self_attn.q_a_layernorm.weight": f"{parts.OURS}attention.q_norm",
    f"{parts.LAYER}self_attn.kv_a_layernorm.weight": f"{parts.OURS}attention.kv_norm",
    f"{parts.LAYER}mlp.gate.weight": f"{parts.OURS}moe.router",
    **mixture.experts(),
}
# Fields that repeat others.
INERT: dict[str, Any] = {
    "head_dim": lambda hf: hf["qk_rope_head_dim"],
    "qk_head_dim": lambda hf: hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
    "num_key_value_heads": lambda hf: hf["num_attention_heads"],
    "moe_layer_freq": 1,
}


def mla(hf: Mapping[str, Any], norm: NormConfig, rope: RopeConfig | None) -> MLAConfig:
    """Names as in transformers; the norms of the latents have an eps of their own there too, 1e-6."""
    bias = hf.get("attention_bias", False)
    return MLAConfig(
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        q_lora_rank=hf.get("q_lora_rank"),
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_head_dim=hf["qk_nope_head_dim"],
        qk_rope_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        attention_bias=bias,
        o_bias=bias,
        norm=norm,
        rope=rope,
        attention_dropout=hf.get("attention_dropout") or 0.0,
        initializer_range=hf.get("initializer_range", 0.02),
    )


def decoder(
    hf: Mapping[str, Any], sparse: Sequence[bool], *, interleaved: bool, mlp_bias: bool = False, **routing: Any
) -> DecoderConfig:
    """sparse: whether a layer has experts. interleaved: how rotary channels pair. routing: of `MoEConfig`."""
    norm = parts.rms(hf)
    attention = mla(hf, norm, parts.rope(hf, interleaved=interleaved))
    dense, experts = feeds(hf, norm, hf["n_routed_experts"], mlp_bias=mlp_bias, **routing)
    stack = parts.layers(hf, attention, [experts if each else dense for each in sparse])
    return parts.decoder(hf, stack, norm)


def feeds(
    hf: Mapping[str, Any], norm: NormConfig, count: int, *, mlp_bias: bool = False, **routing: Any
) -> tuple[MLPConfig, MoEConfig]:
    """What follows attention in a layer without experts, and in one with so many. routing: of `MoEConfig`."""
    dense = parts.mlp(hf, hf.get("hidden_act"), bias=mlp_bias, norm=norm)
    width, shared = hf["moe_intermediate_size"], hf.get("n_shared_experts") or 0
    experts = mixture.moe(
        hf,
        count,
        width,
        norm=norm,
        shared=replace(dense, intermediate_size=shared * width, norm=None) if shared else None,
        routed_scaling_factor=hf.get("routed_scaling_factor", 1.0),
        **routing,
    )
    return dense, experts


def sigmoid_routing(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The router of DeepSeek-V3 and what follows it, in `MoEConfig`'s names."""
    return {
        "scoring_func": "sigmoid",
        "correction_bias": True,
        "norm_topk_prob": bool(hf.get("norm_topk_prob", True)),
        "n_group": hf.get("n_group") or 1,
        "topk_group": hf.get("topk_group") or 1,
    }
