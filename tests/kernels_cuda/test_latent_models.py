"""Models of latent attention on a GPU: what a step of DeepSeek-V3 runs and reads, and a small one's tokens."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import programs

from ..families import family
from ..programs.published import PUBLISHED
from .ops import host_ops
from .test_lowered import as_planned

__all__ = ["as_planned"]


def test_a_decode_step_of_deepseek_v3(tmp_path):
    (tmp_path / "config.json").write_text(PUBLISHED["deepseek-ai/DeepSeek-V3"])
    model = programs.load(tmp_path, abstract=True)
    plan = programs.plan(model, device="cuda", arch="sm_90", dtype=torch.bfloat16, batch=1, max_len=4096)
    decode = plan.phases["decode"]
    assert_expected_inline(
        str(plan).split("\n\ndecode ")[1],
        """\
  B=1 S=1 T<=4096
  layers[0..60] latent attention absorbed: at most 587.2 M products, 4.5 MiB a layer (expanded: 68.9 B products, 644.5 MiB)
  launches: 3 layers of 6 kernels and 9 nodes of the compiler, 58 layers of 7 kernels and 30 nodes of the compiler, 2 kernels and 26 nodes of the compiler beside them; 426 kernels a step
  before the layers
    x                       embedding       1 1 7168     reads      14.0 KiB  compiler
  layers[0..2] x3, each reads <= 1.1 GiB and writes 1.1 KiB
    kv_down q_down          norm_linear     1 1 576      reads      28.9 MiB  gemv
    kv_latent               normalize       1 1 512      reads       1.0 KiB  compiler (no cuda kernel)
    q_latent                normalize       1 1 1536     reads       3.0 KiB  compiler (no cuda kernel)
    key_rope                apply_rope      1 1 1 64                          compiler (no cuda kernel)
    q_BSHE                  norm_linear     1 1 24576    reads      72.0 MiB  gemv
    q_rope                  apply_rope      1 1 128 64                        compiler (no cuda kernel)
    o_BSHV                  absorbed_core   1 1 128 128  reads <=   36.5 MiB  mla_decode
    x_BSD                   linear_add      1 1 7168     reads     224.0 MiB  gemv
    h_BSF                   gated_mlp       1 1 18432    reads     504.0 MiB  gemv
    x_BSD                   linear_add      1 1 7168     reads     252.0 MiB  gemv
    cache.latent            write           1 1 576      writes      1.1 KiB  compiler
  layers[3..60] x58, each reads <= 1.1 GiB and writes 1.1 KiB
    kv_down q_down          norm_linear     1 1 576      reads      28.9 MiB  gemv
    kv_latent               normalize       1 1 512      reads       1.0 KiB  compiler (no cuda kernel)
    q_latent                normalize       1 1 1536     reads       3.0 KiB  compiler (no cuda kernel)
    key_rope                apply_rope      1 1 1 64                          compiler (no cuda kernel)
    q_BSHE                  norm_linear     1 1 24576    reads      72.0 MiB  gemv
    q_rope                  apply_rope      1 1 128 64                        compiler (no cuda kernel)
    o_BSHV                  absorbed_core   1 1 128 128  reads <=   36.5 MiB  mla_decode
    x_BSD                   linear_add      1 1 7168     reads     224.0 MiB  gemv
    h_BSD                   normalize       1 1 7168     reads      14.0 KiB  compiler (no cuda kernel)
    router                  to              256 7168     reads       3.5 MiB  compiler
    logits                  norm_linear     1 1 256                           gemv
    to                      to              256          reads         512 B  compiler
    out_BSD                 expert_mlp      1 1 7168     reads     672.0 MiB  compiler (no cuda kernel)
    h_BSF                   gated_mlp       1 1 2048     reads      56.0 MiB  gemv
    out_BSD                 linear_add      1 1 7168     reads      28.0 MiB  gemv
    cache.latent            write           1 1 576      writes      1.1 KiB  compiler
  after the layers
    logits_Z                norm_linear     1 129280     reads       1.7 GiB  gemv
    token logprob position  sample_advance  1                                 sample_advance

a decode step reads 68.2 GiB of weights and at most 274.5 MiB of cache, and writes 68.6 KiB
bound: 0.0136 steps a second for each GB/s of memory bandwidth, cache full; 0.0137, cache empty""",
    )
    assert not [line for line in decode.left if "absorbed_core" in line or "sample_advance" in line]


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_tokens_are_those_of_transformers(as_planned, name):
    """A ragged batch of three; latents with a rotary key and without one, among gated delta nets."""
    torch.manual_seed(3)
    module = family(name)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    with host_ops() as launches:
        program = programs.build(programs.load(module), batch=3, max_len=24, chunk=2)
        for cache in program.cache:
            if hasattr(cache, "latent"):
                cache.latent.fill_(torch.nan)
        launches.clear()
        found = program.generate(prompts, max_new_tokens=8)
    assert {launch.source for launch in launches} >= {"mla_decode.cu", "latent_heads.cu", "sample_advance.cu"}
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        ids = torch.tensor([prompt])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()
