"""Two layers of each kind of model decode with their kernels, carried out thread by thread: tokens of the plain program,
and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshfn import programs

from ..families import family
from .ops import host_ops
from .test_lowered import as_planned  # noqa: F401  (a fixture)

PROMPTS = [[1, 2, 3], [5], [6, 7]]
NEW = 13
# The least by which the logit of a token is above the next, in fp32, where those of the plain program and ours differ by
# at most a tenth of it.
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


def decoded(model: programs.Model, **options: Any) -> tuple[Any, set[str]]:
    """What a ragged batch of three generates, and the texts launched in doing so."""
    with host_ops() as launches:
        program = programs.build(model, batch=3, max_len=20, chunk=3, **options)
        launches.clear()
        found = program.generate(PROMPTS, max_new_tokens=NEW, return_logprobs=True)
    return found, {launch.source for launch in launches}


def likeliest(module: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], float]:
    """transformers' token after each of these, and the least by which its logit is above the next."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1).tolist(), float((first - second).min())


@pytest.mark.usefixtures("as_planned")
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_plain_program(name):
    more, kernels = KINDS[name]
    torch.manual_seed(5)
    module = family(name, **more)
    model = programs.load(module)
    plain, launched = decoded(model, compile=False)
    assert launched == set()
    found, launched = decoded(model)
    assert launched >= {"gemv.cu", *kernels}
    assert found.tokens == plain.tokens
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(plain.logprobs), rtol=0, atol=MARGIN / 10)
    assert len({token for tokens in found.tokens for token in tokens}) > NEW, "tokens that repeat show little"
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        expected, margin = likeliest(module, prompt, tokens)
        assert len(tokens) == NEW
        assert tokens == expected
        assert margin > MARGIN
