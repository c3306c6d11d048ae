"""Thousands of cases that hypothesis makes up: `pytest -m verify`."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshfn import sharding as sh
from meshfn.sharding.spec import parse_pair

from .cases import body, make

pytestmark = pytest.mark.verify
AXES = ["g", "u", "tp"]
COLLECTIVES = ["all-gather", "all-to-all", "reduce-scatter", "all-reduce"]


def many(n):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


@st.composite
def layouts(draw):
    """A mesh, dimensions (one may be made of two letters), and axes on some letters."""
    axes = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXES))[: draw(st.integers(1, 3))]}
    letters = ["B", "S", "K"][: draw(st.integers(1, 3))]
    sizes = {letter: draw(st.integers(0, 7)) for letter in letters}
    joined = len(letters) > 1 and draw(st.booleans())
    held = {letter: [] for letter in letters}
    for axis in axes:
        place = draw(st.sampled_from([*letters, None]))
        if place:
            held[place].append(axis)
    zigzag = [x for x in letters if held[x] and draw(st.integers(0, 3)) == 0]
    for x in zigzag:
        sizes[x] *= 2 * axes[held[x][0]]
    return axes, sizes, joined, held, zigzag


def written(held, joined, zigzag=(), partial=()):
    words = []
    for x, axes in held.items():
        marks = [axis + ":zigzag" * (i == 0 and x in zigzag) for i, axis in enumerate(axes)]
        words.append("/".join([x, *marks]))
    if joined:
        words[:2] = [f"({words[0]} {words[1]})"]
    return " ".join([*words, "".join(f"+{axis}" for axis in partial)] if partial else words)


@st.composite
def pairs(draw):
    """One move of trailing axes: lost, gained, to another letter, or from a pending sum."""
    axes, sizes, joined, held, zigzag = draw(layouts())
    kind = draw(st.sampled_from(COLLECTIVES))
    right, partial, kept = {x: list(v) for x, v in held.items()}, [], []
    if kind in ("reduce-scatter", "all-reduce"):
        partial = [axis for axis in axes if not any(axis in v for v in held.values())]
        run = partial[: draw(st.integers(0, len(partial)))]
        kept = [axis for axis in partial if axis not in run]
    else:
        source = draw(st.sampled_from(list(held)))
        n = draw(st.integers(0, len(held[source])))
        at = len(held[source]) - n
        run, right[source] = held[source][at:], held[source][:at]
    if kind in ("all-to-all", "reduce-scatter"):
        target = draw(st.sampled_from(list(held)))
        if not right[target] and target in zigzag:
            zigzag = [x for x in zigzag if x != target]
        right[target] = right[target] + run
    pair = written(held, joined, zigzag, partial), written(right, joined, zigzag, kept)
    return axes, sizes, joined, pair, kind


def shard(x, text, mesh, sizes):
    return x[sh.Spec.parse(text).slices(sizes, mesh, mesh.rank)].clone()


def whole(sizes, joined, rank=0):
    n = list(sizes.values())
    n[: 2 * joined] = [n[0] * n[1]] if joined else []
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, n, generator=generator).double()


def on(mesh, body):
    return sh.Threads(mesh, timeout=20).run(body)


@many(1200)
@given(pairs())
def test_a_move_is_what_slices_say_and_its_gradient_is_the_adjoint(drawn):
    """Also <A x, y> = <x, A^T y>, summed over all ranks."""
    axes, sizes, joined, (left, right), _ = drawn
    mesh = sh.Mesh(**axes)
    pending = sh.Spec.parse(left).partial

    def addend(mesh):
        at = mesh.coordinates(mesh.rank)
        return sum((3**i) * at[axis] for i, axis in enumerate(pending))

    def rank(mesh):
        mine = shard(whole(sizes, joined, addend(mesh)), left, mesh, sizes).requires_grad_()
        y = sh.reshard(mine, f"{left} -> {right}", mesh, **sizes)
        if not pending:
            assert torch.equal(y, shard(whole(sizes, joined), right, mesh, sizes))
        weight = whole({str(i): n for i, n in enumerate(y.shape)}, False, 100 + mesh.rank)
        (grad,) = torch.autograd.grad(y, mine, weight)
        return (y * weight).sum().item(), (mine * grad).sum().item(), y.detach()

    found = on(mesh, rank)
    assert sum(a for a, _, _ in found) == sum(b for _, b, _ in found)
    summed = [axis for axis in pending if axis not in sh.Spec.parse(right).partial]
    for r in range(mesh.size):
        at = mesh.at(r, sh.Local())
        members = [mesh.at(m, sh.Local()) for m in mesh.ranks(summed, r)]
        total = sum(whole(sizes, joined, addend(m)) for m in members)
        assert torch.equal(found[r][2], shard(total, right, at, sizes))


@many(600)
@given(pairs())
def test_there_and_back(drawn):
    axes, sizes, joined, (left, right), _ = drawn
    if "+" in left:  # the way back from a sum is no inverse
        left, right = right.split(" +")[0], left.split(" +")[0]

    def rank(mesh):
        mine = shard(whole(sizes, joined), left, mesh, sizes)
        there = sh.reshard(mine, f"{left} -> {right}", mesh, **sizes)
        assert torch.equal(sh.reshard(there, f"{right} -> {left}", mesh, **sizes), mine)

    on(sh.Mesh(**axes), rank)


@many(400)
@given(pairs())
def test_simulate_equals_slicing(drawn):
    axes, sizes, joined, (left, right), _ = drawn
    if "+" in left:
        return
    x = whole(sizes, joined)
    seen = []

    def move(x, mesh):
        seen.append((mesh, x))
        return sh.reshard(x, f"{left} -> {right}", mesh, **sizes)

    f = sh.simulate(move, sh.Mesh(**axes), left, right, **sizes)
    assert torch.equal(f(x), x)
    for mesh, mine in seen:
        assert torch.equal(mine, shard(x, left, mesh, sizes))
    assert torch.equal(torch.func.grad(lambda x: (f(x) ** 2).sum())(x), 2 * x)


@many(1500)
@given(st.integers(400, 2**31))
def test_random_pairs_of_the_other_files(seed):
    case = make(seed)
    found = on(sh.Mesh(**case.axes), functools.partial(body, case))
    assert all(forward and back for forward, back in found), (case, found)


PIECES = st.sampled_from(["B", "S", "K", "H", "K@H", "/", "u", "g", "tp", "(", ")", " ", "  ", "+", ":zigzag", ":", "@", "...",
                          "->", "é", "1", "_", "\n", "\t"])  # fmt: skip


@many(4000)
@given(st.one_of(st.text(max_size=12), st.lists(PIECES, max_size=12).map("".join)))
def test_any_text_parses_to_a_fixed_point_or_is_refused(text):
    try:
        found = sh.Spec.parse(text)
    except sh.SpecError as error:
        assert str(error)  # noqa: PT017
    else:
        again = sh.Spec.parse(str(found))
        assert (again, str(again)) == (found, str(found))
    try:
        left, right = parse_pair(text)
    except sh.SpecError as error:
        assert str(error)  # noqa: PT017
    else:
        assert parse_pair(f"{left} -> {right}") == (left, right)


@many(1500)
@given(layouts())
def test_a_layout_prints_as_it_is_written_and_covers_the_tensor(drawn):
    axes, sizes, joined, held, zigzag = drawn
    text, x = written(held, joined, zigzag), whole(sizes, joined)
    spec, mesh = sh.Spec.parse(text), sh.Mesh(**axes)
    assert str(spec) == text
    index = torch.arange(x.numel()).view(x.shape)
    shards = [index[spec.slices(sizes, mesh, rank)] for rank in range(mesh.size)]
    assert [tuple(s.shape) for s in shards] == [spec.local(sizes, mesh, rank) for rank in range(mesh.size)]
    copies = mesh.size
    for axis in spec.axes:
        copies //= mesh[axis]
    counts = torch.bincount(torch.cat([s.reshape(-1) for s in shards]), minlength=x.numel())
    assert (counts == copies).all()
