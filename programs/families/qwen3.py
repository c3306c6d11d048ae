"""Qwen3, dense: queries and keys normalised a head, windows in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(
    parts.ATTENTION,
    parts.MLP,
    parts.PRE_NORMS,
    {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"},
)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Qwen3Config`, as a mapping, to ours."""
    norm, rope, bias = parts.rms(hf), parts.rope(hf), hf.get("attention_bias", False)
    attentions = [
        parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, qk_norm=norm, rope=rope, window=window)
        for window in parts.windows(hf)
    ]
    mlp = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    _ = hf.get("use_sliding_window"), hf.get("max_window_layers")  # said by layer_types
    return parts.decoder(hf, parts.layers(hf, attentions, mlp), norm)


FAMILY = Family(model_type="qwen3", config=config, names=NAMES)
