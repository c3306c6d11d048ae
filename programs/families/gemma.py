"""Gemma: norms of 1 + w, a gated GELU, embeddings scaled by the root of their width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, parts.PRE_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `GemmaConfig`, as a mapping, to ours."""
    norm, bias = parts.rms(hf, zero_centered=True, scale_in_fp32=True), hf.get("attention_bias", False)
    attention = parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=parts.rope(hf))
    mlp = parts.mlp(hf, _activation(hf), norm=norm)
    width = hf["hidden_size"]
    return parts.decoder(hf, parts.layers(hf, attention, mlp), norm, tied=True, embedding_multiplier=width**0.5)


def _activation(hf: Mapping[str, Any]) -> str:
    """ "gelu" in these configs always meant the approximation."""
    name = hf.get("hidden_act") or "gelu_pytorch_tanh"
    return "gelu_pytorch_tanh" if name == "gelu" else name


FAMILY = Family(model_type="gemma", config=config, names=NAMES, inert={"hidden_activation": _activation})
