"""`gpu.py` without a GPU: the same sections at tiny sizes on a CPU, and plans for an H200."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import _gpu_cases
import _gpu_kernels
import _gpu_models
import gpu

__all__ = ["dry", "harness", "tiny"]

ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What configs say otherwise, so that a CPU runs them in a moment.
SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
TINY: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8},
    "Qwen3.5-4B": {
        **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2},
        **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
    },
    "DeepSeek-V3": {
        **{"num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    },
}  # fmt: skip


def tiny(patch: Callable[[Any, str, Any], None]) -> None:
    """Make cases and models so small. patch: such as `setattr`."""
    dense = _gpu_cases.Sizes(64, 96, 4, 2, 16, 50, turned=16)
    gated = _gpu_cases.Sizes(48, 40, 3, 1, 24, 50, turned=8, gated=True, delta=(2, 4, 8, 4))
    patch(_gpu_cases, "MODELS", {"tiny": dense, "gated": gated})
    patch(_gpu_cases, "LATENT", {"tiny": (3, 8, 4, 6, 24)})
    patch(_gpu_cases, "DELTA", {"by channel": (4, 4, 8, 4)})
    patch(_gpu_cases, "BATCHES", (1, 3))
    patch(_gpu_cases, "CONTEXTS", (5, 40))
    patch(_gpu_cases, "DEVICE", "cpu")
    patch(gpu, "BATCHES", (1, 3))
    patch(gpu, "THEIRS", (2,))
    models = {name: (kind, {**sizes, **SMALL, **TINY[name]}) for name, (kind, sizes) in _gpu_models.MODELS.items()}
    patch(_gpu_models, "MODELS", models)
    for name, value in {"PROMPT": 3, "STEPS": 4, "MAX_LEN": 16, "CHUNK": 4}.items():
        patch(_gpu_models, name, value)


def harness() -> Any:
    """The tests' `host_ops`, which carries launches out thread by thread, where the tests are at hand."""
    from meshfn.tests.kernels_cuda.ops import host_ops

    return host_ops


def dry(names: list[str], say: Callable[[dict[str, Any]], None], host_ops: Any, plans: bool = True) -> None:
    """Run sections here. plans: of the models at their own sizes too, which are traced for seconds each."""
    if plans:
        for name in _gpu_models.MODELS:
            for batch in gpu.BATCHES if any(name in each for each in names) else ():
                say(_gpu_models.predicted(name, batch))
    with contextlib.ExitStack() as undo:

        def patch(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        tiny(patch)
        for section in names:
            kind, _, rest = section.partition(" ")
            if kind == "bandwidth":
                continue  # of a device
            if kind != "kernel":
                for figure in gpu.work_of(section, "cpu")():
                    say(figure)
                continue
            with host_ops():
                for case in _gpu_cases.KERNELS[rest]():
                    error, plain = _gpu_kernels.errors(case)
                    say({"section": section, "label": case.label, "error": error, "plain_error": plain})
