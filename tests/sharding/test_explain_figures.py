"""The figures of `explain` are those that a trace counts when the pair runs."""

from __future__ import annotations

import random

import pytest
import torch
from meshfn.sharding import Mesh, simulate, trace
from meshfn.sharding import reshard as move
from meshfn.sharding.classes import classes_of
from meshfn.sharding.explain import explain
from meshfn.sharding.shards import complete
from meshfn.sharding.spec import parse_pair
from meshfn.sharding.steps import steps

FOUR = Mesh(dp=2, u=2)


def _layout(rng, mesh, need):
    """A random layout: for each letter its axes, then the pending sum, then the order of S."""
    axes = [name for name, _ in mesh.axes]
    rng.shuffle(axes)
    held = {letter: [] for letter in "BSKGE"}
    partial = []
    for axis in axes:
        where = rng.choice(["", "+", *"BSKGE"])
        if where == "+":
            partial.append(axis)
        elif where and not (need and where == "G"):
            held[where].append(axis)
    return held, partial


def _write(held, partial, zigzag, need):
    def atom(letter):
        axes = held[letter]
        order = [a + ":zigzag" if zigzag and letter == "S" and i == 0 else a for i, a in enumerate(axes)]
        return "/".join([letter + ("@H" if need and letter == "K" and axes else ""), *order])

    text = f"{atom('B')} {atom('S')} " + (f"{atom('K')} " if need else f"({atom('K')} {atom('G')}) ") + atom("E")
    return text + (" +" + "+".join(partial) if partial else "")


def _moved(rng, held, partial):
    """Another layout, a move or two away: a trailing run goes elsewhere."""
    held, partial = {k: list(v) for k, v in held.items()}, list(partial)
    named = {a for v in held.values() for a in v} | set(partial)
    sources = [k for k, v in held.items() if v] + ["+"] * bool(partial) + [""]
    source = rng.choice(sources)
    if source == "+":
        run = [partial.pop()]
    elif source:
        n = rng.randint(1, len(held[source]))
        run, held[source] = held[source][-n:], held[source][:-n]
    else:
        run = [a for a in ("g", "u", "dp") if a not in named][:1]
    target = rng.choice(["", *"BSKE"])
    if target and target != source:
        held[target] += run
    elif source not in ("", "+") and rng.random() < 0.3:
        partial += run
    return held, partial


def _pairs(count):
    rng = random.Random(0)
    found = []
    while len(found) < count:
        mesh = rng.choice([Mesh(g=2, u=2), Mesh(u=4), Mesh(dp=2, u=3), Mesh(dp=1, g=2, u=3), Mesh(g=3, dp=2)])
        need, zigzag = rng.random() < 0.3, rng.random() < 0.3
        held, partial = _layout(rng, mesh, need)
        other, rest = _moved(rng, held, partial)
        pair = f"{_write(held, partial, zigzag, need)} -> {_write(other, rest, zigzag, need)}"
        if any(a not in dict(mesh.axes) for spec in parse_pair(pair) for a in spec.axes):
            continue
        per = rng.choice([1, 2, 3])
        sizes = {"B": rng.choice([1, 1, 2, 5]), "S": 24 if zigzag else rng.choice([0, 1, 5, 8]),
                 "K": rng.choice([1, 3, 4]), "G": per, "E": rng.choice([1, 4, 6])}  # fmt: skip
        if len(steps(*parse_pair(pair))) <= 1:
            found.append((pair, mesh, sizes))
    return found


def _count(pair, mesh, sizes):
    """What forward and backward move and copy, counted while they run."""
    left, right = (str(spec) for spec in parse_pair(pair))
    t = trace(mesh)

    def body(x, mesh):
        return move(x, pair, mesh, **sizes)

    shape = [sizes["B"], sizes["S"], sizes["K"] * (sizes["G"] if "(" in pair else 1), sizes["E"]]
    x = torch.randn(shape, requires_grad=True)
    into = left.partition(" +")[0]
    y = simulate(body, t.mesh, into, right, **sizes)(x)
    y.backward(torch.ones_like(y))
    events = [[e for e in t.of(r) if not e.call.backward] for r in range(mesh.size)]
    back = [[e for e in t.of(r) if e.call.backward] for r in range(mesh.size)]
    return events, back


def test_figures_are_those_that_a_trace_counts():
    kinds = {}
    for pair, mesh, sizes in _pairs(150):
        e = explain(pair, mesh, **sizes)
        kinds[e.kind] = kinds.get(e.kind, 0) + 1
        events, back = _count(pair, mesh, sizes)
        where = f"{pair}   {mesh}   {sizes}"
        assert e.sends == tuple(sum(v.sent for v in rank) for rank in events), where
        assert e.receives == tuple(sum(v.received for v in rank) for rank in events), where
        if e.kind not in ("none", "slice", "place in zeros"):
            assert {v.kind for rank in events for v in rank} == {e.kind}, where
            halves = [[v.copies for v in rank] for rank in events]
            assert e.copies == tuple(map(max, zip(*halves, strict=True))), where
        classes = classes_of(pair, mesh.axes, tuple(complete(sizes).items()), torch.float32)
        of_rank = {r: c.backward for c in classes for r in c.ranks}
        shapes = {r: (c.before, c.forward.after) for c in classes for r in c.ranks}
        left, right = parse_pair(pair)
        for r, rank in enumerate(back):
            counted = (sum(v.sent for v in rank), sum(v.received for v in rank))
            assert of_rank[r][:2] == counted, where
            both = (left.local(sizes, mesh, r), right.local(sizes, mesh, r))
            assert shapes[r] == both, where
    assert len(kinds) == 7
    assert min(kinds.values()) > 2, kinds


def test_copies_of_what_is_local():
    """A slice of one range is a view; of two, in head-tail order, it is copied."""
    assert explain("B S D -> B S/u D", FOUR, B=2, S=8, D=3).copies == (0, 0)
    assert explain("B S D -> B S/u:zigzag D", FOUR, B=2, S=8, D=3).copies == (0, 1)
    assert explain("B S/u D -> B S D +u", FOUR, B=2, S=8, D=3).copies == (0, 1)


@pytest.mark.parametrize(
    ("pair", "mesh", "sizes"),
    [
        ("S/u K -> S K/u", Mesh(u=4096), {"S": 8192, "K": 10000}),
        ("B/dp S/g/u D -> B/dp S D", Mesh(dp=16, g=8, u=32), {"B": 37, "S": 4100, "D": 64}),
        ("K@H/u -> K", Mesh(u=4096), {"H": 8192, "K": 512}),
        ("B/dp S/u K -> B/dp S K@H/u", Mesh(dp=16, u=256), {"B": 20, "S": 4000, "H": 8192, "K": 512}),
        ("D +u -> D", Mesh(u=4096), {"D": 5000}),
    ],
)
def test_thousands_of_ranks_are_folded(pair, mesh, sizes):
    e = explain(pair, mesh, **sizes)
    assert len(e.sends) == 4096
    assert sum(e.sends) == sum(e.receives) > 0
    assert len(str(e).splitlines()) < 30
