"""A whole model's training step over dp, cp, tp and ep at once: every loss and every gradient, as one rank has them."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

from . import gdn_cases
from . import test_latent_models as models
from .test_latent_models import HEADS, LATENT, MLP, MOE, NORM, compare

equal = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

DELTA = gdn_cases.config(num_key_heads=2, num_value_heads=4, norm=NORM)
GATED = dataclasses.replace(HEADS, num_attention_heads=4, output_gate=True, sinks=False)
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
    layout, axes, parts = case
    return f"{layout.name} on {sh.Mesh(**axes)}"


@pytest.mark.parametrize("case", CASES, ids=map(named, CASES))
def test_every_loss_and_gradient(case):
    layout, axes, parts = case
    compare(layout, axes, *models.model(*parts), S=12 if "zigzag" in layout.name else 13, equal=equal)
