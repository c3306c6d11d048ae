"""Mixtral 8x7B and 8x22B: Mistral with experts in every layer, whose weights sum to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, mixture, parts

NAMES = parts.names(parts.ATTENTION, parts.PRE_NORMS)
EXPERTS: dict[str, str | Leaves] = {
    f"{parts.LAYER}mlp.gate.weight": Leaves(
        (f"{parts.OURS}moe.router",), files=(f"{parts.LAYER}block_sparse_moe.gate.weight",)
    ),
    **mixture.experts("block_sparse_moe.experts.{e}.{name}.weight", ("w1", "w3", "w2")),
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `MixtralConfig`, as a mapping, to ours."""
    norm = parts.rms(hf)
    attention = parts.attention(hf, norm=norm, rope=parts.rope(hf), window=hf.get("sliding_window"))
    experts = mixture.moe(hf, hf["num_local_experts"], hf["intermediate_size"], norm=norm, norm_topk_prob=True)
    return parts.decoder(hf, parts.layers(hf, attention, experts), norm)


# router_jitter_noise: of training, which as dropout is not computed.
FAMILY = Family(model_type="mixtral", config=config, names={**NAMES, **EXPERTS}, inert={"router_jitter_noise": 0.0})
