"""What carries an exchange: four collectives over a group of ranks, each launched and waited for.

Buffers are flat: the blocks for (or from) each member of the group one after the other, in the order of the mesh, with
their lengths in elements. A transport knows nothing of specs. `Local` is one rank; `threads.Threads` and
`processes.ProcessGroup` are the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .packing import Spare

__all__ = ["Call", "Local", "Part", "Transport", "TransportError", "Work", "disagreement", "moved", "summed"]


class TransportError(RuntimeError):
    """Ranks that do not make the same calls, or a peer that is gone; says what each was doing."""


class Call(NamedTuple):
    """What a collective is for.

    text: the pair that asked for it. site: the source line, of the forward call where this is its backward. rest: the
    sizes of the dimensions that stay as they are. grad: whether backward will come by. edges: the names of the tensors,
    where a layout's wire packs several. seen: what it was told of what queries see. Peers must agree on all but the
    site.
    """

    text: str
    site: str = ""
    backward: bool = False
    rest: tuple[int, ...] = ()
    grad: bool = False
    edges: tuple[str, ...] = ()
    seen: tuple[Any, ...] = ()

    @property
    def title(self) -> str:
        """`q, k, v`, or the pair where it has no name."""
        return (", ".join(self.edges) or self.text) + " (backward)" * self.backward

    def __str__(self) -> str:
        return f'"{self.text}"' + " (backward)" * self.backward + (f"  {self.site}" if self.site else "")


class Work(Protocol):
    """An exchange that is under way."""

    def wait(self) -> Tensor:
        """The blocks received, once they are here."""
        ...


class Transport(Protocol):
    """One rank's reach. axes: those that name the group. counts: of each member's block, in elements."""

    @property
    def spare(self) -> Spare | None:
        """Memory of exchanges that are over."""
        ...

    @property
    def traces(self) -> bool:
        """Whether a compiled function may use it."""
        ...

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

    traces, spare = True, None

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
    mine = to[me] // len(to) + (me < to[me] % len(to))
    both = to[me] + (others - 1) * mine
    return both, both


@dataclass
class Part:
    """What one rank brings to a collective.

    dtype: of its buffer. counts: of the blocks that it sends, or that all bring; receive: of those that it
    expects.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    counts: list[int]
    receive: list[int]
    call: Call

    def __str__(self) -> str:
        return f"{self.kind} over {'/'.join(self.axes)}"


def disagreement(group: Sequence[int], parts: Mapping[int, Part]) -> str | None:
    """Why the parts of some members of a group, by rank, do not belong to one collective; None where they do."""
    first = min(parts)
    for r in parts:
        problem = None if r == first else _differ(first, parts[first], r, parts[r], group)
        if problem:
            return problem
    return None


def _differ(first: int, a: Part, r: int, b: Part, group: Sequence[int]) -> str | None:
    i, j = group.index(first), group.index(r)
    if a.kind != b.kind or a.call.text != b.call.text or a.call.backward != b.call.backward:
        calls = " and ".join(f'{p.kind} for "{p.call.text}"' + " (backward)" * p.call.backward for p in (a, b))
        return f"rank {first} and rank {r} make different calls: {calls}"
    for what, one, other in (
        ("bring different dtypes", a.dtype, b.dtype),
        ("bring shapes that differ in the dimensions that stay", a.call.rest, b.call.rest),
        ("differ in whether x requires a gradient", a.call.grad, b.call.grad),
        ("were told other things of what a query sees (causal, window, cu_seqlens)", a.call.seen, b.call.seen),
    ):
        if one != other:
            return f"rank {first} and rank {r} {what}: {_told(one)} and {_told(other)}"
    if a.kind == "all-to-all":
        blocks = [([a.counts[j]], [b.receive[i]]), ([b.counts[i]], [a.receive[j]])]
    else:
        blocks = [(a.counts, b.counts)]
    for mine, theirs in blocks:
        if mine != theirs:
            return f"rank {first} and rank {r} bring blocks of different sizes: {mine} and {theirs} elements"
    return None


def _told(value: Any) -> str:
    if isinstance(value, tuple) and not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        return str(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def summed(blocks: Tensor) -> Tensor:
    """The sum over the first dimension; half precision is summed in fp32 and rounded once."""
    whole = not (blocks.dtype.is_floating_point or blocks.dtype.is_complex)
    return blocks.sum(0, dtype=blocks.dtype) if whole else blocks.sum(0)


def summable(dtype: torch.dtype) -> bool:
    """Whether values of it can be added up."""
    small = dtype.is_floating_point and dtype.itemsize == 1
    return not small and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)
