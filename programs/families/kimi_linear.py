"""Kimi Linear: Kimi's delta attention (KDA), latent attention without positions in every fourth layer, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...functional import DecoderConfig, GDNConfig
from . import Family, Leaves, hybrid, latent, mixture, parts
from .fields import Renamed

_BLOCK = "block_sparse_moe"  # what files call both the experts of a layer and what it has without
_EACH = ("gate", "up", "down")


def _leaf(path: str, file: str, **options: Any) -> Leaves:
    """One leaf, which files call otherwise than modules do."""
    return Leaves((parts.OURS + path,), files=(parts.LAYER + file,), **options)


def _dense(each: str) -> Leaves:
    """Of a layer without experts; transformers writes it under the name that it has in the others."""
    return Leaves((f"{parts.OURS}dense.{each}",), also=(f"{parts.LAYER}{_BLOCK}.{each}_proj.weight",))


_KDA = {
    **{f"{each}_proj.weight": each for each in "kvb"},
    "g_a_proj.weight": "z_down",
    "g_b_proj.weight": "z_up",
    "o_norm.weight": "o_norm",
}
# In modules a part of the attention.
_DECAY = {"f_a_proj.weight": "a_down", "f_b_proj.weight": "a_up", "dt_bias": "dt_bias"}
_MOE = {
    "gate.weight": "router",
    "gate.e_score_correction_bias": "correction_bias",
    **{f"shared_experts.{each}_proj.weight": f"shared.{each}" for each in _EACH},
}
_ATTENTION, _MLP = f"{parts.LAYER}self_attn.", f"{parts.LAYER}mlp."
NAMES: dict[str, str | Leaves] = {
    **latent.NAMES,
    **{_ATTENTION + theirs: f"{parts.OURS}linear.{ours}" for theirs, ours in _KDA.items()},
    **hybrid.conv("self_attn", apart=True),
    **{
        f"{_ATTENTION}forget_gate.{theirs}": _leaf(f"linear.{ours}", f"self_attn.{theirs}")
        for theirs, ours in _DECAY.items()
    },
    f"{_ATTENTION}forget_gate.A_log": _leaf("linear.a_log", "self_attn.A_log", ones=(0, 1, 3)),
    **{_MLP + theirs: _leaf(f"moe.{ours}", f"{_BLOCK}.{theirs}") for theirs, ours in _MOE.items()},
    **{f"{_MLP}{each}_proj.weight": _dense(each) for each in _EACH},
    **mixture.experts(f"{_BLOCK}.experts.{{e}}.{{name}}.weight", ("w1", "w3", "w2")),
}
# Kimi's names of fields -> the usual ones.
_FIELDS = {
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `KimiLinearConfig`, as a mapping, to ours."""
    hf = Renamed(hf, _FIELDS)
    norm, heads, width = parts.rms(hf), hf["linear_num_heads"], hf["linear_head_dim"]
    linear = GDNConfig(
        hidden_size=hf["hidden_size"],
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_kernel_dim=hf.get("linear_conv_kernel_dim", 4),
        channel_decay=True,
        decay_rank=width,
        gate_rank=width,
        hidden_act=parts.activation(hf.get("hidden_act")),
        gate_act="sigmoid",
        gated_norm=replace(norm, scale_in_fp32=True),
        norm=norm,
        initializer_range=hf.get("initializer_range", 0.02),
    )
    attentions = hybrid.attentions(hf, linear, latent.mla(hf, norm, None), lambda i: i > 0 and i % 4 == 0)
    dense, experts = latent.feeds(hf, norm, hf["num_experts"], **latent.sigmoid_routing(hf))
    types = hf.get("mlp_layer_types") or ["dense"] + ["sparse"] * (hf["num_hidden_layers"] - 1)
    kinds: dict[str, Any] = {"dense": dense, "sparse": experts}
    feeds = [kinds[each] for each in types]
    return parts.decoder(hf, parts.layers(hf, attentions, feeds), norm)


def _as_it_is(name: str) -> Any:
    return lambda hf: hf[name]


# What transformers derives other fields from, what is computed in this way alone, and what NoPE leaves unused.
_INERT = {
    **{name: _as_it_is(name) for name in ("linear_attn_config", "first_k_dense_replace", "rope_theta")},
    **{name: _as_it_is(name) for name in ("rope_parameters", "rope_scaling", "head_dim", "num_nextn_predict_layers")},
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}
FAMILY = Family(
    model_type="kimi_linear",
    config=config,
    names=NAMES,
    tied={},
    inert={**latent.INERT, **_INERT},
    further_layers="num_nextn_predict_layers",
)
