"""One graph a step: choice and random state inside it, several steps a launch. Replayed by the host, without a GPU, and
held to the plain program, in which every step is a call and every choice eager, bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import captured, dynamo, generate

from ..families import Letters, family
from ..tiny import llama
from .test_replay import ROWS, built, host, plainly, tiny_model

__all__ = ["host"]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 4, "temperature": 1.3},
    {"do_sample": True, "seed": [4, 2**62, 0], "top_k": 0, "top_p": 0.9, "min_p": 0.01},
    {"do_sample": True, "seed": 6, "top_k": 7, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2},
]


def pair(monkeypatch: Any, model: programs.Model | None = None, **options: Any) -> tuple[Any, Any]:
    """A program that is replayed, and the plain one."""
    model = model or tiny_model()
    return built(model, **options), plainly(monkeypatch, model, **options)


def same(found: programs.Generation, expected: programs.Generation) -> bool:
    names = ("tokens", "logprobs", "finish_reason", "seeds", "lengths", "text")
    return all(str(getattr(found, name)) == str(getattr(expected, name)) for name in names)  # which equals NaN to NaN


def both(programs_: tuple[Any, Any], prompts: Any = ROWS, **given: Any) -> programs.Generation:
    """What both return, which is one."""
    found, expected = (each.generate(prompts, return_logprobs=True, **given) for each in programs_)
    assert same(found, expected), (found, expected)
    assert found.timings.steps == expected.timings.steps
    assert torch.equal(found.sequences, expected.sequences)
    return found


def test_options_of_every_kind_by_the_same_graphs(host, monkeypatch):
    """Ragged rows, with the greedy ones in between: buffers of options are those of the call, and counts begin anew."""
    two = pair(monkeypatch)
    seen = [both(two, max_new_tokens=20, **options).tokens for options in OPTIONS]
    assert seen == [both(two, max_new_tokens=20, **options).tokens for options in OPTIONS]
    assert two[0]._captured.captures == host.count("capture") == 4
    assert {name for name in host.launched if name[1]} == {(1, True), (8, True)}
    assert len({str(tokens) for tokens in seen}) == len(seen)


def test_double_precision_and_fewer_rows_than_the_batch(host, monkeypatch):
    two = pair(monkeypatch, dtype=torch.float64, batch=4)
    for options in OPTIONS[:2] + OPTIONS[4:]:
        both(two, ROWS[:2], max_new_tokens=11, **options)


def test_a_row_is_drawn_again_alone_by_its_seed(host, monkeypatch):
    two, given = pair(monkeypatch), {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0}
    several = both(two, [ROWS[0]], num_return_sequences=3, seed=7, **given)
    assert len({tuple(row) for row in several.tokens}) == 3
    for row, seed in zip(several.tokens, several.seeds or (), strict=True):
        assert both(two, [ROWS[0]], seed=[seed], **given).tokens == [row]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["greedy", "drawn"])
def test_rows_that_end_within_a_launch_write_nothing_more(host, monkeypatch, options):
    """Ends at each place of a launch; the cache of a row beyond its end keeps its NaN."""
    two = pair(monkeypatch)
    free = both(two, max_new_tokens=30, **options).tokens
    for place in (0, 1, 7, 8, 9, 15, 16, 17):
        end = free[0][place]
        for program in two:
            for cache in program.cache:
                cache.k.fill_(torch.nan)
                cache.v.fill_(torch.nan)
        found = both(two, max_new_tokens=30, eos_token_id=end, **options)
        assert found.tokens[0] == free[0][: free[0].index(end) + 1]
        for program in two:
            for cache in program.cache:
                for i, (row, new) in enumerate(zip(ROWS, found.tokens, strict=True)):
                    held = len(row) + len(new) - 1
                    assert bool(cache.k[i, :held].isfinite().all())
                    assert bool(cache.k[i, held:].isnan().all()), "a row that had ended was written"
    assert host.count("capture") == (4 if options else 2)


def test_steps_of_a_call_and_how_they_are_launched(host, monkeypatch):
    """As many steps as without a graph: ends are looked for every 16, and no launch goes beyond what was asked for."""
    two = pair(monkeypatch)
    free = both(two, [ROWS[0]], max_new_tokens=40).tokens[0]

    def launched(**given: Any) -> tuple[int, list[int]]:
        host.launched.clear()
        steps = both(two, [ROWS[0]], **given).timings.steps
        assert sum(n for n, _ in host.launched) == steps
        return steps, [n for n, _ in host.launched]

    assert launched(max_new_tokens=1) == (0, [])
    assert launched(max_new_tokens=8) == (7, [1] * 7)
    assert launched(max_new_tokens=26) == (25, [8, 8, 8, 1])
    assert launched(max_new_tokens=40, eos_token_id=free[3]) == (16, [8, 8])
    assert launched(max_new_tokens=12, eos_token_id=free[3]) == (11, [8, 1, 1, 1])
    assert launched(max_new_tokens=67) == (66, [8] * 8 + [1, 1])  # to the last slot of max_len=70
    state = two[0].prefill(ROWS)
    host.launched.clear()
    two[0].decode(state)
    assert host.launched == [(1, False)]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["greedy", "drawn"])
def test_between_launches_nothing_is_computed_and_their_tokens_alone_are_copied(host, monkeypatch, options):
    program = built(tiny_model())
    program.generate(ROWS, max_new_tokens=20, **options)
    monkeypatch.setattr(host, "replay", lambda name: None)

    def calls(n: int) -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            program.generate(ROWS, max_new_tokens=n, eos_token_id=(), **options)
        return {event.key: event.count for event in profile.key_averages()}

    few, many = calls(18), calls(34)  # 17 steps, and 16 more: two launches
    more = {name: count - few.get(name, 0) for name, count in many.items() if count != few.get(name, 0)}
    assert more.pop("aten::copy_") == 4  # tokens and log-probabilities
    assert set(more) <= {"aten::slice", "aten::as_strided"}  # views


def test_a_program_too_short_for_a_launch_of_several_steps(host, monkeypatch):
    assert [captured.launch_steps(n) for n in (1, 9, 10, 1024)] == [1, 1, 8, 8]
    assert generate.CHECK_EVERY % captured.STEPS == 0
    two = pair(monkeypatch, max_len=9)
    both(two, [[5]], max_new_tokens=8)
    assert host.count("capture") == 1


def test_stop_strings_and_streams(host, monkeypatch):
    two = pair(monkeypatch, dataclasses.replace(tiny_model(), tokenizer=Letters()))
    given: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 3.0, "seed": 1}
    free = both(two, **given)
    stop = Letters().decode(free.tokens[1][5:8])
    found = both(two, stop_strings=stop, **given)
    assert found.tokens[1] == free.tokens[1][:8]
    host.launched.clear()
    seen: list[list[Any]] = []
    for program in two:
        log: list[Any] = []
        stream = type("Stream", (), {"put": lambda _, x, log=log: log.append(x), "end": lambda _: None})
        program.generate([ROWS[0]], streamer=stream(), **given | {"seed": [(free.seeds or [])[0]]})
        seen.append([x.flatten().tolist() for x in log])  # read at the end: each is as it was put
    assert seen[0] == seen[1] == [ROWS[0], *[[t] for t in free.tokens[0]]]
    assert host.launched == [(1, True)] * 39


def test_a_row_of_nan_ends_within_a_launch(host, monkeypatch):
    two = pair(monkeypatch)
    used = both(two, ROWS[:1], max_new_tokens=12).tokens[0]
    broken = two[0].params.embed.detach().clone()
    broken[used[4]] = torch.nan
    for program in two:
        program.params = F.tree.replace(program.params, {".embed": broken})
    found = both(two, ROWS[:1], max_new_tokens=12)
    assert found.tokens[0] == [*used[: used.index(used[4]) + 1], 0]
    assert found.finish_reason == ["nan"]


def test_where_longrope_turns_counts_are_right_and_no_launch_passes_it(host, monkeypatch):
    """A row is read again there, after which its token is chosen, and counted, once."""
    two = pair(monkeypatch, programs.load(family("phi3-long")))  # rows turn with their 17th token
    for options in OPTIONS:
        host.launched.clear()
        both(two, max_new_tokens=30, **options)
        chosen = bool(options)
        one, eight, greedy = (1, chosen), (8, chosen), (1, False)
        # Rows of 8 and 3 tokens turn with the 9th and the 14th step.
        assert host.launched == [eight, greedy, *[one] * 4, greedy, one, one, eight, *[one] * 5]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["greedy", "drawn"])
def test_a_leaf_that_moved_is_captured_again_once(host, monkeypatch, options, caplog):
    two = pair(monkeypatch)
    before = both(two, max_new_tokens=20, **options).tokens
    captures = host.count("capture")
    with torch.no_grad():
        for leaf in F.tree.leaves(two[0].params):
            leaf.mul_(-0.7)
    assert both(two, max_new_tokens=20, **options).tokens != before
    assert host.count("capture") == captures
    moved = F.tree.map(lambda t: t.detach() * -1.1, two[0].params)
    with caplog.at_level("INFO", "meshfn.programs.captured"):
        for program in two:
            program.params = moved
        for _ in range(2):
            both(two, max_new_tokens=20, **options)
    assert len(caplog.records) == 1
    assert host.count("capture") == captures + 2  # of each length, with these options


def test_a_capture_of_options_that_fails(host, monkeypatch):
    """In the middle of a call, before its first launch: the next calls do as if it had not been."""
    two = pair(monkeypatch)
    capture = host.capture

    def fail(name: Any, run: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing") if name[1] else capture(name, run)

    with monkeypatch.context() as patch:
        patch.setattr(host, "capture", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"cannot be captured.*not permitted(.|\n)*fix: .*compile=False"):
                two[0].generate(ROWS, max_new_tokens=20, **OPTIONS[1])
    for options in OPTIONS:
        both(two, max_new_tokens=20, **options)


def test_a_capture_in_the_middle_of_a_generation_leaves_it_alone(host, monkeypatch):
    """The first launch of one step with options comes after one of eight."""
    two = pair(monkeypatch)
    both(two, max_new_tokens=9, **OPTIONS[3])
    assert host.count("capture") == 3
    both(two, max_new_tokens=12, **OPTIONS[3])
    assert host.count("capture") == 4


def test_a_streamer_that_closes_its_program(host, monkeypatch):
    two = pair(monkeypatch)

    class Closing:
        def put(self, value: Any) -> None:
            two[0].close()

    with pytest.raises(RuntimeError, match="this program is in use by another call"):
        two[0].generate([ROWS[0]], streamer=Closing())
    both(two, max_new_tokens=9)
    releases = host.count("release")
    two[0].close()
    assert host.count("release") == releases + 1
    assert two[0]._captured._columns == {}


def test_copies_of_weights_are_fresh_whatever_wrote_them(host, monkeypatch):
    """Also in the middle of a generation, and where no version counter moves: a fused optimiser of torch's is such."""
    model = tiny_model()
    two = pair(monkeypatch, model, dtype=torch.float64)
    states = [program.prefill(ROWS) for program in two]
    leaves = [leaf for leaf in F.tree.leaves(model.params) if leaf.requires_grad]
    optimiser = torch.optim.AdamW(leaves, lr=0.05, fused=True)

    def fused() -> None:
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        optimiser.step()

    def by_data() -> None:
        leaves[0].data.mul_(-1.1)

    def under_inference() -> None:
        with torch.inference_mode():
            leaves[0].mul_(-0.9)

    for write in (fused, by_data, under_inference):
        write()
        fresh = plainly(monkeypatch, model, dtype=torch.float64)
        expected = fresh.prefill(ROWS).logits
        assert torch.equal(two[0].prefill(ROWS).logits, expected)
        states = [program.prefill(ROWS) for program in two]
        write()
        states = [program.decode(state) for program, state in zip(two, states, strict=True)]
        assert torch.equal(states[0].logits, states[1].logits)
        assert torch.equal(two[0]._weights._converted[".embed"], model.params.embed.double())
    assert host.count("capture") == 2


def test_compiled_once_whatever_a_step_is_fed(host, monkeypatch):
    """Buffers, what a call returned, and within a launch what the step before returned."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    model = tiny_model()
    program, plain = built(model, compile=True), plainly(monkeypatch, model)
    for options in OPTIONS[:4]:
        found, expected = (each.generate(ROWS, max_new_tokens=20, **options) for each in (program, plain))
        assert found.tokens == expected.tokens
    states = [each.decode(each.decode(each.prefill(ROWS))) for each in (program, plain)]
    assert torch.equal(states[0].token, states[1].token)
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_the_plan_says_how_steps_are_launched():
    model = programs.load(llama(), abstract=True)
    text = str(programs.plan(model, device="cuda", arch="sm_90", dtype=torch.bfloat16))
    assert_expected_inline(
        text[: text.index("\n\n")],
        """\
program LlamaForCausalLM   cuda bfloat16 sm_90   batch 1   max_len 1024   chunk 256
  weights  33,360 parameters, 65.2 KiB, 65.2 KiB of it converted copies, refreshed in place before each call
  copies   float32 to bfloat16, 65.2 KiB: every leaf
  cache    128.1 KiB, 2 x (k 1 1025 2 8, v 1 1025 2 8), written in place
  choice   the most likely token, at the end of a step; with sampling options after it, by one kernel
  steps    one graph over 1024 slots, 8 steps a launch; 1 for program.decode, a streamer, and where fewer are left
           inside advance tokens, log-probabilities, positions, finished flags, counts, and draws by seed and position
           captured when built, for options at their first use, again where a leaf moved; the end is looked for every 16""",
    )
