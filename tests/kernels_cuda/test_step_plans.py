"""Whole decode steps for a GPU: six launches a layer of a dense model, and what stands in the way elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from expecttest import assert_expected_inline
from meshfn import programs

from ..programs.published import PUBLISHED


def decode(model: programs.Model, **given) -> str:
    """The part of a plan that is about a decode step."""
    plan = programs.plan(model, device="cuda", arch="sm_90", dtype=torch.bfloat16, chunk=64, **given)
    return "decode" + str(plan).partition("\ndecode")[2]


def published(folder: Path, name: str) -> programs.Model:
    (folder / "config.json").write_text(PUBLISHED[name])
    return programs.load(folder, abstract=True)


def test_smollm2():
    assert_expected_inline(
        decode(programs.load("smollm2-135m", abstract=True)),
        """\
decode   B=1 S=1 T<=1024
  launches: 30 layers of 6 kernels, 2 kernels and 15 nodes of the compiler beside them; 182 kernels a step
  before the layers
    x                       embedding         1 1 576   reads       1.1 KiB  compiler
  layers[0..29] x30, each reads <= 7.5 MiB and writes 768 B
    q k v                   norm_linear       1 1 576   reads       1.1 MiB  gemv
    q_BSHE k_positions      qkv_rope_cache    1 1 9 64  writes        768 B  qkv_rope_cache
    o_BSHV                  decode_attention  1 1 9 64  reads <=  768.0 KiB  decode_attention
    x_BSD                   linear_add        1 1 576   reads     648.0 KiB  gemv
    h_BSF                   gated_mlp         1 1 1536  reads       3.4 MiB  gemv
    x_BSD                   linear_add        1 1 576   reads       1.7 MiB  gemv
  after the layers
    logits_Z                norm_linear       1 49152   reads      54.0 MiB  gemv
    token logprob position  sample_advance    1                              sample_advance

a decode step reads 256.6 MiB of weights and at most 22.5 MiB of cache, and writes 22.5 KiB
bound: 3.42 steps a second for each GB/s of memory bandwidth, cache full; 3.72, cache empty""",
    )


def test_llama_3_2_1b(tmp_path):
    model = published(tmp_path, "meta-llama/Llama-3.2-1B")
    assert_expected_inline(
        decode(model, batch=4, max_len=4096),
        """\
decode   B=4 S=1 T<=4096
  launches: 16 layers of 6 kernels, 2 kernels and 25 nodes of the compiler beside them; 98 kernels a step
  before the layers
    x                       embedding         4 1 2048   reads      16.0 KiB  compiler
  layers[0..15] x16, each reads <= 148.0 MiB and writes 8.0 KiB
    q k v                   norm_linear       4 1 2048   reads      12.0 MiB  gemv
    q_BSHE k_positions      qkv_rope_cache    4 1 32 64  writes      8.0 KiB  qkv_rope_cache
    o_BSHV                  decode_attention  4 1 32 64  reads <=   32.0 MiB  decode_attention
    x_BSD                   linear_add        4 1 2048   reads       8.0 MiB  gemv
    h_BSF                   gated_mlp         4 1 8192   reads      64.0 MiB  gemv
    x_BSD                   linear_add        4 1 2048   reads      32.0 MiB  gemv
  after the layers
    logits_Z                norm_linear       4 128256   reads     501.0 MiB  gemv
    token logprob position  sample_advance    4                               sample_advance

a decode step reads 2.3 GiB of weights and at most 512.0 MiB of cache, and writes 128.0 KiB
bound: 0.332 steps a second for each GB/s of memory bandwidth, cache full; 0.405, cache empty""",
    )


def test_launches_of_other_families(tmp_path):
    """Norms of heads; softcaps, windows and norms behind."""
    found = []
    for name in ("Qwen/Qwen3-0.6B", "google/gemma-2-2b"):
        text = decode(published(tmp_path, name), max_len=8192)
        (line,) = [line for line in text.splitlines() if "launches:" in line]
        found.append(f"{name}\n{line.partition(': ')[2]}")
    assert_expected_inline(
        "\n".join(found),
        """\
Qwen/Qwen3-0.6B
28 layers of 6 kernels, 2 kernels and 15 nodes of the compiler beside them; 170 kernels a step
google/gemma-2-2b
26 layers of 6 kernels and 4 nodes of the compiler, 2 kernels and 20 nodes of the compiler beside them; 158 kernels a step""",
    )
