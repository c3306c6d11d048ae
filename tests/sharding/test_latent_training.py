"""Tiny decoders trained under layouts of latent attention, beside keys and values that are made first and then move.

    pytest -m verify -s tests/sharding/test_latent_training.py    # prints the tables

After torchtitan #4760, which compares losses and norms of gradients at steps 10 and 100: a batch that stays, AdamW at
1e-3, gradients clipped at 1, 2 ranks. *Materialised* is `F.mla` with a core that exchanges: each rank projects keys and
values of every head of its tokens, and a layout that knows nothing of latents moves them, heads for tokens or gathered.
In fp64 all ways agree but for rounding. So what differs in fp32 is rounding too, and is held to what one rank in fp32
differs from itself in fp64.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

B, S, D, Z, HEADS = 2, 32, 32, 61, 4
SINGLE, DOUBLE = torch.float32, torch.float64
SHOWN = (1, 10, 100)
NORM = F.NormConfig(eps=1e-6)
LATENT = F.MLAConfig(
    hidden_size=D, num_attention_heads=HEADS, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, norm=NORM, initializer_range=0.2,
)  # fmt: skip
MLP = F.MLPConfig(hidden_size=D, intermediate_size=48, norm=NORM, initializer_range=0.2)
MOE = F.MoEConfig(
    hidden_size=D, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, scoring_func="sigmoid",
    norm_topk_prob=True, routed_scaling_factor=2.5, correction_bias=True, n_group=4, topk_group=2, norm=NORM,
    shared=F.MLPConfig(hidden_size=D, intermediate_size=16, initializer_range=0.2), initializer_range=0.2,
)  # fmt: skip


def model(attention: F.MLAConfig) -> F.DecoderConfig:
    """The first layer dense, the second of experts."""
    layers = tuple(F.LayerConfig(attention=attention, mlp=mlp) for mlp in (MLP, MOE))
    return F.DecoderConfig(vocab_size=Z, hidden_size=D, layers=layers, norm=NORM, initializer_range=0.2)


MODELS = {
    "DeepSeek V3": model(dataclasses.replace(LATENT, rope=F.RopeConfig(interleaved=True))),
    "Kimi K3": model(dataclasses.replace(LATENT, output_gate=True)),  # no positions, and a gate of heads
}

Way = Callable[[Callable[..., Any]], Callable[..., Tensor]]  # F.decoder or F.next_token_loss -> its first result


def one_rank(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: fn(*args)[0]


def latent(layout: sh.Layout, mesh: sh.Mesh) -> Way:
    return lambda fn: one_rank(sh.simulate(sh.shard(fn, layout, mesh, S=S), mesh))


def materialised(layout: sh.Layout, mesh: sh.Mesh) -> Way:
    """Each rank computes all heads of its tokens, and the layout moves their q, k, v and o."""
    moved = sh.shard(F.dot_product_attention, layout, mesh, S=S, H=HEADS, K=HEADS)
    (tokens,) = layout["tokens"]

    def way(fn: Callable[..., Any]) -> Callable[..., Tensor]:
        def body(params: F.Decoder, ids: Tensor, cfg: F.DecoderConfig, *targets: Tensor, mesh: sh.Mesh) -> Tensor:
            def core(*qkv: Tensor, q_positions: Tensor, k_positions: Tensor, **told: Any) -> Tensor:
                return moved(*qkv, mesh=mesh, **told)  # positions are a rank's own here; the layout has those of all

            here = sh.positions_of(tokens, mesh, S=S)
            return fn(params, ids, cfg, *targets, positions=here, core=core)[0]

        (out,) = layout["logits" if fn is F.decoder else "loss"]
        return lambda params, ids, cfg, *targets: sh.simulate(
            body, mesh, (None, tokens, None, *(tokens for _ in targets)), out
        )(params, ids, cfg, *targets)

    return way


U, G = sh.Mesh(u=2), sh.Mesh(g=2)
LAYOUTS = {
    "ulysses": (materialised(sh.ulysses(), U), {"mla_latent": latent(sh.mla_latent(), U),
                                               "mla_packed": latent(sh.mla_packed(), U)}),
    "all_gather": (materialised(sh.all_gather(), G), {"mla_gather": latent(sh.mla_gather(), G)}),
}  # fmt: skip


class Run(NamedTuple):
    """Of each step its loss and the norm of its gradient before clipping; of the first its logits and gradient."""

    losses: list[float]
    norms: list[float]
    logits: Tensor
    gradient: Tensor


def train(cfg: F.DecoderConfig, dtype: torch.dtype, steps: int, way: Way = one_rank) -> Run:
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, Z, (B, S + 1), generator=made)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    params = F.tree.map(lambda p: p.to(dtype), weights(cfg, made))
    leaves = [p.requires_grad_() for p in F.tree.leaves(params) if p is not params.layers[1].mlp.correction_bias]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3)
    loss_of, losses, norms = way(F.next_token_loss), [], []
    with torch.no_grad():
        logits = way(F.decoder)(params, tokens, cfg)
    for step in range(steps):
        loss = loss_of(params, tokens, cfg, targets) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradient = torch.cat([p.grad.flatten() for p in leaves]).double()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(leaves, 1.0).item())
        optimizer.step()
    return Run(losses, norms, logits, gradient)


def weights(cfg: F.DecoderConfig, made: torch.Generator) -> F.Decoder:
    """With a correction of routing, which no gradient changes, that is not 0."""
    params = F.Decoder.init(cfg, 0, dtype=DOUBLE)
    params.layers[1].mlp.correction_bias.copy_(torch.randn(MOE.num_experts, generator=made, dtype=DOUBLE) / 10)
    return params


class Apart(NamedTuple):
    """Relative differences of two runs: of losses and norms at each step, of the first gradient in L2."""

    losses: list[float]
    norms: list[float]
    gradient: float


def apart(a: Run, b: Run) -> Apart:
    """Of the steps that both have."""
    losses, norms = (
        [abs(x - y) / abs(y) for x, y in zip(*both, strict=False)] for both in zip(a[:2], b[:2], strict=True)
    )
    return Apart(losses, norms, ((a.gradient - b.gradient).norm() / b.gradient.norm()).item())


def close(found: Apart, rounding: Apart, dtype: torch.dtype) -> None:
    """Raise unless the difference is rounding, which grows: up to a step no larger than four times what one rank's is.
    Two runs that round may differ by twice as much, and by chance that of few steps is small."""
    if dtype == DOUBLE:
        assert max(*found.losses, *found.norms, found.gradient) < 1e-12
        return
    eps = torch.finfo(dtype).eps
    for mine, usual in zip(found[:2], rounding[:2], strict=True):
        for i in [i for i in SHOWN if i <= len(mine)]:
            assert max(mine[:i]) <= 4 * max(eps, *usual[:i])
    assert found.gradient <= 2 * rounding.gradient


def show(name: str, run: Run, found: Apart, first: str = "") -> None:
    """A row of each step shown."""
    for i, (of_loss, of_norm) in enumerate(zip(found.losses, found.norms, strict=True)):
        if i + 1 in SHOWN:
            row = f"{run.losses[i]:11.7f}{of_loss:9.1e}{run.norms[i]:12.7f}{of_norm:9.1e}"
            print(f"{name:36}{i + 1:5}{row}" + (f"{found.gradient:10.1e}   {first}" if i == 0 else ""))
            name = ""


def compare(title: str, steps: Mapping[torch.dtype, int], layouts: Mapping[str, Any]) -> None:
    """Train every way, print a table, raise where two are further apart than rounding explains."""
    cfg, longest = MODELS[title], max(steps.values())
    single, double = (train(cfg, dtype, longest) for dtype in (SINGLE, DOUBLE))
    rounding = apart(single, double)
    assert double.losses[-1] < 0.9 * double.losses[0]
    print(f"\n{title:36} step       loss  differs        norm  differs  gradient   first logits and loss")
    show("one rank, float32, to float64", single, rounding)
    for (plain, (of_plain, ways)), (dtype, n) in itertools.product(layouts.items(), steps.items()):
        kind, dense = (", float32", single) if dtype == SINGLE else (", float64", double)
        reference = train(cfg, dtype, n, of_plain)
        close(alone := apart(reference, dense), rounding, dtype)
        show(f"{plain}{kind}, to one rank", reference, alone)
        for name, way in ways.items():
            run = train(cfg, dtype, n, way)
            close(found := apart(run, reference), rounding, dtype)
            close(apart(run, dense), rounding, dtype)
            same = torch.equal(run.logits, reference.logits) and run.losses[0] == reference.losses[0]
            show(f"{name}{kind}, to {plain}", run, found, "bitwise" if same else "rounded")
            # The same products of the same rows. But mla_latent's kv_b has the rows of fewer heads, and meets more
            # tokens: a matrix product may then sum in another order.
            assert same or name == "mla_latent"
            near = {"rtol": 1e-13, "atol": 1e-13} if dtype == DOUBLE else {"rtol": 1e-6, "atol": 1e-5}
            torch.testing.assert_close(run.logits, reference.logits, **near)


@pytest.mark.parametrize("title", MODELS)
def test_some_steps(title):
    compare(title, {SINGLE: 5, DOUBLE: 5}, {"ulysses": LAYOUTS["ulysses"]})


@pytest.mark.verify
@pytest.mark.parametrize("title", MODELS)
def test_a_hundred_steps(title):
    compare(title, {SINGLE: 100, DOUBLE: 30}, LAYOUTS)
