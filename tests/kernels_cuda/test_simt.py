"""The machine that kernels run on without a GPU: right kernels do what they say, with the same bits in every order."""

from __future__ import annotations

import math

import pytest
import torch

from .cases import HERE, c, in_every_order, ints, launch
from .harness import Host, KernelFault


def test_warp_operations_are_what_they_say():
    x = ints(80)
    made = in_every_order(lambda: (launch("warp_operations", (x, y := ints(19, 80)), block=80), [y]))[0]
    warps = [x[i : i + 32].tolist() for i in (0, 32, 64)]

    def signed(n):
        return (n & 0xFFFFFFFF) - (n >> 31 & 1) * 2**32

    def up(v, i, delta, width):
        return v[i - delta] if i % width >= delta else v[i]

    def down(v, i, delta, width):
        return v[i + delta] if i % width + delta < width and i + delta < len(v) else v[i]

    def folded(op, v):
        total = v[0]
        for value in v[1:]:
            total = op(total, value)
        return total

    def swapped(v):
        return [v[i ^ 1] if i < 8 else v[i] for i in range(len(v))]

    rows = [
        lambda v, i: v[3],
        lambda v, i: v[i // 8 * 8 + 5],
        lambda v, i: up(v, i, 3, 32),
        lambda v, i: up(v, i, 1, 4),
        lambda v, i: down(v, i, 1, 4),
        lambda v, i: v[i ^ 2],
        lambda v, i: sum((value > 0) << lane for lane, value in enumerate(v)),
        lambda v, i: int(5 in v),
        lambda v, i: int(max(v) < 9),
        lambda v, i: sum(v),
        lambda v, i: min(v),
        lambda v, i: max(v),
        lambda v, i: min(v, key=lambda n: n & 0xFFFFFFFF),
        lambda v, i: folded(int.__and__, v),
        lambda v, i: folded(int.__or__, v),
        lambda v, i: folded(int.__xor__, v),
        lambda v, i: sum((value == v[i]) << lane for lane, value in enumerate(v)),
        lambda v, i: math.trunc(v[i ^ 1] + 0.5),
        lambda v, i: swapped(v)[i ^ 4],
    ]
    for row, rule in zip(made.tolist(), rows, strict=True):
        assert row == [signed(rule(v, i)) for v in warps for i in range(len(v))]


def test_barriers_count():
    x = ints(7, 80)
    made = in_every_order(lambda: (launch("block_operations", (x, y := ints(3, 7), c(7)), block=80), [y]))[0]
    assert torch.equal(made, torch.stack([(x > 0).sum(1), (x > -9).all(1), (x > 8).any(1)]).int())


def test_atomics():
    x = ints(5, 40, low=0)

    def make():
        i = torch.tensor([0, 0, 99, -99, 0, 0], dtype=torch.int32)
        u = torch.tensor([-1, 0, 0, 0, 0, 99, 0], dtype=torch.int32)
        f, d, n = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
        h, b = torch.zeros(2, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
        return launch("atomics", (x, i, u, f, d, n, h, b), grid=5, block=40), [i, u, f, d, n, h, b]

    i, u, f, d, n, h, b = in_every_order(make)
    bits = [1 << (v & 7) for v in x.flatten().tolist()]
    one = 0
    for bit in bits:
        one ^= bit
    assert i.tolist() == [x.sum(), -x.sum(), x.min(), x.max(), 0, x.sum()]
    assert u.tolist() == [~sum(set(bits)), sum(set(bits)), one, 200 % 7, -200 % 7, x.min(), x.max()]
    assert (f.item(), d.item(), n.tolist()) == (200, 100, [200 << 33, x.max() + 16])
    assert (h.tolist(), b.item()) == ([200, 400], 200)


@pytest.mark.parametrize(
    ("name", "dtype"), [("float", torch.float32), ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)]
)
def test_sums_of_rows(name, dtype):
    x = torch.randn(5, 72).to(dtype)
    shape = {"grid": 5, "block": 128, "shared_bytes": 4}
    made = in_every_order(lambda: (launch(f"row_sum<{name}>", (x, y := torch.zeros(5), c(72)), **shape), [y]))[0]
    torch.testing.assert_close(made, x.double().sum(1).float(), rtol=1e-5, atol=1e-5)


def test_threads_of_the_system_share_the_blocks():
    x, y, again = torch.randn(41, 72), torch.zeros(41), torch.zeros(41)
    for threads, into in ((1, y), (3, again)):
        host = Host(threads=threads, order="shuffled:5", folder=HERE)
        host(launch("row_sum<float>", (x, into, c(72)), grid=41, block=128, shared_bytes=4))
    assert torch.equal(y, again)
    torch.testing.assert_close(y, x.sum(1))


@pytest.mark.parametrize("cooperative", [False, True])
def test_every_block_finds_its_shared_memory_filled_with_nan(cooperative):
    how = {"grid": 6, "block": 40, "shared_bytes": 200, "cooperative": cooperative}
    made = in_every_order(lambda: (launch("poisoned", (y := torch.zeros(2, dtype=torch.int32), c(50)), **how), [y]))[0]
    assert made.tolist() == [6 * 33, 6 * 50]


@pytest.mark.parametrize("cooperative", [False, True])
def test_the_last_block_adds_up(cooperative):
    x = torch.randn(6, 32)

    def make():
        parts, done, y = torch.full((6,), torch.nan), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        return launch("last_block", (x, parts, done, y), grid=6, block=32, cooperative=cooperative), [y]

    torch.testing.assert_close(in_every_order(make)[0][0], x.double().sum().float())


def test_blocks_that_run_at_once_wait_for_each_other():
    x = ints(5, 32)

    def make():
        y, sums = ints(5, 32), ints(5, 32)
        args = (torch.zeros(1, dtype=torch.int32), x, y, sums)
        return launch("ring", args, grid=5, block=32, cooperative=True), [y, sums]

    y, sums = in_every_order(make)
    wanted = x.view(5, 16, 2).flip(2).reshape(5, 32).cumsum(0)
    assert torch.equal(y.long(), wanted)
    assert torch.equal(sums.long(), wanted.sum(0) + x)


def test_a_wait_for_a_block_that_does_not_run_yet():
    args = (torch.zeros(1, dtype=torch.int32), ints(5, 32), ints(5, 32), ints(5, 32))
    with pytest.raises(KernelFault, match=r"ring, block \(4, 0, 0\)[\s\S]*fix: Launch\(..., cooperative=True\)"):
        Host(order="reversed", folder=HERE)(launch("ring", args, grid=5, block=32))


def test_mathematics():
    x = torch.cat((torch.rand(60) * 4 + 0.01, torch.tensor([1.0, 0.5, 2.0])))
    make = lambda: (launch("functions", (x, y := torch.zeros(18, 63), b := ints(7, 63), c(63))), [y, b])  # noqa: E731
    y, b = in_every_order(make)
    X = x.double()
    wanted = [X.rsqrt(), X.exp(), X.log(), X.exp2(), X.log1p(), X.tanh(), X.erf(), 1 / X, 1 / X, X.sqrt(), X**1.5]
    wanted += [X.clamp(0, 1), X * X - 2, X.clamp(min=1), X.clamp(max=1), X, x.bfloat16().double(), x.half().double()]
    torch.testing.assert_close(y, torch.stack(wanted).float(), rtol=3e-7, atol=3e-7)
    words = [n & 0xFFFFFFFF for n in x.view(torch.int32).tolist()]
    assert b[0].tolist() == [n.bit_count() for n in words]
    assert b[1].tolist() == [(n & -n).bit_length() for n in words]
    assert b[2].tolist() == [32 - n.bit_length() for n in words]
    assert b[3].tolist() == [0] * 63
    assert b[4].tolist() == [n * n >> 32 for n in words]
    assert torch.equal(b[5], x.round().int())
    assert b[6].tolist() == [1] * 63


def test_cached_loads_and_stores():
    x = torch.randn(8, 4, 4)
    assert torch.equal(in_every_order(lambda: (launch("cached", (x, y := torch.zeros(8, 4, 4)), block=8), [y]))[0], x)
