"""Moves carried out: packed into one flat buffer, exchanged, unpacked.

Gradients of `K@H` are summed and, on a rank that shares heads, set among zeros: one copy more than `packing` says.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import shards
from .errors import SpecError
from .mesh import Mesh
from .moves import Move, Side
from .packing import Package, apart, package, packed, together, total, unpacked
from .trace import copied
from .transport import Call, Work, summable

__all__ = ["Started", "finish", "local", "start"]


class Started(NamedTuple):
    """An exchange under way, with what unpacks it. lent: the buffer, if it is to be given back."""

    work: Work
    moves: Sequence[Move]
    packages: Sequence[Package]
    call: Call
    mesh: Mesh
    lent: Tensor | None


def start(xs: Sequence[Tensor], moves: Sequence[Move], call: Call, mesh: Mesh) -> Started:
    """Pack and launch. Moves of one kind over the same axes, of tensors of one dtype, make one collective."""
    first, transport = moves[0], mesh.transport
    assert transport is not None
    if first.kind in ("all-reduce", "reduce-scatter") and not summable(xs[0].dtype):
        dtype = str(xs[0].dtype).removeprefix("torch.")
        raise SpecError(f"a pending sum of {dtype} cannot be added up", call.text, fix="x.int(), or x.float()")
    packages = [package(x, move) for x, move in zip(xs, moves, strict=True)]
    if not torch.compiler.is_compiling():
        call = call._replace(rest=tuple(n for each in packages for n in each.rest))
    spare = None if torch.compiler.is_compiling() or xs[0].device.type != "cpu" else transport.spare
    flat = packed(packages, moves, xs[0].new_empty if spare is None else functools.partial(spare.take, xs[0]))
    # Elements to and from each member.
    sent, received = total([each.to for each in packages]), total([each.of for each in packages])
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
    lent = None if spare is None or any(not copied(x, flat) for x in xs) else flat
    return Started(work, moves, packages, call, mesh, lent)


def finish(started: Started) -> tuple[Tensor, ...]:
    """Wait and unpack."""
    work, moves, packages, call, mesh, lent = started
    flat = work.wait()
    if lent is not None and mesh.transport is not None and mesh.transport.spare is not None:
        mesh.transport.spare.give(lent)
    ys = []
    for y, move in zip(unpacked(flat, packages, moves), moves, strict=True):
        if move.target is not None and move.target.fewer:
            y = _among_zeros(y, move.target, move.me)
        y = together(y, move.after)  # which copies too, where the dimension was joined as a view
        # For autograd no view of the buffer, so that y may be written to.
        ys.append(cast(Tensor, torch.ops.aten._unsafe_view(y, y.shape)))
    if mesh.trace is not None and not torch.compiler.is_compiling():
        mesh.trace.waited(mesh, call, moves[0], flat, ys)
    return tuple(ys)


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
        y = shards.select(apart(x, move.before), move.target.dim, move.target.hold[move.me])
        return together(y, move.after)
    if move.kind == "place in zeros":
        side = move.source
        assert side is not None
        y = apart(x, move.before)
        hold, part = side.hold[move.me], side.part[move.me]  # of what several ranks hold, the first one gives it
        found = [
            (a, y.narrow(side.dim, c, d - c)) for (a, _), (c, d) in zip(part, shards.within(hold, part), strict=True)
        ]
        pieces, end = [y.narrow(side.dim, 0, 0)], 0  # a rank that holds nothing is part of the graph too
        for a, piece in sorted(found, key=lambda pair: pair[0]):
            pieces += [_zeros(y, side.dim, a - end), piece]
            end = a + piece.shape[side.dim]
        return together(torch.cat([*pieces, _zeros(y, side.dim, side.size - end)], side.dim), move.after)
    return x


def _zeros(x: Tensor, dim: int, n: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = n
    return x.new_zeros(shape)
