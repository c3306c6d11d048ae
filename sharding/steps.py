"""From one layout to another: which single collective a pair of specs is, or the steps that would do."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .errors import SpecError
from .mesh import Axes, text_of
from .spec import Atom, Spec, parse_pair

__all__ = ["COLLECTIVES", "Step", "one_step", "steps"]

# Those that exchange something; a slice and a placement into zeros are local.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


class Step(NamedTuple):
    """One move. source: the atom that loses `axes`; target: the one that gains them; -1 where it is the pending sum, or
    nothing. after: the spec that it leads to."""

    kind: str
    axes: tuple[str, ...]
    source: int
    target: int
    after: Spec


# What a dimension looks like to the planner: each axis with what else distinguishes shards over it.
Tokens = tuple[tuple[str, bool, str | None], ...]


def _tokens(atom: Atom) -> Tokens:
    return tuple((axis, atom.zigzag and i == 0, atom.need) for i, axis in enumerate(atom.axes))


def _common(a: Tokens, b: Tokens) -> int:
    """How many of the outermost axes are alike."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _with(spec: Spec, atom: int, axes: Sequence[str], like: Atom, partial: Sequence[str]) -> Spec:
    """The spec with other axes on one atom, in the order and need of `like`, and this pending sum."""
    count, dims = -1, []
    for dim in spec.dims:
        new = []
        for old in dim:
            count += 1
            if count == atom:
                zigzag = like.zigzag and bool(axes)
                new.append(replace(old, axes=tuple(axes), zigzag=zigzag, need=like.need if axes else None))
            else:
                new.append(old)
        dims.append(tuple(new))
    return Spec(tuple(dims), tuple(sorted(partial)))


@functools.lru_cache(4096)
def steps(left: Spec, right: Spec) -> tuple[Step, ...]:
    """The moves that lead from one spec to the other, fewest bytes first where there is a choice.

    Raises `SpecError` where none do: a whole value never becomes a pending sum.
    """
    invented = [axis for axis in right.partial if axis not in left.axes]
    if invented:
        at = right.where(invented[0]) - 1
        raise SpecError(
            f'a whole value cannot become a pending sum over "{invented[0]}"',
            right.text, (at, at + 1 + len(invented[0])),
            fix=f'drop "+{invented[0]}" on the right, or write it on the left too if x is one',
        )  # fmt: skip
    found: list[Step] = []
    while left != right:
        step = _next(left, right)
        found.append(step)
        left = step.after
    return tuple(found)


def _next(left: Spec, right: Spec) -> Step:
    have, want = left.atoms, right.atoms
    pending = [axis for axis in left.partial if axis not in right.partial]
    gained = {}  # atom -> the axes that it still has to gain, where nothing needs to be lost before
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if _common(_tokens(a), _tokens(b)) == len(a.axes) < len(b.axes):
            gained[i] = b.axes[len(a.axes) :]
    for j, axes in gained.items():
        run = _leading(axes, pending)
        if run:
            rest = [axis for axis in left.partial if axis not in run]
            return Step("reduce-scatter", run, -1, j, _with(left, j, have[j].axes + run, want[j], rest))
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        free = a.axes[_common(_tokens(a), _tokens(b)) :]
        for j, axes in gained.items():
            run = next((free[n:] for n in range(len(free)) if axes[: len(free) - n] == free[n:]), ())
            if run and i != j:
                kept = a.axes[: len(a.axes) - len(run)]
                moved = _with(left, i, kept, a, left.partial)
                return Step("all-to-all", run, i, j, _with(moved, j, have[j].axes + run, want[j], left.partial))
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        free = a.axes[_common(_tokens(a), _tokens(b)) :]
        run = next((free[n:] for n in range(len(free)) if set(free[n:]) <= set(right.partial)), ())
        if run:
            kept = a.axes[: len(a.axes) - len(run)]
            return Step("place in zeros", run, i, -1, _with(left, i, kept, a, [*left.partial, *run]))
    held = {axis for b in want for axis in b.axes}
    summed = tuple(axis for axis in pending if axis not in held) or (() if _lost(left, right) else tuple(pending))
    if summed:
        rest = [axis for axis in left.partial if axis not in summed]
        return Step("all-reduce", summed, -1, -1, replace(left, partial=tuple(rest)))
    lost = _lost(left, right)
    if lost:
        i, run = lost[0]
        kept = have[i].axes[: len(have[i].axes) - len(run)]
        return Step("all-gather", run, i, -1, _with(left, i, kept, have[i], left.partial))
    j, axes = next(iter(gained.items()))
    return Step("slice", axes, -1, j, _with(left, j, have[j].axes + axes, want[j], left.partial))


def _leading(axes: tuple[str, ...], among: Sequence[str]) -> tuple[str, ...]:
    n = 0
    while n < len(axes) and axes[n] in among:
        n += 1
    return axes[:n]


def _lost(left: Spec, right: Spec) -> list[tuple[int, tuple[str, ...]]]:
    """Atoms with innermost axes that they must lose before they can be what is wanted."""
    pairs = enumerate(zip(left.atoms, right.atoms, strict=True))
    runs = [(i, a.axes[_common(_tokens(a), _tokens(b)) :]) for i, (a, b) in pairs]
    # Not those that are to become a pending sum.
    stop = [max([n + 1 for n, axis in enumerate(run) if axis in right.partial], default=0) for _, run in runs]
    return [(i, run[n:]) for (i, run), n in zip(runs, stop, strict=True) if run[n:]]


def one_step(text: str, axes: Axes) -> Step | None:
    """The one move that a pair is; None where both sides are the same.

    Raises `SpecError` with the lines to write where it takes several.
    """
    left, right = parse_pair(text)
    found = steps(left, right)
    if len(found) <= 1:
        return found[0] if found else None
    words = ", then ".join(f"{step.kind} over {'/'.join(step.axes)}" for step in found)
    raise SpecError(
        f"one reshard is one move, and this takes {len(found)}: {words}", text, mesh=text_of(axes, left, right),
        fix="\n".join(lines(left, found)),
    )  # fmt: skip


def lines(left: Spec, found: Sequence[Step]) -> list[str]:
    """Each step as a pair that `reshard` takes."""
    specs = [left, *(step.after for step in found)]
    return [f"{a} -> {b}" for a, b in itertools.pairwise(specs)]
