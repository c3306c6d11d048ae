"""What carries an exchange: four collectives over a group of ranks, each launched and waited for.

Buffers are flat: the blocks for (or from) each member of the group one after the other, in the order of the mesh, with
their lengths in elements. A transport knows nothing of specs. `Local` is one rank; `threads.Threads` and
`processes.ProcessGroup` are the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .shards import balanced

__all__ = ["Call", "Local", "Transport", "TransportError", "Work", "moved"]


class TransportError(RuntimeError):
    """Ranks that do not make the same calls, or a peer that is gone; says what each was doing."""


class Call(NamedTuple):
    """What a collective is for.

    text: the pair that asked for it. site: the source line, of the forward call where this is its backward. rest: the
    sizes of the dimensions that stay as they are. grad: whether backward will come by. Peers must agree on all but the
    site.
    """

    text: str
    site: str = ""
    backward: bool = False
    rest: tuple[int, ...] = ()
    grad: bool = False

    def __str__(self) -> str:
        return f'"{self.text}"' + " (backward)" * self.backward + (f"  {self.site}" if self.site else "")


class Work(Protocol):
    """An exchange that is under way."""

    def wait(self) -> Tensor:
        """The blocks received, once they are here."""
        ...


class Transport(Protocol):
    """One rank's reach. axes: those that name the group. counts: of each member's block, in elements."""

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        """Everybody's block, in order. x: this rank's, of its count."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        """The sum of everybody's block for this rank. x: a block for each member."""
        ...

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        """The block of everybody for this rank. counts: of what it sends to each; receive: of what each sends it."""
        ...

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: Call) -> Work:
        """The sum of everybody's x."""
        ...


class Done(NamedTuple):
    """Work that needed no waiting."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


class Local:
    """One rank: every collective gives back what it was given."""

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return Done(x)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return Done(x)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        return Done(x)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: Call) -> Work:
        return Done(x)


def moved(kind: str, to: Sequence[int], of: Sequence[int], me: int) -> tuple[int, int]:
    """Elements that a rank sends to others and receives from them, out of those for and from each member.

    What stays on the rank counts nothing. An all-reduce counts as the reduce-scatter and the all-gather of balanced
    pieces, which is the least that does it.
    """
    others = len(to) - 1
    if kind == "all-gather":
        return others * of[me], sum(of) - of[me]
    if kind == "reduce-scatter":
        return sum(to) - to[me], others * to[me]
    if kind == "all-to-all":
        return sum(to) - to[me], sum(of) - of[me]
    start, stop = balanced(to[me], len(to), me)
    both = to[me] + (others - 1) * (stop - start)
    return both, both


def summed(blocks: Sequence[Tensor]) -> Tensor:
    """The sum of blocks in their order; half precision is summed in fp32 and rounded once."""
    if not blocks[0].dtype.is_floating_point and not blocks[0].dtype.is_complex:
        return torch.stack(list(blocks)).sum(0, dtype=blocks[0].dtype)
    return torch.stack(list(blocks)).sum(0)
