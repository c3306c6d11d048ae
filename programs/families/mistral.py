"""Mistral 7B and Small: Llama with a window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, parts.PRE_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `MistralConfig`, as a mapping, to ours."""
    norm = parts.rms(hf)
    attention = parts.attention(hf, norm=norm, rope=parts.rope(hf), window=hf.get("sliding_window"))
    mlp = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    return parts.decoder(hf, parts.layers(hf, attention, mlp), norm)


FAMILY = Family(model_type="mistral", config=config, names=NAMES)
