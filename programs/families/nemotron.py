"""Nemotron and Minitron: LayerNorm of 1 + w, a plain squared ReLU, partial rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig, NormConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, {"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}, parts.PRE_NORMS, bias=True)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `NemotronConfig`, as a mapping, to ours."""
    norm = NormConfig(norm_type="layer_norm", eps=hf.get("norm_eps", 1e-5), zero_centered=True, bias=True)
    bias = hf.get("attention_bias", False)
    attention = parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=parts.rope(hf, partial=True))
    activation = hf.get("hidden_act") or "relu2"
    mlp = parts.mlp(hf, activation, gated=False, bias=hf.get("mlp_bias", False), norm=norm)
    return parts.decoder(hf, parts.layers(hf, attention, mlp), norm)


FAMILY = Family(
    model_type="nemotron",
    config=config,
    names=NAMES,
    inert={
        "kv_channels": lambda hf: hf.get("head_dim"),
        "rope_percent": lambda hf: parts.rope(hf, partial=True).partial_rotary_factor,
    },
)
