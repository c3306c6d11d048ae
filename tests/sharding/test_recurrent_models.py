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
