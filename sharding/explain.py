"""`explain`: what a pair of specs will do, before anything runs.

The figures are those of `reshard` itself: its own plan, packed, exchanged and unpacked on tensors without memory, once
for each kind of rank. What is printed is what `trace` then counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import html, moves, shards
from .classes import Class, Figures, classes_of
from .errors import SpecError
from .mesh import Axes, Mesh, check_axes, text_of
from .show import columns, ranks_text
from .spec import ELLIPSIS, Spec, parse_pair
from .steps import COLLECTIVES, Step, lines, steps

__all__ = ["Explanation", "explain"]

ROWS = 16


def explain(pair: str, mesh: Mesh, *, dtype: torch.dtype = torch.float32, **sizes: int) -> Explanation:
    """Which move a pair is, and what it costs: `print(sh.explain("B S/u D -> B S D", mesh, B=1, S=97, D=64))`.

    pair: as `reshard` takes it. One that takes several moves is explained too, as the steps to write. mesh: any;
    nothing runs. dtype: of the tensor, for bytes. sizes: of every letter, globally (of H, K and G two are enough).

    Raises `SpecError` where the pair does not parse or no steps lead from left to right, an axis is unknown, or a size
    is missing.
    """
    left, right = parse_pair(pair)
    known = shards.complete(sizes, pair)
    for spec in (left, right):
        check_axes(mesh.axes, spec)
        for atom in spec.atoms:
            if atom.name == ELLIPSIS:
                what = 'bytes need the size of every dimension, and "..." has none'
                raise SpecError(what, pair, atom.span, fix='a letter for each dimension in place of "..."')
            shards.size(spec, atom, atom.name, known, mesh.axes)
        shards.check(spec, known, mesh.axes)
    found = steps(left, right)
    given_sizes = [f"sizes: {shards.known(sizes)}"] if sizes else []
    facts = "     ".join([f"mesh: {text_of(mesh.axes, left, right)}", *given_sizes, str(dtype).removeprefix("torch.")])
    head = (f"{left} -> {right}", facts)
    given = tuple(known.items())
    if len(found) > 1:
        return _several(head, left, found, mesh.axes, given, dtype)
    classes = classes_of(pair, mesh.axes, given, dtype)
    return _one(head, left, right, found[0] if found else None, mesh.axes, classes, dtype.itemsize)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a pair does. Prints as text; a notebook shows a table.

    kind: "none", "slice", "place in zeros", a collective, or "several" where one reshard cannot do it. axes: of the
    group. sends, receives: bytes by rank, to and from others (of all steps together). steps: the pairs to write, one
    unless it takes several or nothing moves. copies: of the payload of a contiguous tensor, before and after the
    exchange, on the rank that copies most. backward: the pair of the gradient; empty where it takes several.
    """

    kind: str
    axes: tuple[str, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    steps: list[str]
    copies: tuple[int, int]
    backward: str
    above: tuple[str, ...] = field(repr=False)
    table: tuple[tuple[str, ...], ...] = field(repr=False)
    below: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        middle = ["", *columns(self.table, self._right()), ""] if self.table else []
        return "\n".join([*self.above, *middle, *self.below])

    def __repr__(self) -> str:
        return str(self)

    def _right(self) -> list[bool]:
        return [name in ("sends", "receives") for name in self.table[0]]

    def _repr_html_(self) -> str:
        table = [html.table(self.table[0], self.table[1:], self._right())] if self.table else []
        return html.figure([html.lines(self.above), *table, html.lines(self.below)])


def _one(
    head: Sequence[str], left: Spec, right: Spec, step: Step | None, axes: Axes, classes: Sequence[Class], itemsize: int
) -> Explanation:
    kind = classes[0].move.kind
    over = step.axes if step is not None else ()
    sends, receives = (_by_rank(classes, i) for i in (0, 1))
    copies = _most(cls.forward for cls in classes)
    back = f"{_dual(right, over)} -> {_dual(left, over)}"
    back_kind = moves.adjoint(classes[0].move).kind
    what = _what(left, right, step, kind, axes, classes)
    rows: list[tuple[str, ...]] = [("ranks", "before", "after", "sends", "receives")]
    for cls in classes[:ROWS]:
        shapes = (" ".join(map(str, shape)) or "a scalar" for shape in (cls.before, cls.forward.after))
        rows.append((ranks_text(cls.ranks), *shapes, _bytes(cls.forward.sends), _bytes(cls.forward.receives)))
    more = [f"... {len(classes) - ROWS} more"] if len(classes) > ROWS else []
    shared = _shared(left, right, step, kind)
    worth = max(max(cls.backward[:2]) for cls in classes)
    below = [
        *more,
        f"cost: {_cost(kind, classes, itemsize, bool(shared))}",
        f"copies: {copies[0]} before, {copies[1]} after",
        f"backward: {back} : {back_kind + ', ' if kind != 'none' else ''}{_moving(back_kind, worth)}",
        *shared,
    ]
    text = [] if kind == "none" else [lines(left, [step])[0] if step is not None else ""]
    return Explanation(
        kind,
        over if kind != "none" else (),
        sends,
        receives,
        text,
        copies,
        back,
        (*head, what),
        tuple(rows),
        tuple(below),
    )


def _several(
    head: Sequence[str], left: Spec, found: Sequence[Step], axes: Axes, sizes: tuple[tuple[str, int], ...],
    dtype: torch.dtype,
) -> Explanation:  # fmt: skip
    pairs = lines(left, found)
    of_steps = [classes_of(text, axes, sizes, dtype) for text in pairs]
    rows = []
    for text, step, classes in zip(pairs, found, of_steps, strict=True):
        kind = classes[0].move.kind
        most = max(max(cls.forward[:2]) for cls in classes)
        rows.append((f'    "{text}"', f"{step.kind} over {'/'.join(step.axes)}", _moving(kind, most)))
    below = columns(rows, [False] * 3)
    sends, receives = (
        tuple(map(sum, zip(*(_by_rank(classes, i) for classes in of_steps), strict=True))) for i in (0, 1)
    )
    copies = [_most(cls.forward for cls in classes) for classes in of_steps]
    what = f"not one move: one reshard is one move, and this takes {len(found)}. Write them one after the other:"
    total = (sum(c[0] for c in copies), sum(c[1] for c in copies))
    below.append(f"in all: {_moving('', max(*sends, *receives))}")
    return Explanation("several", (), sends, receives, pairs, total, "", (*head, what), (), tuple(below))


def _by_rank(classes: Sequence[Class], which: int) -> tuple[int, ...]:
    found = [0] * sum(len(cls.ranks) for cls in classes)
    for cls in classes:
        for rank in cls.ranks:
            found[rank] = (cls.forward.sends, cls.forward.receives)[which]
    return tuple(found)


def _most(figures: Iterable[Figures]) -> tuple[int, int]:
    copies = [f.copies for f in figures]
    return max(c[0] for c in copies), max(c[1] for c in copies)


def _dual(spec: Spec, over: Sequence[str]) -> Spec:
    """The layout of the gradient: what is whole over the axes that move becomes a pending sum, and a sum whole."""
    pending = [axis for axis in over if axis not in spec.axes]
    return replace(spec, partial=tuple(sorted(pending)), text="", start=0)


def _what(left: Spec, right: Spec, step: Step | None, kind: str, axes: Axes, classes: Sequence[Class]) -> str:
    if step is None:
        return "nothing moves: both sides say the same"
    over = "/".join(step.axes)
    if kind == "none":
        return f"nothing moves: {over} has one rank"
    members, total = classes[0].move.members, math.prod(n for _, n in axes)
    groups = f", {total // members} groups" if total > members else ""
    loses = left.atoms[step.source].name if step.source >= 0 else ""
    gains = right.atoms[step.target].name if step.target >= 0 else ""
    words = {
        "all-gather": f"{loses} loses {over}, every rank gets all of it",
        "reduce-scatter": f"the pending sum over {over} is added up, {gains} gains {over}",
        "all-reduce": f"the pending sum over {over} is added up, every rank gets all of it",
        "all-to-all": f"{loses} loses {over}, {gains} gains it",
        "slice": f"{gains} gains {over}, each rank keeps its part",
        "place in zeros": f"{loses} loses {over} to a pending sum, each rank's part among zeros",
    }[kind]
    even = ""
    if kind in COLLECTIVES and kind != "all-reduce":
        sides = [s for cls in classes for s in (cls.move.source, cls.move.target) if s is not None]
        alike = all(len({shards.length(ranges) for ranges in side.part}) == 1 for side in sides)
        even = "; even splits" if alike else "; uneven splits"
    return f"{kind} over {over} ({members} ranks{groups}): {words}{even}"


def _cost(kind: str, classes: Sequence[Class], itemsize: int, needed: bool) -> str:
    if kind not in COLLECTIVES:
        return "no bytes move"
    moved = max(max(cls.forward[:2]) for cls in classes)
    if moved == 0:
        return "no bytes move: every shard is empty"
    if needed:
        return f"{_bytes(moved)} for the largest rank"
    before = max(math.prod(cls.before) for cls in classes) * itemsize
    after = max(math.prod(cls.forward.after) for cls in classes) * itemsize
    shares = [(math.prod(cls.before) * itemsize, len(cls.ranks)) for cls in classes]
    mean = sum(size * n for size, n in shares) // sum(n for _, n in shares)
    value, what = {
        "all-gather": (after, "the tensor after"),
        "all-to-all": (mean, "a shard"),
    }.get(kind, (before, "the tensor before"))
    members, rounds = classes[0].move.members, 2 if kind == "all-reduce" else 1
    formula, where = f"{'2 ' * (rounds == 2)}(P-1)/P V", f"P={members} and V={_bytes(value)}, {what}"
    even = rounds * (members - 1) * value
    if moved * members == even:
        return f"{_bytes(moved)} for the largest rank, {formula} with {where}"
    return f"{_bytes(moved)} for the largest rank; evenly split, {formula} = {_bytes(even // members)} with {where}"


def _shared(left: Spec, right: Spec, step: Step | None, kind: str) -> list[str]:
    if step is None or kind == "none":
        return []
    found = []
    if step.source >= 0 and (atom := left.atoms[step.source]).need:
        found.append(f"of several ranks with one {atom.name}, the first sends it, and it alone gets the gradient")
    if step.target >= 0 and (atom := right.atoms[step.target]).need:
        found.append(f"several ranks may get one {atom.name}: in backward its copies are summed")
    return found


def _moving(kind: str, n: int) -> str:
    if n:
        return f"{_bytes(n)} for the largest rank"
    return "nothing moves" if kind == "none" else "no bytes move"


def _bytes(n: int) -> str:
    for least, power, unit in ((1, 3, "GiB"), (1, 2, "MiB"), (10, 1, "KiB")):
        if n >= least * 1024**power:
            return f"{n / 1024**power:.1f} {unit}"
    return f"{n} B"
