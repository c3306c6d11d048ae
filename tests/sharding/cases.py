"""Random reshards with what each rank must get, worked out by numpy from the global tensor. Shared by every executor."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from meshfn import sharding as sh
from torch import Tensor

LETTERS = ["B", "S", "T", "D", "E", "F"]


class Case(NamedTuple):
    """axes: of the mesh. pair, sizes: as reshard takes them. names: letters of each dimension. seed: of the values."""

    axes: dict[str, int]
    pair: str
    sizes: dict[str, int]
    every: dict[str, int]
    dims: tuple[tuple[str, ...], ...]
    left: dict[str, Any]
    right: dict[str, Any]
    kind: str
    seed: int
    dtype: torch.dtype


def make(seed: int, *, ranks: int | None = None) -> Case:
    """A random legal pair. ranks: how many the mesh shall have; else 1 to 12."""
    r = random.Random(seed)
    axes = _mesh(r, ranks)
    every, dims = _dims(r)
    atoms = [x for dim in dims for x in dim]
    left, right, kind = _sides(r, axes, atoms)
    marks = _marks(r, axes, atoms, (left, right), every)
    for side, spec in enumerate((left, right)):
        spec["marks"] = {x: marks.get((side, x)) for x in atoms}
    pair = " -> ".join(_text(dims, spec) for spec in (left, right))
    given = {x: every[x] for x in every if x in atoms and left[x]}
    if "K" in atoms or "H" in atoms:
        given |= {"K": every["K"], "G": every["G"]}
    given |= {x: every[x] for d in dims if len(d) > 1 for x in d}  # factors cannot all be read
    kinds = [torch.float64] * 6 + [torch.float32, torch.bfloat16, torch.int64]
    if kind not in ("all-reduce", "reduce-scatter"):
        kinds.append(torch.bool)
    return Case(axes, pair, given, every, tuple(dims), left, right, kind, seed, r.choice(kinds))


def _mesh(r: random.Random, ranks: int | None) -> dict[str, int]:
    any_size = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (2, 3, 2)]
    this_size = {2: [(2,), (2, 1)], 4: [(4,), (2, 2), (1, 4), (2, 1, 2)]}
    shape = r.choice(this_size[ranks] if ranks else any_size)
    return dict(zip(r.sample(["g", "u", "tp", "cp", "dp", "row"], len(shape)), shape, strict=True))


def _dims(r: random.Random) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Sizes by letter, and the letters of each dimension: with heads, or with two letters in one, or neither."""
    heads = r.random() < 0.4
    letters = r.sample(LETTERS, r.randint(1, 4))
    every = {x: r.choice([0, 1, 1, 2, 3, 5, 6, 7, 8]) for x in letters}
    dims: list[tuple[str, ...]] = [(x,) for x in letters]
    if heads:
        every["G"] = r.choice([1, 2, 3])
        every["K"] = r.choice([1, 2, 3, 4, 5])
        every["H"] = every["K"] * every["G"]
        of_heads = [("K", "G"), ("K",), ("K",), ("H",), ("K", "E") if "E" not in letters else ("K",)]
        dims.insert(r.randint(0, len(dims)), r.choice(of_heads))
        every.setdefault("E", 2)
    elif len(dims) > 2 and r.random() < 0.4:
        at = r.randrange(len(dims) - 1)
        dims[at : at + 2] = [dims[at] + dims[at + 1]]
    return every, dims


def _sides(r: random.Random, axes: dict[str, int], atoms: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Axes by letter, and under "partial", before and after one move; and its kind."""
    free = list(axes)
    r.shuffle(free)
    left: dict[str, Any] = {"partial": [], **{x: [] for x in atoms}}
    for axis in free[: r.randint(0, len(free))]:
        left[r.choice([*atoms, "partial"])].append(axis)
    unused = [axis for axis in free if not any(axis in v for v in left.values())]
    right = {k: list(v) for k, v in left.items()}
    moves: list[tuple[str, str | None, str | None]] = []
    for x in atoms:
        if left[x]:
            moves += [("all-gather", x, None), ("place in zeros", x, None)]
            moves += [("all-to-all", x, y) for y in atoms if y != x] * 2
        if left["partial"]:
            moves += [("reduce-scatter", None, x)] * 2
    if left["partial"]:
        moves += [("all-reduce", None, None)] * 2
    if unused:
        moves += [("slice", None, r.choice(atoms))]
    kind, source, target = r.choice(moves) if moves else ("nothing", None, None)
    run: list[str] = []
    if source:
        kept = len(left[source]) - r.randint(1, len(left[source]))
        run, right[source] = left[source][kept:], left[source][:kept]
    elif kind == "slice":
        run = r.sample(unused, r.randint(1, len(unused)))
    elif kind in ("reduce-scatter", "all-reduce"):
        run = r.sample(left["partial"], r.randint(1, len(left["partial"])))
        right["partial"] = [axis for axis in left["partial"] if axis not in run]
    if target:
        right[target] = left[target] + run
    if kind == "place in zeros":
        right["partial"] = left["partial"] + run
    return left, right, kind


def _marks(
    r: random.Random, axes: dict[str, int], atoms: list[str], sides: tuple[Any, Any], every: dict[str, int]
) -> dict[tuple[int, str], str]:
    """Head-tail order, and heads as queries need them, by side and letter. Sizes are raised to what the order needs."""
    left, right = sides
    marks: dict[tuple[int, str], str] = {}
    for x in atoms:
        for side, spec in enumerate(sides):
            if not spec[x]:
                continue
            if side and left[x] and left[x][0] == right[x][0]:  # the outermost axis stays, and its order with it
                if (0, x) in marks:
                    marks[1, x] = marks[0, x]
            elif x == "K" and r.random() < 0.5:
                marks[side, x] = "@H"
            elif r.random() < 0.25:
                marks[side, x] = ":zigzag"
                every[x] = every[x] // 2 * 2 * axes[spec[x][0]] if every[x] > 1 else 2 * axes[spec[x][0]]
                if x in ("K", "G"):
                    every["H"] = every["K"] * every["G"]
                if x == "H":
                    every |= {"G": 1, "K": every["H"]}
    for x in atoms:  # one size may serve two orders
        needs = [2 * axes[sides[side][x][0]] for side in (0, 1) if marks.get((side, x)) == ":zigzag"]
        for need in [*needs, math.lcm(*needs)] if needs else ():
            every[x] = -(-every[x] // need) * need
    if "H" in atoms:
        every |= {"K": every["H"], "G": 1}
    elif "K" in every:
        every["H"] = every["K"] * every["G"]
    return marks


def _text(dims: Sequence[tuple[str, ...]], spec: dict[str, Any]) -> str:
    def word(x: str) -> str:
        mark = spec["marks"][x] or ""
        axes = [axis + mark * (mark == ":zigzag" and i == 0) for i, axis in enumerate(spec[x])]
        return "/".join([x + mark * (mark == "@H"), *axes])

    names = [word(d[0]) if len(d) == 1 else f"({' '.join(map(word, d))})" for d in dims]
    return " ".join(names + ["".join(f"+{a}" for a in spec["partial"])] * bool(spec["partial"]))


def held(case: Case, side: dict[str, Any], at: dict[str, int]) -> list[np.ndarray]:
    """Global indices of each letter that a rank holds, in its order."""
    found = []
    for x in (x for dim in case.dims for x in dim):
        mark = side["marks"][x]
        index = np.arange(case.every["H"] if mark == "@H" else case.every[x])
        for i, axis in enumerate(side[x]):
            if i == 0 and mark == ":zigzag":
                chunks = np.split(index, 2 * case.axes[axis])
                index = np.concatenate([chunks[at[axis]], chunks[2 * case.axes[axis] - 1 - at[axis]]])
            else:
                index = np.array_split(index, case.axes[axis])[at[axis]]
        found.append(np.unique(index // case.every["G"]) if mark == "@H" else index)
    return found


class Expected(NamedTuple):
    x: Tensor
    y: Tensor
    cotangent: Tensor
    grad: Tensor


def expected(case: Case, rank: int) -> Expected:
    """What a rank holds before and after, a cotangent, and the gradient: the sum of what its elements became."""
    mesh = sh.Mesh(**case.axes)
    atoms = [x for dim in case.dims for x in dim]
    shape = [case.every[x] for x in atoms]
    at = mesh.coordinates(rank)
    moved = [a for a in case.axes if _place(case.left, a) != _place(case.right, a)]
    group = [r for r in range(mesh.size) if all(mesh.coordinates(r)[a] == at[a] for a in at if a not in moved)]
    pending = case.left["partial"]

    def world(r: int, what: int) -> Tensor:
        """The global tensor, one for each addend."""
        c = mesh.coordinates(r)
        key = [case.seed, what, *([c[a] for a in pending] if what == 0 else [r])]
        values = torch.from_numpy(np.random.default_rng(key).integers(-4, 5, shape).astype(np.float64))
        return values if what else (values > 0).double() if case.dtype == torch.bool else values

    def take(t: Tensor, side: dict[str, Any], r: int) -> Tensor:
        return t[np.ix_(*held(case, side, mesh.coordinates(r)))] if shape else t

    def joined(t: Tensor) -> Tensor:
        sizes = iter(t.shape)
        return t.reshape([math.prod(next(sizes) for _ in dim) for dim in case.dims]).to(case.dtype)

    x = world(rank, 0)
    if case.kind in ("all-reduce", "reduce-scatter"):
        y = take(sum(world(r, 0) for r in group), case.right, rank)
    elif case.kind == "place in zeros":
        y = torch.zeros_like(x)
        y[np.ix_(*held(case, case.left, at))] = take(x, case.left, rank) * _first(case, rank, group, moved)
        y = take(y, case.right, rank)
    else:
        y = take(x, case.right, rank)
    # backward: every rank's cotangent, put in its place
    total = torch.zeros(shape, dtype=torch.float64)
    for r in group if case.kind not in ("slice", "place in zeros", "nothing") else [rank]:
        total[np.ix_(*held(case, case.right, mesh.coordinates(r)))] += take(world(r, 1), case.right, r)
    grad = take(total, case.left, rank)
    if case.kind in ("all-gather", "all-to-all", "place in zeros"):
        grad = grad * _first(case, rank, group, moved)
    return Expected(
        joined(take(x, case.left, rank)), joined(y), joined(take(world(rank, 1), case.right, rank)), joined(grad)
    )


def _first(case: Case, rank: int, group: list[int], moved: list[str]) -> Tensor:
    """1 where a rank is the first of its group to hold a key/value head that several hold, else 0."""
    mesh = sh.Mesh(**case.axes)
    atoms = [x for dim in case.dims for x in dim]
    mask = torch.ones([1] * len(atoms), dtype=torch.float64)
    for i, x in enumerate(atoms):
        if case.left["marks"][x] == "@H" and any(a in moved for a in case.left[x]):
            mine = held(case, case.left, mesh.coordinates(rank))[i]
            before = [r for r in group if r < rank]
            others = {k for r in before for k in held(case, case.left, mesh.coordinates(r))[i].tolist()}
            keep = torch.tensor([float(k not in others) for k in mine], dtype=torch.float64)
            mask = mask * keep.reshape([-1 if d == i else 1 for d in range(len(atoms))])
    return mask


def _place(side: dict[str, Any], axis: str) -> str | None:
    return next((k for k, v in side.items() if k != "marks" and axis in v), None)


def body(case: Case, mesh: sh.Mesh) -> tuple[bool, bool]:
    """Reshard on one rank, forward and backward; whether both are right."""
    want = expected(case, mesh.rank)
    x = want.x
    if case.seed % 2 and x.dim() > 1:  # not contiguous
        x = torch.stack([x, x], 1)[:, 0] if case.seed % 4 == 1 else x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.dtype.is_floating_point:
        x = x.detach().requires_grad_()
    y = sh.reshard(x, case.pair, mesh, **case.sizes)
    forward = torch.equal(y, want.y)
    if not x.dtype.is_floating_point:
        return forward, True
    (grad,) = torch.autograd.grad(y, x, want.cotangent)
    return forward, torch.equal(grad, want.grad)
