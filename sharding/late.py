"""A projection whose weight gradient waits until the gradient of its input is on its way.

Autograd computes both at once, and only then goes on to the exchange that the input came by. Here the weight has a node
of its own in the graph, made before that exchange is waited for, so that backward comes to it after it has launched it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["LateProjection"]


class LateProjection:
    """x `... D` -> `... F`, by a weight `F D`, called once. Its weight gradient is computed after what is waited for
    between the making of it and the call: the same products as those of `linear`, in another order."""

    def __init__(self, weight: Tensor) -> None:
        kind = weight.device.type
        casts = not weight.is_meta and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        if casts:  # as `linear` does within
            weight = weight.to(torch.get_autocast_dtype(kind))
        self.weight, self.left = weight, _Left()
        self.token = cast(Tensor, _Weight.apply(weight, self.left))

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Product.apply(x.to(self.weight.dtype), self.weight, self.token, self.left))


class _Left:
    """What the backward of a product leaves to that of its weight: the input, and the gradient of the output."""

    pair: tuple[Tensor, Tensor] | None = None


class _Weight(torch.autograd.Function):
    """A token of no elements, which ties the product to this node."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: _Left) -> Tensor:
        ctx.left = left
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (x, grad), ctx.left.pair = ctx.left.pair, None
        return grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor, left: _Left) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.left.pair = x, grad
        grad_x = (grad.flatten(0, -2) @ weight).view_as(x) if needs_x else None
        return grad_x, None, grad.new_empty(0) if needs_weight else None, None
