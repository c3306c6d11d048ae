"""Decode over ranks as one graph, exchanges and choice in it: what is captured, when, by whom. Replayed by the host, as
`test_replay` does for one rank; ranks are threads here, and processes in `test_ranks_compiled`."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs import pair_sums, rank_held, rank_plan, rank_steps, replay
from meshfn.programs.pair_sums import PairSums
from meshfn.programs.ranks import Ranks
from meshfn.programs.sizes import Sizes, Target
from meshfn.sharding.classes import Dry
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels_cuda.ops import host_ops
from ..kernels_cuda.two_gpus import TwoGpus
from ..sharding.test_latent_models import LATENT, MLP
from ..sharding.test_recurrent_models import DELTA, PLAIN
from .test_pair_sums import DENSE as WHOLE
from .test_pair_sums import model as in_fp32
from .test_ranks import OPTIONS, PROMPTS, RING, SIZES, UNEVEN, build, dense, hybrid, latent, made
from .test_replay import Recorded

DENSE = ((UNEVEN, MLP), (RING, MLP))
CASES = [
    (dense, {"tp": 2}, DENSE),
    (latent, {"tp": 2}, ((LATENT, MLP),)),
    (hybrid, {"tp": 2}, ((DELTA, MLP), (PLAIN, MLP))),
    (dense, {"dp": 2, "tp": 2}, DENSE),
    (dense, {"dp": 3}, DENSE),
]


@pytest.fixture
def captured(monkeypatch):
    """Programs over ranks replay their decode; each rank by a replay of its own."""
    monkeypatch.setattr(rank_held, "replay_of", lambda *_: Recorded())


def over(axes, body):
    return sh.Threads(sh.Mesh(**axes)).run(body)


def host_of(program) -> Any:
    return program._captured._replay


@pytest.mark.parametrize(("layout", "axes", "parts"), CASES, ids=[f"{case[0].name} {case[1]}" for case in CASES])
def test_tokens_are_those_of_one_rank(captured, layout, axes, parts):
    """Options of every kind, in turn; the second round captures nothing."""
    of, n = made(parts), 22
    one = programs.build(of, compile=False, **SIZES)

    def body(at):
        program, found = build(of, layout, at), []
        for _ in range(2):
            found += [program.generate(PROMPTS, max_new_tokens=n, return_logprobs=True, **o) for o in OPTIONS]
            captures = program._captured.captures
        return found, captures, host_of(program).launched

    ranks = over(axes, body)
    want = [one.generate(PROMPTS, max_new_tokens=n, return_logprobs=True, **options) for options in OPTIONS]
    for found, captures, launched in ranks:
        for mine, theirs in zip(found, want * 2, strict=True):
            assert (mine.tokens, mine.seeds, mine.finish_reason) == (theirs.tokens, theirs.seeds, theirs.finish_reason)
            torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-9, atol=1e-9)
        kinds = {options for _, options in launched}
        assert captures == len({*launched, (1, 0), (8, 0)})
        # Of a split vocabulary, by the candidates that a rank sends: 1 for penalties alone, 5, and all that there are.
        assert kinds == ({0, 1, 5, 16} if axes.get("tp") else {0, 1})


def test_each_launch_makes_the_exchanges_of_its_steps(captured):
    of, record = made(DENSE), sh.trace(sh.Mesh(tp=2))

    def body(at):
        program, counts = build(of, dense, at.recording(record)), []
        state = program._run_prefill(program._inputs(), program._start(), PROMPTS, program._eos(()), 9)
        for n in (1, 8):
            before = len(record.of(at.rank))
            program._launch(program._inputs(), state, program._eos(()), n, 0)
            counts.append(len(record.of(at.rank)) - before)
        return counts, len(program.plan.phases["decode"])

    for (one, eight), planned in sh.Threads(record.mesh).run(body):
        assert eight == 8 * one
        assert one == planned - 2, "all of a step but the agreement in front of it"


def test_step_by_step(captured):
    """States go from call to call, a token of one's own among them; each is a copy."""
    of = made(DENSE)

    def called(program):
        states = [program.prefill(PROMPTS)]
        for _ in range(4):
            states.append(program.decode(states[-1]))
        ours = program.prefill(PROMPTS)
        states.append(program.decode(dataclasses.replace(ours, token=ours.token.flip(0))))
        return [(state.token.tolist(), state.position.tolist()) for state in states]

    want = called(programs.build(of, compile=False, **SIZES))
    assert over({"tp": 2}, lambda at: called(build(of, dense, at))) == [want] * 2


class NothingForTheHost(TorchDispatchMode):
    """Raises where an operation waits for the device, or brings numbers from the host: what no graph can hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "lift_fresh", "nonzero", "item"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("layout", "axes", "parts"), CASES[:4], ids=[case[0].name for case in CASES[:4]])
def test_a_step_asks_nothing_of_the_host(captured, layout, axes, parts):
    of = made(parts)

    def body(at):
        program = build(of, layout, at)
        replayed = host_of(program).replay

        def watched(name):
            with NothingForTheHost():
                replayed(name)

        host_of(program).replay = watched
        return [program.generate(PROMPTS, max_new_tokens=12, **options).tokens for options in OPTIONS]

    over(axes, body)


@pytest.mark.parametrize("at_once", [True, False], ids=["at the prompt", "in the middle"])
def test_a_streamer_that_raises_on_one_rank(captured, at_once):
    """Is heard no more, and its rank raises when all have ended the call; the next one runs."""
    of = made(DENSE)

    def body(at):
        program, heard = build(of, dense, at), []

        class Raising:
            def put(self, value: Any) -> None:
                heard.append(value.tolist())
                if at_once or len(heard) == 4:
                    raise KeyError("nobody listens")

            def end(self) -> None:
                heard.append("the end")

        def called():
            return program.generate(PROMPTS[:1], max_new_tokens=12, streamer=Raising() if at.rank else None).tokens

        if at.rank:
            with pytest.raises(KeyError, match="nobody listens"):
                called()
        else:
            called()
        return program.generate(PROMPTS, max_new_tokens=12).tokens, len(heard)

    want = programs.build(of, compile=False, **SIZES).generate(PROMPTS, max_new_tokens=12).tokens
    assert over({"tp": 2}, body) == [(want, 0), (want, 1 if at_once else 4)]


def test_a_leaf_that_moved_on_one_rank_is_captured_again_by_all(captured, caplog):
    """Whose exchanges would otherwise meet others. Written in place, nothing is captured."""
    of = made(DENSE)

    def called(program):
        return program.generate(PROMPTS, max_new_tokens=12).tokens

    def own(scale):
        return dataclasses.replace(of, params=F.tree.map(lambda p: p * scale, of.params))

    def body(at):
        program = build(own(1.0), dense, at)
        found = [called(program)]
        for leaf in F.tree.leaves(program.params):
            leaf.mul_(1.1)
        found.append(called(program))
        before = host_of(program).count("capture")
        program.params = F.tree.map(torch.clone, program.params) if at.rank else program.params
        found += [called(program), called(program)]
        after = host_of(program).count("capture")
        program.params = program.params if at.rank else F.tree.map(torch.clone, program.params)
        program.warm_up()
        return [*found, called(program)], before, after, host_of(program).count("capture")

    with caplog.at_level(logging.INFO, "meshfn.programs.captured"):
        ranks = over({"tp": 2}, body)
    first, second = (called(programs.build(own(scale), compile=False, **SIZES)) for scale in (1.0, 1.1))
    assert ranks == [([first, *[second] * 4], 2, 4, 6)] * 2
    assert [r.getMessage() for r in caplog.records] == [
        f"decode is captured again: leaves moved on rank {rank}" for rank in (1, 1, 0, 0)
    ]


def test_options_of_many_kinds_hold_no_more_graphs_than_some(captured, caplog):
    of = made(DENSE)
    one = programs.build(of, compile=False, **SIZES)

    def called(program):
        given: Any = {"max_new_tokens": 12, "do_sample": True, "seed": 1}
        return [program.generate(PROMPTS, top_k=k, **given).tokens for k in (2, 3, 4, 5, 6, 2)]

    def body(at):
        program = build(of, dense, at)
        return called(program), len({options for _, options in program._captured._columns})

    with caplog.at_level(logging.INFO, "meshfn.programs.captured"):
        assert over({"tp": 2}, body) == [(called(one), 2)] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "decode is captured again: options of 4 kinds are held at most"
    ] * 2


def test_a_launch_that_never_ends(monkeypatch):
    """Is an error that says where, and the program is lost; closing it waits for nothing."""
    of = made(DENSE)

    class Late(Recorded):
        def replay(self, name: Any) -> None:
            raise replay.OverdueError("a launch did not end within 60 s")

    monkeypatch.setattr(rank_held, "replay_of", lambda *_: Late())

    def body(at):
        program, said = build(of, dense, at), []
        for _ in range(2):
            with pytest.raises((sh.TransportError, RuntimeError)) as error:
                program.generate(PROMPTS, max_new_tokens=12)
            said.append(str(error.value))
        program.close()
        return said, host_of(program).count("release")

    (said, releases), (others, _) = over({"tp": 2}, body)
    assert (others[1], releases) == (said[1], 0)
    assert_expected_inline(
        "\n".join(said),
        """\
rank 0: a launch did not end within 60 s
    a peer is gone, was slower than the time limit, or made another call, and this rank's graph waits for it     mesh: tp=2
    fix: end all ranks and build the program again
    during decode, steps 1 to 8 after prefill
this program is closed
    fix: build another one""",
    )


def test_a_capture_that_fails_on_one_rank_fails_on_both(monkeypatch):
    of = made(DENSE)

    class Failing(Recorded):
        def capture(self, name: Any, run: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    here = threading.local()
    monkeypatch.setattr(rank_held, "replay_of", lambda *_: Failing() if here.rank == 1 else Recorded())

    def body(at):
        here.rank = at.rank
        with pytest.raises((RuntimeError, ValueError)) as error:
            build(of, dense, at)
        return f"{at.rank}: {error.value}"

    assert_expected_inline(
        "\n".join(over({"dp": 2, "tp": 2}, body)),
        """\
0: decode: its step cannot be captured as one graph: rank 1 raised, and says why
    fix: build(..., compile=False)
1: decode: its step cannot be captured as one graph: operation not permitted when stream is capturing
    fix: build(..., compile=False)
2: build: rank 0, 1 raised, and says why; so nothing ran
3: build: rank 0, 1 raised, and says why; so nothing ran""",
    )


def test_a_capture_of_options_that_fails_on_one_rank(captured):
    """In the middle of a call: the next ones do as if it had not been."""
    of = made(DENSE)
    one = programs.build(of, compile=False, **SIZES)

    def body(at):
        program, said = build(of, dense, at), []
        if at.rank:
            host = host_of(program)

            def fail(name: Any, run: Any) -> None:
                del host.capture
                raise RuntimeError("out of memory")

            host.capture = fail
        with pytest.raises(RuntimeError, match="cannot be captured") as error:
            program.generate(PROMPTS, max_new_tokens=12, **OPTIONS[2])
        said.append(str(error.value).splitlines()[0])
        return said, [program.generate(PROMPTS, max_new_tokens=12, **options).tokens for options in OPTIONS]

    want = [one.generate(PROMPTS, max_new_tokens=12, **options).tokens for options in OPTIONS]
    (first, tokens), (second, others) = over({"tp": 2}, body)
    assert tokens == others == want
    assert_expected_inline(
        "\n".join(first + second),
        """\
decode: its step cannot be captured as one graph: rank 1 raised, and says why
decode: its step cannot be captured as one graph: out of memory""",
    )


@pytest.mark.parametrize("options", OPTIONS[::2], ids=["greedy", "drawn", "penalized"])
def test_sums_of_the_kernel_are_in_the_graph(captured, monkeypatch, options):
    """Slots and numbers of messages advance on the device, whoever launches."""
    of, gpus = in_fp32(WHOLE), TwoGpus()
    sizes = {**SIZES, "dtype": torch.float32}
    monkeypatch.setattr(pair_sums, "place_rule", lambda device: None)
    monkeypatch.setattr(pair_sums, "memory_of", gpus.mine)

    def body(at):
        gpus.of(at)
        with programs.build(of, mesh=at, layout=dense, **sizes) as program:
            found = [program.generate(PROMPTS, max_new_tokens=12, **options).tokens for _ in range(2)]
            return found, host_of(program).launched

    with host_ops(gpus):
        ranks = over({"tp": 2}, body)
    monkeypatch.undo()
    plain = sh.Threads(sh.Mesh(tp=2)).run(
        lambda at: programs.build(of, mesh=at, layout=dense, **sizes).generate(PROMPTS, max_new_tokens=12, **options)
    )
    for found, launched in ranks:
        assert found == [plain[0].tokens] * 2
        assert [n for n, _ in launched] == [8, 1, 1, 1] * 2
    assert gpus.live == {}


def test_the_plan_says_how_steps_are_launched():
    layout, parts = dense, DENSE
    at = sh.Mesh(tp=2).at(0, Dry((("tp", 2),), 0))
    of, held = made(parts), Ranks(made(parts).config, at, layout, torch.device("cpu"))
    own = dataclasses.replace(of, params=held.params(of.params))
    sums, by = PairSums(at, layout, torch.device("cpu"), torch.float64), ((held, own.params),) * 2
    lines = []
    for why in (None, "gloo exchanges through the host"):
        given = own, by, Sizes(**SIZES), Target("cuda", torch.float64, "sm_90"), (), (None, why), sums
        lines += rank_plan.make_rank_plan(*given).launches
    assert_expected_inline(
        "\n".join(lines),
        """\
one graph over 64 slots, 8 steps a launch; 1 for program.decode, a streamer, and where fewer are left
inside advance tokens, log-probabilities, positions, finished flags, counts, and draws by seed and position
captured when built, for options at their first use, again where a leaf moved; the end is looked for every 16
options have a graph for each top_k; after 4 of these all are captured again
exchanges and choice are inside; the host waits for each launch, 60 s at most
one call each, nothing captured: gloo exchanges through the host""",
    )
    assert rank_steps.why_calls(at, torch.device("cuda")) is None
