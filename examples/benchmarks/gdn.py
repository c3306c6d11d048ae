# %% [markdown]
# The gated delta rule in chunks, beside transformers' own chunked fallback: prefill forward, and forward and backward,
# fp32, in the sizes of Qwen3.5 (16 key and value heads, E = V = 128), batch 1. Both get the same tensors, in one
# process, in turn; medians and spread, and what each holds for its backward and at most.

# %%
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from meshfn import functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

HEADS, WIDTH = 16, 128
Rule = Callable[..., tuple[Tensor, Tensor]]


def tensors(tokens: int) -> list[Tensor]:
    """q, k, v, g, beta: keys and queries of any length, decays as a trained model has them."""
    made = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH, generator=made) for _ in "qkv")
    g = -torch.rand(1, tokens, HEADS, generator=made)
    return [q, k, v, g, torch.rand(1, tokens, HEADS, generator=made)]


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    return F.gated_delta_rule_chunked(F.l2norm(q), F.l2norm(k), v, g, beta, output_final_state=True)


def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)


def forward(rule: Rule, given: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return rule(*given)[0]


def both(rule: Rule, given: list[Tensor]) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    return list(torch.autograd.grad(rule(*given)[0].sum(), given))


def saved(rule: Rule, given: list[Tensor]) -> int:
    """Bytes that autograd keeps, each memory once."""
    found: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = rule(*[x.detach().requires_grad_() for x in given])
    del y
    return sum(found.values())


# %%
def show(lengths: list[int], rounds: int) -> None:
    print(f"{HEADS} heads of {WIDTH}, fp32, {torch.get_num_threads()} threads; ms, median (least to most) of {rounds}")
    print(f"{'tokens':>7} {'':22} {'meshfn':>24} {'transformers':>24} {'ratio':>6}")
    for tokens in lengths:
        given = tensors(tokens)
        a, b = forward(ours, given), forward(theirs, given)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        for name, run in (("forward", forward), ("forward and backward", both)):
            times: dict[Rule, list[float]] = {ours: [], theirs: []}
            for _ in range(rounds):
                for rule, found in times.items():
                    start = time.perf_counter()
                    run(rule, given)
                    found.append((time.perf_counter() - start) * 1e3)
            middle = [statistics.median(found) for found in times.values()]
            text = [f"{statistics.median(t):.0f} ({min(t):.0f} to {max(t):.0f})" for t in times.values()]
            print(f"{tokens:>7} {name:22} {text[0]:>24} {text[1]:>24} {middle[1] / middle[0]:>5.1f}x")
        kept = [saved(rule, given) / 2**20 for rule in (ours, theirs)]
        text = f"{kept[0]:>24,.0f} {kept[1]:>24,.0f} {kept[1] / kept[0]:>5.1f}x"
        print(f"{tokens:>7} {'kept for backward, MiB':22} {text}")


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    show(asked.lengths, asked.rounds)
