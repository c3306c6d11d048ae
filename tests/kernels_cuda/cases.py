"""Launches of the texts in this folder, in every order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .harness import Host, Launch

HERE = Path(__file__).parent
ORDERS = ("forward", "reversed", "shuffled:1", "shuffled:2")


def c(n: int) -> ctypes.c_int:
    return ctypes.c_int(n)


def launch(
    name: str,
    args: tuple[Any, ...],
    grid: int = 1,
    block: int = 64,
    shared_bytes: int = 0,
    source: str = "right.cu",
    **how: bool,
) -> Launch:
    return Launch(source, name, (grid, 1, 1), (block, 1, 1), shared_bytes, args, **how)


def in_every_order(make: Callable[[], tuple[Launch, list[Tensor]]]) -> list[Tensor]:
    """The results of `make()`, which returns a launch and the tensors that it writes: one, in whichever order."""
    results: list[list[Tensor]] = []
    for order in ORDERS:
        host = Host(order=order, folder=HERE)
        asked, written = make()
        host(asked)
        results.append(written)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    return results[0]


def ints(*shape: int, low: int = -9, high: int = 9) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)
