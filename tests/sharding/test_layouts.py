"""Layouts as data: printed, composed, and refused where they cannot be."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.functional.wire import edges, identity
from meshfn.sharding import SpecError


def test_ulysses():
    assert_expected_inline(
        str(sh.ulysses("u")),
        """\
ulysses("u")
  x      B S/u D                         stays
  q      B S/u (K G) E -> B S (K/u G) E  all-to-all over u
  k      B S/u K E -> B S K/u E          all-to-all over u
  v      B S/u K V -> B S K/u V          all-to-all over u
  o      B S (K/u G) V -> B S/u (K G) V  all-to-all over u
  mask   B (K G) S T -> B (K/u G) S T    whole on every rank, then a slice
  sinks  (K G) -> (K/u G)                a slice
  out, h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss, cache_k, cache_v:
  stay as they come
  q_positions, k_positions, q_segment_ids, k_segment_ids: whole on every rank""",
    )


def test_all_gather():
    assert_expected_inline(
        str(sh.all_gather("g", zigzag=True, exchange="needed")),
        """\
all_gather("g", zigzag=True, exchange="needed")
  x              B S/g:zigzag D                       stays
  q              B S/g:zigzag (K G) E                 stays
  k              B S/g:zigzag K E -> B S K E          only what is needed, all-to-all over g
  v              B S/g:zigzag K V -> B S K V          only what is needed, all-to-all over g
  o              B S/g:zigzag (K G) V                 stays
  q_positions    B S -> B S/g:zigzag                  whole on every rank, then a slice
  q_segment_ids  B S -> B S/g:zigzag                  whole on every rank, then a slice
  mask           B (K G) S T -> B (K G) S/g:zigzag T  whole on every rank, then a slice
  out, h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss, sinks: stay as they
  come
  k_positions, k_segment_ids: whole on every rank""",
    )


def test_hybrid():
    assert_expected_inline(
        str(sh.hybrid(tp="tp", dp="dp", overlap=True)),
        """\
hybrid(ulysses="u", gather="g", tp="tp", dp="dp", overlap=True)
  x              B/dp S/g/u D                                                    stays
  q              B/dp S/g/u (K/tp G) E -> B/dp S/g (K/tp/u G) E                  all-to-all over u
  k              B/dp S/g/u K/tp E -> B/dp S/g K/tp/u E -> B/dp S K/tp/u E       all-to-all over u, then all-gather over g
  v              B/dp S/g/u K/tp V -> B/dp S/g K/tp/u V -> B/dp S K/tp/u V       all-to-all over u, then all-gather over g
  o              B/dp S/g (K/tp/u G) V -> B/dp S/g/u (K/tp G) V                  all-to-all over u
  out            B/dp S/g/u D +tp -> B/dp S/g/u D                                all-reduce over tp
  embedded       B/dp S/g/u D +tp -> B/dp S/g/u D                                all-reduce over tp
  shares         P/tp B/dp S/g/u N -> P B/dp S/g/u N                             all-gather over tp
  q_positions    B/dp S -> B/dp S/g                                              whole on every rank, then a slice
  q_segment_ids  B/dp S -> B/dp S/g                                              whole on every rank, then a slice
  mask           B/dp (K G) S T -> B/dp (K/tp/u G) S T -> B/dp (K/tp/u G) S/g T  whole on every rank, then a slice
  sinks          (K/tp G) -> (K/tp/u G)                                          a slice
  h, logits, tokens, targets, weights, rope, rope_positions, loss, cache_k, cache_v: stay as they come
  k_positions, k_segment_ids: whole on every rank""",
    )


def test_a_layout_is_a_value():
    assert sh.ulysses("u") == sh.ulysses("u") != sh.ulysses("cp")
    assert len({sh.hybrid(), sh.hybrid(), sh.hybrid(overlap=True)}) == 2
    layout = sh.Layout("mine", {"q": "B S/u (K G) E->B S (K/u G) E", "x": "B  S/u D"})
    assert layout["q"] == ("B S/u (K G) E", "B S (K/u G) E")
    assert layout["x"] == ("B S/u D",)
    with pytest.raises(KeyError, match='mine has no edge "Q"'):
        layout["Q"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sh.Layout("mine", {"q": "B S/u E -> B E"}), "is lost: it stands on the left alone"),
        (lambda: sh.Layout("mine", {"q": "B S/u/u E"}), 'axis "u" splits S twice'),
        (lambda: sh.all_gather(exchange="some"), """exchange='some'; it is "all" or "needed\""""),
        (lambda: sh.ulysses(dims="S H B E"), '"B S H E" or "S B H E"'),
        (lambda: sh.hybrid(ulysses="u", gather="u"), "two axes are needed"),
    ],
)
def test_layouts_that_cannot_be(make, message):
    with pytest.raises((SpecError, ValueError)) as error:
        make()
    assert message in str(error.value)


SIZES = {"S": 8, "H": 4, "K": 2}


@pytest.mark.parametrize(
    ("layout", "axes", "message"),
    [
        (
            sh.ulysses(),
            {"g": 2, "u": 2},
            'ulysses("u") does not use g=2, over which tokens are split: each part would attend to itself alone\n'
            '    mesh: g=2 u=2     fix: Mesh without g, or hybrid(ulysses="u", gather="g")',
        ),
        (
            sh.all_gather(),
            {"g": 2, "u": 2},
            'all_gather("g") does not use u=2, over which tokens are split: each part would attend to itself alone\n'
            '    mesh: g=2 u=2     fix: Mesh without u, or hybrid(ulysses="u", gather="g")',
        ),
        (sh.hybrid(), {"cp": 2}, 'hybrid(ulysses="u", gather="g") does not use cp=2'),
        (
            sh.Layout("mine", {e: sh.all_gather()["q"][0].replace("(K G) E", d) for e, d in
                               (("q", "(K G) E"), ("k", "K E"), ("v", "K V"), ("o", "(K G) V"))}),
            {"g": 2},
            "mine: k stays split over g, so a query would see only some of its keys",
        ),
    ],
)  # fmt: skip
def test_an_incomplete_layout_is_an_error_and_no_identity(layout, axes, message):
    mesh = sh.Mesh(**axes)
    record = sh.trace(mesh)
    xs = [torch.randn(1, 8, h, 2) for h in (4, 2, 2)]

    def core(q, k, v, **_):
        return q

    with pytest.raises(SpecError) as error:
        sh.simulate(sh.shard(core, layout, mesh, **SIZES), record.mesh)(*xs)
    assert str(error.value).startswith(message)
    with pytest.raises(SpecError):
        layout.plan(mesh, B=1, E=2, **SIZES)
    assert not len(record)


def test_function_and_layout_must_go_together():
    @edges(latent="B S L", out="B S D")
    def latent(params, x, *, wire=identity):
        return x

    with pytest.raises(SpecError, match=r'ulysses\("u"\) has no rule for latent, which latent passes'):
        sh.shard(latent, sh.ulysses(), sh.Mesh(u=2), S=8)
    mine = sh.Layout("mine", {"latent": "B S/u L -> B S L", "kv": "B S/u D -> B S D", "out": "B S/u D"})
    with pytest.raises(SpecError, match="mine moves kv, which latent does not pass"):
        sh.shard(latent, mine, sh.Mesh(u=2), S=8)
    with pytest.raises(SpecError, match=r"shard\(dot_product_attention, ...\): no size for H and K"):
        sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=2), S=8)
    with pytest.raises(TypeError, match="a Layout and a Mesh are needed, not str and Mesh"):
        sh.shard(F.attention, "ulysses", sh.Mesh(u=2), S=8)
    with pytest.raises(SpecError, match="H=5 and K=2 disagree"):
        sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=2), S=8, H=5, K=2)
    with pytest.raises(SpecError, match=r"S=9 does not divide over g=2 in head-tail order"):
        sh.shard(F.attention, sh.all_gather(zigzag=True), sh.Mesh(g=2), S=9)
    core = sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=2), **SIZES)
    with pytest.raises(ValueError, match="its mesh is no rank's own"):
        core(*[torch.zeros(1, 4, 4, 2)] * 3)
    with pytest.raises(SpecError, match="sharded over u=2, and this mesh is u=4"):
        sh.simulate(core, sh.Mesh(u=4))
    with pytest.raises(TypeError, match="has its own specs"):
        sh.simulate(core, sh.Mesh(u=2), "B S/u D", None)
    with pytest.raises(SpecError, match="sharded over u=2, and this mesh is g=2"):
        sh.shard(core, sh.all_gather(), sh.Mesh(g=2))
    with pytest.raises(SpecError, match="only one of them has"):
        sh.shard(core, sh.Layout("mine", {"q": "B S/u H E"}), sh.Mesh(u=2))


XS = [torch.randn(2, 8, h, 2) for h in (4, 2, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask": torch.zeros(8, 8)},
            "mask: boolean, true where a query may see a key, not float32\n    fix: mask == 0",
        ),
        ({"mask": torch.ones(4, 8, dtype=torch.bool)}, "mask 4 8: S S, or B|1 H|1 S S, is needed, with all S=8 tokens"),
        ({"mask": torch.ones(3, 1, 8, 8, dtype=torch.bool)}, "mask 3 1 8 8: S S, or B|1 H|1 S S"),
        (
            {"mask": torch.ones(1, 3, 8, 8, dtype=torch.bool)},
            "mask 1 3 8 8: B|1 H|1 S S is needed, and the layer has H=4",
        ),
        ({"mask": torch.ones(2, 8, 8, dtype=torch.bool)}, "mask 2 8 8: S S"),
        ({"mask": torch.ones(8, 8, dtype=torch.bool, device="meta")}, "mask is on meta, the activations on cpu"),
        ({"mask": [[True]]}, "mask: a tensor is needed, not list"),
        ({"segment_ids": torch.zeros(2, 4)}, "segment_ids 2 4: 2 8 is needed, rows of all S=8 tokens"),
        ({"q_positions": torch.arange(8)[None]}, "q_positions and k_positions: both, or neither"),
        ({"positions": torch.arange(4)[None]}, "positions 1 4: 1 8 is needed"),
        ({"kv_index": torch.zeros(4)}, "dot_product_attention(kv_index=...) under a layout, which says it itself"),
        ({"sinks": torch.zeros(3)}, "sinks does not fit its spec: K G is 4, but the tensor has 3"),
    ],
)
def test_arguments_that_a_layout_cannot_honour(options, message):
    mesh = sh.Mesh(u=2)
    record = sh.trace(mesh)
    run = sh.simulate(sh.shard(F.dot_product_attention, sh.ulysses(), mesh, **SIZES), record.mesh)
    with pytest.raises((ValueError, TypeError)) as error:
        run(*XS, causal=True, **options)
    assert message in str(error.value)
    assert not len(record)


def test_a_mask_that_a_core_does_not_take():
    def core(q, k, v):
        return q

    run = sh.simulate(sh.shard(core, sh.ulysses(), sh.Mesh(u=2), **SIZES), sh.Mesh(u=2))
    with pytest.raises(TypeError, match="mask is given, but core takes none"):
        run(*XS, mask=torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match="segment_ids is given, but core takes none"):
        run(*XS, cu_seqlens=[0, 8])


def test_a_shard_that_is_none():
    core = sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=2), **SIZES)

    def body(mesh):
        with pytest.raises(
            SpecError, match=r"dot_product_attention\(k=...\) does not fit its spec: rank \d holds B 4 2"
        ):
            core(XS[0][:, :4], XS[1], XS[2][:, :4], mesh=mesh)

    sh.Threads(sh.Mesh(u=2)).run(body)
