"""Sampling against transformers' processors, to the bit, and against what a draw must be."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.sampling import Controls, draw, fold_seed, penalize, sample, uniform, warp
from torch import Tensor

NONE = torch.tensor([], dtype=torch.int64)


def controls(batch: int, vocab: int, **given) -> Controls:
    """`Controls.off` with some fields replaced, by a value for all rows or a list."""
    new = Controls.off(batch, vocab)
    for name, value in given.items():
        values = torch.tensor(value, dtype=getattr(new, name).dtype).expand(batch).clone()
        new = dataclasses.replace(new, **{name: values})
    return new


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    )


def transformers_warp(scores: Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=None, stable=True) -> Tensor:
    """As generate builds the list. stable: equal scores in the order of the vocabulary, which torch.sort leaves open
    on a CPU; then its results are defined to the bit."""
    steps = transformers.LogitsProcessorList()
    if temperature != 1.0:
        steps.append(transformers.TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        steps.append(transformers.TopPLogitsWarper(top_p))
    if min_p is not None:
        steps.append(transformers.MinPLogitsWarper(min_p))
    with pytest.MonkeyPatch.context() as patch:
        if stable:
            patch.setattr(torch, "sort", lambda x, descending: x.sort(stable=True, dim=-1, descending=descending))
        return steps(None, scores.clone())


def kinds_of_scores(vocab: int) -> Tensor:
    """Plain, peaked, flat, in a few steps (ties), half of them -inf, all equal, one finite, huge, tiny, signed zeros."""
    plain = torch.randn(vocab)
    masked = torch.where(torch.rand(vocab) < 0.5, plain, -torch.inf)
    one = torch.full((vocab,), -torch.inf)
    one[vocab // 2] = 1.0
    huge = torch.where(plain > 1, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min)
    zeros = torch.where(plain > 0, 0.0, -0.0)
    rows = [plain, plain * 20, plain / 100, (plain * 2).round(), masked, plain * 0 + 3, one, huge, plain * 1e-38, zeros]
    return torch.stack(rows)


@pytest.mark.parametrize("vocab", [1, 2, 37, 1000])
def test_warp_equals_transformers(vocab):
    scores = kinds_of_scores(vocab)
    temperatures, top_ps = [1.0, 0.7, 1.3, 0.01], [1.0, 0.9, 0.5, 0.37, 0.0]
    options = itertools.product(temperatures, [0, 1, 3, 50], top_ps, [None, 0.0, 0.05, 1.0])
    for temperature, top_k, top_p, min_p in options:
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        expected = transformers_warp(scores, **given)
        ours = {"temperature": temperature, "top_k": top_k or vocab, "top_p": top_p, "min_p": min_p or 0.0}
        assert same(warp(scores, controls(len(scores), vocab, **ours)), expected), given


def test_warp_equals_transformers_on_random_options_a_row_each():
    scores = torch.randn(300, 200) * torch.logspace(-1, 1.5, 300)[:, None]
    scores[::3] = (scores[::3] * 2).round() / 2
    given = {
        "temperature": (torch.rand(300) * 3 + 0.01).tolist(),
        "top_k": torch.randint(1, 201, (300,)).tolist(),
        "top_p": torch.rand(300, dtype=torch.float64).tolist(),
        "min_p": (torch.rand(300) * 0.3).tolist(),
    }
    got = warp(scores, controls(300, 200, **given))
    for i, row in enumerate(scores):
        expected = transformers_warp(row[None], **{name: values[i] for name, values in given.items()})
        assert same(got[i : i + 1], expected), i
    assert len(set(got.isfinite().sum(-1).tolist())) > 30


@pytest.mark.parametrize("k", [1, 3, 50])
def test_without_a_sort_warp_is_the_same(k):
    scores = (torch.randn(4, 60) * 2).round(decimals=1)  # with ties
    controls = dataclasses.replace(Controls.off(4, 60), top_k=torch.tensor([k, 1, k, 60 if k > 9 else k]))
    controls = dataclasses.replace(
        controls, temperature=torch.tensor([0.3, 1.0, 2.0, 1.0]), min_p=torch.full((4,), 0.1)
    )
    most = int(controls.top_k.max())
    assert torch.equal(warp(scores, controls, nucleus=False, most=most), warp(scores, controls))
    assert torch.equal(warp(scores, controls, nucleus=False), warp(scores, controls))


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.2])
def test_ties_at_the_edge_of_top_p(top_p):
    """Transformers as it is: without ties the same tokens, with ties as many and as likely ones."""
    scores = torch.cat((torch.randn(8, 500), torch.randn(8, 500).round(), torch.zeros(1, 500)))
    got = warp(scores, controls(len(scores), 500, top_p=top_p))
    expected = transformers_warp(scores, top_p=top_p, stable=False)
    assert torch.equal(got[:8], expected[:8])
    assert torch.equal(got.sort(-1).values, expected.sort(-1).values)
    assert torch.equal(got[-1].isfinite(), torch.arange(500) >= 500 - int(got[-1].isfinite().sum()))


def test_top_p_is_not_rounded_to_fp32():
    """Equal tokens put sums of probabilities right on the edge, where 1 - top_p in fp32 is another number."""
    differ = 0
    for vocab, hundredth in itertools.product((4, 5, 10, 100), range(100)):
        top_p, scores = hundredth / 100, torch.zeros(1, vocab)
        expected = transformers_warp(scores, top_p=top_p)
        assert same(warp(scores, controls(1, vocab, top_p=top_p)), expected), top_p
        rounded = float(torch.tensor(top_p, dtype=torch.float32))
        differ += not same(warp(scores, controls(1, vocab, top_p=rounded)), expected)
    assert differ > 5


def test_what_is_off_changes_no_bit():
    logits = torch.cat((kinds_of_scores(60), torch.full((1, 60), torch.nan)))
    counts = torch.randint(0, 3, logits.shape, dtype=torch.int32)
    off = Controls.off(len(logits), 60)
    for name, x in {"penalize": penalize(logits, counts, off), "warp": warp(logits, off)}.items():
        assert torch.equal(x.view(torch.int32), logits.view(torch.int32)), name


@pytest.mark.parametrize("penalty", [1.0, 1.2, 0.5, 7.3])
def test_repetition_penalty_equals_transformers(penalty):
    processor, logits = transformers.RepetitionPenaltyLogitsProcessor(penalty), kinds_of_scores(60)
    ids = torch.randint(0, 40, (len(logits), 25))
    counts = torch.zeros(logits.shape, dtype=torch.int32).scatter_add(1, ids, torch.ones_like(ids, dtype=torch.int32))
    expected = processor(ids, logits.clone())
    assert same(penalize(logits, counts, controls(len(logits), 60, repetition_penalty=penalty)), expected)
    half = logits.nan_to_num(neginf=-50.0).clamp(-50, 50).bfloat16()
    expected = processor(ids, half.float())
    assert same(penalize(half, counts, controls(len(logits), 60, repetition_penalty=penalty)), expected)


def test_presence_and_frequency_in_words():
    """logit - presence where it stands at all - frequency times how often, after the repetition penalty."""
    logits = torch.tensor([[4.0, 4.0, -4.0, 0.0, -torch.inf]])
    counts = torch.tensor([[0, 1, 3, 2, 2]], dtype=torch.int32)
    given = controls(1, 5, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = [4.0, 4.0 / 2 - 0.5 - 0.25, -4.0 * 2 - 0.5 - 0.75, 0.0 - 0.5 - 0.5, -torch.inf]
    assert penalize(logits, counts, given).tolist() == [expected]
    assert penalize(logits.double(), counts, given).dtype == torch.float64


def mixed(batch: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Controls]:
    """A batch in which each row has options of its own, every other row drawn."""
    logits = torch.randn(batch, vocab) * 3
    counts = torch.randint(0, 3, (batch, vocab), dtype=torch.int32)
    ends = {
        "temperature": (0.5, 1.5), "top_k": (3, batch + 2), "top_p": (0.5, 1.0), "min_p": (0.0, 0.2),
        "repetition_penalty": (0.8, 1.3), "presence_penalty": (-0.5, 0.5), "frequency_penalty": (0.5, -0.5),
    }  # fmt: skip
    given = {name: torch.linspace(*each, batch).tolist() for name, each in ends.items()}
    seeds = [fold_seed(3, i) for i in range(batch)]
    options = controls(batch, vocab, do_sample=[i % 2 == 0 for i in range(batch)], seed=seeds, **given)
    return logits, torch.arange(batch) * 3, counts, options


def test_a_row_equals_itself_alone_and_in_other_company():
    logits, positions, counts, options = mixed(8, 300)
    eos = torch.tensor([4])
    whole = sample(logits, positions, counts, options, eos)
    order = torch.randperm(8)
    shuffled = sample(logits[order], positions[order], counts[order], F.tree.map(lambda x: x[order], options), eos)
    assert all(torch.equal(a[order], b) for a, b in zip(whole, shuffled, strict=True))
    for i in range(8):
        row = slice(i, i + 1)
        alone = sample(logits[row], positions[row], counts[row], F.tree.map(lambda x, row=row: x[row], options), eos)
        assert all(torch.equal(a[row], b) for a, b in zip(whole, alone, strict=True)), i


def test_sample_without_options_is_greedy():
    logits = torch.cat((kinds_of_scores(60), torch.randn(3, 60).round()))
    positions = torch.arange(len(logits)) - 1
    counts = torch.randint(0, 3, logits.shape, dtype=torch.int32)
    eos = torch.tensor([int(logits[3].argmax()), 50])
    token, logprob, after, _ = sample(logits, positions, counts, Controls.off(len(logits), 60), eos)
    for got, expected in zip((token, logprob, after), F.sample_advance(logits, positions, eos), strict=True):
        assert same(got, expected)


def test_what_sample_gives_back():
    """The log-probability is the model's own, greedy rows take the largest of the penalized scores (the lowest among
    equals), ends and counts are those of active rows."""
    logits, positions, counts, options = mixed(8, 30)
    positions[5] = -1
    first, *_ = sample(logits, positions, counts, options, NONE)
    token, logprob, after, new = sample(logits, positions, counts, options, first[2:4])
    assert torch.equal(token, first)
    torch.testing.assert_close(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
    scores = penalize(logits, counts, options)
    assert torch.equal(token[1::2], scores.argmax(-1)[1::2])
    assert torch.equal(token[::2], draw(warp(scores, options), uniform(options.seed, positions))[::2])
    assert [int(p) for p in after] == [-1 if t in first[2:4] else int(p) for t, p in zip(token, positions, strict=True)]
    assert torch.equal(new, counts + torch.nn.functional.one_hot(token, 30) * (positions >= 0)[:, None])
    assert new.dtype == torch.int32
    for given, widest in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert sample(logits.to(given), positions, counts, options, NONE)[1].dtype == widest


@pytest.mark.parametrize("bad", ["nan", "all nan", "+inf", "all -inf"])
def test_a_row_that_is_no_distribution_ends_alone(bad):
    logits, positions, counts, options = mixed(8, 30)
    broken = logits.clone()
    broken[2:4] = {"all nan": torch.nan, "all -inf": -torch.inf}.get(bad, 0.0)
    broken[2:4, 9] = {"nan": torch.nan, "all nan": torch.nan, "+inf": torch.inf, "all -inf": -torch.inf}[bad]
    good, bad_rows = [0, 1, 4, 5, 6, 7], [2, 3]
    for fn in (lambda x: sample(x, positions, counts, options, NONE), lambda x: F.sample_advance(x, positions, NONE)):
        before, after = fn(logits), fn(broken)
        assert all(torch.equal(a[good], b[good]) for a, b in zip(before, after, strict=True))
        assert after[0][bad_rows].tolist() == [0, 0]
        assert bool(after[1][bad_rows].isnan().all())
        assert after[2][bad_rows].tolist() == [-1, -1]
    _, _, after, kept = sample(broken, torch.full((8,), -1), counts, options, NONE)
    assert set(after.tolist()) == {-1}, "what has ended stays so"
    assert torch.equal(kept, counts)
    assert F.greedy(broken)[0][2:4].tolist() == [0, 0]


def test_a_greedy_row_does_not_feel_options_of_drawn_ones():
    """Options that make NaN of the drawn branch: 0/0 and an overflow to +inf."""
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    zeros = torch.zeros(3, 3, dtype=torch.int32)
    options = controls(3, 3, do_sample=[False, False, True], temperature=[0.0, math.nan, 1e-44])
    token, logprob, after, _ = sample(logits, torch.tensor([3, 4, 5]), zeros, options, NONE)
    torch.testing.assert_close(logprob[:2], logits.log_softmax(-1)[:2, 1])
    assert token[:2].tolist() == [1, 1]
    assert int(token[2]) in (1, 2)  # both overflow, and are then equal
    assert after.tolist() == [3, 4, 5]


def test_traces_once_and_values_do_not_recompile():
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda *given: sample(*given), fullgraph=True, backend=backend)
    logits, positions, counts, options = mixed(4, 50)
    eos = torch.tensor([7, -1])
    others = [
        options,
        Controls.off(4, 50),
        controls(4, 50, do_sample=True, temperature=0.3, top_k=1, seed=2**62),
        controls(4, 50, do_sample=True, top_p=0.1, min_p=0.9, repetition_penalty=3.0, seed=[1, 2, 3, 4]),
    ]
    for i, each in enumerate(others):
        expected = sample(logits, positions + i, counts, each, eos)
        for got, want in zip(compiled(logits, positions + i, counts, each, eos), expected, strict=True):
            assert torch.equal(got, want)
    assert len(compiles) == 1


def test_vmap_over_rows_of_options():
    """Many options for the same logits, one at a time."""
    logits, positions, counts, options = mixed(4, 20)
    one = lambda c: sample(logits[:1], positions[:1], counts[:1], F.tree.map(lambda x: x[None], c), NONE)[:2]  # noqa: E731
    token, logprob = torch.vmap(one)(options)
    repeated = (x[:1].expand(4, *x.shape[1:]) for x in (logits, positions, counts))
    expected = sample(*repeated, options, NONE)
    assert torch.equal(token[:, 0], expected[0])
    torch.testing.assert_close(logprob[:, 0], expected[1])


def test_messages():
    logits, positions, counts, options = mixed(3, 5)
    with pytest.raises(F.ShapeError) as first:
        sample(logits, positions[:2], counts, options, NONE)
    with pytest.raises(F.ShapeError) as second:
        warp(logits, Controls.off(2, 5))
    assert_expected_inline(
        f"{first.value}\n\n{second.value}",
        """\
sample(positions=...): B is 3 in logits but 2 in positions
    logits   : B Z = 3 5
    positions: B = 2
                   ^
    so far: B=3 Z=5

warp(controls.temperature=...): B is 3 in scores but 2 in controls.temperature
    scores              : B Z = 3 5
    controls.temperature: B = 2
                              ^
    so far: B=3 Z=5""",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_greedy_of_half_precision(dtype):
    """The largest of what is stored, the first among equals, both zeros being equal."""
    rows = [
        [-0.0, 0.0, -1.0],
        [0.0, -0.0, 0.0],
        [-2.0, -1.0, -1.0],
        [1.0, torch.nan, 3.0],
        [-torch.inf, 1.0, torch.inf],
    ]
    rows += [[-torch.inf, -torch.inf, -3.0], [-torch.inf] * 3]
    logits = torch.tensor(rows, dtype=dtype)
    token, logprob = F.greedy(logits)
    assert token.tolist() == [0, 0, 1, 0, 0, 2, 0]
    assert logprob.isnan().tolist() == [False, False, False, True, True, False, True]
    torch.testing.assert_close(logprob[:3], logits.float().log_softmax(-1).amax(-1)[:3])
    mapped = torch.func.vmap(F.greedy)(logits[:4].unflatten(0, (2, 2)))
    assert torch.equal(mapped[0].flatten(), token[:4])
    grad = torch.func.grad(lambda x: F.greedy(x)[1])(logits[2].float())
    wanted = torch.eye(3)[1] - logits[2].float().softmax(-1)
    torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(
        torch.func.grad(lambda x: F.greedy(x)[1].float())(logits[2]).float(), wanted, atol=1e-2, rtol=0
    )
