"""Decoders with gated delta nets beside attention under one layout of both: every loss and every gradient."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from . import gdn_cases as cases
from . import test_latent_models as models
from .test_latent_models import LATENT, MLP, MOE, NORM, model

DELTA = cases.config(num_key_heads=4, num_value_heads=8, norm=NORM)
KIMI = cases.config(num_key_heads=4, num_value_heads=4, channel_decay=True, decay_rank=3, gate_rank=3, norm=NORM)
NEXT = cases.config(num_key_heads=2, num_value_heads=8, interleaved=True, norm=NORM)
PLAIN = F.AttentionConfig(
    hidden_size=10, num_attention_heads=8, num_key_value_heads=4, head_dim=4, rope=F.RopeConfig(), norm=NORM,
    output_gate=True,
)  # fmt: skip
LAYOUTS = [
    (sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 4}),
    (sh.beside(sh.ulysses(overlap=True), sh.gdn_scan("u", overlap=True)), {"u": 3}),
    (sh.beside(sh.ulysses(tp="tp", dp="dp"), sh.gdn_scan("u", tp="tp", dp="dp")), {"dp": 2, "tp": 2, "u": 2}),
    (sh.beside(sh.all_gather(), sh.gdn_scan("g")), {"g": 5}),
    (sh.beside(sh.all_gather(exchange="needed"), sh.gdn_scan("g")), {"g": 3}),
    (sh.beside(sh.all_gather("u"), sh.gdn_ulysses("u")), {"u": 2}),
    (sh.beside(sh.hybrid(), sh.gdn_scan("g", "u")), {"g": 2, "u": 2}),
    (sh.beside(sh.hybrid(exchange="needed", tp="tp"), sh.gdn_scan("g", "u", tp="tp")), {"u": 2, "tp": 2, "g": 2}),
]
LATENTS = [
    (sh.beside(sh.mla_latent(), sh.gdn_ulysses()), {"u": 4}),
    (sh.beside(sh.mla_latent("u", "g", tp="tp"), sh.gdn_scan("g", "u", tp="tp")), {"tp": 2, "g": 2, "u": 2}),
    (sh.beside(sh.mla_packed("u", "g", overlap=True), sh.gdn_scan("g", "u")), {"u": 3, "g": 2}),
    (sh.beside(sh.mla_gather(exchange="needed", dp="dp"), sh.gdn_scan("g", dp="dp")), {"dp": 2, "g": 3}),
]


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


compare = functools.partial(models.compare, equal=equal)


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS, ids=[layout.name for layout, _ in LAYOUTS])
def test_attention_beside_gated_delta_nets(layout, axes):
    compare(layout, axes, *model((DELTA, MLP), (NEXT, MOE), (PLAIN, MLP), (DELTA, MLP)))


@pytest.mark.parametrize(("layout", "axes"), LATENTS, ids=[layout.name for layout, _ in LATENTS])
def test_latent_attention_beside_gated_delta_nets(layout, axes):
    compare(layout, axes, *model((KIMI, MLP), (LATENT, MOE), (KIMI, MOE)))


# Where tokens lie otherwise in one of the two, activations move to it and back.
MOVED = [
    (sh.beside(sh.all_gather(zigzag=True), sh.gdn_scan("g")), {"g": 3}),
    (sh.beside(sh.hybrid(zigzag=True), sh.gdn_scan("g", "u")), {"u": 2, "g": 3}),
    (sh.beside(sh.hybrid(), sh.gdn_scan("u", "g", overlap=True)), {"g": 2, "u": 2}),
    (sh.beside(sh.hybrid(zigzag=True, tp="tp"), sh.gdn_ulysses("u", tp="tp")), {"tp": 2, "g": 2, "u": 2}),
]


@pytest.mark.parametrize(("layout", "axes"), MOVED, ids=[layout.name for layout, _ in MOVED])
def test_tokens_that_lie_otherwise_in_a_scan(layout, axes):
    compare(layout, axes, *model((DELTA, MLP), (PLAIN, MOE), (NEXT, MLP)), S=12)


def test_what_moves_between_layers_is_printed():
    lines = str(MOVED[0][0]).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if line.lstrip().startswith(("x ", "gdn.x ", "gdn.out "))),
        """\
  x                  B S/g:zigzag D                       stays
  gdn.x              B S/g:zigzag D -> B S D -> B S/g D   all-gather over g, then a slice
  gdn.out            B S/g D -> B S D -> B S/g:zigzag D   all-gather over g, then a slice""",
    )
    assert_expected_inline(
        str(LAYOUTS[6][0]),
        """\
hybrid(ulysses="u", gather="g") beside gdn_scan("g", "u")
  x                  B S/g/u D                                        stays
  q                  B S/g/u (K G) E -> B S/g (K/u G) E               all-to-all over u
  k                  B S/g/u K E -> B S/g K/u E -> B S K/u E          all-to-all over u, then all-gather over g
  v                  B S/g/u K V -> B S/g K/u V -> B S K/u V          all-to-all over u, then all-gather over g
  o                  B S/g (K/u G) V -> B S/g/u (K G) V               all-to-all over u
  q_positions        B S -> B S/g                                     whole on every rank, then a slice
  q_segment_ids      B S -> B S/g                                     whole on every rank, then a slice
  mask               B (K G) S T -> B (K/u G) S T -> B (K/u G) S/g T  whole on every rank, then a slice
  sinks              (K G) -> (K/u G)                                 a slice
  gdn.q              B S/g/u K E -> B S K E                           W-1 tokens in front, all-to-all over g/u
  gdn.k              B S/g/u K E -> B S K E                           W-1 tokens in front, all-to-all over g/u
  gdn.v              B S/g/u (K G) V -> B S (K G) V                   W-1 tokens in front, all-to-all over g/u
  gdn.summary        P/g/u B (K G) N E -> P B (K G) N E               all-gather over g/u
  gdn.tail           P/g/u B (K C) U -> P B (K C) U                   all-gather over g/u
  gdn.rows           P/g/u B -> P B                                   all-gather over g/u
  gdn.q_positions    B S -> B S/g/u                                   whole on every rank, then a slice
  gdn.q_segment_ids  B S -> B S/g/u                                   whole on every rank, then a slice
  out, h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss, cache_k, cache_v,
  gdn.b, gdn.a, gdn.q_conv, gdn.k_conv, gdn.v_conv, gdn.a_log, gdn.dt_bias, gdn.cache_q, gdn.cache_k,
  gdn.cache_v, gdn.cache_state, gdn.o: stay as they come
  k_positions, k_segment_ids, gdn.k_positions, gdn.k_segment_ids: whole on every rank""",
    )


@pytest.mark.parametrize(
    ("layout", "axes"), [LAYOUTS[1], LAYOUTS[7], LATENTS[2], *MOVED[:3]], ids=lambda x: getattr(x, "name", "")
)
def test_every_rank_takes_part_in_every_backward(layout, axes):
    """Without what a simulation does so that ranks meet: each has its own loss and its own graph."""
    mesh, S = sh.Mesh(**axes), 12
    cfg, params = model((KIMI, MLP), (LATENT if "kv_latent" in dict(layout.chains) else PLAIN, MLP), (NEXT, MLP))
    ids, targets = torch.randint(0, 31, (2, S)), torch.randint(0, 31, (2, S))
    loss, where = sh.shard(F.next_token_loss, layout, mesh, S=S), layout["tokens"][0]
    specs = loss.specs(params, cfg)

    want, _ = F.next_token_loss(params, ids, cfg, targets)
    right = F.tree.unflatten(F.tree.structure(params), torch.autograd.grad(want, F.tree.leaves(params)))

    def body(at):
        mine = F.tree.map(lambda t: t.detach().requires_grad_(), sh.cut(params, specs, at))
        total, _ = loss(mine, sh.cut(ids, where, at), cfg, sh.cut(targets, where, at), mesh=at)
        grads = torch.autograd.grad(sh.counted_once(total, where, at), F.tree.leaves(mine))
        summed = sh.sum_gradients(F.tree.unflatten(F.tree.structure(mine), grads), specs, at)
        equal(F.tree.leaves(summed), F.tree.leaves(sh.cut(right, specs, at)))

    sh.Threads(mesh).run(body)
