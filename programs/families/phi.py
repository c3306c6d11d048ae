"""Phi-1, 1.5 and 2: LayerNorm, a parallel residual, a plain GELU, partial rotary embedding, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig, NormConfig
from . import Family, parts

NAMES = parts.names(
    {f"self_attn.{each}_proj": f"attention.{each}" for each in "qkv"},
    {"self_attn.dense": "attention.o", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"},
    {"input_layernorm": "norm"},
    {"self_attn.q_layernorm": "attention.q_norm", "self_attn.k_layernorm": "attention.k_norm"},
    norm="model.final_layernorm",
    bias=True,
) | {"lm_head.bias": ".head_bias"}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `PhiConfig`, as a mapping, to ours."""
    norm = NormConfig(norm_type="layer_norm", eps=hf.get("layer_norm_eps", 1e-5), bias=True)
    attention = parts.attention(
        hf,
        qkv_bias=True,
        o_bias=True,
        qk_norm=norm if hf.get("qk_layernorm", False) else None,
        rope=parts.rope(hf, partial=True),
    )
    mlp = parts.mlp(hf, hf.get("hidden_act") or "gelu_new", gated=False, bias=True)
    stack = parts.layers(hf, attention, mlp, norm=norm, parallel_residual=True, resid_pdrop=hf.get("resid_pdrop", 0.0))
    return parts.decoder(hf, stack, norm, head_bias=True, embd_pdrop=hf.get("embd_pdrop", 0.0))


def _rotary_dim(hf: Mapping[str, Any]) -> int:
    return parts.rope(hf, partial=True).rotary_width(hf["hidden_size"] // hf["num_attention_heads"])


FAMILY = Family(
    model_type="phi", config=config, names=NAMES, inert={"rotary_dim": _rotary_dim, "attention_bias": False}
)
