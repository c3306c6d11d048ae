"""A pair of specs as one rank's move: which ranges go to whom, and where those that come belong.

A move is a tuple of constants, computed in plain Python from the text, the mesh, the rank and the sizes, the same
arithmetic on every rank; it traces. Every move is linear, and its adjoint is the move read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import shards
from .constant import constant
from .errors import SpecError
from .mesh import Axes, check_axes, coordinates, ranks_of, size_of, text_of
from .spec import ELLIPSIS, Atom, Spec, parse_pair
from .steps import Step, one_step

__all__ = ["Move", "Side", "adjoint", "move", "reads"]

Ranges = shards.Ranges


class Side(NamedTuple):
    """The dimension that is cut or joined.

    dim: of the view in which composite dimensions are taken apart. size: of the piece that the group holds together.
    hold: for each member, the ranges of the piece that it holds, as they lie in its shard. part: those of them that it
    exchanges; `fewer` where several members hold one element and the first sends it. lengths: of the parts. layout:
    "even" where they are one range each, one after the other and equal, "tiles" where they are not equal, "ranges"
    where they are anything else. once: whether the parts hold each element of the piece exactly once.
    """

    dim: int
    size: int
    hold: tuple[Ranges, ...]
    part: tuple[Ranges, ...]
    fewer: bool
    lengths: tuple[int, ...]
    layout: str
    once: bool


class Move(NamedTuple):
    """What one rank does.

    kind: "none", "slice", "place in zeros" or a collective. axes: of the group, of `members` ranks, in which this one
    is `me`. source: the dimension that loses the axes; target: the one that gains them. before, after: for each
    composite dimension concerned, its index and its local factors.
    """

    kind: str
    axes: tuple[str, ...] = ()
    members: int = 1
    me: int = 0
    source: Side | None = None
    target: Side | None = None
    before: tuple[tuple[int, tuple[int, ...]], ...] = ()
    after: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Planned(NamedTuple):
    """A move, its adjoint, and the local size of each dimension of the tensor where the sizes say it (else -1)."""

    move: Move
    adjoint: Move
    local: tuple[int, ...]


NOTHING = Move("none")
_BACKWARDS = {
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "slice": "place in zeros",
    "place in zeros": "slice",
}


def adjoint(m: Move) -> Move:
    """The move of the gradient: what was sent comes back, and what was held by several is summed."""
    kind = _BACKWARDS.get(m.kind, m.kind)
    return m._replace(kind=kind, source=m.target, target=m.source, before=m.after, after=m.before)


@constant
def reads(text: str, axes: Axes, sizes: tuple[tuple[str, int], ...], ndim: int) -> tuple[int, ...]:
    """The dimensions of the tensor whose own size the move needs, since it is whole and was not given."""
    left, right = parse_pair(text)
    check_axes(axes, left)
    check_axes(axes, right)
    step = one_step(text, axes)
    given = shards.complete(dict(sizes), text)
    named = left.named
    if ndim < len(named) or (ndim > len(named) and len(named) == len(left.dims)):
        least = "at least " if len(named) < len(left.dims) else ""
        many = f"{ndim} dimension{'s' * (ndim != 1)}"
        what = f"x does not fit its spec: it has {many}, and the spec {least}{len(named)}"
        raise SpecError(what, text, mesh=text_of(axes, left, right))
    shards.check(left, given, axes)
    if step is None:
        return ()
    moved = {left.atoms[i].name for i in (step.source, step.target) if i >= 0}
    dims = shards.dims_of(left, range(ndim))
    needed = moved | ({"H", "K"} if any(atom.need for atom in right.atoms) else set())
    return tuple(
        at
        for at, dim in zip(dims, named, strict=True)
        if {a.name for a in dim} & needed and any(a.name not in given for a in dim)
    )


@constant
def move(
    text: str,
    axes: Axes,
    rank: int,
    sizes: tuple[tuple[str, int], ...],
    ndim: int,
    read: tuple[tuple[int, int], ...],
    needed: tuple[Ranges, ...] | None = None,
) -> Planned:
    """One rank's move. sizes: global, by letter. read: (dimension, local size) of those that `reads` names.

    needed: of an all-gather, which ranges of the result each member of the group wants, instead of all.
    Raises `SpecError`: the same on every rank, unless the rank's own tensor is what does not fit.
    """
    left, right = parse_pair(text)
    step = one_step(text, axes)
    at = coordinates(axes, rank)
    named = left.named
    dims = shards.dims_of(left, range(ndim))
    known = shards.complete(dict(sizes), text)
    for dim, atoms in zip(dims, named, strict=True):
        if dim in dict(read):
            known = _factor(left, atoms, dict(read)[dim], known, axes, at)
    shards.check(left, known, axes)
    shards.check(right, known, axes)
    local = [-1] * ndim
    for dim, atoms in zip(dims, named, strict=True):
        if all(atom.name in known for atom in atoms):
            local[dim] = math.prod(shards.local(atom, known, axes, at) for atom in atoms)
    if step is None or math.prod(size_of(axes, axis) for axis in step.axes) == 1:
        return Planned(NOTHING, NOTHING, tuple(local))
    found = _move(left, right, step, known, axes, rank, dims)
    if needed is not None and found.kind == "all-gather":
        found = _selective(found, needed)
    return Planned(found, adjoint(found), tuple(local))


def _factor(
    spec: Spec, dim: tuple[Atom, ...], n: int, sizes: dict[str, int], axes: Axes, at: Mapping[str, int]
) -> dict[str, int]:
    """The sizes with the one letter of a dimension that is unknown, from the tensor's own size."""
    unknown = [atom.name for atom in dim if atom.name not in sizes]
    span = (dim[0].span[0], dim[-1].span[1])
    facts = {"mesh": text_of(axes, spec), "known": shards.known(sizes)}
    if len(unknown) > 1:
        what = f"no size for {' and '.join(unknown)}, factors of a dimension of {n}"
        raise SpecError(what, spec.text, span, **facts, fix=f"pass {unknown[0]}=...")
    if not unknown:
        return sizes
    known = [atom for atom in dim if atom.name in sizes]
    empty = [atom for atom in known if _smallest(atom, sizes, axes) == 0]
    if empty:
        what = f"no size for {unknown[0]}: some rank holds no {empty[0].name}, and cannot tell it from its shard"
        raise SpecError(what, spec.text, span, **facts, fix=f"pass {unknown[0]}=...")
    product = math.prod(shards.local(atom, sizes, axes, at) for atom in known)
    if n % product:
        words = " ".join(f"{atom.name}={shards.local(atom, sizes, axes, at)}" for atom in known)
        what = f"({' '.join(a.name for a in dim)}) is {n} here, which does not factor: {words} does not divide it"
        fix = f"another {known[0].name}, or pass {unknown[0]}=... and reshape x"
        raise SpecError(what, spec.text, span, **facts, fix=fix)
    return shards.complete({**sizes, unknown[0]: n // product}, spec.text)


def _smallest(atom: Atom, sizes: Mapping[str, int], axes: Axes) -> int:
    """The fewest of a letter that any rank holds."""
    ranks = math.prod(size_of(axes, axis) for axis in atom.axes)
    return sizes["H" if atom.need else atom.name] // ranks


def _move(
    left: Spec, right: Spec, step: Step, sizes: Mapping[str, int], axes: Axes, rank: int, dims: Sequence[int]
) -> Move:
    ranks = ranks_of(axes, step.axes, rank)
    places = [coordinates(axes, r) for r in ranks]
    me = ranks.index(rank)
    moved = [i for i in (step.source, step.target) if i >= 0]
    # The view: composite dimensions that something happens to are taken apart, the others left whole.
    before: list[tuple[int, tuple[int, ...]]] = []
    after: list[tuple[int, tuple[int, ...]]] = []
    where: dict[int, int] = {}  # atom -> dimension of the view
    count, shift = 0, 0
    named = [(a, b) for a, b in zip(left.dims, right.dims, strict=True)]
    index = iter(dims)
    for atoms, others in named:
        if atoms[0].name == ELLIPSIS:
            count += 1
            continue
        dim = next(index)
        where |= {count + i: dim + shift for i in range(len(atoms))}
        if len(atoms) > 1 and any(count <= i < count + len(atoms) for i in moved):
            where |= {count + i: dim + shift + i for i in range(len(atoms))}
            shift += len(atoms) - 1
            before.append((dim, tuple(shards.local(atom, sizes, axes, places[me]) for atom in atoms)))
            after.append((dim, tuple(shards.local(atom, sizes, axes, places[me]) for atom in others)))
        count += len(atoms)

    def side(spec: Spec, i: int, first_holder: bool) -> Side | None:
        if i < 0:
            return None
        atom = spec.atoms[i]
        outer = len(atom.axes) - len(step.axes)
        hold = tuple(shards.part(atom, sizes, axes, place, outer, len(atom.axes)) for place in places)
        size = shards.length(shards.part(atom, sizes, axes, places[me], 0, outer)) if outer else sizes[atom.name]
        meant = shards.first_holders(hold) if first_holder and atom.need else hold
        lengths = tuple(map(shards.length, meant))
        return Side(where[i], size, hold, meant, meant != hold, lengths, _layout(meant, size), _once(meant, size))

    source = side(left, step.source, True)
    target = side(right, step.target, False)
    axes_here = tuple(axis for axis in step.axes if axis in dict(axes))  # those that the mesh lacks split nothing
    return Move(step.kind, axes_here, len(ranks), me, source, target, tuple(before), tuple(after))


def _selective(gather: Move, needed: tuple[Ranges, ...]) -> Move:
    """A gather of which each member wants some ranges: an all-to-all within the dimension, whose gradient is summed
    where several want the same. Where nobody wants anything of another, a slice."""
    side, me = gather.source, gather.me
    assert side is not None  # of a gather
    hold = side.hold
    if all(shards.length(_both(hold[i], needed[i])) == shards.length(needed[i]) for i in range(gather.members)):
        mine = shards.within(hold[me], needed[me])
        kept = Side(side.dim, shards.length(hold[me]), (mine,) * len(hold), (mine,) * len(hold), False, (), "", True)
        return gather._replace(kind="slice", source=None, target=kept)
    sends = tuple(shards.within(hold[me], _both(hold[me], wanted)) for wanted in needed)
    receives = tuple(shards.within(needed[me], _both(held, needed[me])) for held in hold)
    target, source = (
        Side(side.dim, size, parts, parts, False, tuple(map(shards.length, parts)), _layout(parts, size),
             _once(parts, size))
        for parts, size in ((sends, shards.length(hold[me])), (receives, shards.length(needed[me])))
    )  # fmt: skip
    return gather._replace(kind="all-to-all", source=source, target=target)


def _both(hold: Ranges, wanted: Ranges) -> Ranges:
    """What is in both, as it lies in the first."""
    found = ((max(a, c), min(b, d)) for a, b in hold for c, d in wanted)
    return tuple((a, b) for a, b in found if a < b)


def _layout(parts: Sequence[Ranges], size: int) -> str:
    """How the members' parts lie in the piece: see `Side`."""
    at = 0
    for ranges in parts:
        if len(ranges) > 1 or (ranges and ranges[0][0] != at):
            return "ranges"
        at += shards.length(ranges)
    if at != size:
        return "ranges"
    return "even" if len({shards.length(ranges) for ranges in parts}) == 1 else "tiles"


def _once(parts: Sequence[Ranges], size: int) -> bool:
    """Whether ranges cover a piece without overlap."""
    at = 0
    for a, b in sorted(r for ranges in parts for r in ranges):
        if a != at:
            return False
        at = b
    return at == size
