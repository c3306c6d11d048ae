"""A late projection is `linear` in all but when its weight gradient is computed."""

from __future__ import annotations

import pytest
import torch
from meshfn.sharding.late import LateProjection
from torch.nn.functional import linear


@pytest.mark.parametrize("shape", [(2, 11, 7), (1, 1, 7), (0, 3, 7), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bitwise_equal_to_linear(dtype, shape):
    weight, x = (torch.randn(of, dtype=dtype, requires_grad=True) for of in ((13, 7), shape))
    y, usual = LateProjection(weight)(x), linear(x, weight)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(usual, [x, weight], grad)
    assert torch.equal(y, usual)
    assert all(map(torch.equal, torch.autograd.grad(y, [x, weight], grad), wanted))
    assert torch.equal(*torch.autograd.grad(LateProjection(weight)(x.detach()), [weight], grad), wanted[1])
    for of in (weight, weight.detach()):  # asked for or not
        assert torch.equal(*torch.autograd.grad(LateProjection(of)(x), [x], grad), wanted[0])


def test_derivatives_of_derivatives():
    weight, x = (torch.randn(of, dtype=torch.float64, requires_grad=True) for of in ((3, 4), (2, 5, 4)))
    assert torch.autograd.gradgradcheck(lambda x, weight: LateProjection(weight)(x).sin(), (x, weight))


def test_autocast_and_recomputation():
    weight, x = (torch.randn(of, requires_grad=True) for of in ((3, 4), (2, 5, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        y, usual = LateProjection(weight)(x), linear(x, weight)
        again = torch.utils.checkpoint.checkpoint(lambda x: LateProjection(weight)(x), x, use_reentrant=False)
    assert y.dtype == torch.bfloat16
    wanted = torch.autograd.grad(usual.sum(), [x, weight])
    for each in (y, again):
        assert torch.equal(each, usual)
        assert all(map(torch.equal, torch.autograd.grad(each.sum(), [x, weight]), wanted))
