"""What families with gated delta nets share: which layers have one, its names and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...functional import AttentionConfig, GDNConfig, MLPConfig, MoEConfig, NormConfig
from . import Leaves, mixture, parts

__all__ = ["FULL", "QWEN", "attentions", "conv", "every", "experts", "gated_attention", "gdn", "qwen_norm"]

_QKV = ("q", "k", "v")
# The attention of layers that have one.
FULL = {f"self_attn.{each}_proj": f"full.{each}" for each in _QKV + ("o",)}
_GATED = FULL | {"self_attn.q_proj": "full.q_gate"}
_HEAD_NORMS = {f"self_attn.{each}_norm": f"full.{each}_norm" for each in "qk"}
# Qwen's layers, but for what each model has of gated delta nets.
QWEN: dict[str, str | Leaves] = {
    **parts.names(_GATED, mixture.DENSE, parts.PRE_NORMS, _HEAD_NORMS),
    **{
        f"{parts.LAYER}mlp.shared_expert.{each}_proj.weight": f"{parts.OURS}moe.shared.{each}"
        for each in ("gate", "up", "down")
    },
    f"{parts.LAYER}mlp.gate.weight": f"{parts.OURS}moe.router",
    f"{parts.LAYER}mlp.shared_expert_gate.weight": f"{parts.OURS}moe.shared_gate",
    **mixture.experts(),
}


def conv(module: str, *, apart: bool) -> dict[str, Leaves]:
    """The convolution of queries, keys and values in one tensor; apart: files have one of each."""
    begin = f"{parts.LAYER}{module}."
    paths = tuple(f"{parts.OURS}linear.{each}_conv" for each in _QKV)
    files = tuple(f"{begin}{each}_conv1d.weight" for each in _QKV) if apart else ()
    return {f"{begin}conv1d.weight": Leaves(paths, files=files)}


def gdn(hf: Mapping[str, Any], norm: NormConfig, **options: Any) -> GDNConfig:
    """Sizes from their usual fields; all else from `options`."""
    return GDNConfig(
        hidden_size=hf["hidden_size"],
        num_key_heads=hf["linear_num_key_heads"],
        num_value_heads=hf["linear_num_value_heads"],
        key_head_dim=hf["linear_key_head_dim"],
        value_head_dim=hf["linear_value_head_dim"],
        conv_kernel_dim=hf.get("linear_conv_kernel_dim", 4),
        hidden_act=parts.activation(hf.get("hidden_act")),
        norm=norm,
        initializer_range=hf.get("initializer_range", 0.02),
        **options,
    )


def attentions(hf: Mapping[str, Any], linear: Any, full: Any, is_full: Callable[[int], bool]) -> list[Any]:
    """One of the two for each layer, by `layer_types`. is_full: whether a layer is, where the config does not say.
    Fields from which transformers makes `layer_types` are explained by it."""
    kinds = {"linear_attention": linear, "full_attention": full}
    return parts.by_type(hf, kinds, lambda i: "full_attention" if is_full(i) else "linear_attention")


def qwen_norm(hf: Mapping[str, Any]) -> NormConfig:
    return parts.rms(hf, zero_centered=True, scale_in_fp32=True)


def gated_attention(hf: Mapping[str, Any], norm: NormConfig) -> AttentionConfig:
    """Qwen's full attention: a quarter of a head turns, by three axes where the config says so, and heads are gated."""
    if hf.get("attention_bias"):
        raise ValueError("attention_bias=True: projections with a gate have no bias here")
    rope = parts.rope(hf, partial=True, mrope=True)
    return parts.attention(hf, norm=norm, qk_norm=norm, rope=rope, output_gate=True)


def every(hf: Mapping[str, Any]) -> Callable[[int], bool]:
    """Every fourth layer is full, or as `full_attention_interval` says."""
    step = hf.get("full_attention_interval") or 4
    return lambda i: (i + 1) % step == 0


def experts(hf: Mapping[str, Any], norm: NormConfig) -> MoEConfig:
    """Qwen's experts, and the one that every token has, with a gate."""
    width = hf["shared_expert_intermediate_size"]
    shared = MLPConfig(
        hidden_size=hf["hidden_size"],
        intermediate_size=width,
        hidden_act=parts.activation(hf.get("hidden_act")),
        initializer_range=hf.get("initializer_range", 0.02),
    )
    return mixture.moe(
        hf,
        hf["num_experts"],
        hf["moe_intermediate_size"],
        norm=norm,
        norm_topk_prob=bool(hf.get("norm_topk_prob", True)),
        shared=shared,
        shared_gate=True,
    )
