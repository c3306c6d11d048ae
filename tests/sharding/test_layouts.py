"""Layouts as data: printed, composed, and refused where they cannot be."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.functional.wire import edges, identity
from meshfn.sharding import SpecError

from .attention_cases import ids_of


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
  out, h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss: stay as they come
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
  q_positions    B/dp S -> B/dp S/g                                              whole on every rank, then a slice
  q_segment_ids  B/dp S -> B/dp S/g                                              whole on every rank, then a slice
  mask           B/dp (K G) S T -> B/dp (K/tp/u G) S T -> B/dp (K/tp/u G) S/g T  whole on every rank, then a slice
  sinks          (K/tp G) -> (K/tp/u G)                                          a slice
  h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss: stay as they come
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
            SpecError, match=r"dot_product_attention\(k=...\): does not fit its spec: rank \d holds B 4 2"
        ):
            core(XS[0][:, :4], XS[1], XS[2][:, :4], mesh=mesh)

    sh.Threads(sh.Mesh(u=2)).run(body)


# Layers.

NORM = F.NormConfig()
HEADS = {"hidden_size": 24, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "rope": F.RopeConfig()}
CONFIGS = {
    "plain": F.AttentionConfig(**HEADS),
    "everything": F.AttentionConfig(
        **HEADS, v_head_dim=3, norm=NORM, post_norm=NORM, qk_norm=NORM, qkv_bias=True, o_bias=True, sinks=True,
        softcap=5.0, window=5,
    ),
    "gated": F.AttentionConfig(**HEADS, output_gate=True, causal=False, qk_norm=NORM),
}  # fmt: skip
MESHES = [
    (sh.ulysses(), {"u": 4}),
    (sh.all_gather(exchange="needed"), {"g": 3}),
    (sh.hybrid(overlap=True), {"g": 2, "u": 2}),
    (sh.hybrid(tp="tp", dp="dp"), {"dp": 2, "tp": 2, "g": 2, "u": 2}),
    (sh.all_gather(zigzag=True), {"g": 2}),
]


def weights(made):
    return F.tree.map(lambda p: (p + 0.3 * torch.randn_like(p)).double().requires_grad_(), made)


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("layout", "axes"), MESHES)
def test_whole_layers(layout, axes, name):
    cfg, mesh, S = CONFIGS[name], sh.Mesh(**axes), 12
    params, x = weights(F.Attention.init(cfg, 0)), torch.randn(4, S, 24, dtype=torch.float64, requires_grad=True)
    leaves = [x, *F.tree.leaves(params)]
    layer = sh.simulate(sh.shard(F.attention, layout, mesh, S=S), mesh)
    mask = torch.rand(4, 1, S, S) > 0.2
    for options in ({}, {"mask": mask}, {"segment_ids": torch.randint(0, 2, (4, S))}):
        positions = torch.arange(S)[None]
        y, _ = layer(params, x, cfg, positions=positions, **options)
        want, _ = F.attention(params, x, cfg, positions=positions, **options)
        equal(y, want)
        grad = torch.randn_like(want)
        equal(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(want, leaves, grad))


def test_a_layer_needs_no_positions_and_takes_others():
    cfg, mesh, S = CONFIGS["plain"], sh.Mesh(g=2, u=2), 7
    params, x = weights(F.Attention.init(cfg, 0)), torch.randn(3, S, 24, dtype=torch.float64)
    layer = sh.simulate(sh.shard(F.attention, sh.hybrid(), mesh, S=S), mesh)
    equal(layer(params, x, cfg)[0], F.attention(params, x, cfg, positions=torch.arange(S)[None])[0])
    rows = torch.tensor([[0, 1, 2, 3, -1, -1, -1], [-1, -1, 0, 1, 2, 3, 4], list(range(5, 12))])
    equal(layer(params, x, cfg, positions=rows)[0], F.attention(params, x, cfg, positions=rows)[0])
    tables = F.rope_tables(rows, cfg.rope, 4, torch.float64)
    found = layer(params, x, cfg, positions=rows, rope=tables)[0]
    equal(found, F.attention(params, x, cfg, positions=rows)[0])


def test_a_layer_of_other_heads_than_were_said():
    cfg, mesh = CONFIGS["plain"], sh.Mesh(u=2)
    params, x = F.Attention.init(cfg, 0), torch.randn(1, 4, 24)
    record = sh.trace(mesh)
    layer = sh.simulate(sh.shard(F.attention, sh.ulysses(), mesh, S=4, H=8, K=2), record.mesh)
    with pytest.raises(SpecError, match="was made for K=2, and this layer has K=4"):
        layer(params, x, cfg)
    assert not len(record)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": identity}, r"attention\(wire=...\) under a layout: the layout is the wire"),
        ({"cache": object()}, r"attention\(cache=...\) under a layout: a cache is not split over ranks"),
    ],
)
def test_arguments_of_a_layer_that_a_layout_has_no_place_for(options, message):
    cfg, mesh = CONFIGS["plain"], sh.Mesh(u=2)
    layer = sh.shard(F.attention, sh.ulysses(), mesh, S=4)

    def body(at):
        with pytest.raises(ValueError, match=message):
            layer(F.Attention.init(cfg, 0), torch.randn(1, 2, 24), cfg, mesh=at, **options)

    sh.Threads(mesh).run(body)


def test_a_users_core_in_a_layer():
    cfg, mesh, S = dataclasses.replace(CONFIGS["plain"], num_key_value_heads=2), sh.Mesh(u=4), 8
    params, x = weights(F.Attention.init(cfg, 0)), torch.randn(2, S, 24, dtype=torch.float64)
    seen = []

    def core(q, k, v, *, causal, q_positions, k_positions):
        seen.append((q.shape[2], k.shape[2]))
        swapped = (t.transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=causal, enable_gqa=True)
        return y.transpose(1, 2)

    layer = sh.simulate(sh.shard(F.attention, sh.ulysses(), mesh, S=S), mesh)
    equal(layer(params, x, cfg, core=core)[0], F.attention(params, x, cfg, positions=torch.arange(S)[None])[0])
    assert seen == [(2, 1)] * 4


def decoder():
    mlp = F.MLPConfig(hidden_size=24, intermediate_size=20, norm=NORM)
    kinds = [CONFIGS["everything"], dataclasses.replace(CONFIGS["plain"], num_key_value_heads=2, norm=NORM)]
    layers = tuple(F.LayerConfig(attention=a, mlp=mlp) for a in kinds)
    cfg = F.DecoderConfig(vocab_size=31, hidden_size=24, layers=layers)
    return cfg, weights(F.Decoder.init(cfg, 0))


@pytest.mark.parametrize(("layout", "axes"), MESHES[:4])
def test_whole_models_of_unlike_layers(layout, axes):
    (cfg, params), mesh, S = decoder(), sh.Mesh(**axes), 13
    ids, cu = torch.randint(0, 31, (4, S)), [0, 3, 4, 11, 13]
    targets = torch.cat([ids[:, 1:], torch.full((4, 1), -100)], 1)
    leaves = F.tree.leaves(params)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])[None]
    for options, dense in (({}, {}), ({"cu_seqlens": cu}, {"positions": positions, "segment_ids": ids_of(cu, 4)})):
        loss, count = sh.simulate(sh.shard(F.next_token_loss, layout, mesh, S=S), mesh)(
            params, ids, cfg, targets, **options
        )
        want, wanted = F.next_token_loss(params, ids, cfg, targets, **dense)
        equal((loss, count), (want, wanted))
        equal(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves))
        logits, _ = sh.simulate(sh.shard(F.decoder, layout, mesh, S=S), mesh)(params, ids, cfg, **options)
        equal(logits, F.decoder(params, ids, cfg, **dense)[0])


def test_mrope_positions_of_a_shard():
    rope = F.RopeConfig(mrope_section=(1, 1, 0), rope_theta=100.0)
    attention = F.AttentionConfig(**{**HEADS, "rope": rope})
    mlp = F.MLPConfig(hidden_size=24, intermediate_size=20)
    cfg = F.DecoderConfig(vocab_size=31, hidden_size=24, layers=(F.LayerConfig(attention=attention, mlp=mlp),))
    params, mesh = weights(F.Decoder.init(cfg, 0)), sh.Mesh(g=2, u=2)
    ids, three = torch.randint(0, 31, (2, 9)), torch.randint(0, 20, (3, 2, 9))
    logits, _ = sh.simulate(sh.shard(F.decoder, sh.hybrid(), mesh, S=9), mesh)(params, ids, cfg, rope_positions=three)
    equal(logits, F.decoder(params, ids, cfg, rope_positions=three)[0])


# What a trainer needs.


@pytest.mark.parametrize("text", ["B/dp S/g/u", "B S/g:zigzag/u", "B S"])
def test_a_batch_is_shifted_before_it_is_cut(text):
    mesh, ids = sh.Mesh(dp=2, g=2, u=2), torch.arange(4 * 16).reshape(4, 16)
    cu, three = [0, 5, 6, 16], torch.arange(3 * 16).reshape(3, 1, 16)
    targets = ids + 1
    targets[:, [4, 5, 15]] = -100
    labels = ids.clone()
    labels[0, 3] = -100  # so that the token before has no target
    targets[0, 2] = -100
    for rank in range(8):
        at = mesh.at(rank, object())
        held = sh.Spec.parse(text).slices({"B": 4, "S": 16}, mesh, rank)
        batch = sh.shard_batch(ids, labels, three, torch.tensor(cu), text, at)
        assert torch.equal(batch.tokens, ids[held])
        assert torch.equal(batch.labels, targets[held])
        assert batch.positions.shape == (3, 1, batch.tokens.shape[1])
        assert batch.count == 4 * 13 - 1
        plain = sh.shard_batch(ids, None, None, cu, text, at)
        assert torch.equal(plain.positions, sh.positions_of(text, mesh, rank, cu_seqlens=cu))


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": zeros(16)}, r"shard_batch\(tokens=...\): B S is needed"),
        ({"labels": zeros(2, 15)}, r"shard_batch\(labels=...\): \(2, 15\), the tokens are \(2, 16\)"),
        ({"positions": zeros(2, 15)}, r"shard_batch\(positions=...\): \(2, 15\); B\|1 S or M B\|1 S is needed"),
        ({"cu_seqlens": [0, 15]}, "ends with 15, but there are S=16"),
        ({"labels": torch.zeros(2, 16, dtype=torch.uint8)}, "signed integers are needed, not uint8, since -100 leaves"),
        ({"labels": [[1]]}, r"shard_batch\(labels=...\): a tensor is needed, not list"),
        ({"positions": [[1]]}, r"shard_batch\(positions=...\): a tensor is needed, not list"),
        ({"spec": "B S/u D"}, "a batch of tokens has two dimensions, B and S"),
        ({"spec": "B S/q"}, 'no axis "q"'),
        ({"spec": "B S/u:zigzag", "tokens": zeros(2, 15)}, "needs a multiple of 4"),
    ],
)
def test_batches_that_cannot_be(change, message):
    given = {"tokens": zeros(2, 16), "labels": None, "positions": None, "cu_seqlens": None, "spec": "B S/u"}
    with pytest.raises((ValueError, TypeError), match=message):
        sh.shard_batch(*{**given, **change}.values(), sh.Mesh(u=2).at(0, object()))


def test_gradients_are_summed_over_what_does_not_split_them():
    mesh = sh.Mesh(tp=2, u=2)
    assert sh.pending_axes("K/tp E", mesh) == ("u",)
    assert sh.pending_axes("D", mesh) == ("tp", "u")
    assert sh.pending_axes("D/u/tp", mesh) == ()
    record = sh.trace(mesh)

    def body(at):
        at = at.recording(record)
        grads = {"a": torch.full((2,), 1.0 + at.rank), "b": torch.full((3,), 1.0), "c": torch.ones(2) * at.rank}
        return sh.sum_gradients(grads, {"a": "D", "b": "D", "c": "D/tp"}, at)

    for rank, found in enumerate(sh.Threads(mesh).run(body)):
        assert found["a"].tolist() == [10.0] * 2
        assert found["b"].tolist() == [4.0] * 3
        assert found["c"].tolist() == [[1.0, 5.0][rank // 2]] * 2
    assert record.count("all-reduce") == 2  # a and b travel together


def test_parameters_cut_and_counted_once():
    (cfg, params), mesh = decoder(), sh.Mesh(tp=2, u=2)
    model = sh.shard(F.next_token_loss, sh.ulysses(tp="tp"), mesh, S=8)
    specs = model.specs(params, cfg)
    for rank in range(4):
        at = mesh.at(rank, object())
        mine = sh.cut(params, specs, at)
        tp = rank // 2
        first = mine.layers[0].attention
        assert torch.equal(first.q, params.layers[0].attention.q[16 * tp : 16 * tp + 16])
        assert torch.equal(first.sinks, params.layers[0].attention.sinks[4 * tp : 4 * tp + 4])
        assert mine.embed.shape == params.embed.shape  # no layout splits the vocabulary
        assert mine.layers[1].attention.k.shape == (4, 24)  # 2 heads of 4 over tp
        assert mine.layers[0].mlp.down.shape == (24, 10)
        loss = sh.counted_once(torch.tensor(3.0), "B S/u", at)
        assert loss.item() == (3.0 if tp == 0 else 0.0)
