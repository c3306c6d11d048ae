"""The only file that touches torch's private binding of oneDNN, behind an op of our own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["available", "onednn_linear"]


def available() -> bool:
    """Whether this torch has oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@torch.library.custom_op("meshfn_cpu::onednn_linear", mutates_args=(), device_types="cpu")
def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x `N D`, weight `F D` -> `N F`, both in fp32: the product that `torch.nn.functional.linear` leaves to MKL, which
    is slower on processors that are not Intel's."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
