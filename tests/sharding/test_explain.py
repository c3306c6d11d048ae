"""`explain`: what is printed before is what is counted after."""

from __future__ import annotations

import random

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.sharding import Mesh, SpecError, simulate, trace
from meshfn.sharding import reshard as move
from meshfn.sharding.explain import _classes, explain
from meshfn.sharding.shards import complete
from meshfn.sharding.spec import parse_pair
from meshfn.sharding.steps import steps

FOUR = Mesh(dp=2, u=2)
SIZES = {"B": 2, "S": 97, "K": 3, "E": 64}


def test_all_to_all():
    assert_expected_inline(
        str(explain("B S/u K E -> B S K/u E", FOUR, **SIZES)),
        """\
B S/u K E -> B S K/u E
mesh: dp=2 u=2     sizes: B=2 S=97 K=3 E=64     float32
all-to-all over u (2 ranks, 2 groups): S loses u, K gains it; uneven splits

ranks  before     after         sends  receives
0,2    2 49 3 64  2 97 2 64  24.5 KiB  48.0 KiB
1,3    2 48 3 64  2 97 1 64  48.0 KiB  24.5 KiB

cost: 48.0 KiB for the largest rank; evenly split, (P-1)/P V = 48.5 KiB with P=2 and V=97.0 KiB, a shard
copies: 1 before, 1 after
backward: B S K/u E -> B S/u K E : all-to-all, 48.0 KiB for the largest rank""",
    )


def test_all_gather():
    e = explain("B S/dp/u D -> B S D", FOUR, B=1, S=96, D=64, dtype=torch.bfloat16)
    assert_expected_inline(
        str(e),
        """\
B S/dp/u D -> B S D
mesh: dp=2 u=2     sizes: B=1 S=96 D=64     bfloat16
all-gather over dp/u (4 ranks): S loses dp/u, every rank gets all of it; even splits

ranks  before   after     sends  receives
0..3   1 24 64  1 96 64  9216 B    9216 B

cost: 9216 B for the largest rank, (P-1)/P V with P=4 and V=12.0 KiB, the tensor after
copies: 0 before, 0 after
backward: B S D +dp+u -> B S/dp/u D : reduce-scatter, 9216 B for the largest rank""",
    )


def test_reduce_scatter():
    assert_expected_inline(
        str(explain("B S D +u -> B S/u D", FOUR, B=1, S=96, D=64)),
        """\
B S D +u -> B S/u D
mesh: dp=2 u=2     sizes: B=1 S=96 D=64     float32
reduce-scatter over u (2 ranks, 2 groups): the pending sum over u is added up, S gains u; even splits

ranks  before   after       sends  receives
0..3   1 96 64  1 48 64  12.0 KiB  12.0 KiB

cost: 12.0 KiB for the largest rank, (P-1)/P V with P=2 and V=24.0 KiB, the tensor before
copies: 0 before, 0 after
backward: B S/u D -> B S D : all-gather, 12.0 KiB for the largest rank""",
    )


def test_all_reduce():
    assert_expected_inline(
        str(explain("B D +u -> B D", FOUR, B=3, D=5)),
        """\
B D +u -> B D
mesh: dp=2 u=2     sizes: B=3 D=5     float32
all-reduce over u (2 ranks, 2 groups): the pending sum over u is added up, every rank gets all of it

ranks  before  after  sends  receives
0,2    3 5     3 5     60 B      60 B
1,3    3 5     3 5     60 B      60 B

cost: 60 B for the largest rank, 2 (P-1)/P V with P=2 and V=60 B, the tensor before
copies: 0 before, 0 after
backward: B D +u -> B D : all-reduce, 60 B for the largest rank""",
    )


def test_slice():
    assert_expected_inline(
        str(explain("B S D -> B S/u D", FOUR, B=1, S=96, D=64)),
        """\
B S D -> B S/u D
mesh: dp=2 u=2     sizes: B=1 S=96 D=64     float32
slice over u (2 ranks, 2 groups): S gains u, each rank keeps its part

ranks  before   after    sends  receives
0..3   1 96 64  1 48 64    0 B       0 B

cost: no bytes move
copies: 0 before, 0 after
backward: B S/u D -> B S D +u : place in zeros, no bytes move""",
    )


def test_place_in_zeros():
    assert_expected_inline(
        str(explain("B S/u D -> B S D +u", FOUR, B=1, S=96, D=64)),
        """\
B S/u D -> B S D +u
mesh: dp=2 u=2     sizes: B=1 S=96 D=64     float32
place in zeros over u (2 ranks, 2 groups): S loses u to a pending sum, each rank's part among zeros

ranks  before   after    sends  receives
0..3   1 48 64  1 96 64    0 B       0 B

cost: no bytes move
copies: 0 before, 1 after
backward: B S D -> B S/u D : slice, no bytes move""",
    )


def test_heads_that_several_need():
    e = explain("B S/u K E -> B S K@H/u E", Mesh(u=4), B=1, S=32, H=12, K=3, E=4)
    assert_expected_inline(
        str(e),
        """\
B S/u K E -> B S K@H/u E
mesh: u=4     sizes: B=1 S=32 H=12 K=3 E=4     float32
all-to-all over u (4 ranks): S loses u, K gains it; uneven splits

ranks  before   after     sends  receives
0,3    1 8 3 4  1 32 1 4  640 B     384 B
1,2    1 8 3 4  1 32 2 4  512 B     768 B

cost: 768 B for the largest rank
copies: 1 before, 0 after
backward: B S K@H/u E -> B S/u K E : all-to-all, 768 B for the largest rank
several ranks may get one K: in backward its copies are summed""",
    )


def test_heads_that_several_held():
    assert_expected_inline(
        str(explain("B K@H/u E -> B K E", Mesh(u=4), B=1, H=12, K=3, E=4)),
        """\
B K@H/u E -> B K E
mesh: u=4     sizes: B=1 H=12 K=3 E=4     float32
all-gather over u (4 ranks): K loses u, every rank gets all of it; uneven splits

ranks  before  after  sends  receives
0      1 1 4   1 3 4   48 B      32 B
1,2    1 2 4   1 3 4   48 B      32 B
3      1 1 4   1 3 4    0 B      48 B

cost: 48 B for the largest rank
copies: 0 before, 0 after
backward: B K E +u -> B K@H/u E : reduce-scatter, 48 B for the largest rank
of several ranks with one K, the first sends it, and it alone gets the gradient""",
    )


def test_a_composite():
    e = explain("B S/u (K G) E -> B S (K/u G) E", FOUR, B=1, S=97, K=3, H=9, E=64)
    assert_expected_inline(
        str(e),
        """\
B S/u (K G) E -> B S (K/u G) E
mesh: dp=2 u=2     sizes: B=1 S=97 K=3 H=9 E=64     float32
all-to-all over u (2 ranks, 2 groups): S loses u, K gains it; uneven splits

ranks  before     after         sends  receives
0,2    1 49 9 64  1 97 6 64  36.8 KiB  72.0 KiB
1,3    1 48 9 64  1 97 3 64  72.0 KiB  36.8 KiB

cost: 72.0 KiB for the largest rank; evenly split, (P-1)/P V = 72.8 KiB with P=2 and V=145.5 KiB, a shard
copies: 1 before, 0 after
backward: B S (K/u G) E -> B S/u (K G) E : all-to-all, 72.0 KiB for the largest rank""",
    )


def test_nothing():
    e = explain("B S D -> B S D", FOUR, B=1, S=96, D=64)
    assert (e.kind, e.axes, e.steps, e.copies) == ("none", (), [], (0, 0))
    assert_expected_inline(
        str(e),
        """\
B S D -> B S D
mesh: dp=2 u=2     sizes: B=1 S=96 D=64     float32
nothing moves: both sides say the same

ranks  before   after    sends  receives
0..3   1 96 64  1 96 64    0 B       0 B

cost: no bytes move
copies: 0 before, 0 after
backward: B S D -> B S D : nothing moves""",
    )


def test_an_axis_of_one_rank():
    e = explain("B S/tp D -> B S D", FOUR, B=1, S=96, D=64)
    assert (e.kind, e.steps, e.sends) == ("none", [], (0, 0, 0, 0))
    assert_expected_inline(
        str(e),
        """\
B S/tp D -> B S D
mesh: dp=2 u=2 tp=1 (not in the mesh)     sizes: B=1 S=96 D=64     float32
nothing moves: tp has one rank

ranks  before   after    sends  receives
0..3   1 96 64  1 96 64    0 B       0 B

cost: no bytes move
copies: 0 before, 0 after
backward: B S D +tp -> B S/tp D : nothing moves""",
    )


def test_several_steps():
    e = explain("B S/u K E -> B S/dp K/u E", FOUR, **SIZES)
    assert_expected_inline(
        str(e),
        """\
B S/u K E -> B S/dp K/u E
mesh: dp=2 u=2     sizes: B=2 S=97 K=3 E=64     float32
not one move: one reshard is one move, and this takes 2. Write them one after the other:
    "B S/u K E -> B S K/u E"     all-to-all over u  48.0 KiB for the largest rank
    "B S K/u E -> B S/dp K/u E"  slice over dp      no bytes move
in all: 48.0 KiB for the largest rank""",
    )
    assert (e.kind, e.axes, e.backward) == ("several", (), "")
    x = torch.randn(2, 97, 3, 64)

    def body(x, mesh):
        for pair in e.steps:
            x = move(x, pair, mesh, **SIZES)
        return x

    t = trace(FOUR)
    y = simulate(body, t.mesh, "B S/u K E", "B S/dp K/u E", **SIZES)(x)
    assert torch.equal(x, y)
    assert [t.bytes(r) for r in range(4)] == list(zip(e.sends, e.receives, strict=True))


def test_attributes():
    e = explain("B S/u K E -> B S K/u E", FOUR, **SIZES)
    assert (e.kind, e.axes, e.steps) == ("all-to-all", ("u",), ["B S/u K E -> B S K/u E"])
    assert (e.backward, e.copies) == ("B S K/u E -> B S/u K E", (1, 1))
    assert sum(e.sends) == sum(e.receives)
    assert repr(e) == str(e)
    page = e._repr_html_()
    assert "-&gt;" in page
    assert "<script" not in page
    assert page.count("<table") == 1


@pytest.mark.parametrize(
    ("pair", "backward"),
    [
        ("B S/u D -> B S D", "B S D +u -> B S/u D"),
        ("B S D -> B S/u D", "B S/u D -> B S D +u"),
        ("B S D +u -> B S D", "B S D +u -> B S D"),
        ("B S D +u -> B S/u D", "B S/u D -> B S D"),
        ("B S/u D -> B S D +u", "B S D -> B S/u D"),
        ("B S/u D +dp -> B S D +dp", "B S D +u -> B S/u D"),
        ("B S/dp/u D -> B S D/dp/u", "B S D/dp/u -> B S/dp/u D"),
    ],
)
def test_backward_is_the_pair_of_the_gradient(pair, backward):
    """And the pair back from there is the first, but for sums over axes that stay out of it."""
    e = explain(pair, FOUR, B=2, S=5, D=7)
    assert e.backward == backward
    again = explain(backward, FOUR, B=2, S=5, D=7)
    assert again.backward == pair.replace(" +dp", "")
    assert again.kind == {"slice": "place in zeros", "place in zeros": "slice", "all-gather": "reduce-scatter",
                          "reduce-scatter": "all-gather"}.get(e.kind, e.kind)  # fmt: skip
    classes = _classes(pair, FOUR.axes, (("B", 2), ("S", 5), ("D", 7)), torch.float32)
    assert [c.backward[:2] for c in classes for _ in c.ranks] == [
        (again.sends[r], again.receives[r]) for c in classes for r in c.ranks
    ]


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
        classes = _classes(pair, mesh.axes, tuple(complete(sizes).items()), torch.float32)
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


def test_a_missing_size():
    with pytest.raises(SpecError) as e:
        explain("B S/u D -> B S D", FOUR, S=4, D=2)
    assert_expected_inline(
        str(e.value),
        """\
no size for B
    B S/u D -> B S D
    ^
    mesh: dp=2 u=2     sizes: S=4 D=2     fix: pass B=..., its global size""",
    )


def test_no_size_for_any_number_of_dimensions():
    with pytest.raises(SpecError) as e:
        explain("... S/u -> ... S", FOUR, S=4)
    assert_expected_inline(
        str(e.value),
        """\
bytes need the size of every dimension, and "..." has none
    ... S/u -> ... S
    ^^^
    fix: a letter for each dimension in place of "...\"""",
    )


def test_no_steps_lead_there():
    with pytest.raises(SpecError) as e:
        explain("B D -> B D +u", FOUR, B=1, D=4)
    assert_expected_inline(
        str(e.value),
        """\
a whole value cannot become a pending sum over "u"
    B D -> B D +u
               ^^
    fix: drop "+u" on the right, or write it on the left too if x is one""",
    )


def test_an_axis_that_nobody_knows():
    with pytest.raises(SpecError) as e:
        explain("B S/pd D -> B S D", FOUR, B=1, S=4, D=4)
    assert_expected_inline(
        str(e.value),
        """\
no axis "pd"
    B S/pd D -> B S D
        ^^
    mesh: dp=2 u=2     fix: did you mean "dp"?""",
    )


def test_a_spec_is_no_pair():
    with pytest.raises(SpecError):
        explain("B S/u D", FOUR, B=1, S=4, D=4)
