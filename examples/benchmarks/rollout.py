# %% [markdown]
# Rollout, train, rollout on SmolLM2-135M: what is compiled and what is copied after the first round, counted; and the
# compiled step of a tiny hybrid in the shape of Qwen3.5 beside transformers' eager one, the same weights, data and
# optimiser, in turn.

# %%
from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo

ROUNDS = 3
REPEATS = 15


# %%
def copies_of(shapes: set[tuple[int, ...]], fn: Callable[[], Any]) -> int:
    """How many tensors of these shapes are copied or made anew outside of graphs while it runs."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with profile:
        fn()
    kinds = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::contiguous")
    events = [event for event in profile.events() or () if event.name in kinds]
    return sum(bool(event.input_shapes) and tuple(event.input_shapes[0]) in shapes for event in events)


def smollm2() -> None:
    model = programs.load("smollm2-135m")
    params = F.tree.map(lambda leaf: leaf.requires_grad_(), model.params)
    program = programs.build(model, batch=2, max_len=64, chunk=16)
    step = programs.train_step(model.config, functools.partial(torch.optim.SGD, lr=1e-3), max_grad_norm=1.0)
    opt_state = step.init(params)
    leaves = F.tree.leaves(params)
    addresses = [leaf.data_ptr() for leaf in leaves]
    matrices = {tuple(leaf.shape) for leaf in leaves if leaf.dim() > 1}

    def rollout(seed: int) -> programs.Generation:
        prompts = ["The capital of France is", "Water boils at"]
        return program.generate(
            prompts, max_new_tokens=16, do_sample=True, seed=seed, eos_token_id=(), return_logprobs=True
        )

    print("\nSmolLM2-135M, float32: rollout of 2 rows and 16 tokens, a step on them, rollout")
    print(f"  {'round':8}{'rollout':>10}{'step':>10}{'graphs':>9}{'copies of a matrix':>21}   loss")
    graphs = 0
    for i in range(ROUNDS):
        start = time.perf_counter()
        drawn = rollout(i)
        middle = time.perf_counter()
        batch = {"input_ids": drawn.sequences, "attention_mask": drawn.attention_mask}
        params, opt_state, metrics = step(params, opt_state, batch)
        loss, end = metrics["loss"].item(), time.perf_counter()
        new, graphs = dynamo.graphs() - graphs, dynamo.graphs()
        counted = ""
        if i:
            found = [copies_of(matrices, functools.partial(step, params, opt_state, batch))]
            found.append(copies_of(matrices, functools.partial(rollout, i)))
            counted = f"{found[0]} + {found[1]}"
            assert (new, found) == (0, [0, 0]), (new, found)
        print(f"  {i:<8}{middle - start:8.2f} s{end - middle:8.2f} s{new:9}{counted:>21}   {loss:.3f}")
    assert dynamo.graphs() == graphs
    assert addresses == [leaf.data_ptr() for leaf in F.tree.leaves(program.params)]
    fresh = programs.build(model, batch=2, max_len=64, chunk=16, compile=False)
    mine, theirs = program.score(drawn.sequences), fresh.score(drawn.sequences)
    apart = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
    print(f"  scores of the program and of a fresh build on the new weights differ by {apart:.0e} at most")


# %%
def hybrid(hidden: int, layers: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=512,
        rope_parameters=rope | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def beside_transformers(hidden: int, layers: int, rows: int, tokens: int) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    theirs = hybrid(hidden, layers)
    model = programs.load(copy.deepcopy(theirs))
    step = programs.train_step(model.config, optimizer, max_grad_norm=1.0)
    state, peer = step.init(model.params), optimizer(theirs.parameters())
    draw = torch.Generator().manual_seed(0)

    def ours(ids: torch.Tensor) -> float:
        nonlocal state
        _, state, metrics = step(model.params, state, {"input_ids": ids})
        return float(metrics["loss"])

    def other(ids: torch.Tensor) -> float:
        loss = theirs(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        peer.step()
        peer.zero_grad()
        return float(loss.detach())

    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    for i in range(REPEATS + 2):
        ids, clock = torch.randint(0, 256, (rows, tokens), generator=draw), [time.perf_counter()]
        losses = []
        for each in (ours, other):
            losses.append(each(ids))
            clock.append(time.perf_counter())
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
        if i == 0:
            print(
                f"\na step of {rows} x {tokens} tokens, {model.num_parameters / 1e6:.1f} M parameters, {layers} layers"
            )
            print(f"  {step.compiles} layers compiled in {time.perf_counter() - start:.0f} s")
        if i > 1:
            times.append((clock[1] - clock[0], clock[2] - clock[1]))
    mine, others = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    print(f"  meshfn {mine:.0f} ms, transformers {others:.0f} ms, {statistics.median(ratios):.2f} times as long")
    print(f"  ({ratios[0]:.2f} to {ratios[-1]:.2f}; losses {losses[0]:.4f} and {losses[1]:.4f})")


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One set of weights. Takes 5 minutes on two cores, 3 GB of memory.")
    parser.add_argument("--hybrid", action="store_true", help="the tiny hybrid alone")
    chosen = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.2f}")
    if not chosen.hybrid:
        smollm2()
    beside_transformers(128, 8, 4, 128)
