"""SmolLM3: Llama with layers that have no positions (NoPE), and windows in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, parts.PRE_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `SmolLM3Config`, as a mapping, to ours."""
    norm, rope, bias = parts.rms(hf), parts.rope(hf), hf.get("attention_bias", False)
    turning, count = hf["no_rope_layers"], hf["num_hidden_layers"]
    if len(turning) < count:
        raise ValueError(f"no_rope_layers: {len(turning)} entries for num_hidden_layers={count}")
    attentions = [
        parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=rope if turns else None, window=window)
        for turns, window in zip(turning[:count], parts.windows(hf), strict=True)
    ]
    mlp = parts.mlp(hf, hf.get("hidden_act"), bias=hf.get("mlp_bias", False), norm=norm)
    # said by the two lists
    _ = hf.get("use_sliding_window"), hf.get("max_window_layers"), hf.get("no_rope_layer_interval")
    return parts.decoder(hf, parts.layers(hf, attentions, mlp), norm, tied=True)


FAMILY = Family(model_type="smollm3", config=config, names=NAMES)
