"""Olmo Hybrid: gated delta nets with a norm in front, full attention with norms behind, in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig, NormConfig
from . import Family, Leaves, hybrid, parts

_GDN = {
    **{f"{each}_proj.weight": each for each in "qkvbao"},
    "g_proj.weight": "z",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "o_norm.weight": "o_norm",
}
# By a layer's kind: behind its attention, or in front of what follows a gated delta net.
_NORM = (f"{parts.OURS}full.post_norm.weight", f"{parts.OURS}mlp.norm.weight")
NAMES: dict[str, str | Leaves] = {
    **parts.names(hybrid.FULL, parts.MLP),
    **{f"{parts.LAYER}self_attn.{each}_norm.weight": f"{parts.OURS}full.{each}_norm_wide" for each in "qk"},
    f"{parts.LAYER}post_attention_layernorm.weight": Leaves(
        _NORM, files=(f"{parts.LAYER}feedforward_layer_norm.weight",)
    ),
    f"{parts.LAYER}post_feedforward_layernorm.weight": f"{parts.OURS}mlp.post_norm.weight",
    f"{parts.LAYER}input_layernorm.weight": Leaves(
        (f"{parts.OURS}linear.norm.weight",), files=(f"{parts.LAYER}attention_layer_norm.weight",)
    ),
    **{f"{parts.LAYER}linear_attn.{theirs}": f"{parts.OURS}linear.{ours}" for theirs, ours in _GDN.items()},
    **hybrid.conv("linear_attn", apart=True),
}
# How weights are drawn.
_DRAWN = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `OlmoHybridConfig`, as a mapping, to ours."""
    norm, bias = parts.rms(hf, scale_in_fp32=True), hf.get("attention_bias", False)
    rope = parts.rope(hf) if hf.get("rope_parameters") or hf.get("rope_theta") else None
    full = parts.attention(hf, qkv_bias=bias, o_bias=bias, post_norm=norm, qk_norm=norm, qk_norm_wide=True, rope=rope)
    linear = hybrid.gdn(
        hf, norm, allow_neg_eigval=bool(hf.get("linear_allow_neg_eigval", True)), gated_norm=NormConfig(eps=1e-5)
    )
    attentions = hybrid.attentions(hf, linear, full, lambda i: i % 4 == 3)
    front, behind = (parts.mlp(hf, hf.get("hidden_act"), **{where: norm}) for where in ("norm", "post_norm"))
    _ = [hf.get(name) for name in _DRAWN]
    stack = parts.layers(hf, attentions, [front if each is linear else behind for each in attentions])
    return parts.decoder(hf, stack, norm)


FAMILY = Family(model_type="olmo_hybrid", config=config, names=NAMES)
