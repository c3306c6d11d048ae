"""Command R: LayerNorm without a bias, a parallel residual, interleaved rotary pairs, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig, NormConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, {"input_layernorm": "norm"})


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `CohereConfig`, as a mapping, to ours."""
    if hf.get("use_qk_norm", False):
        raise ValueError("use_qk_norm=True: a norm with weights of each head's own is not known to family cohere")
    norm, bias = NormConfig(norm_type="layer_norm", eps=hf.get("layer_norm_eps", 1e-5)), hf.get("attention_bias", False)
    attention = parts.attention(hf, qkv_bias=bias, o_bias=bias, rope=parts.rope(hf, interleaved=True))
    mlp = parts.mlp(hf, hf.get("hidden_act"))
    stack = parts.layers(hf, attention, mlp, norm=norm, parallel_residual=True)
    return parts.decoder(hf, stack, norm, tied=True, logit_scale=hf.get("logit_scale", 0.0625))


FAMILY = Family(model_type="cohere", config=config, names=NAMES)
