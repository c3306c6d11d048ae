"""Tiny random models of every family: transformers' own modules, whose parameters ours reads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 4.0, 9.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 14,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
# YaRN as DeepSeek has it
MSCALE = YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}
LONGER = {"max_position_embeddings": 640}  # 16 times 40
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"moe_intermediate_size": 14, "shared_expert_intermediate_size": 18, "num_experts": 5}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True}

# id -> model_type and what its config says beside SIZES; a window is shorter than the tests' prompts
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "attention_bias": True}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 10, "attention_bias": True}),
    "smollm3": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4, "mlp_bias": True},
    ),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7, "layer_types": KINDS}),
    "olmo2": ("olmo2", {"num_key_value_heads": 3}),
    "phi3": ("phi3", {"sliding_window": 6, "attention_dropout": 0.0}),
    "phi3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    ),
    "phi": ("phi", {"num_key_value_heads": 6, "qk_layernorm": True}),
    "phi-gelu": (
        "phi",
        {
            "num_key_value_heads": 2,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        },
    ),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": 11, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"mlp_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "rope_parameters": MSCALE}
        | LONGER,
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {"q_lora_rank": 11, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "attention_bias": True}
        | {"rope_parameters": MSCALE | {"mscale_all_dim": 1.0}}
        | LONGER,
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT
        | {"q_lora_rank": 9, "n_routed_experts": 5, "rope_interleave": False, "norm_topk_prob": False}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 10, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
        | {"mlp_only_layers": [1], "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "head_dim": 12}),
    "qwen3_5": ("qwen3_5_text", LINEAR | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_section": [2, 1, 1]}}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        LINEAR
        | SHARED
        | {"head_dim": 16, "num_experts_per_tok": 2, "rope_parameters": MROPE | {"mrope_section": [2, 1, 1]}},
    ),
    "qwen3_next": (
        "qwen3_next",
        LINEAR | SHARED | {"head_dim": 16, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "olmo_hybrid": ("olmo_hybrid", LINEAR | {"linear_num_key_heads": 4, "rope_parameters": None}),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        LINEAR | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "linear_allow_neg_eigval": False},
    ),
    "kimi_linear": (
        "kimi_linear",
        {name: n for name, n in LATENT.items() if name != "n_routed_experts"}
        | {"layer_types": LINEAR["layer_types"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"linear_head_dim": 6, "linear_num_heads": 3, "num_local_experts": 6, "n_group": 3, "topk_group": 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": KINDS}
        | {"swiglu_limit": 1.5, "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}},
    ),
}


def family(name: str, **more: Any) -> Any:
    """A module with random weights, large enough that a wrong step shows, norms, biases and buffers included."""
    model_type, given = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**SIZES | given | more)
    # Its grouped products want widths in multiples of 16 bytes.
    module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for part in module.modules():
        if hasattr(part, "limit") and hasattr(config, "swiglu_limit"):
            part.limit = config.swiglu_limit  # which older versions of transformers do not look at
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
            if parameter.dim() == 1:
                parameter += 0.5
        for name, buffer in module.named_buffers():
            if name in module.state_dict():  # not what is derived from the config
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    return module


class Letters:
    """A tokenizer of the letters from A on."""

    def decode(self, ids, **options):
        return "".join(chr(65 + i) for i in ids)
