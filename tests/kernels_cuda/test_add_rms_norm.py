"""A residual added and the sum normalised: against fp64, transformers, and itself in other orders."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from meshfn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from .ops import host_ops

OP = torch.ops.meshfn_cuda.add_norm
NORMS = (
    {"eps": 1e-6},
    {"eps": 1e-5, "zero_centered": True},
    {"eps": 1e-6, "scale_in_fp32": True},
    {"eps": 1e-6, "zero_centered": True, "scale_in_fp32": True},
)


def case(dtype: torch.dtype, rows: tuple[int, ...], width: int, norm: int, *, sliced: bool = False) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(*rows, width + 8, generator=made, dtype=torch.float64).to(dtype) for _ in range(2))
    if sliced:
        x[..., width:] = residual[..., width:] = float("nan")
    x, residual = x[..., :width], residual[..., :width]
    if not sliced:
        x, residual = x.contiguous(), residual.contiguous()
    return x, residual, torch.randn(width, generator=made, dtype=torch.float64).to(dtype), NORMS[norm]


def run(x, residual, weight, norm, **host: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with host_ops(**host) as launches:
        out = OP(x, residual, weight, **norm)
    assert [launch.source for launch in launches] == ["add_rms_norm.cu"]
    return out


def check(x, residual, weight, norm, **host: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found, total = run(x, residual, weight, norm, **host)
    usual, usual_total = F.add_norm(x, residual, weight, **norm)
    right, _ = F.add_norm(x.double(), residual.double(), weight.double(), **norm)
    assert torch.equal(total, usual_total)
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max() + torch.finfo(found.dtype).eps
    return found, total


CASES = {
    "bf16": (torch.bfloat16, (3, 1), 64, 0),
    "an odd width": (torch.float16, (2, 3), 101, 1),
    "sliced": (torch.float32, (5,), 60, 2, True),
    "wider than is kept": (torch.bfloat16, (2, 1), 8200, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64_and_in_other_orders(name):
    dtype, rows, width, norm, *sliced = CASES[name]
    given = case(dtype, rows, width, norm, sliced=bool(sliced))
    found = check(*given)
    for order in ("reversed", "shuffled:5"):
        assert all(map(torch.equal, found, run(*given, order=order)))


def test_no_rows():
    x, residual, weight, norm = case(torch.bfloat16, (1, 1), 64, 0)
    with host_ops() as launches:
        out, total = OP(x[:0], residual[:0], weight, **norm)
    assert out.shape == total.shape == (0, 1, 64)
    assert launches == []


def test_the_norm_of_gemma():
    """Beside transformers' own module in bf16, both against fp64."""
    torch.manual_seed(0)
    module = Gemma3RMSNorm(96).bfloat16()
    torch.nn.init.normal_(module.weight)
    x, residual = torch.randn(2, 4, 1, 96).bfloat16()
    with torch.no_grad(), host_ops():
        found, total = OP(x, residual, module.weight, eps=1e-6, zero_centered=True, scale_in_fp32=True)
        assert torch.equal(found, module(total))


def test_opcheck_and_gradients():
    x, residual, weight, norm = case(torch.float32, (4,), 10, 0)
    leaves = [x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()]
    options = {"eps": 1e-6, "zero_centered": False, "scale_in_fp32": False}

    def loss(op, *given):
        normed, total = op(*given, **norm)
        return normed.square().sum() + total.cos().sum()

    with host_ops():
        torch.library.opcheck(torch.ops.meshfn_cuda.add_rms_norm.default, tuple(leaves), options)
        found = torch.autograd.grad(loss(OP, *leaves), leaves)
        by_func = torch.func.grad(lambda *given: loss(OP, *given), argnums=(0, 1, 2))(*leaves)
    for f, g, r in zip(found, by_func, torch.autograd.grad(loss(F.add_norm, *leaves), leaves), strict=True):
        torch.testing.assert_close(f, r)
        torch.testing.assert_close(g, r)


@pytest.mark.verify
def test_random_shapes():
    for seed in range(200):
        r = random.Random(seed)
        dtype = r.choice([torch.float32, torch.bfloat16, torch.float16])
        rows = r.choice([(1,), (7,), (), (2, 3), (64, 1)])
        width = r.choice([1, 2, 3, 8, 63, 64, 100, 1000, 2049, 4100, 8200])
        given = case(dtype, rows, width, r.randrange(4), sliced=r.random() < 0.3)
        found = check(*given)
        assert all(map(torch.equal, found, run(*given, order=f"shuffled:{seed}")))


@pytest.mark.verify
@pytest.mark.parametrize(("name", "sanitizer"), itertools.product(CASES, ["address", "undefined", "thread"]))
def test_sanitizers_are_silent(name, sanitizer):
    dtype, rows, width, norm, *sliced = CASES[name]
    check(*case(dtype, rows, width, norm, sliced=bool(sliced)), sanitizer=sanitizer)
