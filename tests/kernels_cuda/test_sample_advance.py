"""The end of a step without options: the plain function's tokens, whoever is first."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.shapes import ShapeError
from meshfn.kernels_cuda import sample_advance

from .ops import host_ops

OP = torch.ops.meshfn_cuda.sample_advance
ENDS = torch.tensor([5, 3])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kinds(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Plain, peaked, in a few steps (ties), all equal, -inf here and there, one finite, huge, the lowest number, signed
    zeros; and what is no distribution: NaN, +inf, both, nothing but -inf."""
    made, inf = torch.Generator().manual_seed(vocabulary), torch.inf
    plain, biggest = torch.randn(vocabulary, generator=made), torch.finfo(dtype).max
    masked, one = torch.where(plain < 0.5, plain, -inf), torch.full((vocabulary,), -inf)
    one[vocabulary // 2] = 1.0
    huge = torch.where(plain > 0, biggest, -biggest)
    rows = [plain, plain * 20, (plain * 2).round(), plain * 0 + 3, masked, one, huge, plain * 0 - biggest]
    rows += [torch.where(plain > 0, 0.0, -0.0)]
    for last, bad in itertools.product((0, vocabulary - 1), (torch.nan, inf)):
        rows.append(plain.clone())
        rows[-1][last] = bad
    rows += [torch.full((vocabulary,), each) for each in (-inf, torch.nan, inf)]
    return torch.stack(rows).to(dtype)


def run(logits, positions, ends=ENDS, **host):
    with host_ops(**host) as launches:
        out = OP(logits, positions, ends)
    assert [launch.source for launch in launches] == ["sample_advance.cu"]
    return out


def check(logits, positions, ends=ENDS, **host):
    found, usual = run(logits, positions, ends, **host), F.sample_advance(logits, positions, ends)
    assert [x.dtype for x in found] == [x.dtype for x in usual]
    assert torch.equal(found[0], usual[0])
    assert torch.equal(found[2], usual[2])
    right = logits.double().log_softmax(-1).gather(-1, found[0][:, None])[:, 0]
    torch.testing.assert_close(found[1].double(), right, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(found[1].isnan(), usual[1].isnan())
    return found


@pytest.mark.parametrize(("dtype", "vocabulary"), [*zip(DTYPES, (1, 97, 4100), strict=True), (torch.bfloat16, 9001)])
def test_the_plain_functions_tokens_in_every_order(dtype, vocabulary):
    """A part of a row a block at 4,100 and above."""
    logits = kinds(vocabulary, dtype)
    positions = torch.arange(len(logits)) - 2  # of rows that have ended too
    found = check(logits, positions)
    for order in ("reversed", "shuffled:3"):
        again = run(logits, positions, order=order)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, again, strict=True))


def test_a_row_is_the_same_in_every_batch():
    logits = kinds(9001, torch.bfloat16)[:5]
    whole = run(logits, torch.arange(5))
    for i in range(5):
        assert all(map(torch.equal, run(logits[i : i + 1], torch.arange(5)[i : i + 1]), (x[i : i + 1] for x in whole)))


def test_ties_across_blocks_and_ends():
    """The largest stands in the first, the second and the last block; ends are none, the token, another."""
    logits = torch.zeros(1, 9000)
    logits[0, [4090, 5000, 8999]] = 2.0
    assert check(logits, torch.tensor([7]), torch.tensor([], dtype=torch.int64))[0].tolist() == [4090]
    assert run(logits, torch.tensor([7]), torch.tensor([4090]))[2].tolist() == [-1]
    assert run(logits, torch.tensor([7]), torch.arange(5000, 5100))[2].tolist() == [7]


def test_rows_of_a_wider_tensor():
    wider = torch.full((3, 120), torch.nan)
    wider[:, 1:98] = kinds(97, torch.float32)[:3]
    check(wider[:, 1:98], torch.arange(6)[::2])


def test_opcheck_and_no_rows():
    logits, positions = kinds(97, torch.float32)[:3].requires_grad_(), torch.arange(3)
    with host_ops() as launches:
        # torch's own test adds up results, and the first, of integers, cannot take the others: without a gradient.
        torch.library.opcheck(torch.ops.meshfn_cuda.sample.default, (logits.detach(), positions, ENDS))
        found = torch.autograd.grad(OP(logits, positions, ENDS)[1].sum(), logits)
        launches.clear()
        assert [len(x) for x in OP(logits[:0], positions[:0], ENDS)] == [0, 0, 0]
    assert launches == []
    right = torch.autograd.grad(F.sample_advance(logits, positions, ENDS)[1].sum(), logits)
    torch.testing.assert_close(found, right)


def test_what_it_does_not_take():
    given = {"logits": torch.zeros(2, 9), "positions": torch.zeros(2, dtype=torch.int64), "eos_token_id": ENDS}
    assert sample_advance.supports(given, "sm_80") is None
    changes = [{"logits": torch.zeros(2, 9).double()}, {"logits": torch.zeros(2, 1, 9)}]
    changes += [{"logits": torch.zeros(9, 2).T}, {"positions": torch.zeros(2, dtype=torch.int32)}]
    reasons = [sample_advance.supports({**given, **change}, "sm_80") for change in changes]
    with pytest.raises(ShapeError) as error, host_ops():
        OP(torch.zeros(2, 9), torch.zeros(3, dtype=torch.int64), ENDS)
    assert_expected_inline(
        "\n".join([*map(str, reasons), str(error.value)]),
        """\
no float64
logits of 3 dimensions, only 2
logits by columns
positions of int32, only int64
sample_advance(positions=...): B is 2 in logits but 3 in positions
    logits   : B Z = 2 9
    positions: B = 3
                   ^
    so far: B=2 Z=9""",
    )


@pytest.mark.verify
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitizers_are_silent(sanitizer):
    check(kinds(4100, torch.float16), torch.arange(16), sanitizer=sanitizer)
    check(kinds(9001, torch.bfloat16), torch.arange(16), sanitizer=sanitizer)
