"""What several ranks hold of the same parameters, and whether they hold the same.

A leaf is cut where the ranges of any two ranks begin or end. Of each piece that several ranks hold, these compare a
digest of its bits: the norms of a model that is split over tp, everything over dp, a key/value head that two ranks
read. A piece that one rank holds has nothing to compare with; of such it is known whether it was written, by the
counters that autograd keeps, and so that a leaf was written on some of its ranks alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import sharding as sh
from ..sharding.ports import Sized
from ..sharding.shards import Ranges, ranges_of
from .agreement import Agreement, Said, digest, named

__all__ = ["COMPARE", "MOVED", "REPLACED", "STREAMS", "Copies", "Piece", "bits", "pieces_of"]

# What a rank says of itself in `Said.flags`: its leaves may hold something new; they are other tensors than before;
# a streamer waits for its tokens; a captured graph reads where none lies any more.
COMPARE, REPLACED, STREAMS, MOVED = 1, 2, 4, 8
# Errors name as many leaves.
_NAMED = 3
_COLUMNS = 4096


class Piece(NamedTuple):
    """Of a leaf. holders: the ranks that have it. mine: where it stands in this rank's shard; None on others."""

    path: str
    holders: tuple[int, ...]
    mine: tuple[slice, ...] | None


class Copies:
    """Of one rank's parameters. lies: how the leaves do, with their global sizes."""

    def __init__(self, lies: Mapping[str, Sized], leaves: Mapping[str, Tensor], agreement: Agreement) -> None:
        self._agreement, self._mesh = agreement, agreement.mesh
        self._pieces = pieces_of(lies, self._mesh)
        self._shared = [piece for piece in self._pieces if len(piece.holders) > 1]
        self._sets = list(dict.fromkeys(piece.holders for piece in self._shared))
        self._flags = 0
        self.read(leaves)
        self._known = self._counters()

    @property
    def bytes(self) -> int:
        """That are read where contents are compared."""
        return sum(self._part(piece).nbytes for piece in self._shared if piece.mine is not None)

    def read(self, leaves: Mapping[str, Tensor], *, flags: int = 0) -> None:
        """Take other leaves for those before."""
        self._leaves, self._flags = leaves, self._flags | flags

    def accept(self) -> None:
        """What was written until now is meant, wherever it was; contents are compared all the same."""
        self._flags |= COMPARE
        self._known = self._counters()

    def said(self, number: int = 0, flags: int = 0) -> Said:
        """What this rank tells the others before a call: whether a leaf may have changed, and which."""
        moved = self._moved()
        uncounted = any(leaf.is_inference() for leaf in self._leaves.values())
        flags |= self._flags | (COMPARE if moved or uncounted else 0)
        return Said(number, flags, digest(moved) if moved else 0)

    def check(self, function: str, every: Sequence[Said]) -> None:
        """Raise `ValueError` on every rank where some have other parameters than they should. every: what ranks said.
        Every rank makes this call."""
        replaced = [rank for rank, said in enumerate(every) if said.flags & REPLACED]
        if replaced and len(replaced) < len(every):
            raise ValueError(
                f"{function}: program.params was set on {named(replaced)} alone\n"
                f"    fix: set it on every rank     mesh: {self._mesh}"
            )
        if any(said.flags & COMPARE for said in every):
            self.compare(function)
        if any(said.moved != every[0].moved for said in every) and not replaced:
            self._check_written(function)
        self._flags = 0
        self._known = self._counters()

    def compare(self, function: str) -> None:
        """Raise `ValueError` on every rank where copies differ. It reads all of them."""
        found = [0 if piece.mine is None else bits(self._part(piece)) for piece in self._shared]
        of_sets = [
            digest([value for value, piece in zip(found, self._shared, strict=True) if piece.holders == holders])
            for holders in self._sets
        ]
        every = self._agreement.gather(function, of_sets) if of_sets else []
        wrong = {
            holders
            for i, holders in enumerate(self._sets)
            if any(every[rank][i] != every[holders[0]][i] for rank in holders)
        }
        if not wrong:
            return
        some = [i for i, piece in enumerate(self._shared) if piece.holders in wrong]
        rows, faults = self._agreement.gather(function, [found[i] for i in some]), dict[str, list[str]]()
        for k, i in enumerate(some):
            path, (first, *others), _ = self._shared[i]
            if differ := [rank for rank in others if rows[rank][k] != rows[first][k]]:
                faults.setdefault(path, []).append(f"{named(differ)} otherwise than rank {first}")
        lines = [f"{path}: {'; '.join(dict.fromkeys(each))}" for path, each in faults.items()]
        raise ValueError(
            f"{function}: ranks hold different weights where they should hold the same\n    " + _few(lines) + "\n"
            "    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)"
            f"     mesh: {self._mesh}"
        )

    def _check_written(self, function: str) -> None:
        """Raise `ValueError` where of one leaf some pieces were written and others were not."""
        moved = set(self._moved())
        wrote = [int(piece.path in moved) for piece in self._pieces]
        every = self._agreement.gather(function, wrote)
        there: dict[str, list[int]] = {}
        alone: dict[str, list[bool]] = {}
        for i, piece in enumerate(self._pieces):
            there.setdefault(piece.path, []).extend(rank for rank in piece.holders if every[rank][i])
            alone.setdefault(piece.path, []).append(any(every[rank][i] for rank in piece.holders))
        if lines := [
            f"{path}: written on {named(sorted(set(there[path])))} alone"
            for path, each in alone.items()
            if any(each) and not all(each)
        ]:
            raise ValueError(
                f"{function}: parameters were written on some ranks, and not on others\n    " + _few(lines) + "\n"
                "    fix: the same update on every rank; or program.refresh(), where it was meant for these alone"
                f"     mesh: {self._mesh}"
            )

    def _part(self, piece: Piece) -> Tensor:
        return self._leaves[piece.path].detach()[piece.mine or ()]

    def _counters(self) -> dict[str, tuple[int, int]]:
        """What changes when a leaf is written or given other memory, but not by writes through `.data`."""
        return {
            path: (leaf.data_ptr(), 0 if leaf.is_inference() else leaf._version) for path, leaf in self._leaves.items()
        }

    def _moved(self) -> list[str]:
        now = self._counters()
        return [path for path, counter in self._known.items() if now[path] != counter]


def _few(lines: list[str]) -> str:
    more = len(lines) - _NAMED
    return "\n    ".join([*lines[:_NAMED], *([f"and {more} more"] if more > 0 else [])])


def bits(x: Tensor) -> int:
    """63 bits of the dtype, the shape and every bit of a tensor, read twice where it lies: sums of its rows and of its
    columns, as integers, which are the same in any order."""
    flat = x.contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    table, rest = flat[:whole].view(torch.int64).view(-1, _COLUMNS), flat[whole:]
    told = (x.dtype, tuple(x.shape), table.sum(0).tolist(), table.sum(1).tolist())
    found = hashlib.sha256(repr(told).encode() + bytes(rest.tolist()))
    return int.from_bytes(found.digest()[:8]) >> 1


def pieces_of(lies: Mapping[str, Sized], mesh: sh.Mesh) -> list[Piece]:
    """All pieces of all leaves, in the same order on every rank, without empty ones."""
    known: dict[Any, list[tuple[tuple[int, ...], tuple[slice, ...] | None]]] = {}
    found = []
    for path, each in lies.items():
        key = str(each.spec), tuple(each.sizes.items())
        if key not in known:
            known[key] = list(_cut(each, mesh))
        found += [Piece(path, holders, mine) for holders, mine in known[key]]
    return found


def _cut(each: Sized, mesh: sh.Mesh) -> list[tuple[tuple[int, ...], tuple[slice, ...] | None]]:
    held = [[ranges_of(part) for part in each.spec.slices(each.sizes, mesh, rank)] for rank in range(mesh.size)]
    dims: list[list[tuple[int, int]]] = []
    for of_ranks in zip(*held, strict=True):
        ends = sorted({end for ranges in of_ranks for pair in ranges for end in pair})
        dims.append(list(itertools.pairwise(ends)))
    found = []
    for box in itertools.product(*dims):
        holders = tuple(rank for rank, mine in enumerate(held) if all(map(_place, mine, box)))
        if holders:
            places = map(_place, held[mesh.rank], box)
            mine = tuple(place for place in places if place is not None) if mesh.rank in holders else None
            found.append((holders, mine))
    return found


def _place(ranges: Ranges, box: tuple[int, int]) -> slice | None:
    """Where a range lies in a shard of ranges; None where it is not in it."""
    at = 0
    for start, stop in ranges:
        if start <= box[0] and box[1] <= stop:
            return slice(at + box[0] - start, at + box[1] - start)
        at += stop - start
    return None
