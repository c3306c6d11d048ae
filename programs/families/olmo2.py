"""OLMo 2: norms behind the blocks alone, queries and keys normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NORMS = {"post_attention_layernorm": "attention.post_norm", "post_feedforward_layernorm": "mlp.post_norm"}
NAMES = parts.names(parts.ATTENTION, parts.MLP, NORMS) | {
    f"{parts.LAYER}self_attn.{each}_norm.weight": f"{parts.OURS}attention.{each}_norm_wide" for each in "qk"
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Olmo2Config`, as a mapping, to ours."""
    norm, bias = parts.rms(hf, scale_in_fp32=True), hf.get("attention_bias", False)
    attention = parts.attention(
        hf, qkv_bias=bias, o_bias=bias, post_norm=norm, qk_norm=norm, qk_norm_wide=True, rope=parts.rope(hf)
    )
    mlp = parts.mlp(hf, hf.get("hidden_act"), post_norm=norm)
    return parts.decoder(hf, parts.layers(hf, attention, mlp), norm)


FAMILY = Family(model_type="olmo2", config=config, names=NAMES)
