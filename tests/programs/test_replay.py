"""Decode as one graph, its logic: what is captured, when, what invalidates it. Replayed by the host, without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import held, replay

from ..families import family
from ..tiny import llama, ours

ROWS = [[5, 9, 11], list(range(20, 41)), [3] * 8]
EOS = ()


class Recorded(replay.HostReplay):
    """The host's, which tells what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.launched: list[tuple[int, bool]] = []  # steps, and whether with options

    def warm_up(self, run: Any) -> None:
        self.calls.append("warm_up")
        super().warm_up(run)

    def capture(self, name: Any, run: Any) -> None:
        self.calls.append("capture")
        super().capture(name, run)

    def replay(self, name: Any) -> None:
        self.calls.append("replay")
        self.launched.append(name)
        super().replay(name)

    def release(self) -> None:
        self.calls.append("release")
        super().release()

    def count(self, call: str) -> int:
        return self.calls.count(call)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Programs built from here on replay decode with it."""
    recorded = Recorded()
    monkeypatch.setattr(held, "replay_of", lambda device, compiled: recorded)
    return recorded


def tiny_model(**options: Any) -> programs.Model:
    torch.manual_seed(1)
    return ours(llama(**options))


def built(model: programs.Model, **options: Any) -> programs.Program:
    return programs.build(model, **{"batch": 3, "max_len": 70, "chunk": 8, "compile": False} | options)


def plainly(monkeypatch: pytest.MonkeyPatch, model: programs.Model, **options: Any) -> programs.Program:
    with monkeypatch.context() as patch:
        patch.setattr(held, "replay_of", lambda device, compiled: None)
        return built(model, **options)


def tokens_of(program: programs.Program, n: int = 9, **options: Any) -> list[list[int]]:
    return program.generate(ROWS, max_new_tokens=n, eos_token_id=EOS, **options).tokens


def with_leaf(params: F.Decoder, change: Any) -> F.Decoder:
    """The parameters with another embedding, in memory of its own."""
    return dataclasses.replace(params, embed=change(params.embed))


def test_a_cpu_replays_nothing_and_a_gpu_where_it_is_compiled():
    assert replay.replay_of(torch.device("cpu"), True) is None
    assert replay.replay_of(torch.device("cuda"), False) is None
    assert isinstance(replay.replay_of(torch.device("cuda"), True), replay.CudaReplay)


def test_captured_once_after_warm_up_and_replayed_by_every_call(host, monkeypatch):
    model = tiny_model()
    program = built(model)
    assert host.calls == ["warm_up", "capture"] * 2  # a launch of one step, and of eight
    plain = plainly(monkeypatch, model)
    for n in (9, 4, 40):
        assert tokens_of(program, n) == tokens_of(plain, n)
    assert host.count("capture") == 2
    assert [n for n, _ in host.launched] == [8, 1, 1, 1, *[8] * 4, *[1] * 7]  # 8, 3 and 39 steps


def test_log_probabilities_ends_and_sampling_are_those_of_the_plain_program(host, monkeypatch):
    model = tiny_model()
    program, plain = built(model), plainly(monkeypatch, model)
    end = tokens_of(plain)[0][4]
    for options in ({}, {"do_sample": True, "seed": 4, "temperature": 1.3, "repetition_penalty": 1.2}):
        for ends in ((), (end,)):
            found, expected = (
                p.generate(ROWS, max_new_tokens=20, eos_token_id=ends, return_logprobs=True, **options)
                for p in (program, plain)
            )
            assert found.tokens == expected.tokens
            assert found.finish_reason == expected.finish_reason
            assert found.logprobs == expected.logprobs
    assert host.count("capture") == 4  # with options and without, of both lengths


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "deepseek_v3"])
def test_rings_recurrent_states_and_latents(host, monkeypatch, name):
    model = programs.load(family(name))
    program, plain = built(model), plainly(monkeypatch, model)
    # The second call begins on what the first has left in the buffers.
    assert [tokens_of(program, 30), tokens_of(program)] == [tokens_of(plain, 30), tokens_of(plain)]


def test_returned_states_stay_as_they_were(host, monkeypatch):
    model = tiny_model()
    program, plain = built(model), plainly(monkeypatch, model)
    kept = []
    for each in (program, plain):
        states = [each.prefill(ROWS)]
        for _ in range(3):
            states.append(each.decode(states[-1]))
        # A state of before, and a token of the caller's own.
        states.append(each.decode(states[1]))
        states.append(each.decode(dataclasses.replace(states[1], token=states[1].token + 1)))
        kept.append(states)
    for found, expected in zip(*kept, strict=True):
        for name in ("token", "logprob", "position", "logits"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("captures", [True, False], ids=["graph", "plain"])
def test_a_state_that_no_step_can_follow(host, monkeypatch, captures):
    """On a GPU an index out of range would end the process, and a graph's buffers take numbers of any shape and dtype."""
    other = plainly(monkeypatch, tiny_model())
    program = built(tiny_model()) if captures else plainly(monkeypatch, tiny_model())
    state = program.prefill(ROWS)
    token, position = state.token, state.position
    wrong: list[tuple[Any, type[Exception], str]] = [
        (other.prefill(ROWS), ValueError, "not of this program's last prefill"),
        (
            {"token": token.index_fill(0, torch.tensor(1), 97)},
            ValueError,
            r"token 97 in row 1, and the vocabulary has 97",
        ),
        (
            {"token": token.index_fill(0, torch.tensor(2), -1)},
            ValueError,
            r"token -1 in row 2(.|\n)*fix: 0 to 96, also",
        ),
        ({"token": token[:1]}, ValueError, r"its token is torch.int64 \[1\], and torch.int64 \[3\] is needed"),
        ({"token": token.double()}, ValueError, r"its token is torch.float64 \[3\]"),
        ({"token": token.tolist()}, ValueError, r"its token is list"),
        ({"position": position.int()}, ValueError, r"its position is torch.int32 \[3\]"),
        (token, TypeError, r"a State is needed, not Tensor\n    fix: what this program's last prefill returned"),
    ]
    for given, error, text in wrong:
        with pytest.raises(error, match=rf"decode.*: .*{text}"):
            program.decode(dataclasses.replace(state, **given) if isinstance(given, dict) else given)
    assert torch.equal(program.decode(state).position, position + 1)  # which none of these has spoilt


def test_warmed_up_again_in_the_middle_of_a_generation(host, monkeypatch):
    model = tiny_model()
    two = plainly(monkeypatch, model, dtype=torch.float64), built(model, dtype=torch.float64)
    states = [program.prefill(ROWS) for program in two]
    calls = list(host.calls)
    two[1].warm_up()
    assert host.calls == calls  # nothing is captured twice, and nothing that was is lost
    found, expected = (program.decode(state) for program, state in zip(two, states, strict=True))
    assert torch.equal(found.logits, expected.logits)


def test_weights_written_in_place_are_read_and_nothing_is_captured_again(host, monkeypatch):
    model = tiny_model()
    program = built(model)
    before = tokens_of(program)
    with torch.no_grad():
        for leaf in F.tree.leaves(model.params):
            leaf.mul_(-0.7)
    after = tokens_of(program)
    assert after != before
    assert after == tokens_of(plainly(monkeypatch, model))
    assert host.count("capture") == 2


def test_converted_copies_are_refreshed_in_place(host, monkeypatch):
    model = tiny_model()
    program = built(model, dtype=torch.float64)
    assert "of it converted copies, refreshed in place before each call" in str(program)
    places = [leaf.data_ptr() for leaf in F.tree.leaves(program._weights.live())]
    with torch.no_grad():
        for leaf in F.tree.leaves(model.params):
            leaf.data.mul_(-0.7)  # which no version counter tells
    program.refresh()
    assert tokens_of(program) == tokens_of(plainly(monkeypatch, model, dtype=torch.float64))
    assert [leaf.data_ptr() for leaf in F.tree.leaves(program._weights.live())] == places
    assert host.count("capture") == 2


def test_a_leaf_that_moved_is_captured_again_with_one_line(host, monkeypatch, caplog):
    model = tiny_model()
    program = built(model)
    with caplog.at_level(logging.INFO, "meshfn.programs.captured"):
        tokens_of(program)
        assert not caplog.records
        program.params = with_leaf(program.params, lambda embed: F.tree.map(lambda t: -t.detach(), embed))
        found = tokens_of(program)
        assert tokens_of(program) == found
    (record,) = caplog.records
    assert record.getMessage().startswith("decode is captured again: params.embed")
    assert host.count("capture") == 3  # what was needed: eight steps
    assert "release" in host.calls[host.calls.index("replay") :]  # the old one, whose memory is free again
    plain = plainly(monkeypatch, model)
    plain.params = program.params
    assert found == tokens_of(plain)


def test_memory_given_to_a_parameter_between_prefill_and_decode(host, monkeypatch):
    """A capture in the middle of a generation leaves its cache alone."""
    model = tiny_model()
    plain = plainly(monkeypatch, model)
    expected = plain.decode(plain.prefill(ROWS)).logits
    program = built(model)
    state = program.prefill(ROWS)
    leaf = F.tree.leaves(model.params)[0]
    leaf.data = leaf.data.clone()
    assert torch.equal(program.decode(state).logits, expected)
    assert host.count("capture") == 3


def test_a_capture_that_fails_is_an_error_and_is_tried_again(host, monkeypatch):
    model = tiny_model()
    program = built(model)
    expected = tokens_of(program)

    def fail(name: Any, run: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    program.params = with_leaf(program.params, lambda embed: F.tree.map(lambda t: t.detach().clone(), embed))
    with monkeypatch.context() as patch:
        patch.setattr(host, "capture", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"cannot be captured.*not permitted(.|\n)*fix: .*compile=False"):
                tokens_of(program)
    assert tokens_of(program) == expected
    with monkeypatch.context() as patch:
        patch.setattr(host, "capture", fail)
        with pytest.raises(RuntimeError, match="cannot be captured"):
            built(model)


def test_a_replay_that_fails_leaves_no_stale_state(host, monkeypatch):
    program = built(tiny_model())
    state = program.prefill(ROWS)
    expected = program.decode(state).logits

    def fail(name: Any) -> None:
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(host, "replay", fail)
        with pytest.raises(RuntimeError, match="launch failed"):
            program.decode(state)
    assert torch.equal(program.decode(state).logits, expected)


@pytest.mark.parametrize("call", ["generate", "prefill", "score", "refresh", "warm_up"])
def test_a_closed_program_runs_no_more(host, call):
    program = built(tiny_model())
    program.close()
    assert host.calls[-1] == "release"
    releases = host.count("release")
    program.close()
    assert host.count("release") == releases
    given = () if call in ("refresh", "warm_up") else (ROWS,)
    with pytest.raises(RuntimeError, match=r"this program is closed\n    fix: build another one"):
        getattr(program, call)(*given)


def test_a_context_closes_it_after_an_error_too(host):
    program = built(tiny_model())

    def run() -> None:
        with program:
            program.generate()

    with pytest.raises(ValueError, match="pass prompts"):
        run()
    with pytest.raises(RuntimeError, match="this program is closed"):
        tokens_of(program)


def test_a_program_without_a_graph_closes_too():
    with built(tiny_model()) as program:
        state = program.prefill(ROWS)
    with pytest.raises(RuntimeError, match="this program is closed"):
        program.decode(state)


def test_a_program_in_use_is_not_closed(host):
    program = built(tiny_model())
    with program._alone(), pytest.raises(RuntimeError, match="in use by another call"):
        program.close()
    assert len(tokens_of(program)) == 3


def test_a_replay_that_does_not_end(monkeypatch):
    """Is given up after its time, and what it holds is kept: it may still run."""
    asked: list[str] = []

    class Event:
        done = True

        def record(self) -> None:
            asked.append("record")

        def query(self) -> bool:
            return self.done

    class Graph:
        def replay(self) -> None:
            asked.append("replay")

        def reset(self) -> None:
            asked.append("reset")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("synchronize"))
    device = torch.device("cuda")
    for limit_s in (None, 0.01):
        fine = replay.CudaReplay(device, limit_s)
        fine._graphs = {"a step": Graph()}
        fine.replay("a step")
        fine.release()
    assert asked == ["replay", "synchronize", "reset", "replay", "record", "synchronize", "reset"]
    asked.clear()
    late = replay.CudaReplay(device, 0.01)
    late._graphs, Event.done = {"a step": Graph()}, False
    with pytest.raises(replay.OverdueError, match=r"a launch did not end within 0.01 s"):
        late.replay("a step")
    late.release()
    assert asked == ["replay", "record"]
    assert late._graphs
