"""What a piece of work holds: bytes of the tensors that are alive, each memory once, whenever more of it is taken.

It sees every tensor that an operation makes, in forward and in backward, and when its memory is given back. So what
autograd keeps counts for as long as autograd keeps it, and a view counts nothing. Tensors on meta have memory to count.

This is the only file that asks torch, by private names, which memory a tensor lies in and what operations make.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Meter", "same_memory"]


class Meter(TorchDispatchMode):
    """Counts in the thread that enters it.

    moment: in which part of the work this is, a number that ascends. held: what is there from the start. apart: what
    does not count, nor a view of it. found: the part and the bytes held, at the start, whenever more is taken, and once
    for each part in which nothing is.
    """

    def __init__(self, moment: Callable[[], int], held: Iterable[Tensor], apart: Iterable[Tensor]) -> None:
        super().__init__()
        self._moment, self._bytes = moment, 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for x in apart:
            self._count(x, 0)
        for x in held:
            self._count(x, _nbytes(x))
        self.found = [(moment(), self._bytes)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                before = self._bytes
                if self._count(x, _nbytes(x)):
                    now = self._moment()
                    self.found += [(part, before) for part in range(self.found[-1][0] + 1, now)]
                    self.found.append((now, self._bytes))
        return made

    def _count(self, x: Tensor, nbytes: int) -> bool:
        """Whether it is memory that was not known."""
        memory, key = x.untyped_storage(), _key(x)
        if key in self._alive:
            return False

        def freed(_: Any) -> None:
            del self._alive[key]
            self._bytes -= nbytes

        self._alive[key] = weakref.ref(memory, freed)
        self._bytes += nbytes
        return True


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is a view of what the other is of; also for tensors without memory, which all lie at 0."""
    return _key(a) == _key(b)


def _key(x: Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found


def _nbytes(x: Tensor) -> int:
    return x.untyped_storage().nbytes()
