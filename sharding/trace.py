"""A record of what moved: every launch and wait, with its bytes and copies, in the order in which it happened."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .mesh import Mesh
from .meter import same_memory
from .moves import Move
from .transport import Call, moved

__all__ = ["Event", "Trace", "site", "trace"]

_ROOT = Path(__file__).parents[1]
_ROOMS = [str(_ROOT / room) + os.sep for room in ("functional", "sharding", "programs")]
_INTERNAL = (*_ROOMS, str(Path(torch.__file__).parent) + os.sep)
_STANDARD = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Event:
    """One half of a collective on one rank.

    what: "launch" or "wait". group: the ranks that took part. sent, received: bytes to and from others (0 for a wait,
    which its launch has counted). copies: 1 where the payload had to be packed or unpacked, else 0. call: the pair, its
    source line, and whether this is its backward.
    """

    rank: int
    what: str
    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    sent: int
    received: int
    copies: int
    call: Call


class Trace:
    """What the collectives over a mesh did. `mesh` records here; hand it to `simulate`, or to a body.

    Iterates over its events, prints as a table, and counts: `trace.count("all-to-all", rank=0)`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.events: list[Event] = []
        self.mesh = mesh.recording(self)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def launched(
        self,
        mesh: Mesh,
        call: Call,
        move: Move,
        to: Sequence[int],
        of: Sequence[int],
        xs: Sequence[Tensor],
        flat: Tensor,
    ) -> None:
        """Note a launch. to, of: elements for and from each member. xs, flat: before and after packing."""
        sent, received = moved(move.kind, to, of, move.me)
        size = flat.element_size()
        self._note(mesh, call, move, "launch", (sent * size, received * size), xs, flat)

    def waited(self, mesh: Mesh, call: Call, move: Move, flat: Tensor, ys: Sequence[Tensor]) -> None:
        """Note a wait. flat, ys: before and after unpacking."""
        self._note(mesh, call, move, "wait", (0, 0), ys, flat)

    def _note(
        self, mesh: Mesh, call: Call, move: Move, what: str, size: tuple[int, int], xs: Sequence[Tensor],
        flat: Tensor,
    ) -> None:  # fmt: skip
        copies = int(any(copied(x, flat) for x in xs))
        group = mesh.ranks(move.axes, mesh.rank)
        self.events.append(Event(mesh.rank, what, move.kind, move.axes, group, *size, copies, call))

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events.clear()

    def of(self, rank: int) -> list[Event]:
        """One rank's events, in its order."""
        return [event for event in self.events if event.rank == rank]

    def count(self, kind: str | None = None, *, rank: int = 0) -> int:
        """How many collectives (of a kind) a rank launched."""
        return sum(e.what == "launch" and kind in (None, e.kind) for e in self.of(rank))

    def bytes(self, rank: int = 0) -> tuple[int, int]:
        """Bytes that a rank sent and received."""
        return sum(e.sent for e in self.of(rank)), sum(e.received for e in self.of(rank))

    def copies(self, rank: int = 0) -> int:
        """How often a rank copied a payload to pack or unpack it."""
        return sum(e.copies for e in self.of(rank))

    def __str__(self) -> str:
        rows = [("rank", "", "collective", "axes", "sent", "received", "copies", "pair")]
        for e in sorted(self.events, key=lambda e: e.rank):
            counts = (str(e.sent), str(e.received), str(e.copies))
            rows.append((str(e.rank), e.what, e.kind, "/".join(e.axes), *counts, e.call.title))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        right = (0, 4, 5, 6)
        return "\n".join(
            "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
            .rstrip()
            for r in rows
        )  # fmt: skip

    def __repr__(self) -> str:
        return str(self)


def copied(x: Tensor, flat: Tensor) -> bool:
    """Whether a buffer is other memory than a tensor."""
    return flat.numel() > 0 and not same_memory(x, flat)


def trace(mesh: Mesh) -> Trace:
    """A record of the collectives over a mesh: `t = sh.trace(mesh); sh.simulate(body, t.mesh, ...)(x); print(t)`.

    mesh: any; the one that records is `t.mesh`. Compiled functions record nothing, as they are in the graph;
    a compiled program over ranks records what an eager one does.
    """
    return Trace(mesh)


def site(frame: Any = None) -> str:
    """`file.py:12 in body`: the innermost line of the caller's that is neither ours, torch's nor Python's own."""
    frame = frame or sys._getframe(1)
    while frame is not None and _internal(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _internal(file: str) -> bool:
    return file.startswith(_INTERNAL) or (file.startswith(_STANDARD) and "site-packages" not in file)
