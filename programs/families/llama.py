"""Llama 1 to 3 and what follows it to the letter (SmolLM2, TinyLlama, DeepSeek-Coder, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.MLP, parts.PRE_NORMS)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `LlamaConfig`, as a mapping, to ours."""
    norm, bias = parts.rms(hf), hf.get("attention_bias", False)
    attention = parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=parts.rope(hf))
    mlp = parts.mlp(hf, hf.get("hidden_act"), bias=hf.get("mlp_bias", False), norm=norm)
    return parts.decoder(hf, parts.layers(hf, attention, mlp), norm)


FAMILY = Family(
    model_type="llama",
    config=config,
    names=NAMES,
    inert={"rope_interleaved": False},
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
