"""Llama 1 to 3 and what follows it to the letter (SmolLM2, TinyLlama, DeepSeek-Coder, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import AttentionConfig, DecoderConfig, LayerConfig, MLPConfig, NormConfig, RopeConfig
from ...functional.rope import ROPE_TYPES
from . import Family

_LAYER = "model.layers.{i}."
_OURS = ".layers[{i}]."
_PROJECTIONS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}

NAMES = {
    "model.embed_tokens.weight": ".embed",
    **{f"{_LAYER}{hf}.weight": f"{_OURS}attention.{ours}" for ours, hf in _PROJECTIONS.items()},
    **{f"{_LAYER}{hf}.bias": f"{_OURS}attention.{ours}_bias" for ours, hf in _PROJECTIONS.items()},
    **{f"{_LAYER}{hf}.weight": f"{_OURS}mlp.{ours}" for ours, hf in _MLP.items()},
    **{f"{_LAYER}{hf}.bias": f"{_OURS}mlp.{ours}_bias" for ours, hf in _MLP.items()},
    f"{_LAYER}input_layernorm.weight": f"{_OURS}attention.norm.weight",
    f"{_LAYER}post_attention_layernorm.weight": f"{_OURS}mlp.norm.weight",
    "model.norm.weight": ".norm.weight",
    "lm_head.weight": ".head",
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `LlamaConfig`, as a mapping, to ours."""
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    layer = LayerConfig(
        attention=AttentionConfig(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or width // heads,
            qkv_bias=hf.get("attention_bias", False),
            o_bias=hf.get("attention_bias", False),
            norm=norm,
            rope=rope(hf),
        ),
        mlp=MLPConfig(
            hidden_size=width,
            intermediate_size=hf["intermediate_size"],
            hidden_act=hf.get("hidden_act", "silu"),
            bias=hf.get("mlp_bias", False),
            norm=norm,
        ),
    )
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=width,
        layers=(layer,) * hf["num_hidden_layers"],
        norm=norm,
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
    )


def rope(hf: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older configs."""
    found = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    theta = found.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0
    found.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ValueError(f'rope_type "{kind}" is unknown to family llama\n    known: {", ".join(ROPE_TYPES)}')
    if found.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope_parameters: partial_rotary_factor other than 1.0 is not known to this family")
    known = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    unknown = sorted(set(found) - known)
    if unknown:
        raise ValueError(f"rope_parameters: {', '.join(unknown)} unknown for rope_type={kind!r}")
    return RopeConfig(rope_theta=float(theta), rope_type=kind, **found)


FAMILY = Family(
    model_type="llama",
    config=config,
    names=NAMES,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    gguf_arch="llama",
    gguf_fields={
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "rope.dimension_count": "head_dim",
    },
    gguf_extra=lambda names: {
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
    },
    gguf_permuted={
        "model.layers.{i}.self_attn.q_proj.weight": "num_attention_heads",
        "model.layers.{i}.self_attn.k_proj.weight": "num_key_value_heads",
        "model.layers.{i}.self_attn.q_proj.bias": "num_attention_heads",
        "model.layers.{i}.self_attn.k_proj.bias": "num_key_value_heads",
    },
)
