"""Prompts that are read with their tokens over ranks, and decoded by rows or heads: tokens of one rank in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh

from ..sharding.test_latent_models import HEADS, LATENT, MLP, MOE
from ..sharding.test_recurrent_models import DELTA, KIMI, NEXT, PLAIN
from .test_ranks import FIVE, RING, SMOL, made

CAPPED = dataclasses.replace(HEADS, softcap=3.0, window=7)
tp, rows = {"tp": "tp"}, {"tp": "tp", "dp": "cp"}
beside, ulysses, scan, by_head = sh.beside, sh.ulysses, sh.gdn_scan, sh.gdn_ulysses
# By what prompts are read, by what is decoded, mesh and layers.
CASES = {
    "heads become rows": (ulysses("cp", **tp), ulysses("g", **rows), {"cp": 2, "tp": 2}, ((HEADS, MLP), (RING, MLP))),
    "heads stay": (ulysses("tp"), ulysses(**tp), {"tp": 4}, ((SMOL, MLP), (CAPPED, MLP))),
    "keys of all": (
        sh.all_gather("cp", zigzag=True), ulysses("g", **rows), {"cp": 2}, ((CAPPED, MOE), (RING, MLP))
    ),
    "keys become heads": (
        sh.hybrid(ulysses="tp", gather="g", dp="dp"), ulysses(tp="tp", dp="dp/g"), {"dp": 2, "g": 2, "tp": 2},
        ((RING, MLP),),
    ),
    "latents": (
        sh.mla_latent("cp", **tp), sh.mla_latent("g", **rows), {"cp": 2, "tp": 2}, ((LATENT, MLP), (FIVE, MOE))
    ),
    "latents of all": (
        sh.mla_gather("tp"), sh.mla_latent(**tp), {"tp": 3}, ((dataclasses.replace(FIVE, window=5), MLP),)
    ),
    "states of all": (
        beside(ulysses("cp", **tp), scan("cp", **tp)), beside(ulysses("g", **rows), by_head("g", **rows)),
        {"tp": 2, "cp": 2}, ((DELTA, MLP), (PLAIN, MLP)),
    ),
    "states by head": (
        beside(sh.mla_latent("cp"), by_head("cp")), beside(sh.mla_latent("g", **rows), by_head("g", **rows)),
        {"cp": 4}, ((KIMI, MLP), (LATENT, MLP), (NEXT, MLP)),
    ),
    "states stay": (
        beside(ulysses("tp"), by_head("tp")), beside(ulysses(**tp), by_head(**tp)), {"tp": 2}, ((NEXT, MLP), (PLAIN, MOE)),
    ),
}  # fmt: skip
PROMPTS = [[*range(1, 12)], [9], [20, 30, 11], [4, 3]]
OPTIONS = [
    {"eos_token_id": [3, 5, 7, 11], "return_logprobs": True},
    {"do_sample": True, "top_k": 5, "temperature": 1.3, "seed": 3, "repetition_penalty": 1.2},
]
SIZES = {"batch": 4, "max_len": 40, "chunk": 4}


def build(case, at, of=None, **sizes):
    reads, layout, _, parts = CASES[case]
    of = made(parts) if of is None else of
    program = programs.build(of, mesh=at, layout=layout, prefill_layout=reads, **{**SIZES, **sizes})
    for cache in program.cache:
        for leaf in F.tree.leaves(cache):
            leaf.fill_(torch.nan)  # nothing of an earlier prompt matters, a recurrent state neither
    return program


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_rank(case):
    axes, parts = CASES[case][2:]
    of = made(parts)
    one = programs.build(of, compile=False, **SIZES)
    want = [one.generate(PROMPTS, max_new_tokens=12, **o) for o in OPTIONS]
    few, scores = one.generate(PROMPTS[:1], max_new_tokens=3).tokens, one.score(PROMPTS)

    def body(at):
        program = build(case, at, of)
        found = [program.generate(PROMPTS, max_new_tokens=12, **o) for o in OPTIONS]
        return (
            found,
            program.generate(PROMPTS[:1], max_new_tokens=3).tokens,
            program.score(PROMPTS),
            program.reading.own(4),
        )

    for found, first, of_rank, own in sh.Threads(sh.Mesh(**axes)).run(body):
        assert [x.tokens for x in found] == [x.tokens for x in want]
        assert first == few
        for mine, theirs in zip(found[0].logprobs, want[0].logprobs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(of_rank, scores[own], rtol=1e-9, atol=1e-9)
