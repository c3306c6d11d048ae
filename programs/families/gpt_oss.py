"""gpt_oss: sinks, biases, windows in every other layer, YaRN, and experts with a clamped gate in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, mixture, parts

NAMES = parts.names(parts.ATTENTION, parts.PRE_NORMS, {"mlp.router": "moe.router"})
# Columns of gate and up take turns, and files have the experts as modules do.
_EXPERTS, _OURS = f"{parts.LAYER}mlp.experts.", f"{parts.OURS}moe."
EXPERTS: dict[str, str | Leaves] = {
    f"{parts.LAYER}self_attn.sinks": f"{parts.OURS}attention.sinks",
    f"{_EXPERTS}gate_up_proj": Leaves((f"{_OURS}gate", f"{_OURS}up"), dim=1, interleaved=True, transposed=True),
    f"{_EXPERTS}gate_up_proj_bias": Leaves((f"{_OURS}gate_bias", f"{_OURS}up_bias"), dim=1, interleaved=True),
    f"{_EXPERTS}down_proj": Leaves((f"{_OURS}down",), transposed=True),
    f"{_EXPERTS}down_proj_bias": f"{_OURS}down_bias",
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `GptOssConfig`, as a mapping, to ours. A softmax over the chosen logits is one over all of them,
    divided by the sum of the chosen."""
    norm, rope, bias = parts.rms(hf), parts.rope(hf), hf.get("attention_bias", True)
    attentions = [
        parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=rope, window=window, sinks=True)
        for window in parts.windows(hf)
    ]
    experts = mixture.moe(
        hf,
        hf["num_local_experts"],
        hf["intermediate_size"],
        norm=norm,
        norm_topk_prob=True,
        router_bias=True,
        bias=True,
        swiglu_limit=hf.get("swiglu_limit", 7.0),
        swiglu_alpha=hf.get("swiglu_alpha", 1.702),
    )
    return parts.decoder(hf, parts.layers(hf, attentions, experts), norm)


FAMILY = Family(
    model_type="gpt_oss",
    config=config,
    names={**NAMES, **EXPERTS},
    inert={
        "experts_per_token": lambda hf: hf["num_experts_per_tok"],
        "initial_context_length": lambda hf: parts.rope(hf).original_max_position_embeddings,
    },
)
