"""The mesh: named axes and their sizes, and, where a body runs, one rank of it with its transport."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .errors import SpecError, nearest
from .transport import Local, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from .spec import Spec
    from .trace import Trace

__all__ = ["VOCABULARY", "Mesh"]

# Axes that every mesh knows. One that a mesh lacks has size 1 there, and is printed so.
VOCABULARY = {
    "dp": "data: batch rows",
    "g": "gather: queries stay, keys are gathered",
    "u": "Ulysses: tokens become heads",
    "cp": "context: tokens",
    "tp": "tensor: heads, features, vocabulary",
    "ep": "experts",
}


class Mesh:
    """`Mesh(g=2, u=2)`: four ranks, numbered with the last axis fastest.

    `mesh.at(rank, transport)` is the same mesh as one rank sees it, which is what a body is handed. A mesh of one rank
    is its rank 0.

    Axes have any names. Those of layouts are known to every mesh, with size 1 where it lacks them, which is printed:
    dp (batch rows), u (Ulysses: tokens become heads), g (keys are gathered), cp (tokens), tp (heads, features) and ep
    (experts).
    """

    def __init__(self, /, **axes: int) -> None:
        for name, size in axes.items():
            if not (name.isidentifier() and name.isascii()):
                raise ValueError(f"Mesh({name!r}=...): an axis has a name of letters, digits and _, as in a spec")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"Mesh({name}=...): a positive number of ranks is needed, not {size!r}")
        self.axes: tuple[tuple[str, int], ...] = tuple(axes.items())
        self.transport: Transport | None = Local() if self.size == 1 else None
        self.trace: Trace | None = None
        # What its collectives gave, where an executor wants to know, at this level of transforms.
        self.received: list[Tensor] | None = None
        self.level = 0
        self.key: int | None = None  # of the port that lends it to compiled functions
        self._rank: int | None = 0 if self.size == 1 else None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod([size for _, size in self.axes])

    @property
    def rank(self) -> int:
        """Which rank this is. Raises where it is none in particular."""
        if self._rank is None:
            raise ValueError(
                f"{self!r} is no rank's own\n"
                "    fix: use the mesh that the body is handed (simulate, ProcessGroup), or mesh.at(rank, transport)"
            )
        return self._rank

    @property
    def bound(self) -> bool:
        """Whether it is one rank's own."""
        return self._rank is not None

    def at(self, rank: int, transport: Transport | None = None) -> Mesh:
        """The mesh as this rank sees it, with the transport that reaches its peers (none is needed for one rank)."""
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"Mesh.at(rank={rank}): ranks are 0 to {self.size - 1}     mesh: {self}")
        if transport is None and self.size > 1:
            raise ValueError(
                f"Mesh.at(rank={rank}): {self.size} ranks need a transport     mesh: {self}\n"
                "    fix: simulate(body, mesh, ...), or ProcessGroup(device_mesh).mesh"
            )
        return self._with(rank, transport or Local(), self.trace)

    def recording(self, trace: Trace | None) -> Mesh:
        """The mesh whose collectives are recorded there."""
        return self._with(self._rank, self.transport, trace)

    def keyed(self, key: int) -> Mesh:
        """The mesh as a `Port` of that key lends it."""
        mesh = self._with(self._rank, self.transport, self.trace)
        mesh.key = key
        return mesh

    def _with(self, rank: int | None, transport: Transport | None, trace: Trace | None) -> Mesh:
        mesh = Mesh(**dict(self.axes))
        mesh._rank, mesh.transport, mesh.trace = rank, transport, trace
        mesh.received, mesh.level = self.received, self.level
        return mesh

    def __getitem__(self, axis: str) -> int:
        """The size of an axis; 1 for one of the vocabulary that this mesh lacks."""
        if axis not in dict(self.axes) and axis not in VOCABULARY:
            guess = nearest(axis, dict(self.axes))
            raise KeyError(f'no axis "{axis}"     mesh: {self}' + (f'     did you mean "{guess}"?' if guess else ""))
        return size_of(self.axes, axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank lies, axis by axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"Mesh.coordinates(rank={rank}): ranks are 0 to {self.size - 1}     mesh: {self}")
        return coordinates(self.axes, rank)

    def ranks(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """The group of a rank over some axes: the ranks that differ from it in those alone, ascending."""
        axes = tuple(axes)
        for axis in axes:
            _ = self[axis]  # raises for one that is not known
        return ranks_of(self.axes, axes, rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.axes, self._rank, self.transport, self.trace) == (
            other.axes, other._rank, other.transport, other.trace,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.axes, self._rank))

    def __str__(self) -> str:
        return text_of(self.axes)

    def __repr__(self) -> str:
        at = f".at({self._rank})" if self.bound and self.size > 1 else ""
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)}){at}"


Axes = tuple[tuple[str, int], ...]


def size_of(axes: Axes, axis: str) -> int:
    """The size of an axis that `check_axes` let through."""
    return dict(axes).get(axis, 1)


def constant_axes(mesh: Mesh) -> Axes:
    """The axes of a mesh as constants, also where a compiler takes their sizes for numbers that may change."""
    return tuple((axis, operator.index(size)) for axis, size in mesh.axes)


def coordinates(axes: Axes, rank: int) -> dict[str, int]:
    """Where a rank lies, axis by axis."""
    found = {}
    for name, size in reversed(axes):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name, _ in axes}


def ranks_of(axes: Axes, group: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one in the axes of a group alone."""
    mine = coordinates(axes, rank)
    ranks = [0]
    for name, size in axes:
        steps = range(size) if name in group else (mine[name],)
        ranks = [r * size + step for r in ranks for step in steps]
    return tuple(ranks)


def place_of(axes: Axes, group: tuple[str, ...], rank: int) -> int:
    """Which of the parts over a group of axes, major to minor, is a rank's own, whatever their order in the mesh."""
    mine, found = coordinates(axes, rank), 0
    for name in group:
        found = found * size_of(axes, name) + mine.get(name, 0)
    return found


def text_of(axes: Axes, spec: Spec | None = None, *others: Any) -> str:
    """`g=2 u=2`; with specs, also the axes that they name and the mesh lacks."""
    named = dict.fromkeys(axis for s in (spec, *others) if s is not None for axis in s.axes)
    lacking = [f"{axis}=1 (not in the mesh)" for axis in named if axis not in dict(axes) and axis in VOCABULARY]
    return " ".join([*(f"{name}={size}" for name, size in axes), *lacking]) or "one rank"


def check_names(*names: Any) -> None:
    """Raise `SpecError` unless each of the axes that a layout is told is the name of one."""
    for name in names:
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise SpecError(
                f"an axis of a layout is named by one word, not by {name!r}",
                fix='"u", or "g", "u" where it takes several',
            )


def check_axes(axes: Axes, spec: Spec) -> None:
    """Raise `SpecError` for an axis that neither the mesh nor the vocabulary knows."""
    known = list(dict.fromkeys([*dict(axes), *VOCABULARY]))
    for axis in spec.axes:
        if axis in known:
            continue
        at = spec.where(axis)
        others = {name: axis.removeprefix(name) for name in dict(axes) if axis.startswith(name)}
        parts = [f"{name}/{other}" for name, other in others.items() if other in dict(axes) and other != name]
        guess = nearest(axis, dict(axes)) or nearest(axis, VOCABULARY)
        if parts:
            fix = f'did you mean "{parts[0]}"?'
        else:
            fix = f'did you mean "{guess}"?' if guess else f"one of {', '.join(known)}, or Mesh(..., {axis}=...)"
        raise SpecError(f'no axis "{axis}"', spec.text, (at, at + len(axis)), mesh=text_of(axes), fix=fix)
