"""Tensors as blocks of one flat buffer, and back.

The buffer has the blocks for (or from) each member of the group one after the other. Within those of a member stands
one tensor after the other, or, where several tensors have the same tokens and get all of them, one token after the
other with its part of each tensor: then what arrives is all tokens in order, and each tensor a view of it.

At most one copy before an exchange and one after it; none where blocks already lie one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import shards
from .moves import Move, Side
from .shards import Ranges

__all__ = ["Package", "Spare", "apart", "package", "packed", "together", "total", "unpacked"]


class Package(NamedTuple):
    """One tensor on its way. x: with composite dimensions taken apart, and only what is exchanged of it. shape: of the
    block for this rank itself. to, of: elements for and from each member. rest: the sizes of the dimensions that stay
    as they are."""

    x: Tensor
    shape: list[int]
    to: list[int]
    of: list[int]
    rest: tuple[int, ...]


def package(x: Tensor, move: Move) -> Package:
    if x.dtype.is_complex:
        x = x.resolve_conj()
    source, target = move.source, move.target
    x = apart(x, move.before)
    ends = [side.dim for side in (source, target) if side is not None]
    rest = tuple(n for dim, n in enumerate(x.shape) if dim not in ends)
    if source is not None and source.fewer:
        x = shards.select(x, source.dim, shards.within(source.hold[move.me], source.part[move.me]))
    shape = list(x.shape)
    if target is not None:
        shape[target.dim] = target.lengths[move.me]
    to = [math.prod(shape)] * move.members if target is None else _counts(list(x.shape), target)
    of = [math.prod(shape)] * move.members if source is None else _counts(shape, source)
    return Package(x, shape, to, of, rest)


def _counts(shape: list[int], side: Side) -> list[int]:
    """Elements of each member's block of this dimension."""
    rest = math.prod([n for dim, n in enumerate(shape) if dim != side.dim])
    return [n * rest for n in side.lengths]


def total(counts: Sequence[list[int]]) -> list[int]:
    """Of all tensors together, for each member."""
    return counts[0] if len(counts) == 1 else [sum(of_member) for of_member in zip(*counts, strict=True)]


def apart(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    """Composite dimensions as their factors; a view."""
    for dim, factors in reversed(dims):
        x = x.unflatten(dim, factors)
    return x


def together(x: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    for dim, factors in dims:
        x = x.flatten(dim, dim + len(factors) - 1)
    return x


class Spare:
    """Memory of exchanges that are over, for those to come: on a CPU, whose allocator gives large buffers back to the
    system, new memory costs more time than the copy into it. Of as many bytes as the two largest exchanges had.

    No tensor of inference mode, which training behind an evaluation could not write to."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    @torch.inference_mode(False)
    def take(self, like: Tensor, n: int) -> Tensor:
        """A buffer of n elements of the same dtype, on the same device."""
        for i, found in enumerate(self.kept):
            if found.dtype == like.dtype and found.numel() >= n:
                return self.kept.pop(i).narrow(0, 0, n)
        return like.new_empty(n)

    @torch.inference_mode(False)
    def give(self, flat: Tensor) -> None:
        """Nobody reads or writes it any more."""
        if flat.is_inference():
            return
        whole = flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
        self.kept = sorted([*self.kept, whole], key=lambda x: x.numel() * x.element_size())[-2:]


def packed(packages: Sequence[Package], moves: Sequence[Move], empty: Callable[[int], Tensor]) -> Tensor:
    """The buffer that leaves. empty: memory for it, of so many elements, where what there is does not do as it lies."""
    if _by_token(moves):
        return _packed_by_token(packages, moves, empty)
    first, side = packages[0].x, moves[0].target
    if side is None:  # everybody gets the whole
        pieces = [each.x.contiguous().view(-1) for each in packages]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if len(packages) == 1:
        if side.layout == "even":
            blocks = first.unflatten(side.dim, (len(side.part), side.lengths[0])).movedim(side.dim, 0)
            if blocks.is_contiguous():
                return cast(Tensor, blocks.view(-1))
            flat = empty(blocks.numel())
            flat.view(blocks.shape).copy_(blocks)
            return flat
        if side.layout == "tiles" and math.prod(first.shape[: side.dim]) == 1 and first.is_contiguous():
            return first.view(-1)
    to = [each.to for each in packages]
    flat = empty(sum(map(sum, to)))
    starts = [0, *itertools.accumulate(total(to))]  # where each member's blocks begin
    before = [0] * moves[0].members  # and where this tensor's does among them
    for (x, *_), move, counts in zip(packages, moves, to, strict=True):
        assert move.target is not None
        for member, count in enumerate(counts):
            if not count:  # of many members often few want anything
                continue
            shape = list(x.shape)
            shape[move.target.dim] = move.target.lengths[member]
            block = flat.narrow(0, starts[member] + before[member], count).view(shape)
            _copy_ranges(block, x, move.target, member)
            before[member] += count
    return flat


def _copy_ranges(block: Tensor, x: Tensor, side: Side, member: int) -> None:
    """What a member is to get of a dimension."""
    end = 0
    for a, b in side.part[member]:
        block.narrow(side.dim, end, b - a).copy_(x.narrow(side.dim, a, b - a))
        end += b - a


def unpacked(flat: Tensor, packages: Sequence[Package], moves: Sequence[Move]) -> list[Tensor]:
    """The tensors of a buffer that arrived."""
    if _by_token(moves):
        return _unpacked_by_token(flat, packages, moves)
    of = [each.of for each in packages]
    starts = [0, *itertools.accumulate(total(of))]
    before = [0] * moves[0].members
    found = []
    for (_, shape, _, counts, _), move in zip(packages, moves, strict=True):
        side = move.source
        if side is None:
            found.append(flat.narrow(0, before[0], counts[0]).view(shape))
            before[0] += counts[0]
            continue
        if side.layout == "even" and len(moves) == 1:
            block = [*shape[: side.dim], side.lengths[0], *shape[side.dim + 1 :]]
            y = flat.view([move.members, *block]).movedim(0, side.dim)
            found.append(y.flatten(side.dim, side.dim + 1))
            continue
        blocks, parts = [], []
        for member, count in enumerate(counts):
            if side.layout == "ranges" and not count:
                continue
            block = [*shape[: side.dim], side.lengths[member], *shape[side.dim + 1 :]]
            blocks.append(flat.narrow(0, starts[member] + before[member], count).view(block))
            parts.append(side.part[member])
            before[member] += count
        found.append(_joined(blocks, parts, shape, side, flat, alone=len(moves) == 1))
    return found


def _joined(
    blocks: Sequence[Tensor], parts: Sequence[Ranges], shape: Sequence[int], side: Side, flat: Tensor, alone: bool
) -> Tensor:
    """A dimension of the blocks of members; ranges that several sent are summed. parts: of each block. shape: of the
    tensor that was sent. flat: what came. alone: whether the blocks are all of that, one after the other."""
    shape = [*shape[: side.dim], side.size, *shape[side.dim + 1 :]]
    if side.layout != "ranges":
        if alone and math.prod(shape[: side.dim]) == 1:
            return flat.view(shape)
        return torch.cat(list(blocks), side.dim)
    dtype = flat.dtype
    if side.once:
        out = flat.new_empty(shape)
    else:  # several are summed, half precision in fp32
        half = dtype in (torch.float16, torch.bfloat16)
        out = flat.new_zeros(shape, dtype=torch.float32 if half else dtype)
    for block, ranges in zip(blocks, parts, strict=True):
        at = 0
        for a, b in ranges:
            here, piece = out.narrow(side.dim, a, b - a), block.narrow(side.dim, at, b - a)
            here.copy_(piece) if side.once else here.add_(piece)
            at += b - a
    return out.to(dtype)


def _by_token(moves: Sequence[Move]) -> bool:
    """Whether several tensors travel token by token: each rank gets all tokens of all of them, in order, and what is
    cut of a tensor, if anything, stands behind its tokens."""
    first = moves[0].source
    if len(moves) == 1 or first is None or moves[0].kind not in ("all-to-all", "all-gather"):
        return False
    for move in moves:
        side, target = move.source, move.target
        if side is None or side.fewer or side.layout == "ranges":
            return False
        # Number by number: Dynamo of torch 2.11 does not compare such tuples.
        if side.dim != first.dim or any(a != b for a, b in zip(side.lengths, first.lengths, strict=True)):
            return False
        if target is not None and target.dim <= side.dim:
            return False
    return True


def _packed_by_token(packages: Sequence[Package], moves: Sequence[Move], empty: Callable[[int], Tensor]) -> Tensor:
    """For each member a matrix of my tokens by what it gets of them."""
    source = moves[0].source
    assert source is not None
    tokens = source.lengths[moves[0].me]
    widths = [[_width(each.x, move, member) for each, move in zip(packages, moves, strict=True)]
              for member in range(1 if moves[0].target is None else moves[0].members)]  # fmt: skip
    flat = empty(tokens * sum(map(sum, widths)))
    even = all(move.target is not None and move.target.layout == "even" for move in moves)
    column = 0
    for i, (each, move) in enumerate(zip(packages, moves, strict=True)):
        by_token, side = each.x.movedim(source.dim, 0), move.target
        if even:
            assert side is not None
            blocks = flat.view(len(widths), tokens, sum(widths[0])).narrow(2, column, widths[0][i])
            cut = by_token.unflatten(side.dim, (len(widths), side.lengths[0])).movedim(side.dim, 0)
            blocks.view(cut.shape).copy_(cut)
            column += widths[0][i]
            continue
        start = 0
        for member, of_member in enumerate(widths):
            rows = flat.narrow(0, start, tokens * sum(of_member)).view(tokens, sum(of_member))
            block, shape = rows.narrow(1, sum(of_member[:i]), of_member[i]), list(by_token.shape)
            start += tokens * sum(of_member)
            if side is None:
                block.view(shape).copy_(by_token)
            else:
                shape[side.dim] = side.lengths[member]
                _copy_ranges(block.view(shape), by_token, side, member)
    return flat


def _width(x: Tensor, move: Move, member: int) -> int:
    """Elements of a token that a member gets."""
    assert move.source is not None
    ends = [move.source.dim] if move.target is None else [move.source.dim, move.target.dim]
    rest = math.prod([n for dim, n in enumerate(x.shape) if dim not in ends])
    return rest if move.target is None else rest * move.target.lengths[member]


def _unpacked_by_token(flat: Tensor, packages: Sequence[Package], moves: Sequence[Move]) -> list[Tensor]:
    source = moves[0].source
    assert source is not None
    rests = [[n for dim, n in enumerate(each.shape) if dim != source.dim] for each in packages]
    widths = [math.prod(rest) for rest in rests]
    rows = flat.view(source.size, sum(widths))
    pieces = zip(rows.split(widths, 1), rests, strict=True)
    return [piece.view([source.size, *rest]).movedim(0, source.dim) for piece, rest in pieces]
