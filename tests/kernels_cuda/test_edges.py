"""Inputs at the edge of what the two kernels take: no columns, NaN and infinity, rows that lie otherwise, too many."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.primitive import PRIMITIVES
from meshfn.kernels_cuda import gemv

from .ops import host_ops

OPS = torch.ops.meshfn_cuda
D = 8


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def agrees(name: str, *args, **options) -> None:
    right = PRIMITIVES[name](*args, **options)
    with host_ops():
        found = getattr(OPS, name)(*args, **options)
    torch.testing.assert_close(found, right, equal_nan=True)


def test_nothing_to_sum_or_to_write():
    agrees("linear_add", randn(3, 0), randn(D, 0), randn(3, D))
    agrees("linear_add", randn(3, D), randn(0, D), randn(3, 0))
    agrees("linear_add", randn(0, D), randn(0, D), randn(0, 0))
    agrees("norm_linear", randn(2, 1, 0), randn(0), [randn(D, 0)], [randn(D)])
    agrees("add_norm", randn(3, 0), randn(3, 0), randn(0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20])
def test_what_is_not_finite_stays_so(value):
    """In the row where it stands, and in no other; with an eps of 0 too."""
    x = randn(3, D)
    x[1, 3] = value
    for activation in ("silu", "gelu_pytorch_tanh", "relu2"):
        agrees("plain_mlp", x, None, randn(D, D), activation=activation)
    agrees("norm_linear", x, randn(D), [randn(D, D)], [None], eps=0.0)
    agrees("add_norm", x, randn(3, D), randn(D), eps=0.0)
    agrees("add_norm", x * 0, torch.zeros(3, D), randn(D), eps=0.0)


def test_rows_that_are_one_row_or_far_apart():
    row = randn(1, D)
    agrees("linear_add", row.expand(3, D), row.expand(D, D), row.expand(3, D))
    agrees("linear_add", randn(40_000, D)[::13_333][:3], randn(D, 100_000)[:, 5 : 5 + D], randn(3, D))


def test_what_the_kernels_do_not_take_is_refused_before_a_launch():
    x, w, row = randn(3, D), randn(D, D), randn(D)
    calls = [
        lambda: OPS.linear_add(randn(9, D), w, randn(9, D)),
        lambda: OPS.norm_linear(x, None, [w] * 7, [None] * 7),
        lambda: OPS.norm_linear(x, row, [], []),
        lambda: OPS.linear_add(randn(D, 3).T, w, x),
        lambda: OPS.norm_linear(x, row[:1].expand(D), [w], [None]),
        lambda: OPS.norm_linear(x, None, [w], [randn(2 * D)[::2]]),
        lambda: OPS.add_norm(row[None], x, row),
    ]
    messages = []
    for call in calls:
        with host_ops() as launches, pytest.raises((ValueError, F.ShapeError)) as error:
            call()
        assert launches == []
        messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
gemv(x=...): it has 9 tokens, and the kernel takes at most 8
    fix: x.split(8), or the plain function
gemv(weights=...): it takes 1 to 6 weights, not 7
gemv(weights=...): it takes 1 to 6 weights, not 0
gemv(x=...): numbers of a row lie 3 apart, not side by side
    fix: x.contiguous()
gemv(norm_weight=...): numbers of a row lie 0 apart, not side by side
    fix: norm_weight.contiguous()
gemv(b0=...): numbers of a row lie 2 apart, not side by side
    fix: b0.contiguous()
add_rms_norm(residual=...): it is (3, 8), and x (1, 8)
    fix: torch.broadcast_tensors(x, residual)""",
    )


def test_what_a_plan_says_of_them():
    x, w, row = randn(3, D), randn(D, D), randn(D)
    given = {"x": x, "norm_weight": row, "weights": [w], "biases": [row], "norm_type": "rms_norm"}
    changes = [
        {},
        {"weights": [], "biases": []},
        {"weights": [w] * 7, "biases": [None] * 7},
        {"norm_weight": row[:1].expand(D)},
        {"biases": [randn(2 * D)[::2]]},
        {"x": w.T},
    ]
    assert_expected_inline(
        "\n".join(str(gemv.supports({**given, **c}, "sm_90a")) for c in changes),
        """\
None
no weights
7 weights, at most 6
norm_weight with gaps
biases with gaps
x by columns""",
    )


def test_forward_mode_is_refused_and_second_derivatives_are_the_plain_functions():
    x, w = randn(3, D), randn(D, D)

    def of(fn):
        return lambda x: fn(x, None, w, activation="silu").sum()

    with host_ops():
        twice = torch.func.jacrev(torch.func.jacrev(of(OPS.plain_mlp)))(x)
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(of(OPS.plain_mlp), (x,), (x,))
    torch.testing.assert_close(twice, torch.func.hessian(of(F.plain_mlp))(x))
