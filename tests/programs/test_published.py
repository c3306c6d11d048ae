"""The configs of published checkpoints load as they are: family, parameters, windows, rotary embedding."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs

from .published import PUBLISHED


def summary(model: programs.Model) -> str:
    """`llama 134.5 M bfloat16, 30 layers, default 100000` of a model: what a reader can check against its card."""
    layers = model.config.layers
    latent = ", latent" if any(isinstance(each.attention, F.MLAConfig) for each in layers) else ""
    nets = sum(isinstance(each.attention, F.GDNConfig) for each in layers)
    states = f", {nets} gated delta nets" if nets else ""
    sparse = [each.mlp for each in layers if isinstance(each.mlp, F.MoEConfig)]
    experts = f", {len(sparse)} with {sparse[0].num_experts} experts" if sparse else ""
    windows = [each.attention.window for each in layers if each.attention.window is not None]
    ropes = dict.fromkeys(each.attention.rope for each in layers if each.attention.rope)
    turns = ", ".join(
        f"{r.rope_type} {r.rope_theta:g}" + ("" if r.partial_rotary_factor == 1 else f" of {r.partial_rotary_factor:g}")
        for r in ropes
    )
    window = f", {len(windows)} with a window of {windows[0]}" if windows else ""
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"{model.family.model_type} {model.num_parameters / 1e6:.1f} M {dtype}, {len(layers)} layers{latent}{states}{experts}{window}, "
        f"{turns or 'no rotary embedding'}"
    )


def test_published_configs(tmp_path):
    lines = []
    for name, text in PUBLISHED.items():
        (tmp_path / "config.json").write_text(text)
        try:
            lines.append(f"{name}: {summary(programs.load(tmp_path, abstract=True))}")
        except ValueError as error:
            lines.append(f"{name}: {str(error).splitlines()[0]}")
    assert_expected_inline(
        "\n".join(lines),
        """\
HuggingFaceTB/SmolLM2-135M: llama 134.5 M bfloat16, 30 layers, default 100000
HuggingFaceTB/SmolLM2-360M: llama 361.8 M bfloat16, 32 layers, default 100000
HuggingFaceTB/SmolLM2-1.7B-Instruct: llama 1711.4 M bfloat16, 24 layers, default 130000
HuggingFaceTB/SmolLM3-3B: smollm3 3075.1 M bfloat16, 36 layers, default 5e+06
meta-llama/Llama-2-7b-hf: llama 6738.4 M float16, 32 layers, default 10000
meta-llama/Meta-Llama-3-8B-Instruct: llama 8030.3 M bfloat16, 32 layers, default 500000
meta-llama/Llama-3.1-8B-Instruct: llama 8030.3 M bfloat16, 32 layers, llama3 500000
meta-llama/Llama-3.2-1B: llama 1235.8 M bfloat16, 16 layers, llama3 500000
TinyLlama/TinyLlama-1.1B-Chat-v1.0: llama 1100.0 M bfloat16, 22 layers, default 10000
01-ai/Yi-1.5-34B-Chat: llama 34388.9 M bfloat16, 60 layers, default 5e+06
deepseek-ai/deepseek-coder-1.3b-instruct: llama 1346.5 M bfloat16, 24 layers, linear 100000
lmsys/vicuna-7b-v1.5: llama 6738.4 M float16, 32 layers, default 10000
tiiuae/Falcon3-7B-Instruct: llama 7455.6 M bfloat16, 28 layers, default 1.00004e+06
mistralai/Mistral-7B-v0.1: mistral 7241.7 M bfloat16, 32 layers, 32 with a window of 4096, default 10000
mistralai/Mistral-7B-Instruct-v0.3: mistral 7248.0 M bfloat16, 32 layers, default 1e+06
mistralai/Mistral-Nemo-Base-2407: mistral 12247.8 M bfloat16, 40 layers, default 1e+06
mistralai/Ministral-8B-Instruct-2410: mistral 8019.8 M bfloat16, 36 layers, 36 with a window of 32768, default 1e+08
mistralai/Mistral-Small-24B-Instruct-2501: mistral 23572.4 M bfloat16, 40 layers, default 1e+08
Qwen/Qwen2.5-0.5B: qwen2 494.0 M bfloat16, 24 layers, default 1e+06
Qwen/Qwen2.5-7B-Instruct: qwen2 7615.6 M bfloat16, 28 layers, default 1e+06
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B: qwen2 1777.1 M bfloat16, 28 layers, default 10000
Qwen/Qwen3-0.6B: qwen3 596.0 M bfloat16, 28 layers, default 1e+06
Qwen/Qwen3-8B: qwen3 8190.7 M bfloat16, 36 layers, default 1e+06
google/gemma-2b: gemma 2506.2 M bfloat16, 18 layers, default 10000
google/gemma-2-2b: gemma2 2614.3 M float32, 26 layers, 13 with a window of 4096, default 10000
google/gemma-2-9b-it: gemma2 9241.7 M bfloat16, 42 layers, 21 with a window of 4096, default 10000
google/gemma-3-1b-it: gemma3_text 999.9 M bfloat16, 26 layers, 22 with a window of 512, default 10000, default 1e+06
allenai/OLMo-2-1124-7B: olmo2 7298.6 M float32, 32 layers, default 500000
microsoft/Phi-3-mini-4k-instruct: phi3 3821.1 M bfloat16, 32 layers, 32 with a window of 2047, default 10000
microsoft/Phi-3-mini-128k-instruct: phi3 3821.1 M bfloat16, 32 layers, 32 with a window of 262144, longrope 10000
microsoft/Phi-3.5-mini-instruct: phi3 3821.1 M bfloat16, 32 layers, 32 with a window of 262144, longrope 10000
microsoft/phi-4: phi3 14659.5 M bfloat16, 40 layers, default 250000
microsoft/Phi-4-mini-instruct: phi3 3836.0 M bfloat16, 32 layers, 32 with a window of 262144, longrope 10000 of 0.75
microsoft/phi-1: phi 1414.6 M float32, 24 layers, default 10000 of 0.5
microsoft/phi-1_5: phi 1418.3 M float16, 24 layers, default 10000 of 0.5
microsoft/phi-2: phi 2779.7 M float16, 32 layers, default 10000 of 0.4
nvidia/Nemotron-Mini-4B-Instruct: nemotron 4190.5 M bfloat16, 32 layers, default 10000 of 0.5
CohereForAI/c4ai-command-r-v01: cohere 34980.8 M float16, 40 layers, default 8e+06
CohereForAI/aya-23-8B: cohere 8028.0 M float16, 32 layers, default 10000
deepseek-ai/DeepSeek-V2-Lite: deepseek_v2 15706.5 M bfloat16, 27 layers, latent, 26 with 64 experts, yarn 10000
deepseek-ai/DeepSeek-V3: deepseek_v3 671026.4 M bfloat16, 61 layers, latent, 58 with 256 experts, yarn 10000
moonshotai/Kimi-K2-Instruct: deepseek_v3 1026408.2 M bfloat16, 61 layers, latent, 60 with 384 experts, yarn 50000
zai-org/GLM-4.7-Flash: glm4_moe_lite 29943.4 M bfloat16, 47 layers, latent, 46 with 64 experts, default 1e+06
Qwen/Qwen3-30B-A3B: qwen3_moe 30532.1 M bfloat16, 48 layers, 48 with 128 experts, default 1e+06
mistralai/Mixtral-8x7B-v0.1: mixtral 46702.8 M bfloat16, 32 layers, 32 with 8 experts, default 1e+06
openai/gpt-oss-20b: gpt_oss 20914.8 M float32, 24 layers, 24 with 32 experts, 12 with a window of 128, yarn 150000
Qwen/Qwen3.5-9B: qwen3_5_text 8953.8 M bfloat16, 32 layers, 24 gated delta nets, default 1e+07 of 0.25
Qwen/Qwen3-Next-80B-A3B-Instruct: qwen3_next 79674.4 M bfloat16, 48 layers, 36 gated delta nets, 48 with 512 experts, default 1e+07 of 0.25
allenai/Olmo-Hybrid-7B: olmo_hybrid 7430.9 M bfloat16, 32 layers, 24 gated delta nets, default 10000
moonshotai/Kimi-Linear-48B-A3B-Instruct: kimi_linear 49122.7 M bfloat16, 27 layers, latent, 20 gated delta nets, 26 with 256 experts, no rotary embedding""",
    )


def test_hybrid_models_are_planned_from_their_configs(tmp_path):
    """One layer of each kind, without weights: what a step reads and writes for each."""
    lines = []
    for name in list(PUBLISHED)[-4:]:
        (tmp_path / "config.json").write_text(PUBLISHED[name])
        model = programs.load(tmp_path, abstract=True, layers=(2, 3))
        text = str(programs.plan(model, max_len=1 << 15, chunk=8, device="cuda", arch="sm_90", dtype=torch.bfloat16))
        decode = text[text.index("\ndecode") :].splitlines()
        lines += [name, *(line for line in decode if " reads " in line and "writes" in line)]
    assert_expected_inline(
        "\n".join(lines),
        """\
Qwen/Qwen3.5-9B
  layers[0], reads 418.6 MiB and writes 2.0 MiB
  layers[1], reads <= 528.0 MiB and writes 4.0 KiB
a decode step reads 2.7 GiB of weights, 2.0 MiB of states and at most 128.0 MiB of cache, and writes 2.1 MiB
Qwen/Qwen3-Next-80B-A3B-Instruct
  layers[0], reads 134.4 MiB and writes 2.0 MiB
  layers[1], reads <= 184.0 MiB and writes 2.0 KiB
a decode step reads 845.8 MiB of weights, 2.0 MiB of states and at most 64.0 MiB of cache, and writes 2.0 MiB
allenai/Olmo-Hybrid-7B
  layers[0], reads 413.3 MiB and writes 2.2 MiB
  layers[1], reads <= 834.4 MiB and writes 15.0 KiB
a decode step reads 1.5 GiB of weights, 2.2 MiB of states and at most 480.0 MiB of cache, and writes 2.2 MiB
moonshotai/Kimi-Linear-48B-A3B-Instruct
  layers[0], reads 200.1 MiB and writes 2.1 MiB
  layers[1], reads <= 214.2 MiB and writes 1.1 KiB
a decode step reads 1.1 GiB of weights, 2.1 MiB of states and at most 36.0 MiB of cache, and writes 2.1 MiB""",
    )
