"""One move carried out: packed into one flat buffer, exchanged, unpacked.

At most one copy before the exchange and one after it, and none where blocks already lie one after the other: where
nothing stands before the dimension that is cut or joined. Gradients of `K@H` are summed and, on a rank that shares
heads, set among zeros, which is a copy more.
"""

from __future__ import annotations

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
    """An exchange under way, with what unpacks it."""

    work: Work
    move: Move
    shape: Sequence[int]
    call: Call
    mesh: Mesh


def start(x: Tensor, move: Move, call: Call, mesh: Mesh) -> Started:
    """Pack and launch."""
    if move.kind in ("all-reduce", "reduce-scatter") and not summable(x.dtype):
        dtype = str(x.dtype).removeprefix("torch.")
        raise SpecError(f"a pending sum of {dtype} cannot be added up", call.text, fix="x.int(), or x.float()")
    if x.dtype.is_complex:
        x = x.resolve_conj()
    transport, source, target = mesh.transport, move.source, move.target
    assert transport is not None
    given, x = x, _apart(x, move.before)
    if not torch.compiler.is_compiling():
        ends = [side.dim for side in (source, target) if side is not None]
        call = call._replace(rest=tuple(n for dim, n in enumerate(x.shape) if dim not in ends))
    if source is not None and source.fewer:
        x = shards.select(x, source.dim, shards.within(source.hold[move.me], source.part[move.me]))
    shape = list(x.shape)
    flat = x.contiguous().view(-1) if target is None else _packed(x, target)
    if target is not None:
        shape[target.dim] = target.lengths[move.me]
    # Elements to and from each member.
    to = [math.prod(shape)] * move.members if target is None else _counts(list(x.shape), target)
    of = [math.prod(shape)] * move.members if source is None else _counts(shape, source)
    if move.kind == "all-gather":
        work = transport.all_gather(flat, of, move.axes, call)
    elif move.kind == "reduce-scatter":
        work = transport.reduce_scatter(flat, to, move.axes, call)
    elif move.kind == "all-to-all":
        work = transport.all_to_all(flat, to, of, move.axes, call)
    else:
        work = transport.all_reduce(flat, move.axes, call)
    if mesh.trace is not None and not torch.compiler.is_compiling():
        mesh.trace.launched(mesh, call, move, to, of, given, flat)
    return Started(work, move, shape, call, mesh)


def _counts(shape: list[int], side: Side) -> list[int]:
    """Elements of each member's block of this dimension."""
    rest = math.prod([n for dim, n in enumerate(shape) if dim != side.dim])
    return [n * rest for n in side.lengths]


def finish(started: Started) -> Tensor:
    """Wait and unpack."""
    work, move, shape, call, mesh = started
    flat = work.wait()
    source, target = move.source, move.target
    y = flat.view(shape) if source is None else _unpacked(flat, source, shape)
    if target is not None and target.fewer:
        y = _among_zeros(y, target, move.me)
    y = _together(y, move.after)  # which copies too, where the dimension was joined as a view
    # For autograd no view of the buffer, so that y may be written to.
    y = cast(Tensor, torch.ops.aten._unsafe_view(y, y.shape))
    if mesh.trace is not None and not torch.compiler.is_compiling():
        mesh.trace.waited(mesh, call, move, flat, y)
    return y


def _apart(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    """Composite dimensions as their factors; a view."""
    for dim, factors in reversed(dims):
        x = x.unflatten(dim, factors)
    return x


def _together(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    for dim, factors in dims:
        x = x.flatten(dim, dim + len(factors) - 1)
    return x


def _packed(x: Tensor, side: Side) -> Tensor:
    """A flat buffer of each member's ranges of a dimension, one after the other."""
    if side.layout == "even":
        each = (len(side.part), side.lengths[0])
        return cast(Tensor, x.unflatten(side.dim, each).movedim(side.dim, 0).contiguous().view(-1))
    if side.layout == "tiles" and math.prod(x.shape[: side.dim]) == 1 and x.is_contiguous():
        return x.view(-1)
    flat, at = x.new_empty(sum(_counts(list(x.shape), side))), 0
    for ranges, n in zip(side.part, side.lengths, strict=True):
        shape = list(x.shape)
        shape[side.dim] = n
        block = flat.narrow(0, at, math.prod(shape)).view(shape)
        at += math.prod(shape)
        end = 0
        for a, b in ranges:
            block.narrow(side.dim, end, b - a).copy_(x.narrow(side.dim, a, b - a))
            end += b - a
    return flat


def _unpacked(flat: Tensor, side: Side, shape: Sequence[int]) -> Tensor:
    """The dimension joined from each member's block; ranges that several sent are summed."""
    shape = list(shape)
    if side.layout == "even":
        shape[side.dim] = side.lengths[0]
        return flat.view([len(side.part), *shape]).movedim(0, side.dim).flatten(side.dim, side.dim + 1)
    blocks, at = [], 0
    for n in side.lengths:
        shape[side.dim] = n
        blocks.append(flat.narrow(0, at, math.prod(shape)).view(shape))
        at += math.prod(shape)
    shape[side.dim] = side.size
    if side.layout == "tiles":
        return flat.view(shape) if math.prod(shape[: side.dim]) == 1 else torch.cat(blocks, side.dim)
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
