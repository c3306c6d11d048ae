# %% [markdown]
# What a choice costs after a step: ours, eager as programs run it, beside transformers' processors, softmax and
# multinomial on the same logits, and beside ours compiled. Milliseconds a step, medians of runs in turn.

# %%
from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from meshfn import functional as F
from meshfn.programs.chooser import Chooser
from meshfn.programs.steps import State
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 49_152
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalty, no top_k": {"temperature": 0.8, "top_k": 0, "repetition_penalty": 1.1},
}


def ours(logits: torch.Tensor, options: dict[str, Any]) -> Callable[[], Any]:
    batch = logits.shape[0]
    device = torch.device("cpu")
    rows = [[1, 2, 3]] * batch
    choose = Chooser(
        rows, batch=batch, vocab_size=VOCABULARY, max_new_tokens=20, device=device, do_sample=True, seed=1, **options
    )
    state = State.empty(batch, VOCABULARY, torch.float32, "cpu")
    state = dataclasses.replace(state, logits=logits, position=torch.full((batch,), 3))
    fed, eos = torch.full((batch,), 2), torch.tensor([-1])
    return lambda: choose(state, fed, eos)


def transformers(logits: torch.Tensor, options: dict[str, Any]) -> Callable[[], Any]:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    module = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None))
    process = module._get_logits_processor(GenerationConfig(do_sample=True, **options), input_ids_seq_length=3)
    ids = torch.tensor([[1, 2, 3]] * logits.shape[0])
    return lambda: torch.multinomial(process(ids, logits.clone()).softmax(-1), 1)


def milliseconds(fns: dict[str, Callable[[], Any]], repeats: int = 15) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in fns}
    for i in range(repeats + 2):
        for name, fn in fns.items():
            start = time.perf_counter()
            fn()
            if i > 1:
                found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


# %%
if __name__ == "__main__":
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {VOCABULARY} tokens")
    with torch.no_grad():
        for batch in (1, 4):
            for name, options in OPTIONS.items():
                logits = torch.randn(batch, VOCABULARY) * 3
                found = milliseconds({"ours": ours(logits, options), "theirs": transformers(logits, options)})
                a, b = found["ours"], found["theirs"]
                print(f"batch {batch}  {name:20}  ours {a:6.2f}   transformers {b:6.2f}   ratio {a / b:.2f}")
        logits, drawn = torch.randn(4, VOCABULARY) * 3, torch.ones(4, dtype=torch.bool)
        nine_tenths = torch.full((4,), 0.9, dtype=torch.float64)
        controls = F.Controls.off(4, VOCABULARY)
        controls = F.tree.replace(controls, {".do_sample": drawn, ".top_p": nine_tenths})
        given = (logits, torch.arange(4), torch.zeros(4, VOCABULARY, dtype=torch.int32), controls, torch.tensor([-1]))
        compiled = torch.compile(F.sample, fullgraph=True)
        start = time.perf_counter()
        compiled(*given)
        seconds = time.perf_counter() - start
        found = milliseconds({"eager": lambda: F.sample(*given), "compiled": lambda: compiled(*given)})
        print(f"batch 4  top_p, eager {found['eager']:.2f}   compiled {found['compiled']:.2f}, after {seconds:.1f} s")
