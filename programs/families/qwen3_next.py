"""Qwen3-Next: gated delta nets, full attention in every fourth layer, experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, hybrid, mixture, parts, qwen3_5

_GDN = {
    "in_proj_qkvz.weight": "qkvz",
    "in_proj_ba.weight": "ba",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "norm.weight": "o_norm",
    "out_proj.weight": "o",
}
NAMES: dict[str, str | Leaves] = {
    **hybrid.QWEN,
    **{f"{parts.LAYER}linear_attn.{theirs}": f"{parts.OURS}linear.{ours}" for theirs, ours in _GDN.items()},
    **hybrid.conv("linear_attn", apart=False),
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Qwen3NextConfig`, as a mapping, to ours."""
    norm = hybrid.qwen_norm(hf)
    linear = hybrid.gdn(hf, norm, interleaved=True, gated_norm=parts.rms(hf))
    attentions = hybrid.attentions(hf, linear, hybrid.gated_attention(hf, norm), hybrid.every(hf))
    dense, experts = parts.mlp(hf, hf.get("hidden_act"), norm=norm), hybrid.experts(hf, norm)
    feeds = [experts if each else dense for each in mixture.sparse(hf)]
    return parts.decoder(hf, parts.layers(hf, attentions, feeds), norm)


FAMILY = Family(model_type="qwen3_next", config=config, names=NAMES, inert=qwen3_5.INERT, left_out=("mtp.",))
