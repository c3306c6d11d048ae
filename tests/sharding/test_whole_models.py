"""A whole model's training step over dp, cp, tp and ep at once: every loss and every gradient, as one rank has them."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError

from . import gdn_cases
from . import test_latent_models as models
from .test_latent_models import HEADS, LATENT, MLP, MOE, NORM, compare

equal = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

DELTA = gdn_cases.config(num_key_heads=2, num_value_heads=4, norm=NORM)
GATED = dataclasses.replace(HEADS, num_attention_heads=4, output_gate=True, sinks=False)
SHARED = dataclasses.replace(HEADS, num_attention_heads=9, num_key_value_heads=3, qkv_bias=True)
FEW = dataclasses.replace(MOE, num_experts=3, scoring_func="sigmoid", norm_topk_prob=True)
DENSE, EXPERTS, HYBRID = ((HEADS, MLP), (HEADS, MLP)), ((LATENT, MLP), (LATENT, MOE)), ((DELTA, FEW), (GATED, MLP))

u, g, tp, dp = ({name: name} for name in ("u", "g", "tp", "dp"))
CASES = [
    # dense
    (sh.all_gather(**tp), {"g": 1, "tp": 2}, DENSE),
    (sh.spread(sh.ulysses(**dp), parameters="dp"), {"dp": 2}, DENSE),
    (sh.spread(sh.ulysses(**dp, **tp), parameters="dp"), {"dp": 2, "tp": 2, "u": 1}, DENSE),
    (sh.spread(sh.ulysses(**dp, **tp, overlap=True), parameters="dp"), {"dp": 2, "u": 2, "tp": 2}, DENSE),
    (sh.spread(sh.hybrid(**dp, exchange="needed"), parameters="dp"), {"dp": 3, "g": 2, "u": 1}, DENSE),
    # latent attention and experts
    (sh.spread(sh.mla_latent(), experts="ep"), {"ep": 2}, EXPERTS),
    (sh.spread(sh.mla_latent(**dp), experts="ep", parameters="dp"), {"dp": 2, "ep": 2}, EXPERTS),
    (sh.spread(sh.mla_packed(**tp), experts="ep"), {"ep": 2, "u": 2, "tp": 2}, EXPERTS),
    (sh.spread(sh.mla_gather(**dp, **tp), experts="ep", parameters="dp"), {"tp": 2, "dp": 2, "ep": 2}, EXPERTS),
    (sh.spread(sh.mla_latent("u", "g", zigzag=True), experts="ep"), {"ep": 4, "g": 1, "u": 2}, EXPERTS),
    (sh.spread(sh.mla_gather(**dp), experts="ep"), {"dp": 2, "ep": 4}, EXPERTS),  # four ranks have no rows
    # gated delta nets beside attention
    (sh.beside(sh.ulysses(**tp), sh.gdn_ulysses(**tp)), {"tp": 2}, HYBRID),
    (sh.spread(sh.beside(sh.ulysses(), sh.gdn_scan("u")), experts="ep"), {"u": 2, "ep": 2}, HYBRID),
    (sh.spread(sh.beside(sh.all_gather(**dp, **tp), sh.gdn_scan("g", **dp, **tp)), parameters="dp"),
     {"dp": 2, "g": 2, "tp": 2}, HYBRID),
    (sh.spread(sh.beside(sh.hybrid(**dp), sh.gdn_scan("g", "u", **dp)), experts="ep", parameters="dp"),
     {"dp": 2, "g": 2, "u": 1, "ep": 2}, HYBRID),
]  # fmt: skip


def named(case):
    layout, axes, _ = case
    return f"{layout.name} on {sh.Mesh(**axes)}"


def test_a_layer_of_ones_own_hands_its_wire_on():
    """One that does not would compute with a rank's own tokens and weights alone, and say nothing."""
    layout, mesh, (cfg, params) = sh.ulysses(**tp), sh.Mesh(u=2, tp=2), models.model(*DENSE)
    ids = torch.arange(8)[None] % cfg.vocab_size

    def hands_on(*args, **given):
        return F.layer(*args, **given)

    def forgets(*args, wire, **given):
        return F.layer(*args, **given)

    run = sh.simulate(sh.shard(F.decoder, layout, mesh, S=8), mesh)
    equal(run(params, ids, cfg, layer=hands_on)[0], F.decoder(params, ids, cfg, layer=forgets)[0])
    with pytest.raises(ValueError, match="asks nothing") as error:
        run(params, ids, cfg, layer=forgets)
    assert_expected_inline(
        str(error.value),
        """\
decoder(layer=...): it asks nothing of its wire, so that under a layout a rank would see its own tokens and weights alone
    fix: hand wire on, F.layer(..., wire=wire) or F.mlp(..., wire=wire.scope('mlp'))""",
    )


@pytest.mark.parametrize("case", CASES, ids=map(named, CASES))
def test_every_loss_and_gradient(case):
    layout, axes, parts = case
    compare(layout, axes, *models.model(*parts), S=12 if "zigzag" in layout.name else 13, equal=equal)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_in_parts(tied):
    """With a bias, scales and a cap, ids of every rank's rows, and targets that are left out."""
    cfg, _ = models.model((HEADS, MLP))
    more = {"head_bias": True, "embedding_multiplier": 3.0, "logit_scale": 0.5, "final_logit_softcapping": 2.0}
    cfg = dataclasses.replace(cfg, tie_word_embeddings=tied, **more)
    params = F.tree.map(lambda p: (p + 0.3 * torch.randn_like(p)).double().requires_grad_(), F.Decoder.init(cfg, 0))
    mesh, leaves = sh.Mesh(tp=2, u=2), F.tree.leaves(params)
    model = sh.shard(F.next_token_loss, sh.ulysses(**tp), mesh, S=33)
    ids = torch.stack([torch.arange(33) % 31, torch.randint(0, 31, (33,))])
    targets, weights = torch.where(torch.rand(2, 33) > 0.2, ids.flip(1), -100), torch.rand(2, 33, dtype=torch.float64)
    want = F.next_token_loss(params, ids, cfg, targets, weights)
    record = sh.trace(mesh)
    found = sh.simulate(model, record.mesh)(params, ids, cfg, targets, weights, chunk=5)
    equal(found, want)
    equal(torch.autograd.grad(found[0], leaves), torch.autograd.grad(want[0], leaves))
    shares = next(e for e in record.of(0) if e.call.edges == ("shares",))
    assert shares.sent == 2 * 17 * 3 * 8  # three numbers of each of a rank's tokens, to one other
    for wrong in (31, -1):
        strange = ids.clone()
        strange[1, 3] = wrong
        for given in ((strange, cfg, targets), (ids, cfg, strange)):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                sh.simulate(model, mesh)(params, *given)


def test_key_value_heads_that_some_ranks_share():
    """Nine query heads and three key/value heads over four ranks, one of which reads two of them; and value heads."""
    layout, mesh = sh.beside(sh.ulysses(**tp, **dp), sh.gdn_ulysses(**tp, **dp)), sh.Mesh(dp=2, tp=4)
    cfg, params = models.model((SHARED, MLP), (gdn_cases.config(num_key_heads=3, num_value_heads=6, norm=NORM), MLP))
    ids, leaves = torch.randint(0, 31, (3, 9)), F.tree.leaves(params)
    model = sh.shard(F.next_token_loss, layout, mesh, S=9)
    specs, where = model.specs(params, cfg), layout["tokens"][0]

    def body(at):
        mine = F.tree.map(lambda t: t.detach().requires_grad_(), sh.cut(params, specs, at))
        rows = sh.cut(ids, where, at)
        total, _ = model(mine, rows, cfg, rows, mesh=at)
        grads = torch.autograd.grad(sh.counted_once(total, where, at), F.tree.leaves(mine))
        shapes = [tuple(x.shape) for x in (mine.layers[0].attention.q, mine.layers[0].attention.k)]
        return shapes, sh.sum_gradients(F.tree.unflatten(F.tree.structure(mine), grads), specs, at)

    total, _ = F.next_token_loss(params, ids, cfg, ids)
    right = F.tree.unflatten(F.tree.structure(params), torch.autograd.grad(total, leaves))
    found = sh.Threads(mesh).run(body)
    for rank, (_, grads) in enumerate(found):
        equal(F.tree.leaves(grads), F.tree.leaves(sh.cut(right, specs, mesh.at(rank, object()))))
    assert [(q[0] // 4, k[0] // 4) for (q, k), _ in found[:4]] == [(3, 1), (2, 1), (2, 2), (2, 1)]


def test_a_block_gathers_its_parameters_again_where_it_is_recomputed():
    layout, axes, parts = CASES[2]
    (cfg, params), mesh = models.model(*parts), sh.Mesh(**axes)
    ids, leaves = torch.randint(0, 31, (4, 13)), F.tree.leaves(params)

    def again(*args, **options):
        return torch.utils.checkpoint.checkpoint(F.layer, *args, use_reentrant=False, **options)

    counts = []
    want, _ = F.next_token_loss(params, ids, cfg, ids)
    for options in ({}, {"layer": again}):
        record = sh.trace(mesh)
        model = sh.shard(F.next_token_loss, layout, record.mesh, S=13)
        specs, where = model.specs(params, cfg), layout["tokens"][0]

        def body(at, model=model, specs=specs, where=where, record=record, options=options):
            mine = F.tree.map(lambda t: t.detach().requires_grad_(), sh.cut(params, specs, at))
            rows, at = sh.cut(ids, where, at), at.recording(record)
            total, _ = model(mine, rows, cfg, rows, mesh=at, **options)
            grads = torch.autograd.grad(sh.counted_once(total, where, at), F.tree.leaves(mine))
            return sh.sum_gradients(F.tree.unflatten(F.tree.structure(mine), grads), specs, at)

        right = F.tree.unflatten(F.tree.structure(params), torch.autograd.grad(want, leaves, retain_graph=True))
        for rank, grads in enumerate(sh.Threads(mesh).run(body)):
            equal(F.tree.leaves(grads), F.tree.leaves(sh.cut(right, specs, mesh.at(rank, object()))))
        counts.append(record.count("all-gather"))
    assert counts == [3 + 4, 3 + 8]  # rows, head and shares; and two blocks of each layer


SPREAD = sh.spread(sh.ulysses(tp="tp"), experts="ep")
MISFITS = [  # an axis that no rule uses, experts that no ep deals out, no S; an axis that is taken, or splits no rows
    lambda: sh.shard(F.next_token_loss, sh.ulysses(), sh.Mesh(u=2, tp=2), S=8),
    lambda: sh.shard(F.next_token_loss, sh.mla_latent(), sh.Mesh(u=2, ep=2), S=8),
    lambda: sh.shard(F.next_token_loss, SPREAD, sh.Mesh(tp=2, ep=2)),
    lambda: sh.spread(SPREAD, experts="tp"),
    lambda: sh.spread(sh.ulysses(), parameters="dp"),
]


def test_what_cannot_be_a_model():
    said = []
    for make in MISFITS:
        with pytest.raises(SpecError) as error:
            make()
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
shard(next_token_loss, ...): ulysses("u") on tp=2: no rule of it uses that axis, and its ranks would all do the same
    mesh: u=2 tp=2     fix: Mesh without tp, or tp="tp" in the layout, for heads, features and vocabulary
shard(next_token_loss, ...): mla_latent("u") on ep=2: no experts are dealt out over it, and its ranks would all do the same
    mesh: u=2 ep=2     fix: Mesh without ep, or spread(layout, experts="ep")
shard(next_token_loss, ...): no size for S
    mesh: tp=2 ep=2     fix: S=..., globally
spread(experts="tp"): ulysses("u", tp="tp") spread(experts="ep") has that axis for something else
    fix: an axis of its own, such as "ep"
spread(parameters="dp"): ulysses("u") has rows as B, so that ranks of dp would all do the same
    fix: dp="dp" in the layout""",
    )


def test_what_is_spread_is_printed():
    lines = str(sh.spread(sh.ulysses(**dp, **tp), experts="ep", parameters="dp")).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if line.split()[0] in ("embedded", "shares", "experts", "parameters")),
        """\
  embedded    B/dp/ep S/u D +tp -> B/dp/ep S/u D                all-reduce over tp
  shares      P/tp B/dp/ep S/u N -> P B/dp/ep S/u N             all-gather over tp
  experts     X/ep                                              rows go there and back, all-to-all over ep
  parameters  D/dp -> D                                         all-gather over dp""",
    )
    with pytest.raises(ValueError, match="nothing is spread"):
        sh.spread(sh.ulysses())


def test_parts_that_would_be_empty_are_refused_on_every_rank_alike():
    said = set()
    elsewhere = sh.spread(sh.ulysses(tp="model"), experts="ep")
    for layout, axes, cut in (
        (SPREAD, {"tp": 4}, {"vocab_size": 3}), (SPREAD, {"ep": 4}, {}), (elsewhere, {"model": 2}, {})
    ):  # fmt: skip
        cfg, _ = models.model((HEADS, FEW))
        cfg = dataclasses.replace(cfg, **cut)
        params, mesh, ids = F.Decoder.init(cfg, 0), sh.Mesh(**axes), torch.zeros(4, 8, dtype=torch.int64)
        record = sh.trace(mesh)
        model = sh.shard(F.next_token_loss, layout, record.mesh, S=8)
        specs = model.specs(params, cfg)

        def body(at, model=model, specs=specs, params=params, ids=ids, cfg=cfg, record=record):
            mine, rows = sh.cut(params, specs, at), sh.cut(ids, "B/ep S/u", at)
            with pytest.raises(SpecError) as error:
                model(mine, rows, cfg, rows, mesh=at.recording(record))
            return str(error.value)

        found = set(sh.Threads(mesh).run(body))
        with pytest.raises(SpecError) as error:
            sh.simulate(model, mesh)(params, ids, cfg, ids)
        assert found == {str(error.value)}
        assert not len(record)
        said |= found
    assert_expected_inline(
        "\n".join(sorted(said)),
        """\
next_token_loss(params=...): embed has Z=3 rows of the vocabulary, fewer than tp=4 ranks
    Z/tp D/dp
    ^^^^
    mesh: tp=4     fix: tp=3 at most
next_token_loss(params=...): layers[0].mlp.gate has X=3 experts, fewer than ep=4 ranks
    X/ep F/tp D/dp
    ^^^^
    mesh: ep=4     fix: ep=3 at most
next_token_loss(params=...): ulysses("u", tp="model") spread(experts="ep") has Z/model, and fields say Z/tp
    mesh: model=2     fix: an axis of that name: tp""",
    )
