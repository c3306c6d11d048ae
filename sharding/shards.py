"""Who holds what: the ranges of each letter that a rank holds, balanced, in head-tail order, or as its heads need."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import SpecError
from .mesh import Axes, Mesh, check_axes, size_of, text_of
from .spec import ELLIPSIS, Atom, Spec

__all__ = [
    "Piece", "Ranges", "balanced", "bind", "check", "complete", "dims_of", "first_holders", "held", "known", "length",
    "local", "local_shape", "part", "pieces", "ranges_of", "select", "size", "slices", "whole", "within",
]  # fmt: skip

# (start, stop) one after the other, as they lie in the shard
Ranges = tuple[tuple[int, int], ...]
# (where in the global tensor, where in the shard, how long)
Piece = tuple[int, int, int]


def balanced(size: int, parts: int, index: int) -> tuple[int, int]:
    """The range of one of `parts` balanced pieces: the first `size % parts` of them hold one more."""
    each, more = divmod(size, parts)
    start = index * each + min(index, more)
    return start, start + each + (index < more)


def ranges_of(index: Any) -> Ranges:
    """Of one dimension, from its index as `slices` gives it."""
    if isinstance(index, slice):
        return ((index.start, index.stop),) if index.start < index.stop else ()
    where = index.flatten().tolist()
    starts = [i for i, n in enumerate(where) if not i or n != where[i - 1] + 1]
    return tuple((where[a], where[b - 1] + 1) for a, b in itertools.pairwise([*starts, len(where)]))


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _cut(ranges: Ranges, start: int, stop: int) -> Ranges:
    """What lies at positions start to stop of ranges laid end to end."""
    found = []
    for a, b in ranges:
        first, last = max(start, 0), min(stop, b - a)
        if first < last:
            found.append((a + first, a + last))
        start, stop = start - (b - a), stop - (b - a)
    return tuple(found)


def complete(sizes: Mapping[str, int], text: str = "") -> dict[str, int]:
    """The sizes with the third of H, K, G (H = K G) where two are given. Raises `SpecError` where they disagree."""
    found = {letter: whole(letter, size, text) for letter, size in sizes.items()}
    heads, groups, per = (found.get(letter) for letter in "HKG")
    if heads is not None and groups is not None and per is not None and heads != groups * per:
        fix = f"H={groups * per}, or two of the three"
        raise SpecError(f"H={heads}, K={groups} and G={per} disagree: H is K x G = {groups * per}", text, fix=fix)
    for letter, other in (("K", groups), ("G", per)):
        if heads is not None and other and heads % other:
            what = f"H={heads} and {letter}={other} disagree: H is K x G, and {other} does not divide {heads}"
            raise SpecError(what, text, fix=f"H={heads - heads % other or other}, or another {letter}")
    if groups is not None and per is not None:
        found["H"] = groups * per
    elif heads is not None and groups is not None:
        found["G"] = heads // groups if groups else 1  # of no heads, any
    elif heads is not None and per:
        found["K"] = heads // per
    return found


def whole(letter: str, size: Any, text: str = "") -> int:
    """A size that somebody gave, as an int. Raises `SpecError` for what is no whole number of at least 0."""
    try:
        found = -1 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        found = -1
    if not 0 <= found < 2**63:
        at = re.search(rf"(?<!\w){re.escape(letter)}(?!\w)", text)
        span = at.span() if at else None
        what = f"{letter}={size!r}: a size is a whole number, 0 or more"
        raise SpecError(what, text, span, fix=f"{letter}=..., its global size")
    return found


def known(sizes: Mapping[str, int]) -> str:
    """`B=2 S=97`, for errors."""
    return " ".join(f"{letter}={size}" for letter, size in sizes.items())


def size(spec: Spec, atom: Atom, letter: str, sizes: Mapping[str, int], axes: Axes, what: str = "") -> int:
    """The size of a letter that an atom asks for. Raises `SpecError`, which names `what`, where it is missing."""
    if letter not in sizes:
        why = "" if letter == atom.name else f", which {atom.name}@{atom.need} needs"
        raise SpecError(
            what + f"no size for {letter}{why}", spec.text, atom.span, mesh=text_of(axes, spec), known=known(sizes),
            fix=f"pass {letter}=..., its global size",
        )  # fmt: skip
    return sizes[letter]


def check(spec: Spec, sizes: Mapping[str, int], axes: Axes) -> None:
    """Raise `SpecError` unless every sharded letter has a size that its order allows."""
    check_axes(axes, spec)
    for atom in spec.atoms:
        if not atom.axes:
            continue
        for letter in (atom.name, atom.need, "G" if atom.need else None):
            if letter:
                size(spec, atom, letter, sizes, axes)
        chunks = 2 * size_of(axes, atom.axes[0])
        if atom.zigzag and chunks > 2 and sizes[atom.name] % chunks:
            n, axis = sizes[atom.name], atom.axes[0]
            what = f"{atom.name}={n} does not divide over {axis}={chunks // 2} in head-tail order"
            fix = f'pad {atom.name} to {-(-n // chunks) * chunks}, or drop ":zigzag" (without it shards may be uneven)'
            raise SpecError(
                f"{what} (needs a multiple of {chunks})", spec.text, atom.span, mesh=text_of(axes, spec), fix=fix
            )


def held(atom: Atom, sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int]) -> Ranges:
    """The global ranges of a letter that lie at these coordinates."""
    return part(atom, sizes, axes, at, 0, len(atom.axes))


def part(atom: Atom, sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int], first: int, last: int) -> Ranges:
    """The ranges that axes `first` to `last` of an atom leave, counted within the piece that the axes before leave."""
    if atom.need is not None:
        (start, _), (a, b) = (_needed(atom, sizes, axes, at, n) for n in (first, last))
        return ((a - start, b - start),) if b > a else ()
    total = sizes[atom.name]
    for axis in atom.axes[:first]:
        a, b = balanced(total, size_of(axes, axis), at.get(axis, 0))
        total = b - a
    ranges: Ranges = ((0, total),)
    for i, axis in enumerate(atom.axes[first:last], first):
        parts, index = size_of(axes, axis), at.get(axis, 0)
        if atom.zigzag and i == 0 and parts > 1:
            chunk = total // (2 * parts)
            ranges = _joined([(n * chunk, (n + 1) * chunk) for n in (index, 2 * parts - 1 - index)])
        else:
            ranges = _cut(ranges, *balanced(length(ranges), parts, index))
    return tuple((a, b) for a, b in ranges if b > a)


def _needed(atom: Atom, sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int], upto: int) -> tuple[int, int]:
    """The key/value heads that the query heads at these coordinates read."""
    start, stop = 0, sizes["H"]
    for axis in atom.axes[:upto]:
        a, b = balanced(stop - start, size_of(axes, axis), at.get(axis, 0))
        start, stop = start + a, start + b
    per = sizes["G"]
    return (start // per, -(-stop // per)) if stop > start else (start // max(per, 1), start // max(per, 1))


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Two ranges as one where the second goes on from the first."""
    (a, b), (c, d) = ranges
    return ((a, d),) if b == c else ((a, b), (c, d))


def local(atom: Atom, sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int]) -> int:
    """How many of a letter lie at these coordinates."""
    return length(held(atom, sizes, axes, at))


def local_shape(spec: Spec, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """`Spec.local`."""
    sizes, at = _ready(spec, sizes, mesh, rank)
    for atom in (atom for dim in spec.named for atom in dim):
        size(spec, atom, atom.name, sizes, mesh.axes)
    return tuple(math.prod(local(atom, sizes, mesh.axes, at) for atom in dim) for dim in spec.named)


def slices(spec: Spec, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """`Spec.slices`."""
    sizes, at = _ready(spec, sizes, mesh, rank)
    found: list[Any] = [
        ... if dim[0].name == ELLIPSIS else _indices(spec, dim, sizes, mesh.axes, at) for dim in spec.dims
    ]
    if all(index is ... or len(index) <= 1 for index in found):
        return tuple(index if index is ... else slice(*index[0]) if index else slice(0, 0) for index in found)
    if ... in found[1:-1]:
        what = f'"{spec}" holds several ranges of a dimension around "...", which no index can say'
        raise SpecError(what, spec.text, fix='in place of "...", a letter for each dimension')
    dims = len(found) - (... in found)
    tensors: list[Any] = []
    for index in found:
        if index is ...:
            tensors.append(index)
            continue
        i = sum(t is not ... for t in tensors)
        flat = torch.cat([torch.arange(a, b) for a, b in index] or [torch.arange(0)])
        tensors.append(flat.reshape([-1 if d == i else 1 for d in range(dims)]))
    return tuple(tensors)


def _ready(spec: Spec, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    if not 0 <= rank < mesh.size:
        raise ValueError(f"rank={rank}: ranks are 0 to {mesh.size - 1}     mesh: {mesh}")
    sizes = complete(sizes, spec.text)
    check(spec, sizes, mesh.axes)
    return sizes, mesh.coordinates(rank)


def pieces(dim: Sequence[Atom], parts: Sequence[tuple[Ranges, Ranges] | None], sizes: Mapping[str, int]) -> list[Piece]:
    """Where the pieces of a dimension lie. Those of a composite one are those of its factors, multiplied out.

    parts: for each factor what the shard holds and which of that is meant; None where it holds and means all.
    """
    found = [(0, 0, 1)]
    for atom, part in zip(dim, parts, strict=True):
        n = sizes[atom.name]
        if part is None or part == (((0, n),), ((0, n),)):
            found = [(g * n, at * n, count * n) for g, at, count in found]
            continue
        hold, meant = part
        inner = [(a, c, b - a) for (a, b), (c, _) in zip(meant, within(hold, meant), strict=True)]
        end = length(hold)
        found = [
            ((g + i) * n + a, (at + i) * end + c, count)
            for g, at, outer in found
            for i in range(outer)
            for a, c, count in inner
        ]
    return found


def within(hold: Ranges, meant: Ranges) -> Ranges:
    """Ranges of a piece, as positions in the shard that holds these ranges of it."""
    found, start = [], 0
    for a, b in hold:
        found += [(start + max(a, c) - a, start + min(b, d) - a) for c, d in meant if max(a, c) < min(b, d)]
        start += b - a
    return tuple(found)


def first_holders(hold: Sequence[Ranges]) -> tuple[Ranges, ...]:
    """Of the ranges that each member holds, those that no member before holds."""
    found: list[Ranges] = []
    taken: list[tuple[int, int]] = []
    for ranges in hold:
        for a, b in taken:
            ranges = tuple((c, d) for s, e in ranges for c, d in ((s, min(e, a)), (max(s, b), e)) if c < d)
        found.append(ranges)
        taken += ranges
    return tuple(found)


def _indices(
    spec: Spec, dim: tuple[Atom, ...], sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int]
) -> list[tuple[int, int]]:
    """The global ranges of a whole dimension."""
    for atom in dim:
        size(spec, atom, atom.name, sizes, axes)
    mine = [held(atom, sizes, axes, at) if atom.axes else None for atom in dim]
    parts = [None if ranges is None else (ranges, ranges) for ranges in mine]
    return [(g, g + count) for g, _, count in pieces(dim, parts, sizes)]


def bind(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int], axes: Axes, what: str) -> dict[str, int]:
    """The sizes with what a global tensor of this shape adds. Raises `SpecError` where the two do not fit.

    what: the tensor's name, for errors.
    """
    sizes = complete(sizes, spec.text)
    named = spec.named
    numbers = " ".join(str(int(n)) for n in shape) or "a scalar"
    if len(shape) < len(named) or (len(shape) > len(named) and len(named) == len(spec.dims)):
        raise SpecError(
            f"{what} has {len(shape)} dimensions ({numbers}), its spec {len(named)}",
            spec.text,
            mesh=text_of(axes, spec),
        )
    for dim, n in zip(named, dims_of(spec, shape), strict=True):
        unknown = [atom.name for atom in dim if atom.name not in sizes]
        product = math.prod(sizes[atom.name] for atom in dim if atom.name in sizes)
        span = (dim[0].span[0], dim[-1].span[1])
        word = " ".join(atom.name for atom in dim)
        if not unknown and product != n:
            other = f"{word}={n}" if len(dim) == 1 else f"other sizes of {word}"
            raise SpecError(
                f"{what} does not fit its spec: {word} is {product}, but the tensor has {n} ({numbers})",
                spec.text, span, mesh=text_of(axes, spec), known=known(sizes),
                fix=f"{product} there, of all ranks together, or {other} everywhere else",
            )  # fmt: skip
        if len(unknown) == 1 and len(dim) > 1 and (product == 0 or n % product):
            raise SpecError(
                f"{what}: ({word}) is {n}, which does not factor: {product} does not divide it", spec.text, span,
                mesh=text_of(axes, spec), known=known(sizes), fix=f"pass {unknown[0]}=..., or another size",
            )  # fmt: skip
        if len(unknown) == 1:
            sizes = complete({**sizes, unknown[0]: n // product if len(dim) > 1 else int(n)}, spec.text)
    return dict(sizes)


def dims_of(spec: Spec, shape: Sequence[Any]) -> list[Any]:
    """What a sequence over a tensor's dimensions holds for the named ones: those of `...` are left out."""
    at = next((i for i, dim in enumerate(spec.dims) if dim[0].name == ELLIPSIS), len(spec.dims))
    after = len(spec.dims) - at - 1
    return [*shape[:at], *(shape[len(shape) - after :] if after > 0 else ())]


def select(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """These ranges of a dimension, end to end; a view where it is one range."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)
