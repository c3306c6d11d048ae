"""A step of training against torch's own optimisers, and against itself cut in other ways."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo

from ..families import family
from ..tiny import llama
from .test_train_families import Keep, gradients

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)


def batch(rows=4, size=13, vocab=97):
    """Labels of which some are left out, as transformers has them."""
    ids = torch.randint(1, vocab, (rows, size))
    return {"input_ids": ids, "labels": torch.where(torch.rand(rows, size) < 0.3, -100, ids)}


def in_double(name="qwen3_5", **more):
    return programs.load(family(name, **more).double())


def after(model, step, given, steps=2):
    params, state = model.params, step.init(model.params)
    for _ in range(steps):
        params, state, metrics = step(params, state, given)
    return F.tree.leaves(params), state, metrics


def close(found, wanted, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("llama", functools.partial(torch.optim.Adafactor, lr=1e-2)),
        ("phi3", functools.partial(ADAM, eps=1e-3)),
        ("qwen3_moe", SGD),
    ],
)
def test_steps_are_those_of_torch_on_transformers(name, optimizer):
    """Its loss, its optimiser, its clipping, over three steps in double: the same weights, fused ones too, and metrics."""
    module = family(name, tie_word_embeddings=name == "llama").double()
    theirs, model, given = copy.deepcopy(module), programs.load(module), batch()
    step = programs.train_step(model.config, optimizer, max_grad_norm=0.5, compile=False)
    state, peer = step.init(model.params), optimizer(theirs.parameters())
    for _ in range(3):
        params, state, metrics = step(model.params, state, given)
        assert params is model.params
        logits, targets = theirs(given["input_ids"]).logits[:, :-1], given["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())  # its own is in fp32
        loss.backward()
        # transformers turns by angles in fp32, whatever the weights.
        close(metrics["loss"], loss.detach(), 1e-6)
        close(metrics["grad_norm"], torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5), 1e-5)
        peer.step()
        peer.zero_grad()
    for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
        close(mine, other, 1e-4)
    assert metrics["tokens"] == (given["labels"][:, 1:] >= 0).sum()
    (group,) = state["param_groups"]
    assert group["lr"] == peer.param_groups[0]["lr"]
    assert set(state["state"]) <= set(group["params"]) == set(F.tree.paths(model.params))


def test_a_step_that_keeps_its_arguments_is_the_same_step():
    """Not one byte of what it was given changes, and one tensor at two places stays one."""
    given = batch()
    model = in_double("llama", tie_word_embeddings=False)
    params = F.tree.replace(model.params, {".head": model.params.embed})
    step = programs.train_step(model.config, ADAM, donate=False, compile=False)
    state = step.init(params)
    first = step(params, state, given)
    held = copy.deepcopy((F.tree.leaves(first[0]), first[1]))
    second = step(*first[:2], given)
    assert all(map(torch.equal, held[0], F.tree.leaves(first[0])))
    assert all(torch.equal(held[1]["state"][p][n], x) for p, each in first[1]["state"].items() for n, x in each.items())
    assert second[0].head is second[0].embed
    assert ".head" not in second[1]["state"]
    donating = programs.train_step(model.config, ADAM, compile=False)
    again = donating(*donating(params, state, given)[:2], given)
    assert again[0] is params
    close(F.tree.leaves(again[0]), F.tree.leaves(second[0]))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_microbatches_and_computing_again_change_nothing(name):
    given = batch()
    given["attention_mask"] = (torch.arange(13) >= torch.tensor([0, 3, 9, 1])[:, None]).long()
    found = []
    for options in ({}, {"microbatches": 4}, {"microbatches": 2, "checkpoint": True}):
        torch.manual_seed(5)
        model = in_double(name)
        leaves, _, metrics = after(model, programs.train_step(model.config, ADAM, compile=False, **options), given)
        found.append([*leaves, *metrics.values()])
    close(found[1], found[0])
    close(found[2], found[0])


def test_frozen_leaves_stay_and_buffers_are_never_trained():
    module = family("deepseek_v3").double()
    module.model.layers[1].requires_grad_(False)
    model, given = programs.load(module), batch()
    before = {path: leaf.detach().clone() for path, leaf in F.tree.paths(model.params).items()}
    _, state, _ = after(model, programs.train_step(model.config, ADAM, compile=False), given)
    for path, leaf in F.tree.paths(model.params).items():
        frozen = path.startswith(".layers[1]") or path.endswith("correction_bias")
        assert (path in state["state"]) != frozen, path
        assert torch.equal(leaf, before[path]) == frozen, path


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_computing_in_bf16_over_fp32_weights(name):
    """The gradient is that of transformers in bf16 on rounded weights, and the step is taken in fp32; what the loss
    says is what a program of bf16 over the same weights says."""
    module = family(name)
    half, model, given = copy.deepcopy(module).bfloat16(), programs.load(module), batch()
    ids = given["input_ids"]
    program = programs.build(model, batch=4, max_len=20, chunk=16, dtype=torch.bfloat16, compile=False)
    scored = program.score(ids)
    step = programs.train_step(model.config, Keep, dtype=torch.bfloat16, compile=False)
    _, state, metrics = step(model.params, step.init(model.params), {"input_ids": ids})
    close(metrics["loss"], -torch.stack(scored).mean(), 1e-2)
    exact = copy.deepcopy(module).double()
    for each in (half, exact):
        logits = each(ids).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert {held["grad"].dtype for held in state["state"].values()} == {torch.float32}
    module.zero_grad()
    gradients(model, state)

    def error(other):
        pairs = zip(other.parameters(), exact.parameters(), strict=True)
        return torch.stack([(p.grad.double() - wanted.grad).norm() for p, wanted in pairs]).norm()

    assert error(module) <= 1.5 * error(half)


def test_a_loss_of_ones_own():
    """A policy gradient with a balance loss: the sums that it returns are divided by the tokens of the whole batch."""
    model, given = in_double("qwen3_moe"), batch()
    given["advantages"] = torch.randn(4, 1, dtype=torch.float64)

    def loss(params, cfg, batch, forward):
        logits, _, routings = forward(F.decoder, params, batch["input_ids"], cfg, return_routing=True)
        there = batch["targets"] >= 0
        logp = logits.log_softmax(-1).gather(-1, batch["targets"].clamp_min(0)[..., None])[..., 0]
        balance = F.balance_loss(routings) * there.sum()
        return -(logp * batch["advantages"] * there).sum() + 0.01 * balance, {"balance": balance}

    def plain(params):
        rest = {"targets": targets, "input_ids": given["input_ids"], "advantages": given["advantages"]}
        return loss(params, model.config, rest, lambda fn, *args, **options: fn(*args, **options))[0] / count

    targets = torch.cat([given["labels"][:, 1:], torch.full((4, 1), -100)], 1)
    count = (targets >= 0).sum()
    wanted = torch.func.grad(plain)(model.params)
    step = programs.train_step(model.config, Keep, loss, compile=False)
    _, state, metrics = step(model.params, step.init(model.params), given)
    for path, grad in F.tree.paths(wanted).items():
        close(state["state"][path]["grad"], grad)
    close(metrics["loss"], plain(model.params).detach())
    assert metrics["balance"] > 0


def test_groups_and_a_schedule():
    """Groups by path, as torch has them; what the state says of a group holds from the next step on."""
    model, given = in_double(), batch()

    def optimizer(leaves):
        wide = [(path, leaf) for path, leaf in leaves if leaf.dim() > 1]
        thin = [(path, leaf) for path, leaf in leaves if leaf.dim() <= 1]
        return torch.optim.SGD([{"params": wide}, {"params": thin, "lr": 0.0}], lr=0.1)

    step = programs.train_step(model.config, optimizer, compile=False)
    before = [leaf.detach().clone() for leaf in F.tree.leaves(model.params)]
    params, state, _ = step(model.params, step.init(model.params), given)
    moved = [not torch.equal(a, b) for a, b in zip(before, F.tree.leaves(params), strict=True)]
    assert moved == [leaf.dim() > 1 for leaf in before]
    state["param_groups"][0]["lr"] = 0.0
    held = [leaf.detach().clone() for leaf in F.tree.leaves(params)]
    params, _, _ = step(params, state, given)
    assert all(map(torch.equal, held, F.tree.leaves(params)))


@pytest.mark.parametrize(
    ("name", "options"), [("qwen3_5", {"checkpoint": True, "microbatches": 2}), ("deepseek_v3", {})]
)
def test_layers_compile_once_a_kind(name, options, monkeypatch):
    """By the compiler up to its last stage, forward and backward: as many graphs as kinds, and the eager numbers."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(dynamo, "inductor", aot_eager)
    found = []
    for compiled in (False, True):
        torch.manual_seed(5)
        model = in_double(name)
        given = {**batch(2, 9), "segment_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}
        step = programs.train_step(model.config, ADAM, compile=compiled, **options)
        leaves, _, metrics = after(model, step, given, 3)
        found.append([*leaves, *metrics.values()])
    close(found[1], found[0])
    # By strides too: in a fused tensor one leaf may lie otherwise than its like.
    assert step.compiles == len(dict.fromkeys(model.config.layers))


def test_a_compiled_step_compiles_once_and_waits_for_nothing():
    """By Inductor. What torch's optimiser reads is a counter of its own, which lies with the host."""
    module = llama(bias=True)
    model, eager = programs.load(module), programs.load(copy.deepcopy(module))
    given = batch(3, 9)
    step, plain = (programs.train_step(m.config, ADAM, compile=c) for m, c in ((model, True), (eager, False)))
    found, wanted = after(model, step, given), after(eager, plain, given)
    close(found[0], wanted[0], 1e-4)
    assert step.compiles == 1
    graphs = dynamo.graphs()
    assert graphs > 0
    addresses = [leaf.data_ptr() for leaf in found[0]]
    held = [x.data_ptr() for each in found[1]["state"].values() for x in each.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        params, state, _ = step(model.params, found[1], given)
    assert not [e for e in profile.events() if e.name == "aten::_local_scalar_dense" and not in_optimizer(e)]
    assert addresses == [leaf.data_ptr() for leaf in F.tree.leaves(params)]
    assert held == [x.data_ptr() for each in state["state"].values() for x in each.values()]
    assert (step.compiles, dynamo.graphs()) == (1, graphs)


def in_optimizer(event):
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return event.name.startswith("Optimizer.step")
