"""Inputs of the gated delta rule, and what is compared of it."""

from __future__ import annotations

import torch
from meshfn import functional as F

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
SCAN, CHUNKED, STEP = F.gated_delta_rule_scan, F.gated_delta_rule_chunked, F.gated_delta_rule_step
KINDS = {"by head": False, "by channel": True}


def case(S=37, B=2, K=3, G=2, E=8, V=5, *, by_channel=False, states=None, dtype=torch.float64, decay=3.0):
    """Leaves that need a gradient, by the name of their argument."""
    H = K * G
    made = {
        "q": F.l2norm(torch.randn(B, S, K, E, dtype=dtype)),
        "k": F.l2norm(torch.randn(B, S, K, E, dtype=dtype)),
        "v": torch.randn(B, S, H, V, dtype=dtype),
        "g": -decay * torch.rand(*((B, S, H, E) if by_channel else (B, S, H)), dtype=dtype),
        "beta": torch.rand(B, S, H, dtype=dtype),
        "initial_state": torch.randn(states or B, H, V, E, dtype=dtype),
    }
    return {name: x.detach().requires_grad_() for name, x in made.items()}


def loss(fn, *args, **options):
    """A number that every output and the final state take part in."""
    o, state = fn(**dict(zip(NAMES, args, strict=True)), output_final_state=True, **options)
    return o.sin().sum() + state.square().sum()


def all_of(fn, inputs, **options):
    """Outputs, final state and the gradients of every input."""
    o, state = fn(**inputs, output_final_state=True, **options)
    total = (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() + state.square().sum()
    return o, state, *torch.autograd.grad(total, list(inputs.values()))


def close(found, wanted, tolerance):
    for name, a, b in zip(("o", "state", *NAMES), found, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def cut(inputs, at, end):
    """Tokens at .. end of all inputs, without the state."""
    return {name: x[:, at:end] for name, x in inputs.items() if name != "initial_state"}
