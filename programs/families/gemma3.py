"""Gemma 3, text: Gemma 2 with queries and keys normalised, and another rotary base where there is a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, gemma2, parts

QK_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
NAMES = parts.names(parts.ATTENTION, parts.MLP, gemma2.NORMS, QK_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Gemma3TextConfig`, as a mapping, to ours."""
    norm, bias = parts.rms(hf, zero_centered=True, scale_in_fp32=True), hf.get("attention_bias", False)
    attentions = [
        parts.attention(
            hf,
            qkv_bias=bias,
            o_bias=bias,
            norm=norm,
            post_norm=norm,
            qk_norm=norm,
            rope=parts.rope(hf, kind),
            window=window,
            softmax_scale=hf["query_pre_attn_scalar"] ** -0.5,
        )
        for kind, window in zip(hf["layer_types"], parts.windows(hf), strict=True)
    ]
    if hf.get("attn_logit_softcapping") is not None:
        raise ValueError("attn_logit_softcapping: family gemma3_text has no capped scores, in transformers neither")
    _ = hf.get("sliding_window_pattern")  # said by layer_types
    return gemma2.sandwich(hf, attentions, norm)


FAMILY = Family(model_type="gemma3_text", config=config, names=NAMES)
