"""Gemma 2: Gemma with norms behind its blocks too, capped scores and logits, windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...functional import AttentionConfig, DecoderConfig, NormConfig
from . import Family, parts

NORMS = {
    "input_layernorm": "attention.norm",
    "post_attention_layernorm": "attention.post_norm",
    "pre_feedforward_layernorm": "mlp.norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}
NAMES = parts.names(parts.ATTENTION, parts.MLP, NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Gemma2Config`, as a mapping, to ours."""
    norm, bias = parts.rms(hf, zero_centered=True, scale_in_fp32=True), hf.get("attention_bias", False)
    attentions = [
        parts.attention(
            hf,
            qkv_bias=bias,
            o_bias=bias,
            norm=norm,
            post_norm=norm,
            rope=parts.rope(hf),
            window=window,
            softcap=hf.get("attn_logit_softcapping"),
            softmax_scale=hf["query_pre_attn_scalar"] ** -0.5,
        )
        for window in parts.windows(hf)
    ]
    return sandwich(hf, attentions, norm)


def sandwich(hf: Mapping[str, Any], attentions: Sequence[AttentionConfig], norm: NormConfig) -> DecoderConfig:
    """What is around the attention in Gemma 2 and 3."""
    mlp = parts.mlp(hf, hf.get("hidden_activation") or "gelu_pytorch_tanh", norm=norm, post_norm=norm)
    return parts.decoder(
        hf,
        parts.layers(hf, attentions, mlp),
        norm,
        tied=True,
        embedding_multiplier=hf["hidden_size"] ** 0.5,
        final_logit_softcapping=hf.get("final_logit_softcapping"),
    )


FAMILY = Family(
    model_type="gemma2",
    config=config,
    names=NAMES,
    inert={
        "hidden_act": lambda hf: hf.get("hidden_activation"),
        "sliding_window_size": lambda hf: hf.get("sliding_window"),
    },
)
