"""Latent attention and mixtures of experts beside transformers' own modules, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from meshfn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
    "beta_fast": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


def deepseek(**more: Any) -> tuple[DeepseekV3Attention, Any, F.MLA, F.MLAConfig]:
    """transformers' attention in double precision, its rotary tables, and ours on the same tensors."""
    given = {
        "hidden_size": 36,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": 11,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "attention_bias": True,
        "rope_parameters": YARN,
        "max_position_embeddings": 640,
        "attn_implementation": "eager",
    }
    config = DeepseekV3Config(**given | more)
    module = DeepseekV3Attention(config, 0).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 0.5))
    rope = dict(config.rope_parameters)
    cfg = F.MLAConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        attention_bias=config.attention_bias,
        o_bias=config.attention_bias,
        rope=F.RopeConfig(interleaved=config.rope_interleave, **rope),
    )
    direct = config.q_lora_rank is None
    params = F.MLA(
        q=module.q_proj.weight if direct else None,
        q_a=None if direct else module.q_a_proj.weight,
        q_norm=None if direct else module.q_a_layernorm.weight,
        q_b=None if direct else module.q_b_proj.weight,
        kv_a=module.kv_a_proj_with_mqa.weight,
        kv_norm=module.kv_a_layernorm.weight,
        kv_b=module.kv_b_proj.weight,
        o=module.o_proj.weight,
        q_a_bias=module.q_a_proj.bias if config.attention_bias and not direct else None,
        kv_a_bias=module.kv_a_proj_with_mqa.bias,
        o_bias=module.o_proj.bias,
    )
    return module, DeepseekV3RotaryEmbedding(config), params, cfg


def theirs(module: DeepseekV3Attention, tables: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """transformers' causal attention of x `B S D`, its tables in fp32 as it has them."""
    cos, sin = tables(x.float(), positions)
    size = x.shape[1]
    mask = torch.full((size, size), -torch.inf, dtype=x.dtype).triu(1)[None, None] if size else None
    return module(x, (cos.double(), sin.double()), mask)[0]


def tiny(**more: Any) -> F.MLAConfig:
    """A config of odd sizes, every one of its own."""
    given: dict[str, Any] = {
        "hidden_size": 20,
        "num_attention_heads": 3,
        "kv_lora_rank": 13,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "rope": F.RopeConfig(),
        "initializer_range": 0.4,
    }
    return F.MLAConfig(**given | more)
