"""Two layers of each kind of model decode with their kernels, carried out thread by thread: tokens of the plain program,
and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshfn import programs
from meshfn.programs import dynamo
from meshfn.programs import lower as lowering

from ..families import family
from .ops import host_ops
from .test_lowered import as_on

PROMPTS = [[1, 2, 3], [5], [6, 7]]
NEW = 16
# Logits in fp32 are a few units here, and in one order of additions or another differ in the sixth digit.
MARGIN = 1e-3
ATTENTION = {"qkv_rope_cache.cu", "decode_attention.cu"}
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

# family -> what its config says beside, and kernels that a step of it must launch beside gemv
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    # a window of 5 slots, whose ring turns three times, and a softcap
    "gemma2": ({"num_hidden_layers": 2, "tie_word_embeddings": False}, ATTENTION),
    "deepseek_v3": ({"num_hidden_layers": 2}, {"mla_decode.cu"}),
    "qwen3_5": (HYBRID, ATTENTION | {"gdn_decode.cu"}),
    "kimi_linear": (HYBRID | {"mlp_layer_types": ["dense", "sparse"]}, {"gdn_decode.cu", "mla_decode.cu"}),
}


def decoded(model: programs.Model) -> tuple[list[list[int]], set[str]]:
    """Tokens of a ragged batch of three, and the texts launched in decoding them."""
    with host_ops() as launches:
        program = programs.build(model, batch=3, max_len=20, chunk=3)
        launches.clear()
        found = program.generate(PROMPTS, max_new_tokens=NEW)
    return found.tokens, {launch.source for launch in launches}


def likeliest(module: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], float]:
    """transformers' token after each of these, and the least by which its logit is above the next."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1).tolist(), float((first - second).min())


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_plain_program(name, monkeypatch):
    more, kernels = KINDS[name]
    torch.manual_seed(5)
    module = family(name, **more)
    model = programs.load(module)
    # The lowered graph itself is run, as Inductor would get it: first without kernels, then with those of a GPU.
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(lowering, "KERNELS", {**lowering.KERNELS, "cpu": ()})
    plain, launched = decoded(model)
    assert launched == set()
    monkeypatch.setattr(lowering, "KERNELS", {**lowering.KERNELS, "cpu": as_on("sm_90")})
    found, launched = decoded(model)
    assert launched >= {"gemv.cu", *kernels}
    assert found == plain
    assert [len(tokens) for tokens in found] == [NEW] * 3
    assert len({token for tokens in found for token in tokens}) > NEW, "tokens that repeat show little"
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected, margin = likeliest(module, prompt, tokens)
        assert tokens == expected
        assert margin > MARGIN, margin
