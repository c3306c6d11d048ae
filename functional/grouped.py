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


@torch.library.custom_op("meshfn_experts::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x `M I`, weight `X O I`, counts `X` (rows of each expert, M in all; integers) -> `M O`."""
    if _torch_takes(x, weight):
        return tnf.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, first, end in _groups(counts):
        y[first:end] = x[first:end] @ weight[expert].mT
    return y


@torch.library.custom_op("meshfn_experts::grouped_outer", mutates_args=())
def grouped_outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """y `M O`, x `M I`, counts `X` -> `X O I`, zeros for an expert without rows."""
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


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], y.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    d_x = grouped_linear(grad.contiguous(), weight.mT, counts) if ctx.needs_input_grad[0] else None
    d_weight = grouped_outer(grad.contiguous(), x, counts) if ctx.needs_input_grad[1] else None
    return d_x, d_weight, None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    y, x, counts = ctx.saved_tensors
    d_y = grouped_linear(x, grad.contiguous(), counts) if ctx.needs_input_grad[0] else None
    d_x = grouped_linear(y, grad.contiguous().mT, counts) if ctx.needs_input_grad[1] else None
    return d_y, d_x, None


grouped_linear.register_autograd(_linear_backward, setup_context=_keep)
grouped_outer.register_autograd(_outer_backward, setup_context=_keep)


def _by_sample(op: Any) -> Any:
    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        """Samples have other counts, so each is computed by itself."""
        samples = [
            op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return torch.stack(samples), 0

    return rule


grouped_linear.register_vmap(_by_sample(grouped_linear))
grouped_outer.register_vmap(_by_sample(grouped_outer))
