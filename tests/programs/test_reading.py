"""Prompts that are read with their tokens over ranks, and decoded by rows or heads: tokens of one rank in fp64."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs.rows import size_text

from ..sharding.test_latent_models import HEADS, LATENT, MLP, MOE
from ..sharding.test_recurrent_models import DELTA, KIMI, NEXT, PLAIN
from .test_ranks import FIVE, ODD, RING, SMOL, UNEVEN, made, said

CAPPED = dataclasses.replace(HEADS, softcap=3.0, window=7)
tp, rows = {"tp": "tp"}, {"tp": "tp", "dp": "cp"}
beside, ulysses, scan, by_head = sh.beside, sh.ulysses, sh.gdn_scan, sh.gdn_ulysses
# By what prompts are read, by what is decoded, mesh and layers.
CASES = {
    "heads become rows": (
        ulysses("cp", **tp), ulysses("g", **rows), {"cp": 2, "tp": 2},
        ((HEADS, MLP), (UNEVEN, MLP), (RING, MLP)),
    ),
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
    "latents of both": (
        sh.mla_latent("tp", "g"), sh.mla_latent(tp="tp", dp="g"), {"g": 2, "tp": 2}, ((LATENT, MLP),)
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
# Greedy, where rows end early; and drawn.
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
        )

    for found, first, of_rank in sh.Threads(sh.Mesh(**axes)).run(body):
        assert [x.tokens for x in found] == [x.tokens for x in want]
        assert first == few
        for mine, theirs in zip(found[0].logprobs, want[0].logprobs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(of_rank, scores, rtol=1e-9, atol=1e-9)


def test_a_row_for_two_groups_of_ranks():
    """One long prompt, of which the ranks of one group have nothing to decode, and prompts of no more than a chunk."""
    of = made(CASES["heads become rows"][3])
    one = programs.build(of, compile=False, batch=1, max_len=40, chunk=3)

    def body(at):
        program = build("heads become rows", at, of, batch=1, chunk=3)
        assert program.sizes.batch == 1
        return [program.generate(p, max_new_tokens=6).tokens for p in ([[*range(1, 20)]], [[7]], [[1, 2, 3]])]

    want = [one.generate(p, max_new_tokens=6).tokens for p in ([[*range(1, 20)]], [[7]], [[1, 2, 3]])]
    assert sh.Threads(sh.Mesh(cp=2, tp=2)).run(body) == [want] * 4


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_what_one_rank_has_of_its_rows_and_heads(case):
    """Keys and values, latents, states and the ends of convolutions, each head another: where a rank read what is
    another's, or wrote it elsewhere, some number would differ."""
    axes, parts = CASES[case][2:]
    of = made(parts)
    one = programs.build(of, compile=False, **SIZES)
    for leaf in F.tree.leaves(one.cache):
        leaf.zero_()
    one.prefill(PROMPTS)

    def body(at):
        program = build(case, at, of)
        program.prefill(PROMPTS)
        return program.cache, program.ranks.cache_specs(program._sizes_of_all), program.ranks.own(4)

    mesh = sh.Mesh(**axes)
    for rank, (caches, specs, own) in enumerate(sh.Threads(mesh).run(body)):
        for mine, whole, lies, layer in zip(caches, one.cache, specs, of.config.layers, strict=True):
            window = layer.attention.window or SIZES["max_len"]
            for path, spec in F.tree.paths(lies).items():
                sizes = {**spec.sizes, "B": 4, "T": F.tree.paths(whole)[path].shape[1]}
                theirs, found = F.tree.paths(whole)[path][spec.spec.slices(sizes, mesh, rank)], F.tree.paths(mine)[path]
                for i, prompt in enumerate(PROMPTS[own]):
                    written = found.shape[1] if isinstance(mine, F.GDNCache) else min(len(prompt), window)
                    torch.testing.assert_close(found[i, :written], theirs[i, :written], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["heads become rows", "heads stay", "keys become heads", "states by head"])
def test_the_plan_is_what_a_trace_has(case):
    of, record = made(CASES[case][3]), sh.trace(sh.Mesh(**CASES[case][2]))

    def body(at):
        program = build(case, at.recording(record), of, chunk=40)
        first = len(record.of(at.rank))
        state = program.prefill([[*range(1, 30)] + [1] * 6, [1], [2, 3], [4]])
        middle = len(record.of(at.rank))
        program.decode(state)
        return program.plan, record.of(at.rank)[first:middle], record.of(at.rank)[middle:]

    for plan, prompts, steps in sh.Threads(record.mesh).run(body):
        for events, phases in ((prompts, ("prefill", "hand-over")), (steps, ("decode",))):
            planned = [e for phase in phases for e in plan.phases[phase]]
            found = [
                (e.what, e.kind, e.axes, e.sent, e.received, e.call.title) for e in events if "P/" not in e.call.title
            ]
            assert found == [(e.what, e.kind, e.axes, e.sent, e.received, e.call.title) for e in planned]


def planned(case, at):
    program = build(case, at)
    return str(program) if at.rank == 0 else ""


def test_the_plan_says_what_is_handed_over():
    plans = [sh.Threads(sh.Mesh(**CASES[c][2])).run(lambda at, c=c: planned(c, at))[0] for c in list(CASES)[:2]]
    plans = ["\n".join(each.splitlines()[:8] + each.partition("\n\nhand-over")[2].splitlines()) for each in plans]
    assert_expected_inline(
        "\n".join(plans),
        """\
program tiny   float64   batch 4   max_len 40   chunk 4
  mesh     cp=2 tp=2, rank 0
  layout   ulysses("g", tp="tp", dp="cp")
  weights  2,041 parameters, 15.9 KiB on this rank
  cache    26.1 KiB on this rank, 1 x (k 2 65 1 4, v 2 65 1 4); 1 x (k 2 65 2 4, v 2 65 2 4); 1 x (k 2 7 2 4, v 2 7 2 4)
  prompts  ulysses("cp", tp="tp")
           with 15.3 KiB of weights, parts of the model that was given; caches of 34.2 KiB more while they are read
  runs     eagerly: ranks are threads, among which the compiler is not safe
   4 exchanges, sends 32.8 KiB, receives 16.8 KiB
  all-to-all  over cp  cache_k, cache_v  x3  16.8 KiB
  all-gather  over tp  cache_k, cache_v  x1  16.0 KiB
program tiny   float64   batch 4   max_len 40   chunk 4
  mesh     tp=4, rank 0
  layout   ulysses("u", tp="tp")
  weights  915 parameters, 7.1 KiB on this rank
  cache    18.2 KiB on this rank, 1 x (k 4 65 1 4, v 4 65 1 4); 1 x (k 4 8 1 4, v 4 8 1 4)
  prompts  ulysses("tp")
           with 22.1 KiB of weights, parts of the model that was given; caches of 18.2 KiB more while they are read
  runs     eagerly: ranks are threads, among which the compiler is not safe
   0 exchanges, sends 0 B, receives 0 B""",
    )


def test_the_plan_says_which_weights_are_converted():
    def body(at):
        program = build(list(CASES)[1], at, dtype=torch.float32)
        held = program._weights, program._weights_read
        lines = str(program).splitlines()
        return [size_text(sum(leaf.nbytes for leaf in each._converted.values())) for each in held], lines[3], lines[6]

    ours, read = (found := sh.Threads(sh.Mesh(tp=4)).run(body)[0])[0]
    assert found[1].endswith(f"{ours} on this rank, {ours} of it converted copies")
    assert f"with {read} of weights, {read} of it converted copies; caches of" in found[2]


def test_what_cannot_be_handed_over():
    def layouts(reads, layout, **sizes):
        def call(of, _, at):
            programs.build(of, mesh=at, layout=layout, prefill_layout=reads, **{**SIZES, **sizes})

        return call

    def shards(of, layout, at):
        mine = dataclasses.replace(of, params=programs.build(of, mesh=at, layout=layout, **SIZES).params)
        layouts(ulysses("tp"), layout)(mine, layout, at)

    def set_shards(of, layout, at):
        program = programs.build(of, mesh=at, layout=layout, prefill_layout=ulysses("tp"), **SIZES)
        program.params = program.params

    def alone(of, layout, at):  # given on one rank, and not on the other
        layouts(ulysses("tp") if at.rank else None, layout)(of, layout, at)

    turning = F.RopeConfig(
        rope_type="longrope",
        factor=2.0,
        original_max_position_embeddings=16,
        short_factor=(1.0, 1.0),
        long_factor=(2.0, 2.0),
    )
    decode, two = ulysses("g", **rows), {"cp": 2, "tp": 2}
    long, dense = ((dataclasses.replace(HEADS, rope=turning), MLP),), ((HEADS, MLP),)
    found = [
        *said(None, two, layouts(None, ulysses("cp", **tp)), dense),
        *said(None, two, layouts(ulysses("cp", **tp), ulysses("cp", **tp)), dense),
        *said(None, two, layouts(sh.all_gather("cp", **tp, exchange="needed"), decode), dense),
        *said(None, {"cp": 2}, layouts(sh.all_gather("cp", zigzag=True), decode, chunk=6), dense),
        *said(None, {"cp": 2}, layouts(sh.mla_packed("cp"), sh.mla_latent("g", **rows)), ((LATENT, MLP),)),
        *said(None, {"dp": 2, "cp": 2}, layouts(ulysses("cp", dp="dp"), ulysses("g", dp="cp/dp")), dense),
        *said(None, {"cp": 2}, layouts(ulysses("cp"), decode), long),
        *said(
            None,
            two,
            layouts(beside(ulysses("cp", **tp), by_head("cp", **tp)), beside(decode, by_head("g", **rows))),
            ((ODD, MLP),),
        ),
        *said(ulysses(**tp), {"tp": 2}, shards, dense),
        *said(None, {"cp": 2}, layouts(ulysses("cp"), None), dense),
        *said(ulysses(**tp), {"tp": 2}, set_shards, dense),
        *said(ulysses(**tp), {"tp": 2}, alone, dense),
    ]
    assert_expected_inline(
        "\n".join(dict.fromkeys(found)),
        """\
build(layout=...): ulysses("cp", tp="tp") splits tokens over cp=2, and a step of decode has one
    fix: prefill_layout=ulysses("cp", tp="tp"), and layout=... with rows over these ranks, dp="cp"; or call them tp in the mesh: prefill_layout=... of "tp", layout=... with tp="tp"
build(layout=...): ulysses("cp", tp="tp") splits tokens over cp=2, and a step of decode has one
    fix: layout=... with rows over these ranks, dp="cp"; or call them tp in the mesh: prefill_layout=... of "tp", layout=... with tp="tp"
build(prefill_layout=...): it must keep caches
    backbone(cache=...) under a layout: layers[0].attention is of class Attention, and all_gather("cp", tp="tp", exchange="needed") sends needed keys alone, so that a rank lacks some of the others
    fix: exchange="all"
S=6 does not divide over cp=2 in head-tail order (needs a multiple of 4)
    B S/cp:zigzag D
      ^^^^^^^^^^^
    mesh: cp=2     fix: pad S to 8, or drop ":zigzag" (without it shards may be uneven)
build(prefill_layout=...): it must keep caches
    backbone(cache=...) under a layout: layers[0].attention is of class MLA, and latents of mla_packed("cp") stay split over cp, so that no rank has all of them
    fix: mla_latent("cp"), or no cache
build(prefill_layout=...): ulysses("cp", dp="dp") deals rows over dp, and ulysses("g", dp="cp/dp") over cp/dp, which does not begin with it
    fix: dp="dp" in both     mesh: dp=2 cp=2
build(prefill_layout=...): this model reads a row again that passes 16 tokens (longrope), and ranks of cp have other rows in decode than they read
    fix: without prefill_layout, or the rows of ulysses("cp") in layout
build(prefill_layout=...): one layout deals out H=9 heads of states one by one, the other K=3 key heads unevenly over tp, and they do not meet
    J/cp (K/tp/g G V) U
    mesh: cp=2 tp=2     fix: tp that divides K=3, or gdn_scan for prompts
build(prefill_layout=...): ulysses("tp") reads prompts with other parts of the weights than ulysses("u", tp="tp") decodes with, and the model has those of one rank alone
    fix: the whole model, or two layouts with the same tp
build(layout=...): mesh and layout go together
    fix: both, or neither for one rank
program.params: ulysses("tp") reads prompts with other parts of the weights than ulysses("u", tp="tp") decodes with, and the model has those of one rank alone
    fix: the whole model, or two layouts with the same tp
build: ranks were told different things
    prefill_layout: None on rank 0; 'ulysses("tp")' on rank 1
    prefill_layout.chains: None on rank 0; ...(('x'... on rank 1
    fix: the same arguments on every rank     mesh: tp=2""",
    )


def test_the_readme():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "prefill_layout=" in c)
    of = made(((HEADS, MLP),))
    want = programs.build(of, batch=4, max_len=64, compile=False).generate(PROMPTS, max_new_tokens=4).tokens

    def body(at):
        names = {"sh": sh, "programs": programs, "model": of, "mesh": at}
        exec(code, names)
        return names["program"].generate(PROMPTS, max_new_tokens=4).tokens

    assert sh.Threads(sh.Mesh(cp=2, tp=2)).run(body) == [want] * 4
