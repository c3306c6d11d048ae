"""Tiny random Llamas: transformers' own modules, and ours on the same tensors."""

from __future__ import annotations

from typing import Any

import torch
from meshfn import programs
from meshfn.programs import Model
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(
    heads: int = 6, kv_heads: int = 2, *, bias: bool = False, tied: bool = False, layers: int = 2, **more: Any
) -> LlamaForCausalLM:
    """A transformers module with random weights, large enough that a wrong step shows."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=8 * heads,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        **more,
    )
    module = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    return module


def ours(module: LlamaForCausalLM) -> Model:
    return programs.load(module)


# odd head counts, MQA, MHA, with and without biases, tied and untied
VARIANTS = {
    "gqa-tied": {"heads": 3, "kv_heads": 1, "tied": True},
    "gqa-bias": {"heads": 6, "kv_heads": 2, "bias": True},
    "mha": {"heads": 5, "kv_heads": 5},
    "llama3-rope": {"heads": 6, "kv_heads": 3, "bias": True, "tied": True, "rope_parameters": LLAMA3},
}
