"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, parts.PRE_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Qwen2Config`, as a mapping, to ours."""
    norm, rope = parts.rms(hf), parts.rope(hf)
    attentions = [
        parts.attention(hf, qkv_bias=True, norm=norm, rope=rope, window=window) for window in parts.windows(hf)
    ]
    mlp = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    _ = hf.get("use_sliding_window"), hf.get("max_window_layers")  # said by layer_types
    return parts.decoder(hf, parts.layers(hf, attentions, mlp), norm)


FAMILY = Family(model_type="qwen2", config=config, names=NAMES, inert={"use_mrope": False})
