"""Decoders with latent attention under layouts: every loss and every gradient; and which layers a layout serves."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError

from . import latent_cases as cases
from .attention_cases import ids_of
from .test_layers import equal

NORM = F.NormConfig()
LATENT = cases.config(norm=NORM, output_gate=True)
DELTA = F.GDNConfig(
    hidden_size=10, num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=3, norm=NORM
)  # fmt: skip
DIRECT = cases.config(norm=NORM, q_lora_rank=None, v_head_dim=6, window=5, rope=None, num_attention_heads=5)
HEADS = F.AttentionConfig(
    hidden_size=10, num_attention_heads=6, num_key_value_heads=2, head_dim=4, rope=F.RopeConfig(), norm=NORM,
    sinks=True,
)  # fmt: skip
MLP = F.MLPConfig(hidden_size=10, intermediate_size=8, norm=NORM)
MOE = F.MoEConfig(
    hidden_size=10, moe_intermediate_size=4, num_experts=5, num_experts_per_tok=2, norm=NORM, bias=True,
    shared=F.MLPConfig(hidden_size=10, intermediate_size=6), shared_gate=True, initializer_range=0.3,
)  # fmt: skip
LAYOUTS = [
    (sh.mla_latent(), {"u": 4}),
    (sh.mla_latent("u", "g", overlap=True), {"g": 2, "u": 2}),
    (sh.mla_latent(tp="tp", dp="dp"), {"dp": 2, "tp": 2, "u": 2}),
    (sh.mla_packed(), {"u": 3}),
    (sh.mla_packed("u", "g", exchange="needed", tp="tp"), {"g": 2, "u": 2, "tp": 2}),
    (sh.mla_gather(exchange="needed", overlap=True), {"g": 3}),
    (sh.mla_gather(dp="dp", tp="tp"), {"g": 2, "dp": 2, "tp": 2}),
]


def model(*parts):
    """A decoder of these pairs of attention and what follows it."""
    layers = tuple(F.LayerConfig(attention=attention, mlp=mlp) for attention, mlp in parts)
    cfg = F.DecoderConfig(vocab_size=31, hidden_size=10, layers=layers)
    return cfg, cases.weights(F.Decoder.init(cfg, 0))


def compare(layout, axes, cfg, params, S=13, equal=equal):
    """Loss and logits, all gradients and routings, with and without documents."""
    mesh, leaves = sh.Mesh(**axes), F.tree.leaves(params)
    ids, cu = torch.randint(0, 31, (4, S)), [0, 3, 4, 11, S]
    targets = torch.cat([ids[:, 1:], torch.full((4, 1), -100)], 1)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])[None]
    for options, dense in (({}, {}), ({"cu_seqlens": cu}, {"positions": positions, "segment_ids": ids_of(cu, 4)})):
        loss, count = sh.simulate(sh.shard(F.next_token_loss, layout, mesh, S=S), mesh)(
            params, ids, cfg, targets, **options
        )
        want, wanted = F.next_token_loss(params, ids, cfg, targets, **dense)
        equal((loss, count), (want, wanted))
        found, right = torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves)
        equal(found, right)
        assert all(g.abs().max() > 0 for g in found)
        run = sh.simulate(sh.shard(F.decoder, layout, mesh, S=S), mesh)
        found, right = (
            run(params, ids, cfg, return_routing=True, **options),
            F.decoder(params, ids, cfg, return_routing=True, **dense),
        )
        equal(found[0], right[0])
        for mine, theirs in zip(found[2], right[2], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.indices, theirs.indices)


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS)
def test_dense_layers(layout, axes):
    compare(layout, axes, *model((LATENT, MLP), (DIRECT, MLP)))


@pytest.mark.parametrize("made", [sh.mla_latent, sh.mla_packed])
def test_tokens_in_head_tail_order(made):
    compare(
        made("u", "g", zigzag=True, exchange="needed"), {"g": 3, "u": 2}, *model((LATENT, MLP), (DIRECT, MOE)), S=12
    )


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS)
def test_experts(layout, axes):
    compare(layout, axes, *model((LATENT, MLP), (LATENT, MOE)))


def both(heads, latents, **options):
    """A layout of one's own from the rules of two. Both name q, o and what surrounds them: those of heads stand."""
    edges = {**dict(latents.chains), **dict(heads.chains)}
    return sh.Layout("both kinds", edges, **options)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (both(sh.ulysses(), sh.mla_latent()), {"u": 2}),
        (both(sh.ulysses(), sh.mla_latent(), overlap=True), {"u": 3}),
        (both(sh.ulysses(), sh.mla_packed()), {"u": 2}),
        (both(sh.hybrid(), sh.mla_latent("u", "g"), exchange="needed"), {"g": 2, "u": 2}),
        (both(sh.hybrid(), sh.mla_packed("u", "g")), {"g": 2, "u": 2}),
        (both(sh.all_gather(), sh.mla_gather(), exchange="needed"), {"g": 3}),
        (both(sh.ulysses(tp="tp"), sh.mla_latent(tp="tp")), {"tp": 2, "u": 2}),
    ],
)
def test_layers_of_both_kinds(layout, axes):
    compare(layout, axes, *model((LATENT, MLP), (HEADS, MOE)))
    compare(layout, axes, *model((HEADS, MLP), (LATENT, MLP)))


OWN = "q_conv, k_conv, v_conv, a_log, dt_bias"
ONE_KIND = [
    (
        sh.mla_latent(), (LATENT, HEADS), "layers[1].attention",
        'is of class Attention, and mla_latent("u") has no rule for its k, v',
    ),
    (sh.ulysses(), (HEADS, LATENT), "layers[1].attention",
     'is of class MLA, and ulysses("u") has no rule for its kv_latent, key_rope, kv_b, kv'),
    (sh.ulysses(), (HEADS, DELTA), "layers[1].attention",
     f'is of class GDN, and ulysses("u") has no rule for its b, a, {OWN}'),
    (sh.mla_latent(), (DELTA, LATENT), "layers[0].attention",
     f'is of class GDN, and mla_latent("u") has no rule for its k, v, b, a, {OWN}'),
    (both(sh.hybrid(), sh.mla_latent("u", "g")), (HEADS, LATENT, DELTA), "layers[2].attention",
     f"is of class GDN, and both kinds has no rule for its b, a, {OWN}"),
]  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("layout", "attentions", "which", "why"), ONE_KIND)
def test_a_layer_of_the_other_kind_is_refused_before_anything_moves(layout, attentions, which, why, overlap):
    cfg, params = model(*((attention, MLP) for attention in attentions))
    layout = sh.Layout(layout.name, layout.chains, overlap=overlap)
    mesh, ids = sh.Mesh(u=2), torch.randint(0, 31, (2, 8))
    record, wanted = sh.trace(mesh), f"decoder(params=...): {which} {why}\n    fix: a layout with rules for every kind"
    model_of = sh.shard(F.decoder, layout, mesh, S=8)
    with pytest.raises(SpecError) as error:
        sh.simulate(model_of, record.mesh)(params, ids, cfg)
    assert wanted in str(error.value)
    assert ("; mla_latent, mla_packed and mla_gather" in str(error.value)) == ("class MLA" in why)
    refused = []

    def body(at):
        with pytest.raises(SpecError) as error:
            model_of(params, sh.cut(ids, "B S/u", at), cfg, mesh=at.recording(record))
        refused.append(wanted in str(error.value))

    sh.Threads(mesh).run(body)
    assert refused == [True, True]
    assert not len(record)


def without(layout, *names):
    return sh.Layout("mine", {edge: chain for edge, chain in layout.chains if edge not in names})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (without(sh.mla_latent(), "kv_b"), "mine has no rule for kv_b, which decoder passes in mla"),
        (without(sh.ulysses(), "k"), "mine has no rule for k, which decoder passes in attention"),
        (
            without(both(sh.ulysses(), sh.mla_latent()), "key_rope", "kv"),
            "mine has no rule for key_rope, kv, which decoder passes in mla, beside kv_latent, kv_b",
        ),
        (
            without(both(sh.ulysses(), sh.mla_latent()), "k"),
            "mine has no rule for k, which decoder passes in attention, beside v",
        ),
        (without(sh.mla_latent(), "embedded"), "mine has no rule for embedded, which decoder passes"),
    ],
)
def test_layouts_that_serve_a_kind_in_part(layout, message):
    with pytest.raises(SpecError) as error:
        sh.shard(F.decoder, layout, sh.Mesh(u=2), S=8)
    assert str(error.value).startswith(message + "\n")


@pytest.mark.parametrize(
    ("fn", "layout", "message", "fix"),
    [
        (
            F.attention, sh.mla_latent(), 'mla_latent("u") has no rule for k, v, which attention passes',
            'fix: ulysses, all_gather or hybrid, or Layout("...", {..., "k": "its spec"})',
        ),
        (
            F.mla, sh.ulysses(), 'ulysses("u") has no rule for kv_latent, key_rope, kv_b, kv, which mla passes',
            'fix: mla_latent, mla_packed or mla_gather, or Layout("...", {..., "kv_latent": "its spec"})',
        ),
        (F.mla, without(sh.mla_latent(), "kv_latent"), "mine has no rule for kv_latent", 'fix: Layout("...", {'),
        (F.mla, both(sh.ulysses(), sh.mla_latent()), "both kinds moves k, v, which mla does not pass", ""),
    ],
)  # fmt: skip
def test_a_layer_alone_under_a_layout_of_the_other_kind(fn, layout, message, fix):
    with pytest.raises(SpecError) as error:
        sh.shard(fn, layout, sh.Mesh(u=2), S=8)
    assert str(error.value).startswith(message)
    assert fix in str(error.value)
