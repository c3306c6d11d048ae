"""`show`: who holds what of a tensor, drawn in text and, in a notebook, in colours.

Each sharded letter is one dimension of the drawing, cut wherever some rank's part starts or ends; a cell lists the
ranks that hold it. One letter is a ruler, two are a grid, more are a grid for each combination of the outer ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import html, shards
from .mesh import Axes, Mesh, size_of, text_of
from .spec import ELLIPSIS, Atom, Spec, parse

__all__ = ["Picture", "columns", "ranks_text", "show"]

ROWS = 16  # of the table
GRIDS, GRID_ROWS, GRID_COLUMNS = 4, 8, (16, 12, 8, 6, 4, 3)
WIDTH = 100

# A piece of a letter, and the coordinates, over the letter's axes, that hold it.
Piece = tuple[int, int, tuple[tuple[int, ...], ...]]


def show(spec: str | Spec, mesh: Mesh, **sizes: int) -> Picture:
    """Draw which rank holds which part: `print(sh.show("B S/g/u (K G) E", mesh, B=2, S=97, K=3, G=3, E=64))`.

    spec: of a tensor of any rank. mesh: any; nothing runs. sizes: global, by letter. Those of sharded letters are
    needed; letters that are whole may go without, and then stand for themselves in the shapes.

    Raises `SpecError` where the spec does not parse, names an axis that nobody knows, or a size is missing.
    """
    spec = parse(spec)
    known = shards.complete(sizes, spec.text)
    shards.check(spec, known, mesh.axes)
    facts = [str(spec), f"mesh: {text_of(mesh.axes, spec)}", f"sizes: {shards.known(sizes)}" if sizes else ""]
    drawn = [a for a in spec.atoms if math.prod(size_of(mesh.axes, axis) for axis in a.axes) > 1]
    notes = _notes(spec, drawn, known, mesh.axes)
    if any(known[atom.name] == 0 for atom in drawn):
        drawn = []
    grids, more = _grids(drawn, spec, known, mesh.axes)
    header, rows, rest = _table(spec, known, mesh.axes)
    return Picture("     ".join(filter(None, facts)), notes, grids, more, header, rows, rest)


@dataclass(frozen=True)
class Cell:
    """What a cell says, and the first rank that it lists, whose colour it takes."""

    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Grid:
    """One grid, or a ruler where it has no row letter. A piece that is None stands for those that are left out."""

    title: str
    row: str
    rows: tuple[Piece | None, ...]
    column: str
    columns: tuple[Piece | None, ...]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, repr=False)
class Picture:
    """Who holds what. Prints as text; a notebook shows it in colours, one a rank."""

    title: str
    notes: tuple[str, ...]
    grids: tuple[Grid, ...]
    more_grids: int
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more_rows: int

    def __str__(self) -> str:
        blocks = [[self.title, *self.notes], *(_text(grid) for grid in self.grids)]
        if self.more_grids:
            blocks.append([_more_grids(self.more_grids)])
        right = [i == len(self.header) - 1 and self.header[i] == "elements" for i in range(len(self.header))]
        blocks.append([*columns([self.header, *self.rows], right), *self._rest()])
        return "\n\n".join("\n".join(block) for block in blocks)

    def __repr__(self) -> str:
        return str(self)

    def _rest(self) -> list[str]:
        return [f"... {self.more_rows} more"] if self.more_rows else []

    def _repr_html_(self) -> str:
        parts = [html.lines([self.title, *self.notes])]
        for grid in self.grids:
            names = [_label(grid.column, piece) for piece in grid.columns]
            sides = [_label(grid.row, piece) for piece in grid.rows] if grid.row else [""]
            body = [
                [side, *(html.block(cell.text, cell.rank) for cell in cells)]
                for side, cells in zip(sides, grid.cells, strict=True)
            ]
            parts += [html.lines([grid.title])] * bool(grid.title)
            parts.append(html.table(["", *names], body, [False] * (len(names) + 1)))
        parts += [html.lines([_more_grids(self.more_grids)])] * bool(self.more_grids)
        last = [name == "elements" for name in self.header]
        parts += [html.table(self.header, self.rows, last), html.lines(self._rest())]
        return html.figure(parts)


def _more_grids(n: int) -> str:
    return f"... {n} more grid{'s' * (n > 1)}"


def _notes(spec: Spec, drawn: Sequence[Atom], sizes: Mapping[str, int], axes: Axes) -> tuple[str, ...]:
    found = []
    if spec.partial:
        whole = "" if drawn else " of all of it"
        found.append(f"pending sum over {', '.join(spec.partial)}: each rank holds an addend{whole}")
    elif not drawn:
        found.append("every rank holds all of it")
    found += [f"{atom.name} is empty" for atom in drawn if sizes[atom.name] == 0]
    for atom in drawn:
        if atom.zigzag:
            axis, chunks = atom.axes[0], 2 * size_of(axes, atom.axes[0])
            found.append(f"head-tail order: of {chunks} chunks of {atom.name}, {axis} r holds r and {chunks - 1} - r")
        if atom.need:
            found.append(f"each rank holds the {atom.name} that its {atom.need} need; several may hold the same")
    return tuple(found)


def _pieces(atom: Atom, sizes: Mapping[str, int], axes: Axes) -> list[Piece]:
    """A letter cut at every boundary of every rank's part."""
    n = sizes[atom.name]
    cuts, holds = {0, n}, []
    if atom.zigzag:
        cuts |= set(range(0, n, max(1, n // (2 * size_of(axes, atom.axes[0])))))
    for place in itertools.product(*(range(size_of(axes, axis)) for axis in atom.axes)):
        ranges = shards.held(atom, sizes, axes, dict(zip(atom.axes, place, strict=True)))
        holds += [(a, b, place) for a, b in ranges]
        cuts |= {end for ends in ranges for end in ends}
    ends = sorted(cuts)
    where = {end: i for i, end in enumerate(ends)}
    holders: list[list[tuple[int, ...]]] = [[] for _ in ends]
    for a, b, place in holds:
        for i in range(where[a], where[b]):
            holders[i].append(place)
    return [(a, b, tuple(holders[i])) for i, (a, b) in enumerate(itertools.pairwise(ends))]


def _grids(drawn: Sequence[Atom], spec: Spec, sizes: Mapping[str, int], axes: Axes) -> tuple[tuple[Grid, ...], int]:
    if not drawn:
        return (), 0
    pieces = [_pieces(atom, sizes, axes) for atom in drawn]
    outer, inner = drawn[:-2], drawn[-2:]
    combinations = itertools.product(*pieces[: len(outer)])
    count = math.prod(len(p) for p in pieces[: len(outer)])
    found = [
        _grid(inner, pieces[len(outer) :], list(zip(outer, some, strict=True)), axes)
        for some in itertools.islice(combinations, GRIDS)
    ]
    return tuple(found), count - len(found)


def _grid(
    inner: Sequence[Atom], pieces: Sequence[list[Piece]], outer: Sequence[tuple[Atom, Piece]], axes: Axes
) -> Grid:
    column, title = inner[-1].name, ", ".join(_label(atom.name, piece) for atom, piece in outer)
    row, rows = ("", (None,)) if len(inner) == 1 else (inner[0].name, _folded(pieces[0], GRID_ROWS))
    for limit in GRID_COLUMNS:
        across = _folded(pieces[-1], limit)
        cells = tuple(
            tuple(
                Cell("...") if other is None or (row and piece is None)
                else _cell([*outer, *zip(inner, [piece, other] if row else [other], strict=True)], axes)
                for other in across
            )
            for piece in rows
        )  # fmt: skip
        grid = Grid(title, row, rows, column, across, cells)
        if len(_text(grid)[-1]) <= WIDTH:
            break
    return grid


def _folded(pieces: list[Piece], limit: int) -> tuple[Piece | None, ...]:
    return tuple(pieces) if len(pieces) <= limit else (*pieces[: limit - 2], None, pieces[-1])


def _cell(where: Iterable[tuple[Atom, Piece | None]], axes: Axes) -> Cell:
    places = [(atom.axes, piece[2]) for atom, piece in where if piece is not None]
    ranks = list(_ranks(places, axes))
    return Cell(ranks_text(ranks), ranks[0]) if ranks else Cell("-")


def _ranks(places: Sequence[tuple[tuple[str, ...], Sequence[tuple[int, ...]]]], axes: Axes) -> list[int]:
    """The ranks at some places over some axes, wherever they are in the other axes."""
    strides, step = {}, 1
    for name, size in reversed(axes):
        strides[name] = step
        step *= size
    named = {axis for over, _ in places for axis in over}
    found = [0]
    for over, some in places:
        offsets = [sum(strides.get(a, 0) * i for a, i in zip(over, place, strict=True)) for place in some]
        found = [r + offset for r in found for offset in offsets]
    for name, size in axes:
        if name not in named:
            found = [r + strides[name] * i for r in found for i in range(size)]
    return sorted(found)


def ranks_text(ranks: Sequence[int]) -> str:
    """`3`, `0,2`, `0..3`, `0..12 by 4`."""
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}..{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    texts = [",".join(map(str, run)) if len(run) < 3 else f"{run[0]}..{run[-1]}" for run in runs]
    return ",".join(texts if len(texts) <= 4 else [*texts[:3], "..."])


def _label(letter: str, piece: Piece | None) -> str:
    return "..." if piece is None else f"{letter} {piece[0]}:{piece[1]}"


def _text(grid: Grid) -> list[str]:
    """A grid, or a ruler with its boundaries above."""
    width = max(len(cell.text) for row in grid.cells for cell in row) + 2
    if not grid.row:
        ends = [piece[0] if piece else grid.columns[i - 1][1] for i, piece in enumerate(grid.columns)]  # type: ignore[index]
        last = str(grid.columns[-1][1] if grid.columns[-1] else "")
        width = max(width, *(len(str(end)) for end in ends), len(last))
        margin = len(grid.column) + 2
        return [
            f"{grid.column}  " + "".join(str(end).ljust(width + 1) for end in ends) + last,
            " " * margin + "".join("|" + cell.text.center(width) for cell in grid.cells[0]) + "|",
        ]
    names = [_label(grid.column, piece) for piece in grid.columns]
    sides = [_label(grid.row, piece) for piece in grid.rows]
    width, margin = max(width, *(len(name) + 2 for name in names)), max(map(len, sides))
    rule = " " * (margin + 1) + "+" + ("-" * width + "+") * len(names)
    return [
        *([grid.title] if grid.title else []),
        (" " * (margin + 2) + " ".join(name.center(width) for name in names)).rstrip(),
        rule,
        *(
            f"{side.ljust(margin)} |" + "".join(cell.text.center(width) + "|" for cell in row)
            for side, row in zip(sides, grid.cells, strict=True)
        ),
        rule,
    ]


def _table(
    spec: Spec, sizes: Mapping[str, int], axes: Axes
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], int]:
    """A line for all ranks that hold the same, of the first few, and how many are left out."""
    counted = all(atom.name in sizes for atom in spec.atoms)
    letters = [atom.name for atom in spec.atoms]
    header = ("ranks", *(name for name, _ in axes), *letters, "local shape", *(["elements"] if counted else []))
    named = [name for name, size in axes if name in spec.axes and size > 1]
    places = itertools.product(*(range(size_of(axes, name)) for name in named))
    rows = [
        _row(spec, sizes, axes, dict(zip(named, place, strict=True)), counted)
        for place in itertools.islice(places, ROWS)
    ]
    return header, tuple(rows), math.prod(size_of(axes, name) for name in named) - len(rows)


def _row(spec: Spec, sizes: Mapping[str, int], axes: Axes, at: Mapping[str, int], counted: bool) -> tuple[str, ...]:
    ranks = _ranks([((name,), ((i,),)) for name, i in at.items()], axes)
    held = [shards.held(atom, sizes, axes, at) if atom.axes else None for atom in spec.atoms]
    parts = [
        "..." if atom.name == ELLIPSIS else _part(ranges, sizes.get(atom.name))
        for atom, ranges in zip(spec.atoms, held, strict=True)
    ]
    mine: Iterator[shards.Ranges | None] = iter(held)
    shape = []
    for dim in spec.dims:
        factors: list[int | str] = [
            sizes.get(atom.name, atom.name) if ranges is None else shards.length(ranges)
            for atom, ranges in zip(dim, mine, strict=False)
        ]
        number = math.prod(n for n in factors if isinstance(n, int))
        words = [n for n in factors if isinstance(n, str)]
        shape.append("*".join([*([str(number)] if number != 1 or not words else []), *words]))
    places = (str(at.get(name, "*" if size > 1 else 0)) for name, size in axes)
    count = [str(math.prod(map(int, shape)))] if counted else []
    return ranks_text(ranks), *places, *parts, " ".join(shape) or "a scalar", *count


def _part(ranges: shards.Ranges | None, size: int | None) -> str:
    if ranges is None or (ranges == ((0, size),)):
        return ":"
    return " ".join(f"{a}:{b}" for a, b in ranges) or "-"


def columns(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Rows of text as aligned lines. right: which columns are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]
