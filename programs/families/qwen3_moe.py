"""Qwen3 with experts, in all layers or in some; a window, where there is one, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, mixture, parts

NAMES = parts.names(
    parts.ATTENTION,
    mixture.DENSE,
    parts.PRE_NORMS,
    {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"},
)
EXPERTS: dict[str, str | Leaves] = {f"{parts.LAYER}mlp.gate.weight": f"{parts.OURS}moe.router", **mixture.experts()}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Qwen3MoeConfig`, as a mapping, to ours."""
    norm, bias = parts.rms(hf), hf.get("attention_bias", False)
    attention = parts.attention(
        hf, qkv_bias=bias, o_bias=bias, norm=norm, qk_norm=norm, rope=parts.rope(hf), window=hf.get("sliding_window")
    )
    dense = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    experts = mixture.moe(
        hf,
        hf["num_local_experts"],
        hf["moe_intermediate_size"],
        norm=norm,
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
    )
    _ = hf.get("use_sliding_window"), hf.get("max_window_layers")  # said by sliding_window
    feeds = [experts if each else dense for each in mixture.sparse(hf)]
    return parts.decoder(hf, parts.layers(hf, attention, feeds), norm)


FAMILY = Family(model_type="qwen3_moe", config=config, names={**NAMES, **EXPERTS})
