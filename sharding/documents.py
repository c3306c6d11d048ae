"""Packed documents: their boundaries, and which keys the queries of a shard can see.

Everything here is of whole numbers: boundaries are global and the same on every rank, so each rank works out what every
other one needs.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import shards
from .constant import constant
from .errors import SpecError
from .mesh import Axes, Mesh, coordinates
from .shards import Ranges
from .spec import Spec, parse

__all__ = [
    "Boundaries",
    "Sight",
    "boundaries",
    "document_ids",
    "needed",
    "pairs",
    "positions_of",
    "positions_within",
    "sight_of",
]

Boundaries = tuple[int, ...]
# What a query sees: whether only keys at its position and before, and how many tokens back.
Sight = tuple[bool, int | None]


def boundaries(cu_seqlens: Any, tokens: int) -> Boundaries:
    """`[0, 3, 10]`, as a tensor or a sequence -> `(0, 3, 10)`. Raises `ValueError` unless documents cover the tokens.

    A boundary may stand several times, as where `cu_seqlens` is padded to a fixed length: such documents are empty.
    """
    if isinstance(cu_seqlens, (tuple, list)) and len(cu_seqlens) == 2 and not isinstance(cu_seqlens[0], int):
        queries, keys = (boundaries(of_side, tokens) for of_side in cu_seqlens)
        if queries != keys:
            raise ValueError(
                f"cu_seqlens differ between queries and keys: {_some(queries)} and {_some(keys)}\n"
                "    fix: one cu_seqlens; documents attend to themselves"
            )
        return queries
    if isinstance(cu_seqlens, Tensor):
        if torch.compiler.is_compiling():
            raise TypeError("cu_seqlens in a compiled function: a tuple of whole numbers, on which the plan depends")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            dtype = str(cu_seqlens.dtype).removeprefix("torch.")
            raise ValueError(f"cu_seqlens: one dimension of whole numbers is needed, not {dtype} {_shape(cu_seqlens)}")
        cu_seqlens = cu_seqlens.tolist()
    try:
        found = tuple(shards.whole("cu_seqlens", n) for n in cu_seqlens)
    except (TypeError, SpecError):
        raise ValueError(f"cu_seqlens={cu_seqlens!r}: whole numbers are needed, such as [0, 3, 10]") from None
    if len(found) < 2 or found[0] != 0:
        raise ValueError(f"cu_seqlens={_some(found)}: it starts with 0 and ends with S={tokens}")
    back = next((i for i in range(1, len(found)) if found[i] < found[i - 1]), None)
    if back is not None:
        raise ValueError(f"cu_seqlens={_some(found)}: {found[back]} comes after {found[back - 1]}; it must ascend")
    if found[-1] != tokens:
        more = f"append {tokens}: padding is then a document of its own" if found[-1] < tokens else f"end with {tokens}"
        raise ValueError(
            f"cu_seqlens={_some(found)} ends with {found[-1]}, but there are S={tokens} tokens\n    fix: {more}"
        )
    return found


def _some(found: Boundaries) -> str:
    return str(list(found)) if len(found) <= 8 else f"[{', '.join(map(str, found[:4]))}, ..., {found[-1]}]"


def _shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape)) or "a scalar"


def sight_of(causal: object, window: object) -> Sight:
    """What a layer says of its queries. Raises `ValueError` for a window that is none."""
    if window is None:
        return bool(causal), None
    try:
        found = -1 if isinstance(window, bool) else operator.index(window)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if found < 1:
        raise ValueError(f"window={window!r}: at least 1 token, the query's own, or None")
    return bool(causal), found


def needed(queries: Ranges, cu: Boundaries, sight: Sight) -> Ranges:
    """The keys that some query in these ranges may see, ascending."""
    causal, window = sight
    found: list[tuple[int, int]] = []
    for a, b in queries:
        for start, stop in itertools.pairwise(cu):
            first, last = max(a, start), min(b, stop)
            if first >= last:
                continue
            low = start if window is None else max(start, first - window + 1)
            high = last if causal else stop if window is None else min(stop, last + window - 1)
            found.append((low, high))
    joined: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def pairs(queries: Ranges, cu: Boundaries, sight: Sight) -> int:
    """How many pairs of a query in these ranges and a key that it sees there are."""
    causal, window = sight
    count = 0
    for a, b in queries:
        for start, stop in itertools.pairwise(cu):
            first, last = max(a, start), min(b, stop)
            if first < last:
                back = _sum(first - start, last - start, window)  # keys at a query's position and before
                ahead = 0 if causal else _sum(stop - last, stop - first, window) - (last - first)
                count += back + ahead
    return count


def _sum(first: int, last: int, window: int | None) -> int:
    """The sum of min(i + 1, window) over i in first .. last - 1."""
    if window is None or last <= window:
        return (last * (last + 1) - first * (first + 1)) // 2
    middle = max(first, min(last, window))
    return _sum(first, middle, None) + (last - middle) * window


class Traffic(NamedTuple):
    """Tokens that a rank sends to others and receives from them, gives in all (its own included), and wants in all.
    once: whether each token that it holds is given exactly once."""

    sent: int
    received: int
    given: int
    wanted: int
    once: bool

    @property
    def tokens(self) -> tuple[int, int, int, int]:
        return self.sent, self.received, self.given, self.wanted


def traffic(holds: Sequence[Ranges], wanted: Sequence[Ranges]) -> list[Traffic]:
    """Of each member of a group, from what each of them holds and wants; in a time that grows like their number."""
    steps: dict[int, int] = {}  # where the number of members that want a token changes
    for ranges in wanted:
        for a, b in ranges:
            steps[a], steps[b] = steps.get(a, 0) + 1, steps.get(b, 0) - 1
    points = sorted(steps)
    count, totals = 0, [(0, 0)]  # of all tokens before each point, how often they are wanted, and how many once
    for i, point in enumerate(points):
        often, once = totals[-1]
        span = point - points[i - 1] if i else 0
        totals.append((often + count * span, once + (count == 1) * span))
        count += steps[point]
    counts = [0, *itertools.accumulate(steps[point] for point in points)]

    def upto(at: int) -> tuple[int, int]:
        i = bisect.bisect_right(points, at)
        (often, once), span = totals[i], at - points[i - 1] if i else 0
        return often + counts[i] * span, once + (counts[i] == 1) * span

    found = []
    for hold, mine in zip(holds, wanted, strict=True):
        own = sum(max(0, min(b, d) - max(a, c)) for a, b in hold for c, d in mine)
        given, once = (sum(upto(b)[which] - upto(a)[which] for a, b in hold) for which in (0, 1))
        all_of_it = shards.length(mine)
        found.append(Traffic(given - own, all_of_it - own, given, all_of_it, once == given == shards.length(hold)))
    return found


@constant
def of_group(
    text: str, axes: Axes, ranks: tuple[int, ...], size: int, cu: Boundaries, sight: Sight
) -> tuple[Ranges, ...]:
    """For each of these ranks the keys that its queries need. text: the spec of the queries."""
    atom = next(atom for atom in parse(text).atoms if atom.name == "S")
    return tuple(needed(shards.held(atom, {"S": size}, axes, coordinates(axes, r)), cu, sight) for r in ranks)


def positions_within(cu: Boundaries, device: Any = None) -> Tensor:
    """`1 S`: the position of each token in its document."""
    pieces = [torch.arange(b - a, device=device) for a, b in itertools.pairwise(cu) if b > a]
    return torch.cat(pieces or [torch.arange(0, device=device)])[None]


def document_ids(cu: Boundaries, device: Any = None) -> Tensor:
    """`1 S`: which document each token belongs to."""
    pieces = [torch.full((b - a,), i, device=device) for i, (a, b) in enumerate(itertools.pairwise(cu)) if b > a]
    return torch.cat(pieces or [torch.arange(0, device=device)])[None]


def positions_of(
    spec: str | Spec, mesh: Mesh, rank: int | None = None, *, cu_seqlens: Any = None, device: Any = None, **sizes: int
) -> Tensor:
    """The positions of the tokens that a rank holds, `1 S/...`, in the order in which it holds them.

    spec: of a tensor with a dimension `S`, `"B S/g:zigzag/u D"`. rank: the mesh's own unless given. cu_seqlens: `N+1`,
    the boundaries of packed documents, in each of which positions begin with 0. sizes: S, which cu_seqlens also gives.
    `rope_tables(positions_of(...), ...)` are the rotary tables of that shard.
    """
    spec = parse(spec)
    at = mesh.rank if rank is None else rank
    if "S" not in sizes and isinstance(cu_seqlens, (Tensor, tuple, list)) and len(cu_seqlens):
        sizes = {**sizes, "S": operator.index(cu_seqlens[-1])}
    atom = next((atom for atom in spec.atoms if atom.name == "S"), None)
    if atom is None:
        raise SpecError("positions are those of a dimension S, and this spec has none", spec.text or str(spec))
    sizes = shards.complete(sizes, spec.text)
    shards.size(spec, atom, "S", sizes, mesh.axes)
    shards.check(Spec(((atom,),), (), spec.text, spec.start), sizes, mesh.axes)
    cu = boundaries(cu_seqlens if cu_seqlens is not None else (0, sizes["S"]), sizes["S"])
    held: Sequence[tuple[int, int]] = shards.held(atom, sizes, mesh.axes, mesh.coordinates(at))
    return shards.select(positions_within(cu, device), 1, tuple(held))
