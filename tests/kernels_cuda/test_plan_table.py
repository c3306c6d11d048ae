"""What a decode step is planned to launch, read and write on a GPU: a dense model, a hybrid and a latent one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import programs

from ..programs.published import PUBLISHED

# What Qwen3.5-4B says otherwise than Qwen3.5-9B.
SMALLER = {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}


def models() -> dict[str, str]:
    """name -> config.json"""
    hybrid = json.loads(PUBLISHED["Qwen/Qwen3.5-9B"])
    hybrid["text_config"] |= SMALLER
    hybrid["tie_word_embeddings"] = True
    return {
        "Llama-3.2-1B": PUBLISHED["meta-llama/Llama-3.2-1B"],
        "Qwen3.5-4B": json.dumps(hybrid),
        "DeepSeek-V3": PUBLISHED["deepseek-ai/DeepSeek-V3"],
    }


def lines(folder: Path, config: str, layers: list[int] | None) -> list[str]:
    (folder / "config.json").write_text(config)
    model = programs.load(folder, abstract=True, layers=layers)
    given = {"device": "cuda", "arch": "sm_90", "dtype": torch.bfloat16, "chunk": 64, "max_len": 8192}
    text = str(programs.plan(model, **given)).partition("\ndecode")[2]
    kept = ("launches: ", "a decode step reads ", "bound: ")
    return [f"  {line.strip().removeprefix(kept[0])}" for line in text.splitlines() if line.strip().startswith(kept)]


def table(folder: Path, layers: dict[str, list[int]]) -> str:
    """layers: those that are planned of a model; all unless it is in it."""
    found = []
    for name, config in models().items():
        each = lines(folder, config, layers.get(name))
        assert len(each) == 3
        found += [name, *each]
    return "\n".join(found)


def test_a_step_of_each_kind(tmp_path):
    """Of some layers, every kind among them."""
    some = {"Llama-3.2-1B": [0, 1], "Qwen3.5-4B": list(range(8)), "DeepSeek-V3": [0, 1, 2, 3, 4]}
    assert_expected_inline(
        table(tmp_path, some),
        """\
Llama-3.2-1B
  2 layers of 6 kernels, 2 kernels and 25 nodes of the compiler beside them; 14 kernels a step
  a decode step reads 733.0 MiB of weights and at most 32.0 MiB of cache, and writes 4.0 KiB
  bound: 1.25 steps a second for each GB/s of memory bandwidth, cache full; 1.30, cache empty
Qwen3.5-4B
  6 layers of 5 kernels, 2 layers of 6 kernels, 2 kernels and 15 nodes of the compiler beside them; 44 kernels a step
  a decode step reads 2.8 GiB of weights, 12.3 MiB of states and at most 64.0 MiB of cache, and writes 12.3 MiB
  bound: 0.318 steps a second for each GB/s of memory bandwidth, cache full; 0.324, cache empty
DeepSeek-V3
  3 layers of 6 kernels and 9 nodes of the compiler, 2 layers of 7 kernels and 30 nodes of the compiler, 2 kernels and 26 nodes of the compiler beside them; 34 kernels a step
  a decode step reads 7.2 GiB of weights and at most 45.0 MiB of cache, and writes 5.6 KiB
  bound: 0.129 steps a second for each GB/s of memory bandwidth, cache full; 0.13, cache empty""",
    )


@pytest.mark.verify
def test_a_step_of_whole_models(tmp_path):
    """One row, a cache of 8,192 tokens. The cache's bytes are T times layers that attend times numbers that a token
    leaves: 8 heads of 64 twice, 4 of 256 twice, 576; a state's are 4 H V E a layer, and convolutions."""
    assert_expected_inline(
        table(tmp_path, {}),
        """\
Llama-3.2-1B
  16 layers of 6 kernels, 2 kernels and 25 nodes of the compiler beside them; 98 kernels a step
  a decode step reads 2.3 GiB of weights and at most 256.0 MiB of cache, and writes 32.0 KiB
  bound: 0.365 steps a second for each GB/s of memory bandwidth, cache full; 0.405, cache empty
Qwen3.5-4B
  24 layers of 5 kernels, 8 layers of 6 kernels, 2 kernels and 15 nodes of the compiler beside them; 170 kernels a step
  a decode step reads 7.8 GiB of weights, 49.1 MiB of states and at most 256.0 MiB of cache, and writes 49.2 MiB
  bound: 0.114 steps a second for each GB/s of memory bandwidth, cache full; 0.117, cache empty
DeepSeek-V3
  3 layers of 6 kernels and 9 nodes of the compiler, 58 layers of 7 kernels and 30 nodes of the compiler, 2 kernels and 26 nodes of the compiler beside them; 426 kernels a step
  a decode step reads 68.2 GiB of weights and at most 549.0 MiB of cache, and writes 68.6 KiB
  bound: 0.0135 steps a second for each GB/s of memory bandwidth, cache full; 0.0137, cache empty""",
    )
