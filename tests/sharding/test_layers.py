"""Whole layers and models under layouts, with every gradient."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.functional.wire import identity
from meshfn.sharding import SpecError

from .attention_cases import ids_of

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
        ({"cache": object()}, r"attention\(positions=...\): needed with a cache, which does not say how full it is"),
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
    experts = F.MoEConfig(
        hidden_size=24, moe_intermediate_size=3, num_experts=5, num_experts_per_tok=2, norm=NORM, bias=True,
        shared=F.MLPConfig(hidden_size=24, intermediate_size=6), shared_gate=True, initializer_range=0.3,
    )  # fmt: skip
    other = dataclasses.replace(CONFIGS["plain"], num_key_value_heads=2, norm=NORM)
    layers = (
        F.LayerConfig(attention=CONFIGS["everything"], mlp=mlp),
        F.LayerConfig(attention=other, mlp=experts),
    )
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
        found = sh.simulate(sh.shard(F.decoder, layout, mesh, S=S), mesh)(
            params, ids, cfg, return_routing=True, **options
        )
        wanted = F.decoder(params, ids, cfg, return_routing=True, **dense)
        equal(found[0], wanted[0])
        equal(F.balance_loss(found[2]), F.balance_loss(wanted[2]))
        assert torch.equal(found[2][1].indices, wanted[2][1].indices)


def test_experts_alone_over_ranks():
    cfg = F.MoEConfig(hidden_size=24, moe_intermediate_size=5, num_experts=6, num_experts_per_tok=3)
    params, x = weights(F.MoE.init(cfg, 0)), torch.randn(4, 12, 24, dtype=torch.float64, requires_grad=True)
    mesh = sh.Mesh(tp=2, u=2)
    layout = sh.Layout("tokens", {"x": "B S/u D", "h": "B S/u F/tp", "out": "B S/u D +tp -> B S/u D"})
    y = sh.simulate(sh.shard(F.moe, layout, mesh, S=12), mesh)(params, x, cfg)
    want, leaves = F.moe(params, x, cfg), [x, *F.tree.leaves(params)]
    equal(y, want)
    equal(torch.autograd.grad(y.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves))


def latent_layout(heads: str, gather: bool) -> sh.Layout:
    """Queries stay with their tokens; heads over an axis that splits the projections; latents gathered."""
    S = "S/g" if gather else "S"
    ends = {"kv_latent": "L", "key_rope": "R"}
    return sh.Layout(
        "latent",
        {
            "x": f"B {S} D",
            "q": f"B {S} H{heads} E",
            "kv_b": f"(H{heads} NV) L",
            "kv": f"B T H{heads} NV",
            "o": f"B {S} H{heads} V",
            "out": f"B {S} D +tp -> B {S} D" if heads else f"B {S} D",
            **{name: f"B {S} {n} -> B S {n}" if gather else f"B S {n}" for name, n in ends.items()},
        },
    )


@pytest.mark.parametrize(("heads", "gather", "axes"), [("/tp", False, {"tp": 2}), ("", True, {"g": 3})])
def test_a_layout_of_ones_own_for_latent_attention(heads, gather, axes):
    """The seam has what such layouts need: heads split by weights, and latents that travel before the up-projection."""
    cfg = F.MLAConfig(
        hidden_size=24, num_attention_heads=4, kv_lora_rank=10, q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, norm=NORM, rope=F.RopeConfig(), output_gate=True, o_bias=True, initializer_range=0.3,
    )  # fmt: skip
    params, x = weights(F.MLA.init(cfg, 0)), torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    mesh, leaves = sh.Mesh(**axes), [x, *F.tree.leaves(params)]
    told = set()

    def rotary(x, cos, sin, *, interleaved, head_offset=None, local_heads=None):
        told.add((x.shape[2], head_offset, local_heads))
        return F.apply_rope(x, cos, sin, interleaved=interleaved)

    layer = sh.simulate(sh.shard(F.mla, latent_layout(heads, gather), mesh, S=7), mesh)
    y, _ = layer(params, x, cfg, positions=torch.arange(7)[None], rotary=rotary)
    want, _ = F.mla(params, x, cfg, positions=torch.arange(7)[None])
    equal(y, want)
    equal(torch.autograd.grad(y.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves))
    assert told == {(1, None, None), *([(2, 0, 2), (2, 2, 2)] if heads else [(4, 0, 4)])}


def test_mrope_positions_of_a_shard():
    rope = F.RopeConfig(mrope_section=(1, 1, 0), rope_theta=100.0)
    attention = F.AttentionConfig(**{**HEADS, "rope": rope})
    mlp = F.MLPConfig(hidden_size=24, intermediate_size=20)
    cfg = F.DecoderConfig(vocab_size=31, hidden_size=24, layers=(F.LayerConfig(attention=attention, mlp=mlp),))
    params, mesh = weights(F.Decoder.init(cfg, 0)), sh.Mesh(g=2, u=2)
    ids, three = torch.randint(0, 31, (2, 9)), torch.randint(0, 20, (3, 2, 9))
    logits, _ = sh.simulate(sh.shard(F.decoder, sh.hybrid(), mesh, S=9), mesh)(params, ids, cfg, rope_positions=three)
    equal(logits, F.decoder(params, ids, cfg, rope_positions=three)[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_work_of_a_models_own_while_the_output_returns(overlap):
    """`restore=False`: the output of a rank's heads, and what ends the layer; in between nothing is waited for."""
    cfg = F.MLAConfig(
        hidden_size=24, num_attention_heads=5, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope=F.RopeConfig(), output_gate=True, initializer_range=0.3,
    )  # fmt: skip
    params, x = weights(F.MLA.init(cfg, 0)), torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    mesh, leaves = sh.Mesh(u=2), [x, *F.tree.leaves(params)]
    layer = sh.shard(F.mla, sh.mla_latent(overlap=overlap), mesh, S=7)
    record, seen = sh.trace(mesh), []

    def body(x, params, *, mesh):
        o, finish = layer(params, x, cfg, mesh=mesh, restore=False)
        seen.append((mesh.rank, tuple(o.shape), sum(e.what == "launch" for e in record.events if e.rank == mesh.rank)))
        aside = x.sin()
        (out, _), (again, _) = finish(), finish()  # as often as one likes
        return (out + again) / 2 + aside

    y = sh.simulate(body, record.mesh, ("B S/u D", None), "B S/u D")(x, params)
    want = F.mla(params, x, cfg, positions=torch.arange(7)[None])[0] + x.sin()
    equal(y, want)
    equal(torch.autograd.grad(y.cos().sum(), leaves), torch.autograd.grad(want.cos().sum(), leaves))
    assert sorted(seen) == [(0, (2, 7, 3, 5), 2 + overlap), (1, (2, 7, 2, 5), 2 + overlap)]
