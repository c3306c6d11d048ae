"""Products of rows that are sorted by expert, each group with its own weight. Two operators, since how many rows an
expert has is known only when they are computed: a graph takes them as they are.

    y_m = W_e x_m                         for each row m of expert e
    G_e = sum_m y_m x_m^T                 over the rows m of expert e

Each is the other's derivative. An expert without rows is not read.

Letters: M rows, X experts, I and O the widths of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

__all__ = ["grouped_linear", "grouped_outer"]

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
_ROWS_WITH_COPIES = 32


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x `M I`, weight `X O I`, counts `X` (rows of each expert, M in all; integers) -> `M O`."""
    kind = _GroupedLinear if torch.compiler.is_compiling() else _ForwardLinear
    y: Tensor = kind.apply(x, weight, counts)
    return y


def grouped_outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """y `M O`, x `M I`, counts `X` -> `X O I`, zeros for an expert without rows."""
    kind = _GroupedOuter if torch.compiler.is_compiling() else _ForwardOuter
    found: Tensor = kind.apply(y, x, counts)
    return found


def _linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if _is_captured(x.device) and not (_torch_takes(x, weight) and _has_kernel(x)):
        return _row_by_row(x, weight, counts)
    if _torch_takes(x, weight):
        # Its rows are padded to 16 bytes, and a graph was told that they are not.
        return tnf.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32)).contiguous()
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, first, end in _groups(counts):
        y[first:end] = x[first:end] @ weight[expert].mT
    return y


def _row_by_row(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """For a device's graph, in which no host learns how many rows an expert has: each row gets a weight of its own, a
    few rows at once, since these are copies."""
    expert = torch.searchsorted(counts.cumsum(0), torch.arange(x.shape[0], device=x.device), right=True)
    parts = zip(x.split(_ROWS_WITH_COPIES), expert.split(_ROWS_WITH_COPIES), strict=True)
    return torch.cat([(weight[which] @ rows[:, :, None])[:, :, 0] for rows, which in parts])


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
        aligned = all(n > 0 and n * t.element_size() % 16 == 0 for n in strides) and t.data_ptr() % 16 == 0
        return width == 1 and t.numel() > 0 and aligned

    return x.dtype == weight.dtype and x.dtype in _FORMATS and lies_well(x) and lies_well(weight)


def _has_kernel(x: Tensor) -> bool:
    """Whether torch's own is one launch; else it reads the counts on the host, group by group."""
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_linear_op = torch.library.custom_op("meshfn_experts::grouped_linear", _linear, mutates_args=())
_outer_op = torch.library.custom_op("meshfn_experts::grouped_outer", _outer, mutates_args=())


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_outer_op.register_fake
def _(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], y.shape[1], x.shape[1])


def _opaque(counts: Tensor) -> bool:
    """Whether the counts have no values here: in a graph that is being traced, on the meta device, or faked."""
    return torch.compiler.is_compiling() or counts.is_meta or type(counts) is not Tensor


class _Grouped(torch.autograd.Function):
    """What the two have in common. The operators' own autograd does not go through `torch.func`; this does."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


def _by_sample(
    fn: Callable[..., Tensor], info: Any, in_dims: tuple[int | None, ...], args: tuple[Tensor, ...]
) -> tuple[Tensor, int]:
    """Samples have other counts, so each is computed by itself."""
    samples = [
        fn(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return torch.stack(samples), 0


@_linear_op.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    return _by_sample(_linear_op, info, in_dims, args)


@_outer_op.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    return _by_sample(_outer_op, info, in_dims, args)


def _tangent(fn: Callable[..., Tensor], ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor:
    """Both products are linear in each of their two arguments."""
    first, second, counts = ctx.saved_tensors
    parts = [] if a is None else [fn(a, second, counts)]
    parts += [] if b is None else [fn(first, b, counts)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _GroupedLinear(_Grouped):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        found: Tensor = (_linear_op if _opaque(counts) else _linear)(x, weight, counts)
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
        return _by_sample(grouped_linear, info, in_dims, args)


class _GroupedOuter(_Grouped):
    @staticmethod
    def forward(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        found: Tensor = (_outer_op if _opaque(counts) else _outer)(y, x, counts)
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
        return _by_sample(grouped_outer, info, in_dims, args)


# Forward mode has classes of its own, since Dynamo refuses a Function that has it.
class _ForwardLinear(_GroupedLinear):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return _tangent(grouped_linear, ctx, *tangents[:2])


class _ForwardOuter(_GroupedOuter):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return _tangent(grouped_outer, ctx, *tangents[:2])
