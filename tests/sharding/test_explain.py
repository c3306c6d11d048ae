"""`explain`: what it says of each move, as a person reads it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.sharding import Mesh, SpecError, simulate, trace
from meshfn.sharding import reshard as move
from meshfn.sharding.classes import classes_of
from meshfn.sharding.explain import explain

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

cost: 48.0 KiB for the largest rank; evenly split, (P-1)/P V = 36.4 KiB with P=2 and V=72.8 KiB, a shard
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

cost: 72.0 KiB for the largest rank; evenly split, (P-1)/P V = 54.6 KiB with P=2 and V=109.1 KiB, a shard
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
    classes = classes_of(pair, FOUR.axes, (("B", 2), ("S", 5), ("D", 7)), torch.float32)
    assert [c.backward[:2] for c in classes for _ in c.ranks] == [
        (again.sends[r], again.receives[r]) for c in classes for r in c.ranks
    ]


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
