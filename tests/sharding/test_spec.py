"""The spec language: what parses and how it is printed, and the text of every refusal."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from meshfn.sharding import moves, spec, steps

MESH = sh.Mesh(g=2, u=2)


def message(fn, *args, **given):
    with pytest.raises((sh.SpecError, TypeError)) as error:
        fn(*args, **given)
    return str(error.value)


def short(*messages):
    """Refusals, a line each: the text with what is marked in brackets; what; and the facts and the fix."""
    found = []
    for what, *rest in (text.splitlines() for text in messages):
        text = rest.pop(0)[4:] if rest and not rest[0].lstrip().startswith("fix:") else ""
        if rest and set(rest[0]) <= {" ", "^"}:
            caret = rest.pop(0)[4:]
            start, stop = caret.index("^"), len(caret)
            text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
        found.append(" | ".join(word.strip() for word in (f"{text:<20}", what, *rest)))
    return "\n".join(found)


def refusals(*texts):
    return short(*(message(sh.Spec.parse, text) for text in texts))


def moved(pair, *shape, mesh=MESH, dtype=torch.float32, **sizes):
    """A reshard on rank 0 of a mesh; its refusal comes before anything moves."""
    return message(sh.reshard, torch.zeros(shape, dtype=dtype), pair, mesh.at(0, sh.Local()), **sizes)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", ""),
        ("  B   S ", "B S"),
        ("B(S T)D", "B (S T) D"),
        ("(B)", "B"),
        ("((K/u G) E) D", "(K/u G E) D"),
        ("(((K/u) G)\tE/g)", "(K/u G E/g)"),
        ("B S/g/u ... E", "B S/g/u ... E"),
        ("...", "..."),
        ("... +u", "... +u"),
        ("+tp", "+tp"),
        ("B S +u+g", "B S +g+u"),
        ("B S/cp:zigzag/u", "B S/cp:zigzag/u"),
        ("K@H/u K_2/tp", "K@H/u K_2/tp"),
    ],
)
def test_what_parses_is_printed_in_one_way(text, printed):
    found = sh.Spec.parse(text)
    assert str(found) == printed
    assert repr(found) == f'Spec("{printed}")'
    again = sh.Spec.parse(str(found))
    assert (str(again), again, hash(again)) == (printed, found, hash(found))
    assert sh.Spec.parse(found) is found


def test_specs_are_equal_when_they_say_the_same():
    parse = sh.Spec.parse
    assert parse("B ((K G) E) +g+u") == parse("B  (K G E)  +u+g")
    different = ["B S", "S B", "(B S)", "B/u S", "B S/u", "B S/g", "B S/g/u", "B S/u/g", "B S/u:zigzag", "B S +u",
                 "B S ...", "... B S", "K@H/u S", "K/u S"]  # fmt: skip
    assert len({parse(text) for text in different}) == len(different)
    assert parse("B S/g/u (K/tp G) +dp").axes == ("g", "u", "tp", "dp")
    assert parse("B ... (K G)").letters == ("B", "K", "G")


def test_a_known_axis_that_the_mesh_lacks_has_size_one_and_is_printed_so():
    everything = sh.Spec.parse("B/dp S/cp/g/u K/tp X/ep")
    sizes = {"B": 3, "S": 5, "K": 3, "X": 4}
    assert everything.local(sizes, sh.Mesh(), 0) == (3, 5, 3, 4)
    assert everything.local(sizes, sh.Mesh(g=2), 1) == (3, 2, 3, 4)
    x = torch.zeros(2, 6)
    assert sh.reshard(x, "B S/cp -> B S", sh.Mesh(g=2).at(0, sh.Local()), S=6) is x
    assert_expected_inline(
        moved("B S/cp/g K/tp -> B S K", 2, 6, 3, S=7, K=3),
        """\
one reshard is one move, and this takes 2: all-gather over cp/g, then all-gather over tp
    B S/cp/g K/tp -> B S K
    mesh: g=2 u=2 cp=1 (not in the mesh) tp=1 (not in the mesh)
    fix: B S/cp/g K/tp -> B S K/tp
         B S K/tp -> B S K""",
    )


def test_caches_are_bounded():
    for cached in (spec._parse, spec._parse_pair, steps.steps, moves.reads, moves.move):
        assert 0 < cached.cache_info().maxsize <= 4096
    before = spec._parse.cache_info().hits
    assert sh.Spec.parse("B Cached/u") is sh.Spec.parse("B Cached/u")
    assert spec._parse.cache_info().hits == before + 1


def test_unknown_axes():
    found = [
        moved("B S/pt -> B S", 2, 3, S=6),
        moved("B S/gu -> B S", 2, 3, mesh=sh.Mesh(ug=2), S=6),
        moved("B S -> B S/rows", 2, 3, mesh=sh.Mesh(row=2)),
        moved("B S/g +uu -> B S/g", 2, 3, S=6),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
no axis "pt"
    B S/pt -> B S
        ^^
    mesh: g=2 u=2     fix: did you mean "tp"?

no axis "gu"
    B S/gu -> B S
        ^^
    mesh: ug=2     fix: did you mean "ug"?

no axis "rows"
    B S -> B S/rows
               ^^^^
    mesh: row=2     fix: did you mean "row"?

no axis "uu"
    B S/g +uu -> B S/g
           ^^
    mesh: g=2 u=2     fix: did you mean "u"?""",
    )


def test_an_axis_splits_once_and_a_letter_stands_once():
    assert_expected_inline(
        refusals("B S/u/u", "B S/u H/u", "B S/u D +u", "B +u+u", "B S/g (K/g G)", "B S S"),
        """\
B S/u/[u] | axis "u" splits S twice | fix: u once
B S/u H/[u] | axis "u" splits S and H | fix: one mesh axis splits a tensor once: drop it from one of them
B S/u D +[u] | axis "u" splits S and the pending sum | fix: one mesh axis splits a tensor once: drop it from one of them
B +u+[u] | axis "u" splits the pending sum twice | fix: u once
B S/g (K/[g] G) | axis "g" splits S and K | fix: one mesh axis splits a tensor once: drop it from one of them
B S [S] | dimension "S" stands twice | fix: the second one its own letter, such as S for queries and T for keys""",
    )


def test_malformed_text():
    assert_expected_inline(
        refusals("B (S", "B S)", "B ()", "B S/", "S//u", "B/1u", "S/u:foo", "S/u:", "S/u/g:zigzag", "B +u S", "(B +u) S",
                 "B -> S", "B .. D", "B,S", "(... B)"),
        """\
B [(]S | a "(" is never closed
B S[)] | a ")" too many
B [()] | "()" names no dimension | fix: a name, such as (K G)
B S/[] | "S/" names no axis | fix: S, or S/u
S/[/]u | "S/" names no axis | fix: S, or S/u
B/[1u] | "1u" is no name of an axis | fix: B, or B/u
S/[u:foo] | ":foo" is no order | fix: u:zigzag, or u
S/[u:] | ":" is no order | fix: u:zigzag, or u
S/u/[g:zigzag] | head-tail order stands on the outermost axis of a dimension | fix: S/u:zigzag/g
B +u [S] | "S" stands after the pending sum, which is last | fix: ... S +u
(B [+u]) S | a pending sum is of the whole tensor, not of a dimension
B [->] S | one spec is needed here, not a pair ("->")
B [..] D | ".." is no dimension | fix: a name, sharded or not: S, S/u, S/g/u, S/cp:zigzag, K@H/u
[B,S] | "B,S" is no dimension | fix: a name, sharded or not: S, S/u, S/g/u, S/cp:zigzag, K@H/u
([...] B) | "..." stands for whole dimensions, not inside of one""",
    )  # fmt: skip


def test_needs():
    assert_expected_inline(
        refusals("K@H", "K@H/u:zigzag", "K@/u", "K@K/u", "S/u@H"),
        """\
[K@H] | "K@H" needs plain axes, over which H is dealt out | fix: K@H/u, or K
[K@H/u:zigzag] | "K@H" needs plain axes, over which H is dealt out | fix: K@H/u, or K
K[@]/u | "@" names no other dimension | fix: K@H/u: the K that my H need
K[@K]/u | "@K" names no other dimension | fix: K@H/u: the K that my H need
S/[u@H] | "u@H" is no name of an axis | fix: S, or S/u""",
    )


@pytest.mark.parametrize(
    "text",
    "+  ++u  B_+  B_+_u  +u_+g  ..._B_...  S@T/u  B_S/u→B_S  é  B/é_S  @H/u  /u  K@H@H/u  1".replace("_", " ").split(
        "  "
    ),
)
def test_other_text_is_refused_with_the_text_in_the_message(text):
    found = message(sh.Spec.parse, text).splitlines()
    assert found[1] == f"    {text}"
    assert set(found[2]) == {" ", "^"}
    assert len(found[2]) <= len(found[1]) + 1


def test_pairs_that_are_none():
    pairs = ["B S/u", "", "B -> S -> D", "B S/u -> B", "B -> B D/u", "B S H -> B H S", "(B S) D -> B S D"]
    pairs.append("B ... -> ... B")
    assert_expected_inline(
        short(*(message(spec.parse_pair, pair) for pair in pairs)),
        """\
B S/u | a pair has one "->", this has none | fix: "from -> to", as "B S/u D -> B S D"
 | a pair has one "->", this has none | fix: "from -> to", as "B S/u D -> B S D"
B -> S [->] D | a pair has one "->", this has 2 | fix: "from -> to", as "B S/u D -> B S D"
B [S/u] -> B | dimension "S" is lost: it stands on the left alone | fix: write it on the right too, as S/u
B -> B [D/u] | dimension "D" is invented: it stands on the right alone | fix: write it on the left too, or drop it: a reshard makes none
B S H -> B [H] S | a reshard keeps the dimensions as they are: their order and what is composite differ | fix: "B S H" on both sides; einops.rearrange moves dimensions
(B S) D -> [B] S D | a reshard keeps the dimensions as they are: their order and what is composite differ | fix: "(B S) D" on both sides; einops.rearrange moves dimensions
B ... -> [...] B | a reshard keeps the dimensions as they are: their order and what is composite differ | fix: "B ..." on both sides; einops.rearrange moves dimensions""",
    )


def test_not_text():
    given = [None, 3, b"B", ["B"]]
    found = [message(sh.Spec.parse, value) for value in given] + [
        message(spec.parse_pair, value) for value in given[:1]
    ]
    found.append(message(sh.reshard, [1.0], "B/u -> B", sh.Mesh(u=1), B=1))
    assert_expected_inline(
        "\n".join(found),
        """\
a spec is a string such as 'B S/u D', not NoneType
a spec is a string such as 'B S/u D', not int
a spec is a string such as 'B S/u D', not bytes
a spec is a string such as 'B S/u D', not list
a pair is a string such as 'B S/u D -> B S D', not NoneType
reshard(x=...): a tensor is needed, not list""",
    )


def test_moves_that_take_several():
    found = [
        moved("B S/u K/g -> B S/g K/u", 2, 3, 3, S=6, K=6),
        moved("B S/g/u (K G) E -> B/g S (K/u G) E", 2, 3, 6, 4, S=12, K=3),
        moved("B S/g/u -> B S/u/g", 2, 3, S=12),
        moved("B S/u:zigzag -> B S/u", 2, 4, S=8),
        moved("B S/u D +g -> B/u S D", 2, 3, 4, S=6),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
one reshard is one move, and this takes 3: all-gather over u, then all-to-all over g, then slice over u
    B S/u K/g -> B S/g K/u
    mesh: g=2 u=2
    fix: B S/u K/g -> B S K/g
         B S K/g -> B S/g K
         B S/g K -> B S/g K/u

one reshard is one move, and this takes 2: all-to-all over u, then all-to-all over g
    B S/g/u (K G) E -> B/g S (K/u G) E
    mesh: g=2 u=2
    fix: B S/g/u (K G) E -> B S/g (K/u G) E
         B S/g (K/u G) E -> B/g S (K/u G) E

one reshard is one move, and this takes 2: all-gather over g/u, then slice over u/g
    B S/g/u -> B S/u/g
    mesh: g=2 u=2
    fix: B S/g/u -> B S
         B S -> B S/u/g

one reshard is one move, and this takes 2: all-gather over u, then slice over u
    B S/u:zigzag -> B S/u
    mesh: g=2 u=2
    fix: B S/u:zigzag -> B S
         B S -> B S/u

one reshard is one move, and this takes 2: all-to-all over u, then all-reduce over g
    B S/u D +g -> B/u S D
    mesh: g=2 u=2
    fix: B S/u D +g -> B/u S D +g
         B/u S D +g -> B/u S D""",
    )


def test_the_steps_that_a_refusal_writes_are_moves():
    for pair in ("B S/u K/g -> B S/g K/u", "B S/g/u K -> B/g S K/u", "B S/g/u -> B S/u/g", "B S/u K +g -> B/u S K"):
        with pytest.raises(sh.SpecError) as error:
            steps.one_step(pair, MESH.axes)
        lines = str(error.value).partition("fix: ")[2].split("\n         ")
        assert len(lines) > 1
        assert all(steps.one_step(line, MESH.axes) is not None for line in lines)
        left, right = spec.parse_pair(pair)
        assert (spec.parse_pair(lines[0])[0], spec.parse_pair(lines[-1])[1]) == (left, right)


def test_a_whole_value_is_no_pending_sum():
    assert_expected_inline(
        "\n\n".join([moved("B S -> B S +u", 2, 3), moved("B/u S +g -> B/u S +g+tp", 1, 3, B=2)]),
        """\
a whole value cannot become a pending sum over "u"
    B S -> B S +u
               ^^
    fix: drop "+u" on the right, or write it on the left too if x is one

a whole value cannot become a pending sum over "tp"
    B/u S +g -> B/u S +g+tp
                        ^^^
    fix: drop "+tp" on the right, or write it on the left too if x is one""",
    )


def test_sizes():
    gqa = "B S/u (K G) E -> B S (K/u G) E", 2, 3, 6, 4
    need = "B S/u K E -> B S K@H/u E", 2, 3, 3, 4
    found = [
        moved("B S/u -> B S", 2, 3),
        moved(*gqa, S=6),
        moved(*gqa, S=6, K=4),
        moved(*gqa, S=6, K=3, G=2, H=7),
        moved(*gqa, S=6, H=7, K=3),
        moved(*need, S=6),
        moved("B S/cp:zigzag H E -> B S H E", 1, 4100, 1, 1, mesh=sh.Mesh(cp=8), S=4100),
        moved("B S/u -> B S", 2, 3, S=-1),
        moved("B S/u -> B S", 2, 3, S=5.5),
        moved("B S/u T -> B S T", 2, 3, 1, S=6, T=True),
        moved("B S/u -> B S", 2, 3, S="6"),
    ]
    assert_expected_inline(
        short(*found),
        """\
B [S/u] -> B S | no size for S | mesh: g=2 u=2     fix: pass S=..., its global size
B S/u ([K G]) E -> B S (K/u G) E | no size for K and G, factors of a dimension of 6 | mesh: g=2 u=2     sizes: S=6     fix: pass K=...
B S/u ([K G]) E -> B S (K/u G) E | (K G) is 6 here, which does not factor: K=4 does not divide it | mesh: g=2 u=2     sizes: S=6 K=4     fix: another K, or pass G=... and reshape x
B S/u (K G) E -> B S (K/u G) E | H=7, K=3 and G=2 disagree: H is K x G = 6 | fix: H=6, or two of the three
B S/u (K G) E -> B S (K/u G) E | H=7 and K=3 disagree: H is K x G, and 3 does not divide 7 | fix: H=6, or another K
B S/u K E -> B S [K@H/u] E | no size for H, which K@H needs | mesh: g=2 u=2     sizes: S=6 K=3     fix: pass H=..., its global size
B [S/cp:zigzag] H E -> B S H E | S=4100 does not divide over cp=8 in head-tail order (needs a multiple of 16) | mesh: cp=8     fix: pad S to 4112, or drop ":zigzag" (without it shards may be uneven)
B [S]/u -> B S | S=-1: a size is a whole number, 0 or more | fix: S=..., its global size
B [S]/u -> B S | S=5.5: a size is a whole number, 0 or more | fix: S=..., its global size
B S/u [T] -> B S T | T=True: a size is a whole number, 0 or more | fix: T=..., its global size
B [S]/u -> B S | S='6': a size is a whole number, 0 or more | fix: S=..., its global size""",
    )


def test_tensors_that_do_not_fit():
    found = [
        moved("B S/u -> B S", 2, 3, 4, S=6),
        moved("B S/u D -> B S D", 2, 6, 4, S=6),
        moved("B S +u -> B S", 2, 3, dtype=torch.bool),
        message(sh.Spec.parse("B/u D").local, {"B": 3}, sh.Mesh(u=2), 0),
        message(sh.Spec.parse("B/u:zigzag ... D").slices, {"B": 4, "D": 3}, sh.Mesh(u=2), 0),
    ]
    assert_expected_inline(
        short(*found),
        """\
B S/u -> B S | x does not fit its spec: it has 3 dimensions, and the spec 2 | mesh: g=2 u=2
B [S/u] D -> B S D | x does not fit its spec: rank 0 holds B 3 D, but x is 2 6 4 | mesh: g=2 u=2, rank 0     sizes: S=6 | fix: x is all of S: pass this rank's shard of it, x[Spec.parse(...).slices(...)] | or, if 6 is what the shard holds: S=12, since sizes are global
B S +u -> B S | a pending sum of bool cannot be added up | fix: x.int(), or x.float()
B/u [D] | no size for D | mesh: u=2     sizes: B=3     fix: pass D=..., its global size
B/u:zigzag ... D | "B/u:zigzag ... D" holds several ranges of a dimension around "...", which no index can say | fix: in place of "...", a letter for each dimension""",
    )


def test_what_simulate_is_handed():
    def handed(in_specs, *args, out="B S", **sizes):
        return message(sh.simulate(lambda *xs, mesh: xs[0], MESH, in_specs, out, **sizes), *args)

    x = torch.zeros(4, 6)
    found = [
        handed("B S +u", x),
        handed("B S/u", x[None]),
        handed("B S/u", x, x),
        handed(("B S/u", "B T"), x, x[1:]),
        handed("B (K/u G)", x, K=4),
        handed("B S/u", 3),
        handed("B S/u", (x, x)),
        handed(({"a": "B S/u"},), {"b": x}),
        handed("B S/u", x),
        handed("B S/u", x, out="B S D"),
    ]
    assert_expected_inline(
        short(*found),
        """\
B S [+u] | args[0]: a whole value is needed here, not a pending sum | mesh: g=2 u=2     fix: drop it: the value is whole outside, and every rank gets its shard of it
B S/u | args[0] has 3 dimensions (1 4 6), its spec 2 | mesh: g=2 u=2
 | simulate: 2 arguments, but in_specs has 1 | fix: one spec an argument
[B] T | args[1] does not fit its spec: B is 4, but the tensor has 3 (3 6) | mesh: g=2 u=2     sizes: B=4 S=6     fix: 4 there, of all ranks together, or B=3 everywhere else
B ([K/u G]) | args[0]: (K G) is 6, which does not factor: 4 does not divide it | mesh: g=2 u=2     sizes: K=4 B=4     fix: pass G=..., or another size
 | args[0] is int, and its spec "B S/u" is of one tensor | fix: a tree of specs (params.specs()), or None: every rank gets all of it
 | args[0] is a tree of 2 leaves, and its spec "B S/u" is of one tensor | fix: a tree of specs (params.specs()), or None: every rank gets all of it
 | args[0]: its specs have another structure; without a spec: args[0]['b']; in the specs alone: args[0]['a'] | fix: one spec a tensor
B S | the result does not fit its spec: rank 0 returned 4x3 float32, and 4x6 float32 is its shard | mesh: g=2 u=2     sizes: B=4 S=6
B S D | the result has 2 dimensions (4x3), its spec 3 | mesh: g=2 u=2""",
    )
