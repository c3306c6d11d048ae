"""DeepSeek-V3, V3.1, R1 and Kimi K2: latent attention, experts in groups, chosen by sigmoids with a correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, latent, parts

NAMES = latent.NAMES | {f"{parts.LAYER}mlp.gate.e_score_correction_bias": f"{parts.OURS}moe.correction_bias"}
INERT = latent.INERT | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `DeepseekV3Config`, as a mapping, to ours."""
    first = hf.get("first_k_dense_replace") or 0
    sparse = [i >= first for i in range(hf["num_hidden_layers"])]
    _ = hf.get("num_nextn_predict_layers")  # further layers, which are left out
    return latent.decoder(hf, sparse, interleaved=bool(hf.get("rope_interleave", True)), **latent.sigmoid_routing(hf))


FAMILY = Family(
    model_type="deepseek_v3", config=config, names=NAMES, inert=INERT, further_layers="num_nextn_predict_layers"
)
