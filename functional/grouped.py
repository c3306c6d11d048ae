"""Products of rows that are sorted by expert, each group with its own weight. Two operators, since how many rows an
expert has is known only when they are computed: a graph takes them as they are.

    y_m = W_e x_m                         for each row m of expert e
    G_e = sum_m y_m x_m^T                 over the rows m of expert e

Each is the other's derivative. An expert without rows is not read.

Letters: M rows, X experts, I and O the widths of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

__all__ = ["grouped_linear", "grouped_outer"]

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x `M I`, weight `X O I`, counts `X` (rows of each expert, M in all; integers) -> `M O`."""
    y: Tensor = _GroupedLinear.apply(x, weight, counts)
    return y


def grouped_outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """y `M O`, x `M I`, counts `X` -> `X O I`, zeros for an expert without rows."""
    found: Tensor = _GroupedOuter.apply(y, x, counts)
    return found


def _linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if _torch_takes(x, weight):
        return tnf.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, first, end in _groups(counts):
        y[first:end] = x[first:end] @ weight[expert].mT
    return y


def _outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    found = x.new_zeros(counts.shape[0], y.shape[1], x.shape[1])
    for expert, first, end in _groups(counts):
        found[expert] = y[first:end].mT @ x[first:end]
    return found


def _groups(counts: Tensor) -> list[tuple[int, int, int]]:
    """The experts that have rows, with their first and the one after their last."""
    found, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            found.append((expert, first, first + count))
        first += count
    return found


def _torch_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own grouped product can: it wants rows or columns in multiples of 16 bytes, from there on."""

    def lies_well(t: Tensor) -> bool:
        row, column = t.stride()[-2:]
        apart, width = (row, column) if column == 1 else (column, row)
        strides = (apart, *t.stride()[:-2])
        return width == 1 and all(n * t.element_size() % 16 == 0 for n in strides) and t.data_ptr() % 16 == 0

    return x.dtype in _FORMATS and x.numel() > 0 and lies_well(x) and lies_well(weight)


_linear_op = torch.library.custom_op("meshfn_experts::grouped_linear", _linear, mutates_args=())
_outer_op = torch.library.custom_op("meshfn_experts::grouped_outer", _outer, mutates_args=())


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_outer_op.register_fake
def _(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], y.shape[1], x.shape[1])


class _Grouped(torch.autograd.Function):
    """What the two have in common. The operators' own autograd does not go through `torch.func`; this does."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def by_sample(cls, info: Any, in_dims: tuple[int | None, ...], args: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Samples have other counts, so each is computed by itself."""
        samples = [
            cls.apply(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return torch.stack(samples), 0


class _GroupedLinear(_Grouped):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        found: Tensor = (_linear_op if torch.compiler.is_compiling() else _linear)(x, weight, counts)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = grouped_linear(grad, weight.mT, counts) if ctx.needs_input_grad[0] else None
        d_weight = grouped_outer(grad, x, counts) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _GroupedLinear.by_sample(info, in_dims, args)


class _GroupedOuter(_Grouped):
    @staticmethod
    def forward(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        found: Tensor = (_outer_op if torch.compiler.is_compiling() else _outer)(y, x, counts)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, x, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_y = grouped_linear(x, grad, counts) if ctx.needs_input_grad[0] else None
        d_x = grouped_linear(y, grad.mT, counts) if ctx.needs_input_grad[1] else None
        return d_y, d_x, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _GroupedOuter.by_sample(info, in_dims, args)
