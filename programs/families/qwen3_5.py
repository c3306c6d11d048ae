"""Qwen3.5, the language model: gated delta nets, full attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, Wrapper, hybrid, parts

_GDN = {
    "in_proj_z.weight": "z",
    "in_proj_b.weight": "b",
    "in_proj_a.weight": "a",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "norm.weight": "o_norm",
    "out_proj.weight": "o",
}
NAMES: dict[str, str | Leaves] = {
    **hybrid.QWEN,
    f"{parts.LAYER}linear_attn.in_proj_qkv.weight": Leaves(tuple(f"{parts.OURS}linear.{each}" for each in "qkv")),
    **{f"{parts.LAYER}linear_attn.{theirs}": f"{parts.OURS}linear.{ours}" for theirs, ours in _GDN.items()},
    **hybrid.conv("linear_attn", apart=False),
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Qwen3_5TextConfig` or `Qwen3_5MoeTextConfig`, as a mapping, to ours."""
    norm = hybrid.qwen_norm(hf)
    linear = hybrid.gdn(hf, norm, gated_norm=parts.rms(hf))
    attentions = hybrid.attentions(hf, linear, hybrid.gated_attention(hf, norm), hybrid.every(hf))
    if hf.get("num_experts"):
        feed: Any = hybrid.experts(hf, norm)
        _ = hf.get("intermediate_size")  # of layers without, which there are none of
    else:
        feed = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    return parts.decoder(hf, parts.layers(hf, attentions, feed), norm)


# What published configs of Qwen say beside: that attention has its gate, the dtype of a state, no windows, and what the
# part that guesses further tokens is like, which is left out.
INERT: dict[str, Any] = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "use_sliding_window": False,
    "mtp_num_hidden_layers": lambda hf: hf["mtp_num_hidden_layers"],
    "mtp_use_dedicated_embeddings": lambda hf: hf["mtp_use_dedicated_embeddings"],
}
LEFT_OUT = ("mtp.",)
FAMILY = Family(model_type="qwen3_5_text", config=config, names=NAMES, inert=INERT, left_out=LEFT_OUT)
PARTS: dict[str, Any] = {
    "field": "text_config",
    "prefixes": {"model.language_model.": "model."},
    "left_out": ("model.visual.", *LEFT_OUT),
}
WRAPPER = Wrapper(model_type="qwen3_5", **PARTS)
