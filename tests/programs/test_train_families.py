"""The step of every family against transformers: its loss and every gradient, of ragged rows and packed documents."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import programs

from ..families import FAMILIES, family

LENGTHS = (7, 11, 1)


class Keep(torch.optim.Optimizer):
    """Steps nowhere, and remembers the gradient."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["grad"] = p.grad.clone()


def gradients(model, state):
    """Those of the pytree, led on to the module's own parameters, of which leaves may be views."""
    leaves = F.tree.paths(model.params)
    pairs = [(leaves[path], held["grad"]) for path, held in state["state"].items()]
    torch.autograd.backward(*zip(*pairs, strict=True))


def expected(module, documents):
    """The sum of the losses of documents by themselves, in the module's own gradients -> it, and the tokens."""
    total, tokens = 0, 0
    for ids in documents:
        loss = torch.nn.functional.cross_entropy(module(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        total, tokens = total + loss, tokens + ids.numel() - 1
    (total / tokens).backward()
    return float(total.detach()) / tokens, tokens


def compared(module, found, wanted):
    for name, parameter in module.named_parameters():
        error = (found[name] - wanted[name]).norm()
        assert error <= 1e-4 * wanted[name].norm() + 1e-7, (name, error, wanted[name].norm())
        assert parameter.requires_grad


@pytest.mark.parametrize("name", FAMILIES)
def test_every_gradient_of_packed_documents_is_transformers(name):
    """Of documents one by one: packed in a row, two rows of them in two microbatches, each layer computed again."""
    module = family(name)
    documents = [torch.randint(1, 97, (n,)) for n in (*LENGTHS, 12, 7)]
    loss, tokens = expected(module, documents)
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()

    model = programs.load(module)
    ids = torch.stack([torch.cat(documents[:3]), torch.cat(documents[3:])])
    segments = torch.tensor([[0] * 7 + [1] * 11 + [2], [5] * 12 + [6] * 7])
    step = programs.train_step(model.config, Keep, microbatches=2, checkpoint=True, compile=False)
    params, state, metrics = step(model.params, step.init(model.params), {"input_ids": ids, "segment_ids": segments})
    assert params is model.params
    assert metrics["tokens"] == tokens
    torch.testing.assert_close(metrics["loss"].item(), loss, rtol=1e-5, atol=0)
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    gradients(model, state)
    compared(module, {name: p.grad for name, p in module.named_parameters()}, wanted)
    torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_reads_what_a_step_wrote(name):
    """Norms, buffers, gates and fused weights alike: nothing that was made of a weight before the step outlives it."""
    module = family(name)
    model = programs.load(module)
    program = programs.build(model, max_len=20, chunk=8, compile=False)
    row = torch.randint(1, 97, (13,))
    before = program.score(row[None])[0]
    step = programs.train_step(model.config, lambda leaves: torch.optim.SGD(leaves, lr=0.03), compile=False)
    step(model.params, step.init(model.params), {"input_ids": row[None]})
    with torch.no_grad():
        logprobs = module(row[None]).logits[0, :-1].log_softmax(-1)
    found = program.score(row[None])[0]
    torch.testing.assert_close(found, logprobs.gather(-1, row[1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-2
