"""GLM-4.7-Flash: DeepSeek-V3's decoder, with a list of which layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, deepseek_v3, latent

KINDS = {"dense": False, "sparse": True}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Glm4MoeLiteConfig`, as a mapping, to ours."""
    types, count = hf["mlp_layer_types"], hf["num_hidden_layers"]
    unknown = sorted(set(types) - set(KINDS))
    if unknown:
        raise ValueError(f"mlp_layer_types: {', '.join(unknown)} unknown\n    known: {', '.join(KINDS)}")
    if len(types) != count:
        raise ValueError(f"mlp_layer_types: {len(types)} entries for num_hidden_layers={count}")
    _ = hf.get("num_nextn_predict_layers")  # further layers, which are left out
    return latent.decoder(
        hf,
        [KINDS[each] for each in types],
        interleaved=bool(hf.get("rope_interleave", True)),
        **latent.sigmoid_routing(hf),
    )


def _first_dense(hf: Mapping[str, Any]) -> int:
    types = [*hf["mlp_layer_types"], "sparse"]
    return types.index("sparse")


FAMILY = Family(
    model_type="glm4_moe_lite",
    config=config,
    names=deepseek_v3.NAMES,
    inert=deepseek_v3.INERT | {"first_k_dense_replace": _first_dense},
    further_layers="num_nextn_predict_layers",
)
