"""Programs against transformers, against themselves on single rows, and against their own promises."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo, generate
from transformers import BatchEncoding

from ..tiny import VARIANTS, llama, ours

ROWS = [[5, 9, 11], list(range(20, 41)), [3] * 8]


def transformers_tokens(module, rows, n, **options):
    """Greedy tokens of transformers, left-padded, with its own attention mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    out = module.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=0, **options)
    return out[:, longest:].tolist()


def bits(cache):
    return [t.clone().view(torch.int32) for each in cache for t in (each.k, each.v)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_generates_as_transformers(variant):
    module = llama(**VARIANTS[variant])
    program = programs.build(ours(module), batch=3, max_len=64, chunk=8, compile=False)
    assert program.generate(ROWS, max_new_tokens=24).tokens == transformers_tokens(module, ROWS, 24)


def test_compiled_equals_transformers_and_eager_with_one_compile_each(tiny, eager):
    module, _, program = tiny
    got = program.generate(ROWS, max_new_tokens=24, return_logprobs=True)
    assert got.tokens == transformers_tokens(module, ROWS, 24)
    same = eager.generate(ROWS, max_new_tokens=24, return_logprobs=True)
    assert same.tokens == got.tokens
    torch.testing.assert_close(torch.tensor(same.logprobs), torch.tensor(got.logprobs), rtol=1e-5, atol=1e-5)
    for ours_, theirs in zip(program.cache, eager.cache, strict=True):
        for i, row in enumerate(ROWS):
            held = slice(0, len(row) + 23)
            torch.testing.assert_close(ours_.k[i, held], theirs.k[i, held], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours_.v[i, held], theirs.v[i, held], rtol=1e-5, atol=1e-5)
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_prompts_of_every_length_use_the_same_graphs(tiny):
    for n in (1, 2, 7, 8, 9, 31, 32, 33, 63, 69):
        tiny.program.generate([list(range(n))], max_new_tokens=min(70 - n, 3))
    tiny.program.generate([[1]], max_new_tokens=69)
    assert (tiny.program.prefill.compiles, tiny.program.decode.compiles) == (1, 1)


def test_each_row_equals_that_row_alone(tiny):
    together = tiny.program.generate(ROWS, max_new_tokens=20, return_logprobs=True)
    for i, row in enumerate(ROWS):
        alone = tiny.program.generate([row], max_new_tokens=20, return_logprobs=True)
        assert alone.tokens[0] == together.tokens[i]
        a, b = torch.tensor(alone.logprobs[0]), torch.tensor(together.logprobs[i])
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 5, 21, 64])
def test_any_chunk_gives_the_same(tiny, chunk):
    program = programs.build(tiny.model, batch=3, max_len=64, chunk=chunk, compile=False)
    same = program.generate(ROWS, max_new_tokens=9, return_logprobs=True)
    got = tiny.program.generate(ROWS, max_new_tokens=9, return_logprobs=True)
    assert same.tokens == got.tokens
    torch.testing.assert_close(torch.tensor(same.logprobs), torch.tensor(got.logprobs), rtol=1e-5, atol=1e-5)


def test_unwritten_slots_and_finished_rows_keep_their_bytes(tiny):
    program = tiny.program
    free = program.generate(ROWS, max_new_tokens=20).tokens
    first_end = free[0][4]
    for cache in program.cache:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    state = program.prefill(ROWS, eos_token_id=first_end)
    while int(state.position[0]) >= 0:
        state = program.decode(state, eos_token_id=first_end)
    before = bits(program.cache)
    for _ in range(3):
        state = program.decode(state, eos_token_id=first_end)
    for old, new in zip(before, bits(program.cache), strict=True):
        assert torch.equal(old[0], new[0]), "a finished row changed"
        assert not torch.equal(old[1], new[1])
    held = len(ROWS[0]) + free[0].index(first_end)
    for cache in program.cache:
        assert bool(cache.k[0, :held].isfinite().all())
        assert bool(cache.k[0, held:].isnan().all())


@pytest.mark.parametrize("end", [0, 1, 14, 15, 16, 17, 33])
def test_end_of_sequence_wherever_it_falls(tiny, end):
    program = tiny.program
    free = program.generate([ROWS[0]], max_new_tokens=40)
    stop = free.tokens[0][end]
    expected = free.tokens[0][: free.tokens[0].index(stop) + 1]
    got = program.generate([ROWS[0]], max_new_tokens=40, eos_token_id=[stop, 96])
    assert got.tokens == [expected] == transformers_tokens(tiny.module, ROWS[:1], 40, eos_token_id=[stop, 96])
    assert got.finish_reason == ["stop"]
    assert got.lengths == [len(expected)]
    kept, n = got.timings.kept, len(expected)
    assert (kept, got.timings.steps) == (n, min(39, -(-(n - 1) // generate.CHECK_EVERY) * generate.CHECK_EVERY))


def test_no_end_token_no_check(tiny):
    """Whether rows have ended is read from the device once in 16 steps, and never where no token ends them."""

    def reads(**options):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            tiny.program.generate([ROWS[0]], max_new_tokens=40, **options)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::is_nonzero")

    assert reads(eos_token_id=()) == 0
    assert reads(eos_token_id=96) == 3


def test_what_comes_back(tiny):
    stop = tiny.program.generate(ROWS, max_new_tokens=12).tokens[1][3]
    ids = torch.tensor([[5, 9, 11, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    right = tiny.program.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, pad_token_id=7)
    left = {"input_ids": torch.tensor([[0, 5, 9, 11], [1, 2, 3, 4]]), "attention_mask": mask.flip(1)}
    left = tiny.program.generate(left, max_new_tokens=5)
    lists = tiny.program.generate([[5, 9, 11], [1, 2, 3, 4]], max_new_tokens=5)
    assert right.tokens == left.tokens == lists.tokens
    assert torch.equal(right.sequences[:, :4], ids)
    assert lists.sequences.tolist()[0][:4] == [0, 5, 9, 11]
    assert lists.attention_mask.tolist() == [[0] + [1] * 8, [1] * 9]
    ended = tiny.program.generate(ROWS, max_new_tokens=12, eos_token_id=stop, pad_token_id=1)
    assert ended.finish_reason[1] == "stop"
    assert ended.sequences.shape[1] == 21 + max(ended.lengths)
    row = ended.sequences[1, 21:].tolist()
    assert row[: ended.lengths[1]] == ended.tokens[1]
    assert set(row[ended.lengths[1] :]) <= {1}
    assert ended.attention_mask[1].sum() == 21 + ended.lengths[1]
    assert ended.text is None
    assert ended.logprobs is None


def test_by_hand_is_as_generate(tiny):
    program = tiny.program
    state = program.prefill(ROWS)
    tokens = [state.token]
    for _ in range(5):
        state = program.decode(state)
        tokens.append(state.token)
    assert torch.stack(tokens, 1).tolist() == program.generate(ROWS, max_new_tokens=6).tokens
    expected = tiny.module(torch.tensor([ROWS[1]])).logits[0, -1]
    torch.testing.assert_close(program.prefill(ROWS).logits[1], expected.detach(), rtol=1e-4, atol=1e-4)


def test_score_and_logprobs_agree_with_transformers(tiny):
    program, module = tiny.program, tiny.module
    generated = program.generate(ROWS, max_new_tokens=10, return_logprobs=True)
    whole = [row + new for row, new in zip(ROWS, generated.tokens, strict=True)]
    for row, new, scores, logprobs in zip(
        ROWS, generated.tokens, program.score(whole), generated.logprobs, strict=True
    ):
        ids = torch.tensor([row + new])
        expected = module(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].detach()
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(logprobs), scores[-10:], rtol=1e-4, atol=1e-4)
    assert [len(s) for s in program.score([[4], [1, 2]])] == [0, 1]


def test_live_parameters_are_seen_and_replaced_ones_do_not_compile(tiny):
    program, module = tiny.program, tiny.module
    before = program.generate(ROWS, max_new_tokens=12).tokens
    assert program.params.embed is module.model.embed_tokens.weight
    saved = {n: p.detach().clone() for n, p in module.named_parameters()}
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    trained = program.generate(ROWS, max_new_tokens=12).tokens
    assert trained != before
    assert trained == transformers_tokens(module, ROWS, 12)
    copies = F.tree.map(lambda t: t.detach().clone(), program.params)
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(saved[n])
    assert program.generate(ROWS, max_new_tokens=12).tokens == before
    mine = program.params
    program.params = copies
    assert program.generate(ROWS, max_new_tokens=12).tokens == trained
    program.params = mine
    assert program.generate(ROWS, max_new_tokens=12).tokens == before
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_two_programs_interleave():
    """Other head counts, other depth, other batch: neither sees the other."""
    models = [ours(llama(3, 1, tied=True)), ours(llama(6, 3, layers=3))]
    alone = [
        programs.build(m, batch=b, max_len=40, chunk=8, compile=False).generate([[1, 2, 3]], max_new_tokens=8).tokens
        for m, b in zip(models, (1, 2), strict=True)
    ]
    built = [
        programs.build(m, batch=b, max_len=40, chunk=8, compile=False) for m, b in zip(models, (1, 2), strict=True)
    ]
    states = [p.prefill([[1, 2, 3]]) for p in built]
    tokens = [[int(s.token[0])] for s in states]
    for _ in range(7):
        states = [p.decode(s) for p, s in zip(built, states, strict=True)]
        for found, state in zip(tokens, states, strict=True):
            found.append(int(state.token[0]))
    assert [[t] for t in tokens] == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_follow_the_live_weights(dtype):
    module = llama()
    program = programs.build(ours(module), max_len=32, chunk=8, dtype=dtype, compile=False)
    program.generate([[1, 2]], max_new_tokens=2)
    copies = [t.data_ptr() for t in program._weights._converted.values()]
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(-0.5)
    logits = program.prefill([[4, 5, 6]]).logits[0]
    expected = llama_in(module, dtype)(torch.tensor([[4, 5, 6]])).logits[0, -1]
    assert logits.dtype == dtype
    exact = llama_in(module, torch.float64)(torch.tensor([[4, 5, 6]])).logits[0, -1]
    assert (logits - exact).abs().max() <= 1.5 * (expected - exact).abs().max() + 1e-6
    assert [t.data_ptr() for t in program._weights._converted.values()] == copies


def llama_in(module, dtype):
    other = type(module)(module.config).to(dtype)
    other.load_state_dict(module.state_dict())
    return other.eval()


def test_a_streamer_gets_each_token_and_may_fail(tiny):
    class Log:
        def __init__(self, fail_at=None):
            self.values, self.ended, self.fail_at = [], False, fail_at

        def put(self, value):
            self.values.append(value.flatten().tolist())
            if len(self.values) == self.fail_at:
                raise KeyboardInterrupt

        def end(self):
            self.ended = True

    log = Log()
    got = tiny.program.generate([ROWS[0]], max_new_tokens=6, streamer=log)
    assert log.values == [ROWS[0], *[[t] for t in got.tokens[0]]]
    assert log.ended
    with pytest.raises(KeyboardInterrupt):
        tiny.program.generate([ROWS[0]], max_new_tokens=6, streamer=Log(fail_at=4))
    assert tiny.program.generate([ROWS[0]], max_new_tokens=6).tokens == got.tokens


def test_what_is_ambient_neither_compiles_nor_changes_a_number(tiny):
    program = tiny.program
    expected = program.generate(ROWS, max_new_tokens=5, return_logprobs=True)
    drawn = program.generate(ROWS, max_new_tokens=5, do_sample=True, seed=1).tokens
    threads = torch.get_num_threads()

    @contextlib.contextmanager
    def one_thread():
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    @contextlib.contextmanager
    def double():
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    modes = [torch.inference_mode(), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16), one_thread(), double()]
    for mode in [*modes, torch.device("meta")]:
        with mode:
            got = program.generate(ROWS, max_new_tokens=5, return_logprobs=True)
            assert program.generate(ROWS, max_new_tokens=5, do_sample=True, seed=1).tokens == drawn
            state = program.prefill(ROWS)
        assert got.tokens == expected.tokens
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), rtol=1e-6, atol=1e-6)
        assert program.decode(state).token.tolist() == [row[1] for row in expected.tokens]
    with torch.inference_mode():
        born = F.tree.map(torch.clone, tiny.model.params)
    try:
        program.params = born
        assert program.generate(ROWS, max_new_tokens=5).tokens == expected.tokens
    finally:
        program.params = tiny.model.params
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)
    with torch.inference_mode():
        inside = programs.build(tiny.model, batch=3, max_len=40, chunk=8, compile=False)
    assert inside.generate(ROWS, max_new_tokens=5).tokens == expected.tokens


def test_a_state_belongs_to_its_prefill(eager):
    state = eager.prefill(ROWS)
    forced = dataclasses.replace(state, token=torch.tensor([1, 2, 3]))
    a, b = eager.decode(forced), eager.decode(state)
    assert eager.decode(forced).token.tolist() == a.token.tolist()
    eager.generate([[4]], max_new_tokens=2)
    for old in (state, b):
        with pytest.raises(ValueError, match="not of this program's last prefill"):
            eager.decode(old)


def test_programs_of_many_sizes_in_one_process(monkeypatch):
    """Dynamo remembers by source line which sizes it has met; no program may notice the others."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    model = ours(llama(3, 1, tied=True))
    expected = programs.build(model, max_len=40, compile=False).generate([[1, 2, 3]], max_new_tokens=4).tokens
    for i in range(3):
        program = programs.build(model, batch=1 + i % 3, max_len=8 + 7 * i, chunk=1 + i)
        assert program.generate([[1, 2, 3]], max_new_tokens=4).tokens == expected
        assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_forms_of_prompts_are_one(eager):
    rows = [[1, 2, 3], [4, 5, 6]]
    expected = eager.generate(rows, max_new_tokens=3).tokens
    ids = torch.tensor(rows)
    same = [
        ids,
        ids.numpy(),
        [ids[0], ids[1].numpy()],
        {"input_ids": rows, "attention_mask": [[1, 1, 1]] * 2},
        BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
        {"input_ids": [[0, *row] for row in rows], "attention_mask": [[0, 1, 1, 1]] * 2},
    ]
    for prompts in same:
        assert eager.generate(prompts, max_new_tokens=3).tokens == expected
    stop = expected[0][0]
    for eos in (stop, [stop], torch.tensor(stop), np.int64(stop), [stop] * 9):
        assert eager.generate([rows[0]], max_new_tokens=3, eos_token_id=eos).tokens == [[stop]]


def test_padding_without_a_mask_is_seen_as_transformers_sees_it():
    """Where the padding token is no end token and stands in the ids; lists of ids have none."""
    module = llama()
    module.generation_config.pad_token_id = module.config.pad_token_id = 7
    program = programs.build(ours(module), batch=2, max_len=20, compile=False)
    ids = torch.tensor([[7, 7, 3, 4], [3, 4, 5, 6]])
    expected = module.generate(ids, max_new_tokens=4, do_sample=False)
    found = program.generate(ids, max_new_tokens=4)
    assert torch.equal(found.sequences, expected)
    assert found.attention_mask[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert program.generate([[7, 7, 3, 4]], max_new_tokens=4).tokens != found.tokens[:1]
    with pytest.raises(ValueError, match="fix: pass attention_mask, where pad_token_id is a token like others"):
        program.generate(torch.tensor([[3, 7, 4]]), max_new_tokens=2)
    mask = torch.ones(1, 3, dtype=torch.int64)
    program.generate(torch.tensor([[3, 7, 4]]), attention_mask=mask, max_new_tokens=2)
    # The call's own tokens decide, not the model's.
    for ends, pads, seen in ((7, None, False), (None, 9, False), (96, None, True), (96, 7, True)):
        given = {} if pads is None else {"pad_token_id": pads}
        theirs = module.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=ends, **given)
        mine = program.generate(ids, max_new_tokens=4, eos_token_id=() if ends is None else ends, **given)
        assert torch.equal(mine.sequences[:1], theirs[:1, : mine.sequences.shape[1]])
        assert (mine.attention_mask[0, 0] == 0) == seen
    module.generation_config.eos_token_id = 7
    meant = programs.build(ours(module), batch=2, max_len=20, compile=False)
    assert meant.generate(ids, max_new_tokens=1).attention_mask[0].tolist() == [1] * 5
