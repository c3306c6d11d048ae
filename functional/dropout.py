"""Dropout is not computed: ignored where nothing is differentiated, refused by name where something is.

A model trained with dropout runs without it in inference, as `module.eval()` does; trained here without a word, it
would be another model than its config says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import tree

__all__ = ["check_rate", "refuse_dropout"]


def refuse_dropout(function: str, name: str, rate: float, *values: Any) -> None:
    """Raise `ValueError` where the rate is above 0 and a leaf of `values` is being differentiated."""
    if rate:
        for leaf in tree.leaves(values):
            if isinstance(leaf, Tensor) and _differentiated(leaf):
                raise ValueError(
                    f"{function}: the config has {name}={rate}, which is not computed\n"
                    f"    fix: dataclasses.replace(cfg, {name}=0.0) to train without it, torch.no_grad() for inference"
                )


def _differentiated(leaf: Tensor) -> bool:
    """In reverse or, by `torch.func.jvp`, forward."""
    backward = torch.is_grad_enabled() and leaf.requires_grad
    return backward or forward_ad.unpack_dual(leaf).tangent is not None


def check_rate(config: str, **rates: float) -> None:
    """Raise `ValueError` for a rate outside 0 .. 1."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{config}({name}={rate}): a rate is at least 0 and below 1")
