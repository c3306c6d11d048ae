"""What ranks tell each other before a call runs: that they were asked for the same, or which of them was not.

Each call is one exchange of `COLUMNS` numbers a rank. Where they differ, ranks send each other what they were told, so
that every one of them raises the same error, which names the argument, the values and the ranks.

Letters: P ranks, N numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import sharding as sh
from ..sharding.reshard import call_of, exchanged, planned

__all__ = ["COLUMNS", "Agreement", "OfRows", "Said", "digest", "during", "named"]

COLUMNS = 6
# Of a text that ranks send each other where they were told different things; and of what an error shows of one.
_TEXT, _SHOWN = 1 << 16, 60


class OfRows(NamedTuple):
    """What ranks must be told alike if they have the same rows."""

    value: Any


class Said(NamedTuple):
    """What a rank adds of its own. number: any; flags, moved: of its parameters, see `Copies.said`."""

    number: int = 0
    flags: int = 0
    moved: int = 0


class Agreement:
    """Of the ranks of a mesh. device: where what they send lies. rows: the axes over which rows are split."""

    def __init__(self, mesh: sh.Mesh, device: torch.device, rows: tuple[str, ...] = ()) -> None:
        self.mesh, self.device = mesh, device
        # The first of those that have the same rows.
        firsts: dict[tuple[int, ...], int] = {}
        places = ([mesh.coordinates(rank)[axis] for axis in rows] for rank in range(mesh.size))
        self._first = [firsts.setdefault(tuple(place), rank) for rank, place in enumerate(places)]

    def refuse(self, function: str) -> None:
        """Tell the others that this rank raises, by itself: what is wrong with what it was told, or went wrong."""
        with contextlib.suppress(Exception):  # its own error is the one to raise, also where no group is left
            self.gather(function, [0] * COLUMNS)

    def check(self, function: str, told: Mapping[str, Any], said: Said | None = None) -> list[Said]:
        """Raise `ValueError` on every rank unless all were told the same. told: by argument. -> what each rank said.
        Every rank makes this call or `refuse`, and tells as many things."""
        digests = [digest(value) for value in told.values()]
        own = [isinstance(value, OfRows) for value in told.values()]
        both = [digest([d for d, mine in zip(digests, own, strict=True) if mine is which]) for which in (False, True)]
        every = self.gather(function, [1, *both, *(said or Said())])
        if failed := [rank for rank, row in enumerate(every) if not row[0]]:
            raise ValueError(f"{function}: {named(failed)} raised, and says why; so nothing ran")
        if any(row[1] != every[0][1] or row[2] != every[self._first[r]][2] for r, row in enumerate(every)):
            raise ValueError(self._differing(function, told, digests))
        return [Said(*row[3:]) for row in every]

    def _differing(self, function: str, told: Mapping[str, Any], digests: Sequence[int]) -> str:
        rows, lines = self.gather(function, digests), []
        for i, (name, value) in enumerate(told.items()):
            first = self._first if isinstance(value, OfRows) else [0] * self.mesh.size
            wrong = [rank for rank, row in enumerate(rows) if row[i] != rows[first[rank]][i]]
            if any(row[i] != rows[0][i] for row in rows):
                texts = self._texts(function, repr(value.value if isinstance(value, OfRows) else value))
            if wrong:
                among = [rank for rank in range(self.mesh.size) if first[rank] in {first[r] for r in wrong}]
                lines.append(f"    {name}: {_values(texts, among)}")
        return (
            f"{function}: ranks were told different things\n" + "\n".join(lines) + "\n"
            f"    fix: the same arguments on every rank     mesh: {self.mesh}"
        )

    def _texts(self, function: str, text: str) -> list[str]:
        """What each rank has, of as much as is sent."""
        mine = text.encode()[:_TEXT]
        longest = max(n for (n,) in self.gather(function, [len(mine)]))
        rows = self.gather(function, [*mine, *[0] * (longest - len(mine))])
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]

    def gather(self, function: str, numbers: Sequence[int]) -> list[list[int]]:
        """numbers `N` of each rank -> of every rank, in their order."""
        with during(f"the agreement of ranks on what {function} was told"):
            rows: list[list[int]] = self.exchange(numbers).tolist()
        return rows

    def exchange(self, numbers: Sequence[int]) -> Tensor:
        """numbers `N` of each rank -> `P N`."""
        mine = torch.tensor([list(numbers)], dtype=torch.int64, device=self.device)
        pair = f"P/{'/'.join(axis for axis, _ in self.mesh.axes)} N -> P N"
        if self.mesh.size == 1:
            return mine
        plan = planned(mine, pair, self.mesh, {"P": self.mesh.size})
        call = call_of((mine,), pair, ("agreement",))
        return exchanged((mine,), (plan.move,), (plan.adjoint,), call, self.mesh)[0]


def _values(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """`3 on rank 0; 4 on rank 1`: where texts are long, what stands around the first difference."""
    some = [texts[r] for r in ranks]
    at = next((i for i, letters in enumerate(zip(*some, strict=False)) if len(set(letters)) > 1), min(map(len, some)))
    of: dict[str, list[int]] = {}
    for r in ranks:
        of.setdefault(texts[r], []).append(r)
    if len(of) == 1:
        return f"{named(ranks)} were told different things after {at} characters"
    return "; ".join(f"{_around(text, at)} on {named(some)}" for text, some in of.items())


def _around(text: str, at: int) -> str:
    if len(text) <= _SHOWN:
        return text
    start = max(text.rfind(mark, 0, at) + len(mark) for mark in (", ", "(", "["))
    start = max(start, at - _SHOWN // 2)
    ends = [end for mark in ",)]" if (end := text.find(mark, at)) >= 0]
    stop = min([*ends, start + _SHOWN, len(text)])
    return "..." * (start > 0) + text[start : max(stop, at + 1)] + "..." * (stop < len(text))


@contextlib.contextmanager
def during(what: str | Callable[[], str]) -> Iterator[None]:
    """Say of an exchange that fails what it was part of."""
    try:
        yield
    except sh.TransportError as error:
        error.args = (f"{error}\n    during {what if isinstance(what, str) else what()}",)
        raise


def digest(value: Any) -> int:
    """63 bits of what a value prints as."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8]) >> 1


def named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
