"""Rollout, train, rollout: one set of weights, which the trainer writes and the program reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo
from torch.utils.checkpoint import checkpoint

from ..families import family
from ..tiny import llama
from .test_donation import largest_allocation

ROWS = [[5, 9, 11], list(range(20, 41)), [3] * 8]
IDS = torch.tensor([[5, 9, 11, 3, 2, 1, 0, 8], [7, 7, 7, 20, 21, 22, 23, 24]])
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


def loss_of(params, cfg):
    total, count = F.next_token_loss(params, IDS[:, :-1], cfg, IDS[:, 1:])
    return total / count


def through_the_module(module, model, program):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def backward_on_the_pytree(module, model, program):
    """Gradients of two parts of the batch add up in the leaves' .grad, each layer computed again in backward."""

    def layer(params, x, cfg, **given):
        return checkpoint(lambda x: F.layer(params, x, cfg, **given)[0], x, use_reentrant=False), None

    optimizer = torch.optim.AdamW(F.tree.trainable(model.params), lr=1e-2)
    for row in IDS:
        total, _ = F.next_token_loss(model.params, row[None, :-1], model.config, row[None, 1:], layer=layer)
        (total / (IDS.numel() - 2)).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_a_step(module, model, program):
    step = programs.train_step(model.config, ADAM, compile=False)
    params, _, _ = step(model.params, step.init(model.params), {"input_ids": IDS})
    assert params is model.params


def grad_in_place(module, model, program):
    grads = torch.func.grad(loss_of)(model.params, model.config)
    with torch.no_grad():
        F.tree.map(lambda p, g: p.sub_(0.05 * g), model.params, grads)


def grad_to_new_leaves(module, model, program):
    grads = torch.func.grad(loss_of)(model.params, model.config)
    program.params = F.tree.map(lambda p, g: (p - 0.05 * g).detach(), model.params, grads)


STEPS = [through_the_module, backward_on_the_pytree, by_a_step, grad_in_place, grad_to_new_leaves]


@contextmanager
def restored(tiny) -> Iterator[None]:
    """Other tests read the same module."""
    saved = {name: p.detach().clone() for name, p in tiny.module.named_parameters()}
    try:
        yield
    finally:
        tiny.program.params = tiny.model.params
        with torch.no_grad():
            for name, p in tiny.module.named_parameters():
                p.copy_(saved[name])


def counted(events: str, profile) -> int:
    return sum(each.count for each in profile.key_averages() if each.key.startswith(events))


@pytest.mark.parametrize("train", STEPS, ids=lambda each: each.__name__)
def test_the_next_rollout_is_that_of_a_fresh_build(tiny, train):
    """Tokens and log-probabilities, with nothing compiled, copied, moved or waited for between step and rollout."""
    module, model, program = tiny
    leaves = F.tree.leaves(model.params)
    assert {id(p) for p in module.parameters()} == {id(leaf) for leaf in leaves}
    with restored(tiny):
        before = program.generate(ROWS, max_new_tokens=12, return_logprobs=True)
        addresses = [leaf.data_ptr() for leaf in leaves]
        compiled = dynamo.graphs()
        train(module, model, program)
        assert addresses == [leaf.data_ptr() for leaf in F.tree.leaves(model.params)]
        # What a call of the program takes before its first product: handles on the leaves, where they are.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            handles = F.tree.leaves(program._weights.live())
        assert [h.data_ptr() for h in handles] == [leaf.data_ptr() for leaf in F.tree.leaves(program.params)]
        assert counted("aten::copy_", profile) == counted("aten::_local_scalar_dense", profile) == 0
        after = program.generate(ROWS, max_new_tokens=12, return_logprobs=True)
        assert dynamo.graphs() == compiled
        now = dataclasses.replace(model, params=program.params)
        again = programs.build(now, batch=3, max_len=40, chunk=8, compile=False)
        fresh = again.generate(ROWS, max_new_tokens=12, return_logprobs=True)
        assert largest_allocation(lambda: program.decode(program.prefill([[1]]))) < program.params.embed.nbytes / 2
    assert after.logprobs != before.logprobs
    assert after.tokens == fresh.tokens
    torch.testing.assert_close(torch.tensor(after.logprobs), torch.tensor(fresh.logprobs), rtol=1e-4, atol=1e-4)
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_tied_weights_are_one():
    """The head is the embedding: one leaf, whose gradient is the sum of both, in the module and for the program."""
    module = llama(3, 1, tied=True)
    model = programs.load(module)
    assert model.params.head is None
    program = programs.build(model, max_len=40, chunk=8, compile=False)
    before = program.score([[1, 2, 3]])[0]
    through_the_module(module, model, program)
    assert model.params.embed is module.lm_head.weight
    after = program.score([[1, 2, 3]])[0]
    assert not torch.equal(before, after)
    with torch.no_grad():
        wanted = module(torch.tensor([[1, 2, 3]])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(after, wanted.gather(-1, torch.tensor([[2], [3]]))[:, 0], rtol=1e-4, atol=1e-4)


# How far the log-probabilities of one token may lie apart, in units of the dtype's eps times the largest logit.
BOUND = {torch.float64: 32, torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "deepseek_v2-lite", "qwen3_5", "olmo_hybrid", "gpt_oss"])
def test_log_probabilities_of_rollout_score_and_training_agree(name, dtype):
    """What a policy gradient takes the ratio of: three ways to the same number, within a few roundings of a logit."""
    model = programs.load(family(name).to(dtype))
    rows = [torch.randint(1, 97, (n,)).tolist() for n in (9, 3)]
    program = programs.build(model, batch=2, max_len=40, chunk=8, compile=False)
    rollout = program.generate(rows, max_new_tokens=10, do_sample=True, seed=3, return_logprobs=True)
    whole = [row + new for row, new in zip(rows, rollout.tokens, strict=True)]
    scores = program.score(whole)
    for row, new, ids, score in zip(rows, rollout.logprobs, whole, scores, strict=True):
        trained, largest = of_training(model, ids)
        bound = BOUND[dtype] * torch.finfo(dtype).eps * largest
        assert (score - trained).abs().max() <= bound
        assert (torch.tensor(new, dtype=trained.dtype) - trained[len(row) - 1 :]).abs().max() <= bound


def of_training(model, ids):
    """-> the log-probability of each token after the first, by the plain function, and the largest logit."""
    tokens = torch.tensor([ids])
    logits = F.decoder(model.params, tokens[:, :-1], model.config)[0][0].detach()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0], float(logits.abs().max())


def test_log_probabilities_of_the_compiled_program_agree(tiny):
    rollout = tiny.program.generate(ROWS, max_new_tokens=20, do_sample=True, seed=3, return_logprobs=True)
    for row, tokens, new in zip(ROWS, rollout.tokens, rollout.logprobs, strict=True):
        trained, largest = of_training(tiny.model, row + tokens)
        bound = BOUND[torch.float32] * torch.finfo(torch.float32).eps * largest
        assert (torch.tensor(new) - trained[len(row) - 1 :]).abs().max() <= bound
