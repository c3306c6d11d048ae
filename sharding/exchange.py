"""Moves carried out: packed into one flat buffer, exchanged, unpacked.

At most one copy before the exchange and one after it, and none where blocks already lie one after the other: where
nothing stands before the dimension that is cut or joined. Gradients of `K@H` are summed and, on a rank that shares
heads, set among zeros, which is a copy more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import shards
from .errors import SpecError
from .mesh import Mesh
from .moves import Move, Side
from .transport import Call, Work, summable

__all__ = ["Started", "finish", "local", "start"]


class Started(NamedTuple):
    """An exchange under way, with what unpacks it. shapes: of each tensor's own block."""

    work: Work
    moves: Sequence[Move]
    shapes: Sequence[Sequence[int]]
    call: Call
    mesh: Mesh


def start(xs: Sequence[Tensor], moves: Sequence[Move], call: Call, mesh: Mesh) -> Started:
    """Pack and launch. Moves of one kind over the same axes, of tensors of one dtype, make one collective."""
    first, transport = moves[0], mesh.transport
    assert transport is not None
    if first.kind in ("all-reduce", "reduce-scatter") and not summable(xs[0].dtype):
        dtype = str(xs[0].dtype).removeprefix("torch.")
        raise SpecError(f"a pending sum of {dtype} cannot be added up", call.text, fix="x.int(), or x.float()")
    packages = [_package(x, move) for x, move in zip(xs, moves, strict=True)]
    if not torch.compiler.is_compiling():
        call = call._replace(rest=tuple(n for package in packages for n in package.rest))
    # Elements to and from each member, of each tensor.
    to = [package.to for package in packages]
    of = [package.of for package in packages]
    flat = _packed(packages, to)
    sent, received = _total(to), _total(of)
    if first.kind == "all-gather":
        work = transport.all_gather(flat, received, first.axes, call)
    elif first.kind == "reduce-scatter":
        work = transport.reduce_scatter(flat, sent, first.axes, call)
    elif first.kind == "all-to-all":
        work = transport.all_to_all(flat, sent, received, first.axes, call)
    else:
        work = transport.all_reduce(flat, first.axes, call)
    if mesh.trace is not None and not torch.compiler.is_compiling():
        mesh.trace.launched(mesh, call, first, sent, received, xs, flat)
    return Started(work, moves, [package.shape for package in packages], call, mesh)


class Package(NamedTuple):
    """One tensor on its way out. x: with composite dimensions taken apart, and only what is exchanged of it. side: the
    dimension that is cut, if one is. shape: of the block that each member gets, or that this one brings. to, of:
    elements for and from each member. rest: the sizes of the dimensions that stay as they are."""

    x: Tensor
    side: Side | None
    shape: list[int]
    to: list[int]
    of: list[int]
    rest: tuple[int, ...]


def _package(x: Tensor, move: Move) -> Package:
    if x.dtype.is_complex:
        x = x.resolve_conj()
    source, target = move.source, move.target
    x = _apart(x, move.before)
    ends = [side.dim for side in (source, target) if side is not None]
    rest = tuple(n for dim, n in enumerate(x.shape) if dim not in ends)
    if source is not None and source.fewer:
        x = shards.select(x, source.dim, shards.within(source.hold[move.me], source.part[move.me]))
    shape = list(x.shape)
    if target is not None:
        shape[target.dim] = target.lengths[move.me]
    to = [math.prod(shape)] * move.members if target is None else _counts(list(x.shape), target)
    of = [math.prod(shape)] * move.members if source is None else _counts(shape, source)
    return Package(x, target, shape, to, of, rest)


def _counts(shape: list[int], side: Side) -> list[int]:
    """Elements of each member's block of this dimension."""
    rest = math.prod([n for dim, n in enumerate(shape) if dim != side.dim])
    return [n * rest for n in side.lengths]


def _total(counts: Sequence[list[int]]) -> list[int]:
    """Of all tensors together, for each member."""
    return counts[0] if len(counts) == 1 else [sum(of_member) for of_member in zip(*counts, strict=True)]


def finish(started: Started) -> tuple[Tensor, ...]:
    """Wait and unpack."""
    work, moves, shapes, call, mesh = started
    flat = work.wait()
    ys = []
    for i, move in enumerate(moves):
        source, target = move.source, move.target
        y = _unpacked(flat, moves, shapes, i) if source is not None else _whole(flat, shapes, i)
        if target is not None and target.fewer:
            y = _among_zeros(y, target, move.me)
        y = _together(y, move.after)  # which copies too, where the dimension was joined as a view
        # For autograd no view of the buffer, so that y may be written to.
        ys.append(cast(Tensor, torch.ops.aten._unsafe_view(y, y.shape)))
    if mesh.trace is not None and not torch.compiler.is_compiling():
        mesh.trace.waited(mesh, call, moves[0], flat, ys)
    return tuple(ys)


def _apart(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    """Composite dimensions as their factors; a view."""
    for dim, factors in reversed(dims):
        x = x.unflatten(dim, factors)
    return x


def _together(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    for dim, factors in dims:
        x = x.flatten(dim, dim + len(factors) - 1)
    return x


def _packed(packages: Sequence[Package], to: Sequence[list[int]]) -> Tensor:
    """A flat buffer: for each member the blocks of every tensor, one after the other."""
    first, side, *_ = packages[0]
    if side is None:  # everybody gets the whole
        pieces = [x.contiguous().view(-1) for x, *_ in packages]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if len(packages) == 1:
        if side.layout == "even":
            each = (len(side.part), side.lengths[0])
            return cast(Tensor, first.unflatten(side.dim, each).movedim(side.dim, 0).contiguous().view(-1))
        if side.layout == "tiles" and math.prod(first.shape[: side.dim]) == 1 and first.is_contiguous():
            return first.view(-1)
    flat = first.new_empty(sum(map(sum, to)))
    rows = [0, *itertools.accumulate(_total(to))]  # where each member's blocks begin
    within = 0  # where this tensor's does, within those of a member; uneven ones are counted member by member
    before = [0] * len(to[0])
    for (x, side, *_), counts in zip(packages, to, strict=True):
        assert side is not None
        if all(package.side is not None and package.side.layout == "even" for package in packages):
            members = len(side.part)
            block = [*x.shape[: side.dim], side.lengths[0], *x.shape[side.dim + 1 :]]
            blocks = flat.view(members, -1).narrow(1, within, counts[0]).view(members, *block)
            blocks.copy_(x.unflatten(side.dim, (members, side.lengths[0])).movedim(side.dim, 0))
            within += counts[0]
            continue
        for member, ranges in enumerate(side.part):
            shape = list(x.shape)
            shape[side.dim] = side.lengths[member]
            block_of = flat.narrow(0, rows[member] + before[member], counts[member]).view(shape)
            end = 0
            for a, b in ranges:
                block_of.narrow(side.dim, end, b - a).copy_(x.narrow(side.dim, a, b - a))
                end += b - a
            before[member] += counts[member]
    return flat


def _whole(flat: Tensor, shapes: Sequence[Sequence[int]], i: int) -> Tensor:
    """Of tensors that come as they are, one."""
    sizes = [math.prod(shape) for shape in shapes]
    return flat.narrow(0, sum(sizes[:i]), sizes[i]).view(list(shapes[i]))


def _unpacked(flat: Tensor, moves: Sequence[Move], shapes: Sequence[Sequence[int]], i: int) -> Tensor:
    """Of the tensors received, one: its dimension joined from each member's block; ranges that several sent are
    summed."""
    side, shape = moves[i].source, list(shapes[i])
    assert side is not None
    counts = [_counts(list(s), m.source) for s, m in zip(shapes, moves, strict=True) if m.source is not None]
    members = len(side.part)
    if all(move.source is not None and move.source.layout == "even" for move in moves):
        shape[side.dim] = side.lengths[0]
        mine = flat.view(members, -1)
        if len(moves) > 1:
            mine = mine.narrow(1, sum(of[0] for of in counts[:i]), counts[i][0])
        return mine.view([members, *shape]).movedim(0, side.dim).flatten(side.dim, side.dim + 1)
    blocks, at = [], 0
    for member in range(members):
        shape[side.dim] = side.lengths[member]
        start = at + sum(of[member] for of in counts[:i])
        blocks.append(flat.narrow(0, start, counts[i][member]).view(shape))
        at += sum(of[member] for of in counts)
    shape[side.dim] = side.size
    if side.layout != "ranges":
        if len(moves) == 1 and math.prod(shape[: side.dim]) == 1:
            return flat.view(shape)
        return torch.cat(blocks, side.dim)
    if side.once:
        out = flat.new_empty(shape)
    else:  # several are summed, half precision in fp32
        half = flat.dtype in (torch.float16, torch.bfloat16)
        out = flat.new_zeros(shape, dtype=torch.float32 if half else flat.dtype)
    for block, ranges in zip(blocks, side.part, strict=True):
        at = 0
        for a, b in ranges:
            here, piece = out.narrow(side.dim, a, b - a), block.narrow(side.dim, at, b - a)
            here.copy_(piece) if side.once else here.add_(piece)
            at += b - a
    return out.to(flat.dtype)


def _among_zeros(y: Tensor, side: Side, me: int) -> Tensor:
    """A shard of all that this rank holds, zero where nothing was exchanged."""
    shape = list(y.shape)
    shape[side.dim] = shards.length(side.hold[me])
    out, at = y.new_zeros(shape), 0
    for a, b in shards.within(side.hold[me], side.part[me]):
        out.narrow(side.dim, a, b - a).copy_(y.narrow(side.dim, at, b - a))
        at += b - a
    return out


def local(x: Tensor, move: Move) -> Tensor:
    """What needs no peer: nothing, a slice, or a shard among zeros. Plain operations differentiate themselves."""
    if move.kind == "slice":
        assert move.target is not None
        y = shards.select(_apart(x, move.before), move.target.dim, move.target.hold[move.me])
        return _together(y, move.after)
    if move.kind == "place in zeros":
        side = move.source
        assert side is not None
        y = _apart(x, move.before)
        hold, part = side.hold[move.me], side.part[move.me]  # of what several ranks hold, the first one gives it
        found = [
            (a, y.narrow(side.dim, c, d - c)) for (a, _), (c, d) in zip(part, shards.within(hold, part), strict=True)
        ]
        pieces, end = [y.narrow(side.dim, 0, 0)], 0  # a rank that holds nothing is part of the graph too
        for a, piece in sorted(found, key=lambda pair: pair[0]):
            pieces += [_zeros(y, side.dim, a - end), piece]
            end = a + piece.shape[side.dim]
        return _together(torch.cat([*pieces, _zeros(y, side.dim, side.size - end)], side.dim), move.after)
    return x


def _zeros(x: Tensor, dim: int, n: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = n
    return x.new_zeros(shape)
