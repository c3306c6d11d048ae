"""Decode steps with norms of heads, rings and softcaps, carried out thread by thread, and what the compiler makes of an
op that writes a cache."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.cache import KVCache, cache_update
from meshfn.programs import dynamo
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import lower
from meshfn.programs.sizes import Target

from ..families import family
from .ops import host_ops
from .test_lowered import as_planned  # noqa: F401  (a fixture)


@pytest.mark.usefixtures("as_planned")
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_tokens_are_those_of_transformers(name):
    """A ragged batch of three, whose prompts take one call of prefill or two; Gemma's rings turn."""
    torch.manual_seed(5)
    module = family(name)
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    with host_ops() as launches:
        program = programs.build(programs.load(module), batch=3, max_len=24, chunk=2)
        launches.clear()
        found = program.generate(prompts, max_new_tokens=9)
    assert {launch.source for launch in launches} >= {"gemv.cu", "qkv_rope_cache.cu", "decode_attention.cu"}
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        ids = torch.tensor([prompt])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()


def step(q, k, v, weight, cos, sin, k_cache, v_cache, positions, read):
    q, k = (F.apply_rope(F.normalize(x, weight, eps=1e-6), cos, sin) for x in (q, k))
    cache, k_read, v_read, k_positions = cache_update(KVCache(k=k_cache, v=v_cache), k, v, positions, read)
    o = F.decode_attention(q, k_read, v_read, q_positions=positions, k_positions=k_positions)
    k_cache.copy_(cache.k)
    v_cache.copy_(cache.v)
    return o.tanh()


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(6)
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    caches = [torch.randn(2, 9, 2, 16) for _ in "kv"]
    angles = torch.randn(2, 1, 8)
    return [q, k, v, torch.randn(16), angles.cos(), angles.sin(), *caches, torch.tensor([[3], [-1]]), torch.arange(8)]


def test_a_compiled_step_writes_the_cache_where_it_lies():
    given = arguments()
    module = dynamo.capture(step, *given)
    lower(module, Target("cuda", torch.float32, "sm_90"), CUDA_KERNELS)
    names = [str(node.name).removeprefix("l_").removesuffix("_") for node in module.graph.find_nodes(op="placeholder")]
    order = ["q", "k", "v", "weight", "cos", "sin", "k_cache", "v_cache", "positions", "read"]
    with host_ops() as launches, torch.no_grad():
        ordered = [given[order.index(name)] for name in names]
        compiled = dynamo.inductor(module, ordered)
        launches.clear()
        (found,) = compiled(*ordered)
    assert [launch.source for launch in launches] == ["qkv_rope_cache.cu", "decode_attention.cu"]
    places = {x.data_ptr() for launch in launches for x in launch.args if isinstance(x, torch.Tensor)}
    assert {given[6].data_ptr(), given[7].data_ptr()} <= places
    plain = arguments()
    torch.testing.assert_close(found, step(*plain))
    torch.testing.assert_close(given[6:8], plain[6:8])
    assert torch.equal(given[6][1], arguments()[6][1]), "a row without a token changed a byte"
