"""A projection whose weight gradient waits until the gradient of its input is on its way.

Autograd computes both at once, and only then goes on to the exchange that the input came by. Here the weight has a node
of its own in the graph, made before that exchange is waited for, so that backward comes to it after it has launched it.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["LateProjection"]


class LateProjection:
    """x `... D` -> `... F`, by a weight `F D`. Its weight gradient is computed after what is waited for between the
    making of it and the calls: the same products as those of `linear`, in another order. A weight that wants no
    gradient has nothing to be late, and is a plain `linear`."""

    def __init__(self, weight: Tensor) -> None:
        kind = weight.device.type
        self.casts = not weight.is_meta and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        if self.casts:  # as `linear` does within
            weight = weight.to(torch.get_autocast_dtype(kind))
        self.weight, self.left = weight, _Left()
        self.token = cast(Tensor, _Weight.apply(weight, self.left)) if weight.requires_grad else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.token is None:
            return linear(x, self.weight)
        if self.casts and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(self.weight.dtype)
        return cast(Tensor, _Product.apply(x, self.weight, self.token, self.left))


class _Left:
    """What the backward of each product leaves to that of the weight: the input, and the gradient of the output."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by product: a backward that failed left what is now old


class _Weight(torch.autograd.Function):
    """A token of no elements, which ties the products to this node."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: _Left) -> Tensor:
        ctx.left = left
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        pairs, ctx.left.pairs = ctx.left.pairs.values(), {}
        found = (_rows(grad).t() @ _rows(x) for x, grad in pairs)
        return functools.reduce(operator.add, found), None


class _Product(torch.autograd.Function):
    """Keeps what `linear` keeps: the weight for the gradient of x, and x for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor, left: _Left) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.left = left
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.left.pairs[id(ctx)] = x, grad
        grad_x = (_rows(grad) @ weight).view_as(x) if needs_x else None
        return grad_x, None, grad.new_empty(0) if needs_weight else None, None


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
