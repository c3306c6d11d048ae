"""Programs over ranks that are threads: tokens and log-probabilities of one rank in fp64, what is refused, the plan."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh

from ..sharding.test_latent_models import HEADS, LATENT, MLP, MOE, model
from ..sharding.test_recurrent_models import DELTA, KIMI, PLAIN

UNEVEN = dataclasses.replace(HEADS, num_attention_heads=6, num_key_value_heads=3)
RING = dataclasses.replace(HEADS, num_attention_heads=8, num_key_value_heads=4, window=6)
FEW = dataclasses.replace(HEADS, num_attention_heads=8, num_key_value_heads=2, qkv_bias=True)
SMOL = dataclasses.replace(HEADS, num_attention_heads=9, num_key_value_heads=3, qkv_bias=True)
TWELVE = dataclasses.replace(HEADS, num_attention_heads=12, num_key_value_heads=3, window=6)
FIVE = dataclasses.replace(LATENT, num_attention_heads=5)
ODD = dataclasses.replace(DELTA, num_key_heads=3, num_value_heads=9)
ODD_KIMI = dataclasses.replace(KIMI, num_key_heads=3, num_value_heads=6)
dense = sh.ulysses(tp="tp", dp="dp")
latent = sh.mla_latent(tp="tp", dp="dp")
hybrid = sh.beside(dense, sh.gdn_ulysses(tp="tp", dp="dp"))
kimi = sh.beside(latent, sh.gdn_ulysses(tp="tp", dp="dp"))
CASES = [
    (dense, {"tp": 2}, ((UNEVEN, MLP), (RING, MLP))),
    (dense, {"tp": 4}, ((FEW, MLP), (RING, MLP))),  # two ranks read one key/value head
    (dense, {"dp": 2, "tp": 2}, ((UNEVEN, MLP), (HEADS, MOE))),
    (dense, {"dp": 3}, ((HEADS, MLP),)),
    (latent, {"tp": 2}, ((LATENT, MLP), (LATENT, MOE))),
    (latent, {"tp": 2, "dp": 2}, ((LATENT, MLP), (LATENT, MOE))),
    (sh.spread(latent, experts="ep"), {"ep": 2, "tp": 2}, ((LATENT, MLP), (LATENT, MOE))),
    (hybrid, {"tp": 2}, ((DELTA, MLP), (PLAIN, MOE))),
    (hybrid, {"tp": 4}, ((DELTA, MLP), (PLAIN, MLP))),
    (kimi, {"tp": 4}, ((KIMI, MLP), (LATENT, MOE))),
    (dense, {"tp": 4}, ((SMOL, MLP), (TWELVE, MLP))),
    (kimi, {"tp": 2}, ((ODD_KIMI, MLP), (FIVE, MLP))),
    (kimi, {"dp": 2, "tp": 4}, ((ODD, MLP), (ODD_KIMI, MLP), (FIVE, MLP))),
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8], [20, 30, 11, 4]]
OPTIONS = [
    {},
    {"eos_token_id": [3, 5, 7, 11]},
    {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 1.3, "seed": 3, "repetition_penalty": 1.2},
    {"do_sample": True, "top_k": 50, "min_p": 0.01, "seed": [4, 5, 6]},
    {"frequency_penalty": 2.0},
]
SIZES = {"batch": 3, "max_len": 40, "chunk": 4}


def made(parts):
    cfg, params = model(*parts)
    return programs.Model(name="tiny", config=cfg, params=F.tree.map(lambda p: p.detach(), params))


def build(of, layout, at, **options):
    program = programs.build(of, mesh=at, layout=layout, **SIZES, **options)
    for cache in program.cache:
        for leaf in F.tree.leaves(cache) if not isinstance(cache, F.GDNCache) else ():
            leaf.fill_(torch.nan)  # a slot that was never written never matters
    return program


@pytest.mark.parametrize(("layout", "axes", "parts"), CASES, ids=[f"{case[0].name} {case[1]}" for case in CASES])
def test_tokens_are_those_of_one_rank(layout, axes, parts):
    of = made(parts)
    one = programs.build(of, compile=False, **SIZES)
    # How a token is chosen knows the mesh and not the layers: of each mesh, all ways once.
    first = next(case for case in CASES if case[1] == axes)
    some = OPTIONS if first[0] is layout and math.prod(axes.values()) <= 4 else OPTIONS[:3:2]

    def body(at):
        program = build(of, layout, at)
        return [program.generate(PROMPTS, max_new_tokens=12, return_logprobs=True, **o) for o in some]

    found = sh.Threads(sh.Mesh(**axes)).run(body)
    for i, options in enumerate(some):
        want = one.generate(PROMPTS, max_new_tokens=12, return_logprobs=True, **options)
        for of_rank in found:
            assert (of_rank[i].tokens, of_rank[i].seeds) == (want.tokens, want.seeds)
            assert of_rank[i].finish_reason == want.finish_reason
            for mine, theirs in zip(of_rank[i].logprobs, want.logprobs, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}], ids=str)
def test_rows_end_at_different_lengths_on_different_ranks(axes):
    """A row that ends at once on one rank, while others go on past a check; scores of all rows, and of one alone, which
    leaves ranks without any."""
    of, prompts, sizes = made(CASES[2][2]), [*PROMPTS, [5], [6, 7]], {**SIZES, "batch": 5}
    one = programs.build(of, compile=False, **sizes)
    first = one.generate(prompts, max_new_tokens=25).tokens
    ends = {"max_new_tokens": 25, "eos_token_id": [first[2][0]]}
    want, scores = one.generate(prompts, **ends), one.score(prompts)
    assert min(want.lengths) == 1 < max(want.lengths)

    def body(at):
        program = programs.build(of, mesh=at, layout=dense, **sizes)
        return program.generate(prompts, **ends), program.score(prompts), program.score(prompts[:1])

    for found, of_rank, few in sh.Threads(sh.Mesh(**axes)).run(body):
        assert found.tokens == want.tokens
        torch.testing.assert_close([*of_rank, *few], [*scores, scores[0]], rtol=1e-9, atol=1e-9)


def test_experts_of_rows_elsewhere():
    """All ranks read as many chunks as the longest row has, and read again with a row whose angles turn (longrope):
    its experts lie on all of them."""
    turn: Any = {"factor": 2.0, "original_max_position_embeddings": 10}
    rope = F.RopeConfig(rope_type="longrope", short_factor=(1.0, 1.0), long_factor=(2.0, 2.0), **turn)
    of = made(((dataclasses.replace(HEADS, rope=rope), MOE),))

    def called(program):
        drawn = program.generate(PROMPTS, max_new_tokens=6, eos_token_id=[3, 5], return_logprobs=True)
        scores = program.score(PROMPTS)
        state = program.decode(program.prefill(PROMPTS[::-1]))
        return drawn.tokens, drawn.logprobs, scores, state.token[state.position >= 0].tolist()

    tokens, logprobs, scores, after = called(programs.build(of, compile=False, **SIZES))
    layout, mesh = sh.spread(sh.ulysses(dp="dp"), experts="ep"), sh.Mesh(ep=2)
    found = sh.Threads(mesh).run(lambda at: called(programs.build(of, mesh=at, layout=layout, **SIZES)))
    for mine in found:
        assert mine[0] == tokens
        torch.testing.assert_close(mine[1:3], (logprobs, scores), rtol=1e-9, atol=1e-9)
    assert found[0][3] + found[1][3] == after


@pytest.mark.parametrize("case", [3, 6], ids=str)
def test_prompts_of_other_lengths_on_other_ranks(case):
    """Of rows over dp, and of experts that are dealt out, whose ranks wait for each other in every chunk; also where
    there are fewer prompts than ranks."""
    layout, axes, parts = CASES[case]
    of = made(parts)
    one, calls = programs.build(of, compile=False, **SIZES), (PROMPTS, PROMPTS[1:], PROMPTS[:1])
    want = [(one.prefill(prompts).token, one.score(prompts)) for prompts in calls]
    assert [len(slots) for *_, (slots, *_) in one._chunks([], 9)] == [32] * 3  # no size that is compiled anew

    def body(at):
        program = build(of, layout, at)
        return [(program.prefill(each).token, program.score(each), program.ranks.own(len(each))) for each in calls]

    for found in sh.Threads(sh.Mesh(**axes)).run(body):
        for (token, scores, own), (token_of_all, scores_of_all) in zip(found, want, strict=True):
            assert token[: own.stop - own.start].tolist() == token_of_all[own].tolist()
            torch.testing.assert_close(scores, scores_of_all, rtol=1e-9, atol=1e-9)


def test_caches_are_of_the_ranks_own_shapes():
    def shapes(at, parts, layout):
        return [[tuple(leaf.shape) for leaf in F.tree.leaves(c)] for c in build(made(parts), layout, at).cache]

    of = [
        sh.Threads(sh.Mesh(**axes)).run(functools.partial(shapes, parts=parts, layout=layout))
        for layout, axes, parts in (CASES[0], CASES[1])
    ]
    assert [x[0][0] for x in of[0]] == [(3, 65, 2, 4), (3, 65, 1, 4)]
    assert [x[0][0] for x in of[1]] == [(3, 65, 1, 4)] * 4


def test_weights_are_read_where_they_lie():
    of = made(CASES[0][2])

    def body(at):
        program = build(of, dense, at)
        before = program.generate(PROMPTS, max_new_tokens=6).tokens
        if at.rank == 0:
            for leaf in F.tree.leaves(of.params):
                leaf.mul_(1.5)
        sh.reshard(torch.zeros(1), "P/tp -> P", at, P=2)
        after = program.generate(PROMPTS, max_new_tokens=6).tokens
        program.params = F.tree.map(lambda p: p / 1.5, of.params)  # of the whole model
        assert program.generate(PROMPTS, max_new_tokens=6).tokens == before
        return before, after

    for before, after in sh.Threads(sh.Mesh(tp=2)).run(body):
        assert after == programs.build(of, compile=False, **SIZES).generate(PROMPTS, max_new_tokens=6).tokens
        assert after != before


@pytest.mark.parametrize("case", [0, 2, 5, 7], ids=str)
def test_the_plan_is_what_a_trace_has(case):
    layout, axes, parts = CASES[case]
    of, record = made(parts), sh.trace(sh.Mesh(**axes))

    def body(at):
        program = build(of, layout, at.recording(record))
        state = program.prefill([[1, 2, 3]] * 3)
        first = len(record.of(at.rank))
        program.decode(state)
        return program.plan, record.of(at.rank)[first:]

    for plan, events in sh.Threads(record.mesh).run(body):
        found, planned = (
            [(e.what, e.kind, e.axes, e.sent, e.received, e.call.title) for e in some]
            for some in (events, plan.phases["decode"])
        )
        assert found == planned
        assert found


def said(layout, axes, call, parts=CASES[0][2]):
    """What each rank says, without the notes of the executor."""

    def body(at):
        with pytest.raises((ValueError, TypeError)) as error:
            call(made(parts), layout, at)
        return str(error.value)

    return sh.Threads(sh.Mesh(**axes)).run(body)


def test_ranks_that_are_told_different_things():
    def generate(of, layout, at):
        build(of, layout, at).generate(PROMPTS[at.rank :], max_new_tokens=5 + at.rank)

    def one_is_wrong(of, layout, at):
        build(of, layout, at).generate([[99]] if at.rank else PROMPTS, max_new_tokens=5)

    def sizes(of, layout, at):
        programs.build(of, mesh=at, layout=layout, batch=3 + at.rank, max_len=20)

    assert_expected_inline(
        "\n".join(
            dict.fromkeys(each for call in (generate, one_is_wrong, sizes) for each in said(dense, {"tp": 2}, call))
        ),
        """\
generate: ranks were told different things
    prompts: [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8], [20, 30, 11, 4]] on rank 0; [[9, 8], [20, 30, 11, 4]] on rank 1
    max_new_tokens: 5 on rank 0; 6 on rank 1
    fix: the same arguments on every rank     mesh: tp=2
generate: rank 1 raised, and says why; so nothing ran
prompts[0][0]: token id 99 is outside the vocabulary of 31
build: ranks were told different things
    batch: 3 on rank 0; 4 on rank 1
    fix: the same arguments on every rank     mesh: tp=2""",
    )


def test_what_no_program_runs_over():
    def undrawn(of, layout, at):
        build(of, layout, at).generate(PROMPTS, max_new_tokens=5, do_sample=True, top_k=0)

    def batch(of, layout, at):
        programs.build(of, mesh=at, layout=layout, batch=1)

    def elsewhere(of, layout, at):
        programs.build(of, mesh=at, layout=layout, batch=3, device="cuda")

    found = [
        *said(sh.ulysses(tp="tp"), {"u": 2}, build),
        *said(sh.spread(dense, parameters="dp"), {"dp": 2}, build),
        *said(dense, {"dp": 2}, batch),
        *said(dense, {"tp": 2}, undrawn),
        *said(dense, {"tp": 2}, elsewhere),
        *said(dense, {"tp": 7}, build),  # six query heads
    ]
    assert_expected_inline(
        "\n".join(dict.fromkeys(found)),
        """\
build(layout=...): ulysses("u", tp="tp") splits tokens over u=2, and a step of decode has one
    fix: prefill_layout=ulysses("u", tp="tp"), and layout=... with rows over these ranks, dp="u"; or call them tp in the mesh: prefill_layout=... of "tp", layout=... with tp="tp"
build(layout=...): ulysses("u", tp="tp", dp="dp") spread(parameters="dp") keeps parameters in parts over dp, which every step would gather
    fix: the layout without parameters=...
build(batch=1): fewer rows than the 2 ranks of dp
    fix: batch=2
generate(top_k=0): without it any of 31 tokens may be drawn, and their logits lie on 2 ranks, which would have to send them all
    fix: top_k=50
build(device="cuda"): no CUDA device is available
    fix: programs.plan(model, device="cuda", arch="sm_90") prints the plan without one
ulysses("u", tp="tp", dp="dp"): H=6 query heads over tp=7, which splits them before
    B/dp S/u (K/tp G) E
    mesh: tp=7 dp=1 (not in the mesh) u=1 (not in the mesh)     fix: tp=6""",
    )


def test_a_plan_of_experts_that_are_dealt_out_leaves_out_what_only_the_router_knows():
    layout, axes, parts = CASES[6]
    for text in sh.Threads(sh.Mesh(**axes)).run(lambda at: str(build(made(parts), layout, at))):
        assert text.endswith("what the choice of experts says, step by step; sharding.trace has it")


def test_the_readme():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "layout=sh.ulysses(tp=" in c)
    of = made(CASES[0][2])
    want = programs.build(of, batch=4, max_len=64, compile=False).generate(PROMPTS, max_new_tokens=8).tokens

    def body(at):
        code_of_rank = code[code.index("\nmesh = ") : code.index("dist.destroy")]
        code_of_rank = code_of_rank.replace("sh.ProcessGroup(device_mesh).mesh", "at")
        code_of_rank = code_of_rank.replace('programs.load("smollm2-135m")', "of")
        code_of_rank = code_of_rank.replace('["The capital of France is"]', "prompts")
        names = {"sh": sh, "programs": programs, "of": of, "prompts": PROMPTS, "at": at}
        exec(code_of_rank, names)
        return names["found"].tokens

    assert sh.Threads(sh.Mesh(dp=2, tp=2)).run(body) == [want] * 4


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "drawn"])
def test_seeds_are_refused_as_on_one_rank(options):
    """Whatever rows a rank has."""
    of = made(CASES[3][2])

    def called(program):
        said = []
        for seed in ([1, 2], [4, -1, 2], *([] if options else [[1, 2, 3]])):
            with pytest.raises(ValueError, match="generate") as error:
                program.generate(PROMPTS, max_new_tokens=3, seed=seed, **options)
            said.append(str(error.value))
        return said

    want = called(programs.build(of, compile=False, **SIZES))
    assert sh.Threads(sh.Mesh(dp=2)).run(lambda at: called(build(of, dense, at))) == [want] * 2


@pytest.mark.parametrize(("axes", "said"), [({"dp": 2}, "a rank has whole"), ({"tp": 2}, "three numbers a rank")])
def test_the_plan_says_of_which_logits_a_token_is_chosen(axes, said):
    """Over rows alone no step sends any."""
    of = made(CASES[3][2])
    for plan in sh.Threads(sh.Mesh(**axes)).run(lambda at: build(of, dense, at).plan):
        assert said in next(line for line in str(plan).splitlines() if line.startswith("  choice"))
        assert any("shares" in event.call.edges for event in plan.phases["decode"]) == ("tp" in axes)


def test_the_plan_says_who_has_what():
    of = made(CASES[0][2])
    plan = sh.Threads(sh.Mesh(dp=2, tp=2)).run(lambda at: str(build(of, dense, at)))[1]
    assert_expected_inline(
        plan,
        """\
program tiny   float64   batch 3   max_len 40   chunk 4
  mesh     dp=2 tp=2, rank 1
  layout   ulysses("u", tp="tp", dp="dp")
  weights  1,316 parameters, 10.3 KiB on this rank
  cache    9.9 KiB on this rank, 1 x (k 2 65 1 4, v 2 65 1 4); 1 x (k 2 7 2 4, v 2 7 2 4)
  runs     eagerly: ranks are threads, among which the compiler is not safe
  agrees   once a call; on 10.3 KiB of weights, which other ranks hold too, when these may have changed
  choice   the most likely token, of three numbers a rank; with sampling options 3 top_k + 1 more
  sums     over tp by the library's all-reduce (one_shot_all_reduce: no float64)

prefill   7 exchanges, sends 3.3 KiB, receives 3.3 KiB
  all-gather  over dp/tp  agreement  x1    144 B
  all-reduce  over tp     embedded   x1    640 B
  all-reduce  over tp     out        x4  2.5 KiB
  all-gather  over tp     shares     x1     48 B

decode   7 exchanges, sends 992 B, receives 992 B
  all-gather  over dp/tp  agreement  x1  144 B
  all-reduce  over tp     embedded   x1  160 B
  all-reduce  over tp     out        x4  640 B
  all-gather  over tp     shares     x1   48 B""",
    )
