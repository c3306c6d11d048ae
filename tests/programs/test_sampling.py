"""Programs that sample: transformers' distributions at every step, rows that repeat, rows that end."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.sampling import draw, uniform
from transformers import GenerationConfig

from ..families import Letters

ROWS = [[5, 9, 11, 9], list(range(20, 41)), [3] * 8]
OPTIONS = {
    "default": {},
    "warped": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"repetition_penalty": 1.3, "top_k": 0, "temperature": 1.5},
}


def answers(module, row, tokens, options):
    """The distribution before each draw, as transformers makes it of its own logits."""
    config = GenerationConfig(do_sample=True, **{"top_k": 50} | options)
    process = module._get_logits_processor(generation_config=config, input_ids_seq_length=len(row))
    logits = module(torch.tensor([row + tokens])).logits[0, len(row) - 1 : -1].float()
    for i in range(len(tokens)):
        yield process(torch.tensor([row + tokens[:i]]), logits[i : i + 1].clone())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_token_is_drawn_from_transformers_distribution(tiny, name):
    options, program = OPTIONS[name], tiny.program
    found = program.generate(ROWS, max_new_tokens=20, do_sample=True, seed=3, return_logprobs=True, **options)
    for row, tokens, seed, logprobs in zip(ROWS, found.tokens, found.seeds, found.logprobs, strict=True):
        raw = tiny.module(torch.tensor([row + tokens])).logits[0, len(row) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(logprobs), raw.gather(-1, torch.tensor(tokens)[:, None])[:, 0], rtol=1e-4, atol=1e-4
        )
        for i, scores in enumerate(answers(tiny.module, row, tokens, options)):
            u = uniform(torch.tensor([seed]), torch.tensor([len(row) + i]))
            assert draw(scores, u).item() == tokens[i], (row, i)
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_presence_and_frequency_penalties_count_prompt_and_new_tokens(tiny):
    given = {"presence_penalty": 0.7, "frequency_penalty": 0.4}
    for row, tokens in zip(ROWS, tiny.program.generate(ROWS, max_new_tokens=16, **given).tokens, strict=True):
        logits = tiny.module(torch.tensor([row + tokens])).logits[0, len(row) - 1 : -1]
        for i, token in enumerate(tokens):
            counts = torch.bincount(torch.tensor(row + tokens[:i]), minlength=97)
            assert (logits[i] - 0.7 * (counts > 0) - 0.4 * counts).argmax().item() == token


def test_greedy_with_a_penalty_is_transformers(tiny):
    """Row by row: transformers counts the padding of a batch as tokens."""
    found = tiny.program.generate(ROWS, max_new_tokens=16, repetition_penalty=1.4).tokens
    for row, tokens in zip(ROWS, found, strict=True):
        out = tiny.module.generate(torch.tensor([row]), max_new_tokens=16, do_sample=False, repetition_penalty=1.4)
        assert out[0, len(row) :].tolist() == tokens
    assert found != tiny.program.generate(ROWS, max_new_tokens=16).tokens


def test_a_row_repeats_alone_by_its_seed_and_identical_prompts_differ(tiny):
    program, given = tiny.program, {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0}
    same = program.generate([ROWS[0]] * 3, seed=7, **given)
    assert len({tuple(row) for row in same.tokens}) == 3
    assert program.generate([ROWS[0]] * 3, seed=7, **given).tokens == same.tokens
    assert program.generate([ROWS[0]] * 3, seed=8, **given).tokens != same.tokens
    for i in range(3):
        alone = program.generate([ROWS[0]], seed=[same.seeds[i]], **given)
        assert alone.tokens == [same.tokens[i]]
        others = program.generate([ROWS[1], ROWS[2], ROWS[0]], seed=[1, 2, same.seeds[i]], **given)
        assert others.tokens[2] == same.tokens[i]
    free = program.generate([ROWS[0]], **given)
    assert program.generate([ROWS[0]], seed=free.seeds, **given).tokens == free.tokens
    assert program.generate([ROWS[0]], **given).seeds != free.seeds
    several = program.generate([ROWS[0]], num_return_sequences=3, seed=7, **given)
    assert several.tokens == same.tokens
    assert several.sequences.shape == (3, 4 + 12)
    torch.manual_seed(0)
    program.generate([ROWS[0]], **given)
    first = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(1)), "the generator of torch was touched"


def test_compiled_and_eager_draw_the_same(tiny, eager):
    given = {"max_new_tokens": 16, "do_sample": True, "seed": 5, "top_p": 0.95}
    assert tiny.program.generate(ROWS, **given).tokens == eager.generate(ROWS, **given).tokens


def test_end_tokens_and_streams_of_sampled_rows(tiny):
    program, given = tiny.program, {"max_new_tokens": 20, "do_sample": True, "seed": 11, "temperature": 1.5}
    free = program.generate(ROWS, **given)
    end = free.tokens[1][3]
    ended = program.generate(ROWS, eos_token_id=end, **given)
    for full, cut, reason in zip(free.tokens, ended.tokens, ended.finish_reason, strict=True):
        kept = full[: full.index(end) + 1] if end in full else full
        assert (cut, reason) == (kept, "stop" if end in full else "length")

    class Stream:
        seen: list = []  # noqa: RUF012

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    program.generate([ROWS[0]], streamer=(stream := Stream()), **{**given, "seed": [free.seeds[0]]})
    assert stream.seen == [*ROWS[0], *free.tokens[0], "end"]


def test_stop_strings_end_a_row_with_the_token_that_completes_one(tiny):
    """The string may begin in the prompt; rows that go on are not touched, and an end token before it wins."""
    plain = programs.build(
        dataclasses.replace(tiny.model, tokenizer=Letters()), batch=3, max_len=70, chunk=8, compile=False
    )
    text = Letters().decode
    free = plain.generate(ROWS, max_new_tokens=40, do_sample=True, temperature=3.0, seed=1)
    given = {"max_new_tokens": 40, "do_sample": True, "temperature": 3.0}
    stop = text(free.tokens[1][5:8])
    assert all(stop not in text(row) for row in (free.tokens[0], free.tokens[2], free.tokens[1][:7]))
    found = plain.generate(ROWS, seed=1, stop_strings=[stop, "!never!"], **given)
    assert found.tokens == [free.tokens[0], free.tokens[1][:8], free.tokens[2]]
    assert found.finish_reason == ["length", "stop", "length"]
    assert found.text[1].endswith(stop)
    given["seed"] = [free.seeds[1]]
    across = text([ROWS[1][-1], free.tokens[1][0]])
    assert plain.generate([ROWS[1]], stop_strings=across, **given).tokens == [free.tokens[1][:1]]
    assert plain.generate([ROWS[1]], stop_strings=text(ROWS[1][-2:]), **given).lengths == [40]
    before = plain.generate([ROWS[1]], stop_strings=stop, eos_token_id=free.tokens[1][0], **given)
    assert before.tokens == [free.tokens[1][:1]]
    early = plain.generate([ROWS[1]], stop_strings=stop, **given)
    assert early.timings.steps <= 16, "it was noticed at the check after it"


def test_a_stream_ends_with_a_row_of_nan(eager):
    broken = F.tree.map(lambda t: torch.full_like(t, torch.nan), eager.model.params)
    program = programs.build(dataclasses.replace(eager.model, params=broken), max_len=20, chunk=8, compile=False)
    seen = []
    stream = type("Stream", (), {"put": lambda _, value: seen.extend(value.flatten().tolist()), "end": lambda _: None})
    found = program.generate([[5]], max_new_tokens=9, streamer=stream())
    assert (found.tokens, found.finish_reason, seen) == ([[0]], ["nan"], [5, 0])


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}, {"repetition_penalty": 1.2}])
def test_a_row_of_nan_ends_with_a_defined_token_and_disturbs_no_other(tiny, options):
    program, others = tiny.program, [ROWS[0], ROWS[2]]
    seeds = {"seed": [4, 5]} if options.get("do_sample") else {}
    used = program.generate(others, max_new_tokens=9, **options | seeds)
    poison = min(set(range(97)) - {token for row in (*others, *used.tokens) for token in row})
    broken = tiny.model.params.embed.detach().clone()
    broken[poison] = torch.nan
    try:
        program.params = F.tree.replace(tiny.model.params, {".embed": broken})
        seeds = {"seed": [4, 9, 5]} if seeds else {}
        found = program.generate(
            [ROWS[0], [poison, 4], ROWS[2]], max_new_tokens=9, return_logprobs=True, **options | seeds
        )
    finally:
        program.params = tiny.model.params
    assert [found.tokens[0], found.tokens[2]] == used.tokens
    assert found.tokens[1] == [0]
    assert found.finish_reason == ["length", "nan", "length"]
    assert found.logprobs[1][0] != found.logprobs[1][0]


def test_messages(eager):
    texts = []
    for given in (
        {"num_return_sequences": 0},
        {"num_return_sequences": 4},
        {"tempreature": 0.3},
        {"do_sample": True, "temperature": 0.0},
        {"top_p": 1.5},
        {"top_k": 5},
        {"seed": [1, 2]},
        {"stop_strings": "x"},
        {"do_sample": True, "top_k": float("inf")},
        {"do_sample": True, "temperature": 1e-39},
        {"frequency_penalty": -3e38},
        {"pad_token_id": "x"},
        {"pad_token_id": 97},
        {"eos_token_id": 2**70},
        {"streamer": 5},
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            eager.generate([[1, 2]], max_new_tokens=3, **given)
        texts.append(str(error.value))
    assert_expected_inline(
        "\n\n".join(texts),
        """\
generate(num_return_sequences=...): a positive integer is needed, not 0

generate(num_return_sequences=4): 1 prompts make 4 rows, but the program was built for batch=3
    fix: batch=4

generate: tempreature unknown
    known: prompts, input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, stop_strings, num_return_sequences, return_logprobs, streamer, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    fix: temperature=...

generate(temperature=0.0): must be above 0
    fix: do_sample=False for the most likely tokens

generate(top_p=1.5): must be between 0 and 1
    fix: top_p=1.0, or None, to switch it off

generate(top_k=5): it changes nothing where no token is drawn
    fix: do_sample=True, or leave it out

generate(seed=[...]): 2 seeds for 1 rows
    fix: one a row, or a single integer for all

generate(stop_strings=...): text needs a tokenizer, and this model has none
    fix: eos_token_id=[...] for single tokens

generate(top_k=inf): an integer is needed, not float
    fix: top_k=0, or None, to switch it off

generate(temperature=1e-39): is so extreme that scores in fp32 would overflow; 1e-30 to 1e30 is enough
    fix: do_sample=False for the most likely tokens

generate(frequency_penalty=-3e+38): is so extreme that scores in fp32 would overflow; 1e-30 to 1e30 is enough
    fix: frequency_penalty=0.0, or None, to switch it off

generate(pad_token_id='x'): a token id below 97 is needed

generate(pad_token_id=97): a token id below 97 is needed

eos_token_id: token id 1180591620717411303424 is outside the vocabulary of 97, and would end no row
    fix: eos_token_id=() for none

generate(streamer=...): an object with put and end is needed, not int""",
    )
