"""Ranks folded into classes that do the same, and what a move does on one of them, found without memory.

The figures are those of `reshard` itself: its own plan, packed, exchanged and unpacked on tensors without memory, once
for each kind of rank. So thousands of ranks cost what a few do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import moves, shards
from .exchange import finish, local, start
from .mesh import Axes, Mesh, ranks_of
from .moves import Move
from .spec import Atom, Spec, parse_pair
from .steps import COLLECTIVES, Step, one_step
from .trace import Trace, copied
from .transport import Call, Work

__all__ = ["Class", "Dry", "Figures", "classes_of", "key_of"]


class Figures(NamedTuple):
    """What a move does on one rank."""

    sends: int
    receives: int
    copies: tuple[int, int]
    after: tuple[int, ...]


class Class(NamedTuple):
    """Ranks that do the same: their move, the shape before, and its figures forward and backward."""

    ranks: tuple[int, ...]
    move: Move
    before: tuple[int, ...]
    forward: Figures
    backward: Figures


class Dry:
    """A transport that gives blocks without memory. Like one of processes it holds what it was handed until it is
    waited for, and what it gives from the start."""

    traces, spare = True, None

    def __init__(self, axes: Axes, rank: int) -> None:
        self.axes, self.rank = axes, rank

    def _done(self, x: Tensor, n: int) -> Work:
        return _Blocks(x, x.new_empty(n))

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return self._done(x, sum(counts))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return self._done(x, counts[ranks_of(self.axes, axes, self.rank).index(self.rank)])

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        return self._done(x, sum(receive))

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: Call) -> Work:
        return self._done(x, x.numel())


class _Blocks:
    def __init__(self, sent: Tensor, received: Tensor) -> None:
        self.sent: Tensor | None = sent
        self.received = received

    def wait(self) -> Tensor:
        self.sent = None
        return self.received


def _figures(move: Move, shape: Sequence[int], dtype: torch.dtype, text: str, axes: Axes, rank: int) -> Figures:
    x = torch.empty(tuple(shape), dtype=dtype, device="meta")
    if move.kind not in COLLECTIVES:
        y = local(x, move)
        return Figures(0, 0, (0, int(copied(x, y))), tuple(y.shape))
    trace = Trace(Mesh(**dict(axes)).at(rank, Dry(axes, rank)))
    (y,) = finish(start((x,), (move,), Call(text), trace.mesh))
    launched, waited = trace
    return Figures(*trace.bytes(rank), (launched.copies, waited.copies), tuple(y.shape))


def classes_of(text: str, axes: Axes, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype) -> list[Class]:
    """Ranks by what they do, each class worked out on its first rank."""
    left, right = parse_pair(text)
    step, ndim = one_step(text, axes), len(left.dims)
    key = key_of(left, right, step, dict(sizes), axes, lambda r: moves.move(text, axes, r, sizes, ndim, ()).move)
    ranks: dict[object, list[int]] = {}
    for rank in range(math.prod(n for _, n in axes)):
        ranks.setdefault(key(rank), []).append(rank)
    found = []
    for alike in ranks.values():
        plan = moves.move(text, axes, alike[0], sizes, ndim, ())
        forward = _figures(plan.move, plan.local, dtype, text, axes, alike[0])
        backward = _figures(plan.adjoint, forward.after, dtype, text, axes, alike[0])
        found.append(Class(tuple(alike), plan.move, plan.local, forward, backward))
    return found


def key_of(
    left: Spec, right: Spec, step: Step | None, sizes: Mapping[str, int], axes: Axes, move: Callable[[int], Move]
) -> Callable[[int], object]:
    """What tells ranks apart: how much they hold of each letter, before and after, and what their group holds."""
    strides, stride, members = {}, 1, 1
    group: list[tuple[int, int, int]] = []  # how a rank's place in its group is counted
    for name, n in reversed(axes):
        strides[name] = (stride, n)
        if step is not None and name in step.axes:
            group.append((stride, n, members))
            members *= n
        stride *= n
    moved = {0: step.source, 1: step.target} if step is not None else {}

    @functools.cache
    def of(atom: Atom, outer: int | None, place: tuple[int, ...]) -> object:
        at = dict(zip(atom.axes, place, strict=True))
        found: list[object] = [tuple(b - a for a, b in shards.held(atom, sizes, axes, at))]
        if outer is not None:
            found.append(tuple(b - a for a, b in shards.part(atom, sizes, axes, at, 0, outer)))
            # Which heads are shared depends on where the group's heads start, not on how many they are.
            found.append(place[:outer] if atom.need else None)
        return tuple(found)

    sent: dict[int, int] = {}  # how much each rank sends of heads that others hold too

    def sends(rank: int) -> int:
        assert step is not None
        if rank not in sent:
            side = move(rank).source
            assert side is not None
            sent.update(zip(ranks_of(axes, step.axes, rank), map(shards.length, side.part), strict=True))
        return sent[rank]

    def key(rank: int) -> object:
        found: list[object] = []
        if step is not None and step.kind == "all-reduce":  # the first members sum one element more
            count = 1
            for atom in left.atoms:
                at = {axis: rank // s % n for axis, (s, n) in strides.items() if axis in atom.axes}
                count *= shards.length(shards.held(atom, sizes, axes, at))
            found.append(sum(rank // s % n * m for s, n, m in group) < count % members)
        for which, spec in enumerate((left, right)):
            for i, atom in enumerate(spec.atoms):
                if not atom.axes:
                    continue
                place = tuple(rank // s % n for s, n in (strides.get(axis, (1, 1)) for axis in atom.axes))
                outer = len(atom.axes) - len(step.axes) if step is not None and moved[which] == i else None
                found.append(of(atom, outer, place))
                if outer is not None and which == 0 and atom.need and move(0).kind != "none":
                    found.append(sends(rank))
        return tuple(found)

    return key
