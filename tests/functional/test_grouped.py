"""Products of rows in groups, each with its own weight."""

from __future__ import annotations

import pytest
import torch
from meshfn.functional import grouped
from meshfn.functional.grouped import _linear_op, _outer_op, grouped_linear, grouped_outer


@pytest.mark.parametrize(("rows", "width"), [(5, 7), (8, 16)], ids=["plain", "torch's"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_products(rows, width, dtype):
    """Against a loop, whichever way they are computed; an expert without rows among them."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 3, 0, rows - 3])
    x, w = torch.randn(rows, width, dtype=dtype), torch.randn(4, 2 * width, width, dtype=dtype)
    expert = torch.repeat_interleave(torch.arange(4), counts)
    wanted = torch.stack([w[e].double() @ a.double() for e, a in zip(expert, x, strict=True)])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    found = grouped_linear(x, w, counts)
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    outer = grouped_outer(found, x, counts)
    for e in range(4):
        here = found[expert == e].double().T @ x[expert == e].double()
        torch.testing.assert_close(outer[e].double(), here, rtol=tolerance, atol=10 * tolerance)


def test_grouped_products_differentiate_twice():
    counts = torch.tensor([2, 0, 1])
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for fn, args in (
        (lambda x, w: grouped_linear(x, w, counts), (x, w)),
        (lambda y, x: grouped_outer(y, x, counts), (y, x)),
    ):
        assert torch.autograd.gradcheck(fn, args)
        assert torch.autograd.gradgradcheck(fn, args)


def test_a_weight_whose_rows_are_one_row():
    """A stride of 0, which torch's own grouped product refuses."""
    one = torch.randn(4, 1, 16).expand(4, 8, 16)
    found = grouped_linear(torch.ones(4, 16), one, torch.tensor([1, 0, 3, 0]))
    torch.testing.assert_close(found, one.sum(-1)[[0, 2, 2, 2]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [7, 8, 14])
def test_products_lie_as_a_graph_is_told(width):
    """torch's own pads rows to 16 bytes, and a compiled graph would read the padding."""
    counts = torch.tensor([0, 3, 0, 6])
    x, w, y = torch.randn(9, 16), torch.randn(4, width, 16), torch.randn(9, width)
    for op, args in ((_linear_op, (x, w, counts)), (_outer_op, (y, x, counts))):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
        assert op(*args).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [[0, 3, 0, 2, 1], [0, 0, 0, 0, 0], [0, 9, 0, 0, 0]])
def test_in_a_device_graph_no_host_reads_the_counts(monkeypatch, dtype, rows):
    """Which it could not: a graph with experts is captured, whatever torch's own product takes."""
    torch.manual_seed(0)
    x, w = torch.randn(16, sum(rows), dtype=dtype).mT, torch.randn(5, 16, 8, dtype=dtype).mT
    counts = torch.tensor(rows)
    want = grouped_linear(x, w, counts)

    def refused(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(grouped, "_is_captured", lambda device: True)
    monkeypatch.setattr(grouped, "_has_kernel", lambda x: False)
    monkeypatch.setattr(grouped, "_ROWS_WITH_COPIES", 4)
    monkeypatch.setattr(torch.Tensor, "tolist", refused)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", refused)
    found = grouped_linear(x, w, counts)
    monkeypatch.undo()
    near = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(found, want, rtol=near, atol=near)
