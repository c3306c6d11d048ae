"""Every family's mathematics against transformers: logits and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import programs

from ..families import FAMILIES, family


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_every_gradient(name):
    module = family(name)
    model = programs.load(module)
    tokens, labels = torch.randint(1, 97, (2, 2, 19)).unbind()
    expected = module(tokens).logits
    logits, _ = F.decoder(model.params, tokens, model.config)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    F.next_token_loss(model.params, tokens, model.config, labels, chunk=7)[0].backward()
    for name, parameter in module.named_parameters():
        error = (parameter.grad - wanted[name]).norm()
        assert error <= 1e-4 * wanted[name].norm() + 1e-6, (name, error, wanted[name].norm())
