"""One launch of a kernel: what to run, on how many threads, with what."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Argument", "Launch", "Mapped"]


@dataclass(frozen=True)
class Mapped:
    """Memory that is no tensor's, such as a peer's: where it lies here, and how many bytes of it a kernel may touch."""

    address: int
    bytes: int


Argument = Tensor | Mapped | None | ctypes.c_int | ctypes.c_longlong | ctypes.c_float


@dataclass(frozen=True)
class Launch:
    """source: the file of this folder with the kernel's text. name: the kernel, as C++ calls it, with its template's
    arguments. grid: blocks. block: threads of each. shared_bytes: dynamic shared memory of a block. args: tensors and
    mapped memory go as pointers to their first element, None as a null pointer, numbers by value.

    cooperative: all blocks run at once, and may wait for each other. programmatic: the kernel may begin before the one
    in front of it has ended; it waits for it (`griddep_wait`) before it touches anything that another kernel writes.
    """

    source: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    args: tuple[Argument, ...] = ()
    cooperative: bool = False
    programmatic: bool = False
