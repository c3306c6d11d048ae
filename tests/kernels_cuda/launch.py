"""A kernel's launch as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """What cuLaunchKernel is told.

    source: the text's file name in kernels_cuda/. name: a C++ name expression, such as "gemv<__nv_bfloat16, 2>". grid:
    blocks by x, y, z. block: threads by x, y, z. shared_bytes: dynamic shared memory of a block. args: tensors or None,
    passed as pointers, and ctypes scalars, passed by value. cooperative: all blocks run at once. programmatic: the
    kernel may begin before the one before it has ended.
    """

    source: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    args: tuple[Any, ...]
    cooperative: bool = False
    programmatic: bool = False
