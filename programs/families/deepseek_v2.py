"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, experts chosen by softmax, the first layers without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, latent


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `DeepseekV2Config`, as a mapping, to ours."""
    method, groups = hf.get("topk_method") or "greedy", {}
    if method == "group_limited_greedy":
        groups = {"n_group": hf["n_group"], "topk_group": hf["topk_group"], "group_score_topk": 1}
    elif method != "greedy":
        raise ValueError(f'topk_method="{method}" is unknown\n    known: greedy, group_limited_greedy')
    _ = hf.get("n_group"), hf.get("topk_group")  # greedy looks at no groups
    first = hf.get("first_k_dense_replace") or 0
    sparse = [i >= first for i in range(hf["num_hidden_layers"])]
    return latent.decoder(hf, sparse, interleaved=True, mlp_bias=hf.get("mlp_bias", False), **groups)


FAMILY = Family(
    model_type="deepseek_v2",
    config=config,
    names=latent.NAMES,
    # transformers never renormalises here, whatever the field says.
    inert={**latent.INERT, "norm_topk_prob": False, "scoring_func": "softmax"},
)
