"""Faults of ranks that are threads: other arguments, other weights, other parameters set, a rank that ends. Every rank
says so, names what differs and where, and goes on with the next call."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs.copies import bits, pieces_of

from .test_ranks import CASES, FEW, MLP, PROMPTS, SIZES, build, dense, kimi, made

UNEVEN = CASES[0][2]
AXES = {"dp": 2, "tp": 2}


def own(of):
    """A model of a rank's own, as each process would load it."""
    return dataclasses.replace(of, params=F.tree.map(torch.clone, of.params))


def run(body, axes=AXES, layout=dense, parts=UNEVEN):
    of = made(parts)
    return sh.Threads(sh.Mesh(**axes)).run(lambda at: body(own(of), layout, at))


def refused(call, *kinds):
    with pytest.raises(kinds or (ValueError,)) as error:
        call()
    return str(error.value)


def text(found):
    """What all ranks said; that they said the same."""
    (said,) = {tuple(each) for each in found}
    return "\n".join(said)


def test_build_is_told_different_things():
    def body(of, layout, at):
        odd, said = at.rank == 3, []
        heads = dataclasses.replace(of.config.layers[0].attention, softmax_scale=0.5 if odd else 1.0)
        other = dataclasses.replace(of.config.layers[0], attention=heads)
        cfg = dataclasses.replace(of.config, layers=(other, *of.config.layers[1:]))
        for model, more in (
            (of, {"max_len": 40 + odd}),
            (of, {"batch": 4 - odd, "chunk": 4 + odd}),
            (of, {"dtype": torch.float32 if odd else torch.float64}),
            (of, {"layout": sh.ulysses(tp="tp", dp="dp", overlap=True) if odd else layout}),
            (dataclasses.replace(of, config=cfg), {}),
        ):
            told = {"mesh": at, "layout": layout, **SIZES, **more}
            said.append(refused(lambda: programs.build(model, **told)))  # noqa: B023
        return said

    assert_expected_inline(
        text(run(body)),
        """\
build: ranks were told different things
    max_len: 40 on rank 0, 1, 2; 41 on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2
build: ranks were told different things
    batch: 4 on rank 0, 1, 2; 3 on rank 3
    chunk: 4 on rank 0, 1, 2; 5 on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2
build: ranks were told different things
    dtype: torch.float64 on rank 0, 1, 2; torch.float32 on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2
build: ranks were told different things
    layout: 'ulysses("u", tp="tp", dp="dp")' on rank 0, 1, 2; 'ulysses("u", tp="tp", dp="dp", overlap=True)' on rank 3
    layout.chains: ...False... on rank 0, 1, 2; ...True... on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2
build: ranks were told different things
    model.config: ...softmax_scale=1.0... on rank 0, 1, 2; ...softmax_scale=0.5... on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2""",
    )


def test_what_one_rank_refuses_is_an_error_on_all():
    """Whatever it is told, as long as its mesh is one."""

    def body(of, layout, at):
        odd, said = at.rank == 1, []
        wrong = dataclasses.replace(of, params=dataclasses.replace(of.params, embed=of.params.embed[:-1]))
        abstract = dataclasses.replace(of, params=F.Decoder.abstract(of.config))
        for model, more in (
            (of, {"batch": 0 if odd else 3}),
            (of, {"layout": None if odd else layout}),
            (of, {"device": "nowhere" if odd else "cpu"}),
            (of, {"device": "cuda" if odd else "cpu"}),
            (of, {"dtype": torch.int32 if odd else None}),
            (of, {"strict": odd}),
            (None if odd else of, {}),
            (wrong if odd else of, {}),
            (abstract if odd else of, {}),
        ):
            told = {"mesh": at, "layout": layout, **SIZES, **more}
            said.append(refused(lambda: programs.build(model, **told), ValueError, TypeError, F.TreeError))  # noqa: B023
        program = build(of, layout, at)
        said.append(refused(lambda: program.prefill(PROMPTS, eos_token_id="x" if odd else ()), ValueError, TypeError))
        said.append(refused(lambda: program.score([[99]] if odd else PROMPTS)))
        lengths = program.generate(PROMPTS, max_new_tokens=3).lengths
        if odd:
            program.close()
        said.append(refused(lambda: program.generate(PROMPTS, max_new_tokens=3), ValueError, RuntimeError))
        return said, lengths

    found = run(body)
    calls = ["build"] * 9 + ["prefill", "score", "generate"]
    for rank, (said, lengths) in enumerate(found):
        others = [f"{call}: rank 1 raised, and says why; so nothing ran" for call in calls]
        assert said == others if rank != 1 else not set(said) & set(others)
        assert lengths == [3] * 3


def test_calls_are_told_different_things_and_the_next_ones_run():
    of = made(UNEVEN)
    want = programs.build(of, compile=False, **SIZES).generate(PROMPTS, max_new_tokens=6).tokens

    def body(of, layout, at):
        program, odd = build(of, layout, at), at.rank == 2
        state = program.prefill(PROMPTS)
        said = [
            refused(lambda: program.decode(dataclasses.replace(state, token=state.token + odd))),
            refused(lambda: program.decode(state, eos_token_id=(5, 6) if odd else 5)),
            refused(lambda: program.prefill(PROMPTS, eos_token_id=7 + odd)),
            refused(lambda: program.score([*PROMPTS[: 3 - odd]])),
            refused(lambda: program.generate(PROMPTS, do_sample=True, temperature=0.5 + odd, max_new_tokens=3)),
            refused(lambda: program.generate([list(range(30)), [*range(20), 20 + odd, *range(9)]], max_new_tokens=3)),
        ]
        assert program.decode(state).token.tolist()  # the state is good for the next step all the same
        return said, program.generate(PROMPTS, max_new_tokens=6).tokens

    found = run(body)
    assert [tokens for _, tokens in found] == [want] * 4
    assert_expected_inline(
        text(said for said, _ in found),
        """\
decode: ranks were told different things
    state.token, state.position: ([12], [4]) on rank 2; ([11], [4]) on rank 3
    fix: the same arguments on every rank     mesh: dp=2 tp=2
decode: ranks were told different things
    eos_token_id: (5,) on rank 0, 1, 3; (5, 6) on rank 2
    fix: the same arguments on every rank     mesh: dp=2 tp=2
prefill: ranks were told different things
    eos_token_id: (7,) on rank 0, 1, 3; (8,) on rank 2
    fix: the same arguments on every rank     mesh: dp=2 tp=2
score: ranks were told different things
    prompts: [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8], [20, 30, 11, 4]] on rank 0, 1, 3; [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8]] on rank 2
    fix: the same arguments on every rank     mesh: dp=2 tp=2
generate: ranks were told different things
    options of sampling: {'do_sample': True, 'temperature': 0.5} on rank 0, 1, 3; {'do_sample': True, 'temperature': 1.5} on rank 2
    fix: the same arguments on every rank     mesh: dp=2 tp=2
generate: ranks were told different things
    prompts: ...20... on rank 0, 1, 3; ...21... on rank 2
    fix: the same arguments on every rank     mesh: dp=2 tp=2""",
    )


def test_weights_that_differ():
    """When it is built, and when they are written, or set, on some ranks alone."""
    of = made(UNEVEN)
    want = programs.build(of, compile=False, **SIZES).generate(PROMPTS, max_new_tokens=4).tokens

    def body(of, layout, at):
        said, odd = [], at.rank == 3
        other = own(of)
        other.params.layers[1].attention.norm.weight.add_(odd)
        other.params.embed[:16].mul_(1 + odd)  # rows of rank 0 and 2, which it does not read
        said.append(refused(lambda: build(other, layout, at)))
        program = build(of, layout, at)

        def generate():
            return program.generate(PROMPTS, max_new_tokens=4).tokens

        assert generate() == want
        if odd:
            program.params.norm.weight.mul_(2)
        said.append(refused(generate))
        said.append(refused(lambda: program.score(PROMPTS)))
        if odd:
            program.params.norm.weight.div_(2)
        assert generate() == want
        if at.rank >= 2:  # the copies of rank 2 and 3 are those of 0 and 1
            for leaf in F.tree.leaves(program.params):
                leaf.mul_(3)
        said.append(refused(generate))
        if at.rank < 2:
            for leaf in F.tree.leaves(program.params):
                leaf.mul_(3)
        generate()
        if odd:
            program.params = of.params
        said.append(refused(generate))
        program.params = made(UNEVEN).params
        assert generate() == want
        if odd:
            program.params.norm.weight.data.add_(1)  # which no counter counts
        generate()
        program.refresh()
        said.append(refused(generate))
        return said

    assert_expected_inline(
        text(run(body)),
        """\
build: ranks hold different weights where they should hold the same
    .layers[1].attention.norm.weight: rank 3 otherwise than rank 0
    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)     mesh: dp=2 tp=2
generate: ranks hold different weights where they should hold the same
    .norm.weight: rank 3 otherwise than rank 0
    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)     mesh: dp=2 tp=2
score: ranks hold different weights where they should hold the same
    .norm.weight: rank 3 otherwise than rank 0
    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)     mesh: dp=2 tp=2
generate: ranks hold different weights where they should hold the same
    .embed: rank 2 otherwise than rank 0; rank 3 otherwise than rank 1
    .layers[0].attention.norm.weight: rank 2, 3 otherwise than rank 0
    .layers[0].attention.q: rank 2 otherwise than rank 0; rank 3 otherwise than rank 1
    and 20 more
    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)     mesh: dp=2 tp=2
generate: program.params was set on rank 3 alone
    fix: set it on every rank     mesh: dp=2 tp=2
generate: ranks hold different weights where they should hold the same
    .norm.weight: rank 3 otherwise than rank 0
    fix: the same checkpoint and the same updates on every rank (sharding.sum_gradients before a step)     mesh: dp=2 tp=2""",
    )


def test_a_part_that_one_rank_holds():
    """It has no copy: that it was written on one rank of two is seen, and may be meant."""

    def body(of, layout, at):
        program = build(of, layout, at)
        before = program.generate(PROMPTS, max_new_tokens=4).tokens
        if at.rank:
            program.params.layers[0].mlp.gate.mul_(2)
            program.params.layers[0].mlp.up.mul_(0.5)
        said = [refused(lambda: program.generate(PROMPTS, max_new_tokens=4))]
        program.refresh()
        return said, program.generate(PROMPTS, max_new_tokens=4).tokens, before

    found = run(body, {"tp": 2})
    assert all(after != before for _, after, before in found)
    assert_expected_inline(
        text(said for said, *_ in found),
        """\
generate: parameters were written on some ranks, and not on others
    .layers[0].mlp.gate: written on rank 1 alone
    .layers[0].mlp.up: written on rank 1 alone
    fix: the same update on every rank; or program.refresh(), where it was meant for these alone     mesh: tp=2""",
    )


def test_pieces_are_what_ranks_share():
    """Of heads that two ranks read each, over a mesh of three axes: each element of each leaf lies in one piece, whose
    holders have the same there."""
    for layout, parts in ((dense, ((FEW, MLP),)), (kimi, CASES[9][2])):
        of, mesh = made(parts), sh.Mesh(dp=2, tp=4)

        def body(at, of=of, layout=layout):
            program = programs.build(of, mesh=at, layout=layout, **SIZES)
            leaves = F.tree.paths(program.params)
            pieces = pieces_of(program.ranks.lies(program.params), at)
            mine = [None if p.mine is None else leaves[p.path][p.mine] for p in pieces]
            covered = sum(x.numel() for x in mine if x is not None)
            assert covered == sum(leaf.numel() for leaf in leaves.values())
            return [(p.path, p.holders) for p in pieces], mine

        found = sh.Threads(mesh).run(body)
        pieces = found[0][0]
        assert all(said == pieces for said, _ in found)
        whole = dict.fromkeys(F.tree.paths(of.params), 0)
        for i, (path, holders) in enumerate(pieces):
            whole[path] += found[holders[0]][1][i].numel()
            assert [rank for rank in range(8) if found[rank][1][i] is not None] == list(holders)
            for rank in holders:
                assert torch.equal(found[rank][1][i], found[holders[0]][1][i])
        assert whole == {path: leaf.numel() for path, leaf in F.tree.paths(of.params).items()}
    assert {len(holders) for path, holders in pieces_of_few()} == {2, 4, 8}


def test_pieces_where_a_rank_has_nothing():
    """Rows in several ranges, and no column."""
    like = {"w": sh.ports.Sized(sh.Spec.parse("(J K/u) D/g"), {"J": 2, "K": 2, "D": 1})}
    found = [pieces_of(like, sh.Mesh(u=2, g=2).at(rank, object())) for rank in range(4)]
    assert [[piece.holders for piece in each] for each in found] == [[(0,), (2,), (0,), (2,)]] * 4
    assert [[piece.mine is not None for piece in each] for each in found] == [
        [rank == holder for holder in (0, 2, 0, 2)] for rank in range(4)
    ]


def pieces_of_few():
    of = made(((FEW, MLP),))
    ranks = programs.ranks.Ranks(of.config, sh.Mesh(dp=2, tp=4).at(0, object()), dense, torch.device("cpu"))
    return [(p.path, p.holders) for p in pieces_of(ranks.lies(of.params), ranks.mesh)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64], ids=str)
def test_bits_tell_any_change(dtype):
    made = torch.Generator().manual_seed(0)
    for shape in ((), (0, 3), (3,), (130, 257), (1, 40_000)):
        x = torch.randint(0, 2, shape, generator=made).to(dtype)
        same = bits(x)
        assert same == bits(x.clone()) == bits(torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape))
        flat, seen = x.clone().flatten(), {same}
        for at in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
            flat[at] = 1 - flat[at].to(torch.int32)
            seen.add(bits(flat.view(shape)))
            flat[at] = 1 - flat[at].to(torch.int32)
        assert len(seen) == 1 + min(3, flat.numel())
        moved = flat.roll(1)
        assert torch.equal(moved, flat) or bits(moved.view(shape)) != same


class Strikes:
    """A streamer, of one rank alone, which does something to its rank when a token comes."""

    def __init__(self, what, at=3):
        self.what, self.left = what, at

    def put(self, value):
        self.left -= 1
        if not self.left:
            self.what()

    def end(self):
        pass


def test_one_rank_streams_and_all_end_together():
    of = made(UNEVEN)
    one = programs.build(of, compile=False, **SIZES)
    first = one.generate(PROMPTS[:1], max_new_tokens=5).tokens[0]
    asked = {"max_new_tokens": 25, "eos_token_id": first[2]}
    want = one.generate(PROMPTS[:1], **asked)

    def body(of, layout, at):
        heard = []
        streamer = Strikes(lambda: None) if at.rank == 0 else None
        if streamer:
            streamer.put = lambda value: heard.append(value.tolist())
        found = build(of, layout, at).generate(PROMPTS[:1], streamer=streamer, **asked)
        return found.tokens, found.timings.steps, heard

    for tokens, steps, heard in run(body, {"tp": 2}):
        assert tokens == want.tokens
        assert steps == want.lengths[0] - 1
        assert len(heard) in (0, 1 + want.lengths[0])


def test_a_rank_that_ends_in_the_middle_of_a_call():
    """It raises, or returns, or computes for ever: each of the others waits for it by name, and says in which step."""
    said = {}

    def body(of, layout, at):
        program = build(of, layout, at)

        def fail():
            raise KeyboardInterrupt

        def hang():
            time.sleep(3)

        streamer = Strikes({"raises": fail, "hangs": hang}[what]) if at.rank == 1 else None
        try:
            program.generate(PROMPTS[:1], max_new_tokens=9, streamer=streamer)
        except sh.TransportError as error:
            said[what, at.rank] = str(error)
            raise

    of = made(UNEVEN)
    for what, kind in (("raises", KeyboardInterrupt), ("hangs", sh.TransportError)):
        threads = sh.Threads(sh.Mesh(tp=2), timeout=1.5)
        with pytest.raises(kind):
            threads.run(lambda at: body(own(of), dense, at))
        told = said[what, 0]
        assert {"raises": "rank 1 raised KeyboardInterrupt", "hangs": "rank 1   runs"}[what] in told
        assert told.endswith("during decode, step 1 after prefill"), told
    assert "longer than the time limit of 1.5 s" in told
