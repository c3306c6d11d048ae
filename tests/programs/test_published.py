"""The configs of published checkpoints load as they are: family, parameters, windows, rotary embedding."""

from __future__ import annotations

from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs

from .published import PUBLISHED


def summary(model: programs.Model) -> str:
    """`llama 134.5 M bfloat16, 30 layers, default 100000` of a model: what a reader can check against its card."""
    layers = model.config.layers
    latent = ", latent" if any(isinstance(each.attention, F.MLAConfig) for each in layers) else ""
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
        f"{model.family.model_type} {model.num_parameters / 1e6:.1f} M {dtype}, {len(layers)} layers{latent}{experts}{window}, "
        f"{turns}"
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
openai/gpt-oss-20b: gpt_oss 20914.8 M float32, 24 layers, 24 with 32 experts, 12 with a window of 128, yarn 150000""",
    )
