"""Whole models for `gpu.py`: decode steps of our programs, and transformers' on the same random weights.

Configs are those of published models; weights are made on the device, and our parameters are the module's own tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from meshfn import programs
from meshfn.functional import tree

__all__ = ["MODELS", "Compiled", "Eager", "Ours", "predicted"]

EVERY_FOURTH = [*["linear_attention"] * 3, "full_attention"]
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# name -> model_type, and what its config says
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        {
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
            "rope_parameters": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen3.5-4B": (
        "qwen3_5_text",
        {
            **{"vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": EVERY_FOURTH * 8},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
            "max_position_embeddings": 262144,
        },
    ),
    # The first four layers, of which the last has experts.
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 4},
            **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048},
            **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3},
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "tie_word_embeddings": False},
            "rope_parameters": {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
            "max_position_embeddings": 163840,
        },
    ),
}  # fmt: skip
PROMPT, STEPS, MAX_LEN, CHUNK = 64, 128, 1024, 64


def module_of(name: str, device: str) -> Any:
    """transformers' module in bf16, weights drawn where they lie."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, sizes = MODELS[name]
    with torch.device(device), torch.no_grad():
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes), dtype=torch.bfloat16).eval()
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    return module


def prompts(name: str, batch: int) -> list[list[int]]:
    vocab = MODELS[name][1]["vocab_size"]
    return [[(7 * i + 13 * row + 1) % vocab for i in range(PROMPT)] for row in range(batch)]


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def moved(plan: programs.Plan) -> int:
    """Bytes that a step of the plan moves at the middle of a measured run."""
    decode, held = plan.phases["decode"], PROMPT + STEPS // 2
    return int(decode.reads + decode.state + decode.writes + decode.context * held / (plan.sizes.slots - 1))


def launches(plan: programs.Plan) -> str:
    notes = plan.phases["decode"].notes
    return next((note.removeprefix("launches: ") for note in notes if note.startswith("launches: ")), "")


def predicted(name: str, batch: int) -> dict[str, Any]:
    """What a plan for an H200 says of a step, without weights or the device."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, sizes = MODELS[name]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes), dtype=torch.bfloat16)
    given = {"batch": batch, "max_len": MAX_LEN, "chunk": CHUNK, "dtype": torch.bfloat16}
    plan = programs.plan(programs.load(module), device="cuda", arch="sm_90", **given)
    found = {"section": f"ours {name}", "batch": batch, "moved": moved(plan), "planned": launches(plan)}
    return {**found, "bound_us": moved(plan) / 4.8e12 * 1e6, "left": plan.phases["decode"].left}


class Ours:
    """Programs of a model, one a batch. Made, they are built; called, their steps are timed."""

    def __init__(self, name: str, batches: tuple[int, ...], device: str) -> None:
        self.name, self.device = name, device
        self.module = module_of(name, device)
        model = programs.load(self.module)
        self.programs, self.plans = {}, {}
        for batch in batches:
            given = {"batch": batch, "max_len": MAX_LEN, "chunk": CHUNK, "compile": device == "cuda"}
            self.programs[batch] = programs.build(model, **given)
            self.plans[batch] = self.programs[batch].plan
            self._steps(batch, 4)

    def __call__(self) -> Iterator[dict[str, Any]]:
        for batch, program in self.programs.items():
            self._steps(batch, STEPS)
            step = min(self._steps(batch, STEPS) for _ in range(3))
            busy, count = self._device(batch, 16)
            found = {"us": step * 1e6, "tokens": batch / step, "moved": moved(self.plans[batch])}
            found |= {"device_us": busy, "launches": count, "host_us": busy and max(0.0, step * 1e6 - busy)}
            found |= {"build_s": program.build_seconds, "capture_s": self._capture(batch)}
            yield {"section": f"ours {self.name}", "batch": batch, **found, "planned": launches(self.plans[batch])}

    def _steps(self, batch: int, steps: int) -> float:
        """Seconds a step, as a user's call has them."""
        given = {"max_new_tokens": steps + 1, "eos_token_id": ()}
        timings = self.programs[batch].generate(prompts(self.name, batch), **given).timings
        return float(timings.decode) / steps

    def _device(self, batch: int, steps: int) -> tuple[float | None, float | None]:
        """Of a step, microseconds of kernels and how many there are, from two runs, so that a prefill is left out."""
        if self.device != "cuda":
            return None, None
        found = []
        for count in (1, steps + 1):
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                self._steps(batch, count)
            kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            kernels = [e for e in kernels if not e.name.startswith(("Memcpy", "Memset"))]
            found.append((sum(e.time_range.elapsed_us() for e in kernels), len(kernels)))
        (less_us, less), (more_us, more) = found
        return (more_us - less_us) / steps, (more - less) / steps

    def _capture(self, batch: int) -> float | None:
        """Seconds by which a call is longer that captures again, since a leaf has moved."""
        if self.device != "cuda":
            return None
        program = self.programs[batch]
        leaves = tree.paths(program.params)
        path = next(path for path in leaves if path.endswith("norm.weight"))
        program.params = tree.replace(program.params, {**leaves, path: leaves[path].clone()})
        times = []
        for _ in range(2):
            begin = now(self.device)
            self._steps(batch, 1)
            times.append(now(self.device) - begin)
        return max(0.0, times[0] - times[1])


class Eager:
    """transformers' own generation, a call of its module a step. module: one that is there already."""

    section = "transformers"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, batches: tuple[int, ...], device: str, module: Any = None) -> None:
        self.name, self.batches, self.device = name, batches, device
        self.module = module_of(name, device) if module is None else module
        self.first_s = self._times(batches[0])[1]

    def __call__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            self._times(batch)
            times = min((self._times(batch) for _ in range(2)), key=lambda times: times[-1] - times[2])
            step = (times[-1] - times[2]) / (len(times) - 3)
            told = {"us": step * 1e6, "tokens": batch / step, "first_s": self.first_s}
            yield {"section": f"{self.section} {self.name}", "batch": batch, **told}

    def _times(self, batch: int) -> list[float]:
        """When each new token was there, the beginning in front."""
        ids = torch.tensor(prompts(self.name, batch), device=self.device)
        begin = now(self.device)
        times = [0.0]

        def clock(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(now(self.device) - begin)
            return torch.zeros(batch, dtype=torch.bool, device=self.device)

        given = {"max_new_tokens": STEPS // 2 + 2, "do_sample": False, "stopping_criteria": [clock], **self.options}
        self.module.generate(ids, attention_mask=torch.ones_like(ids), **given)
        return times


class Compiled(Eager):
    """With its static cache, for which it compiles its step on a GPU."""

    section = "transformers compiled"
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "static"}
