"""A late projection is `linear` in all but when its weight gradient is computed."""

from __future__ import annotations

import pytest
import torch
from meshfn.sharding.late import LateProjection
from torch.nn.functional import linear


@pytest.mark.parametrize("shape", [(2, 11, 7), (1, 1, 7), (0, 3, 7), (5, 7), (7,)])
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


def test_called_more_than_once():
    weight, x, z = (torch.randn(of, dtype=torch.float64, requires_grad=True) for of in ((3, 4), (2, 5, 4), (7, 4)))
    late = LateProjection(weight)
    found, wanted = (
        [project(x).square().sum(), project(z).sin().sum()] for project in (late, lambda x: linear(x, weight))
    )
    for of in (sum, lambda ys: ys[0], lambda ys: ys[1]):
        grads = [torch.autograd.grad(of(ys), [weight], retain_graph=True) for ys in (found, wanted)]
        assert torch.equal(*grads[0], *grads[1])


def test_a_backward_that_failed_leaves_nothing():
    weight, x = (torch.randn(of, dtype=torch.float64, requires_grad=True) for of in ((3, 4), (5, 4)))
    late = LateProjection(weight)
    x_late = x * 1
    y, other = late(x_late), late(x.detach())
    hook = x_late.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y.sum(), [x, weight], retain_graph=True)
    hook.remove()
    for ys in (y, y + other):
        found = torch.autograd.grad(ys.square().sum(), [x, weight], retain_graph=True)
        n = linear(x, weight) + (0 if ys is y else linear(x.detach(), weight))
        wanted = torch.autograd.grad(n.square().sum(), [x, weight])
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("frozen", ["weight", "x", "both", "neither"])
def test_it_keeps_what_linear_keeps(frozen):
    weight, x = (torch.randn(of, requires_grad=frozen not in (name, "both")) for name, of in
                 (("weight", (3, 4)), ("x", (5, 4))))  # fmt: skip
    found = []
    for project in (LateProjection(weight), lambda x: linear(x, weight)):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t):
            project(x)
        found.append(set(kept))
    assert found[0] == found[1]


def test_dtypes_that_do_not_meet_are_refused_as_by_linear():
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    for casts in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            for w, given in ((weight, x.double()), (weight.double(), x)):
                for project in (LateProjection(w), lambda x, w=w: linear(x, w)):
                    with pytest.raises(RuntimeError, match="same dtype"):
                        project(given)
