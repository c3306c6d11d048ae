"""Drawing a token: the numbers it is drawn by, and frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from meshfn.functional import sampling
from meshfn.functional.sampling import draw, fold_seed, sample, uniform, warp
from torch import Tensor

from .test_sampling import controls

NONE = torch.tensor([], dtype=torch.int64)


def test_philox_known_answers():
    """The vectors that Random123 publishes (kat_vectors, philox4x32 10), with integers and with tensors."""
    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    vectors += [(tuple(pi[:4]), tuple(pi[4:]), "d16cfe09 94fdcceb 5001e420 24126ea1")]
    for counter, key, expected in vectors:
        assert " ".join(f"{x:08x}" for x in sampling._philox(counter, key)) == expected
        tensors = sampling._philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert " ".join(f"{int(x):08x}" for x in tensors) == expected


def test_uniform_is_philox_of_seed_and_counter():
    """The first 27 and 26 bits of two words, over 2^53; both words of seed and counter count."""
    seeds, counters = [0, 2**63 - 1, 5, 5 + 2**32, 5, 5], [0, 2**40 + 3, 7, 7, 7 + 2**32, -1]
    got = uniform(torch.tensor(seeds), torch.tensor(counters)).tolist()
    for seed, counter, u in zip(seeds, counters, got, strict=True):
        words = (counter % 2**32, counter // 2**32 % 2**32, 0, 0)
        a, b, _, _ = sampling._philox(words, (seed % 2**32, seed // 2**32))
        assert u == (a // 2**5 * 2**26 + b // 2**6) / 2**53
    assert len(set(got)) == len(got)
    assert got[0] == (0x6627E8D5 // 2**5 * 2**26 + 0xE169C58D // 2**6) / 2**53


def test_uniform_is_uniform():
    """100,000 counters of one seed, and seeds of one counter: 100 cells, chi-squared of 99 degrees below 180 (a fair
    generator exceeds it once in 10^6), and no correlation of neighbours beyond 5 sigma."""
    n = 100_000
    many, one = torch.arange(n), torch.full((n,), 12345)
    for u in (uniform(one, many), uniform(many, one)):
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        cells = torch.bincount((u * 100).long(), minlength=100).double()
        assert float(((cells - n / 100) ** 2 / (n / 100)).sum()) < 180
        assert abs(float(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) * 12) < 5 / math.sqrt(n)


def test_fold_seed():
    found = {fold_seed(seed, i) for seed in (0, 1, 2, 2**32, 2**63 - 1) for i in range(200)}
    assert len(found) == 1000
    assert all(0 <= each < 2**63 for each in found)
    # As first released: a seed must give the same tokens for good.
    assert [fold_seed(0, 1), fold_seed(7, 0)] == [7295404027446279926, 4565936198957886679]


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    """Weights 1 0 2 1, so 1/4, 0, 1/2, 1/4: edges belong to the token after them."""
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0]).double().log().expand(9, 4)
    below = math.nextafter(1.0, 0.0)
    u = [0, 0.1, math.nextafter(0.25, 0), 0.25, 0.5, math.nextafter(0.75, 0), 0.76, 0.99, below]
    assert draw(scores, torch.tensor(u, dtype=torch.float64)).tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]


def test_draw_never_takes_what_has_no_probability():
    inf = torch.inf
    below = math.nextafter(1.0, 0.0)
    rows = [
        [-inf, 0.0, -inf, -inf],
        [-inf, 0.0, 0.0, -inf],
        [-inf, -1e4, 0.0, -1e4],  # exp(-1e4) is 0 in fp64
        [-inf, 3e38, -3e38, -inf],
        [-inf, inf, 3e38, inf],
        [-inf, -3e38, -inf, -inf],
    ]
    scores = torch.tensor(rows)
    assert draw(scores, torch.zeros(6)).tolist() == [1, 1, 2, 1, 1, 1]
    assert draw(scores, torch.full((6,), below, dtype=torch.float64)).tolist() == [1, 2, 2, 1, 3, 1]
    # 1 itself, which no generator should give, is no reason to leave the vocabulary.
    assert draw(scores, torch.ones(6)).tolist() == [1, 2, 2, 1, 3, 1]
    wide = torch.where(torch.rand(50, 5000) < 0.3, torch.randn(50, 5000) * 10, -inf)
    for u in (torch.zeros(50), torch.rand(50), torch.full((50,), below)):
        assert bool((wide.gather(1, draw(wide, u.double())[:, None]) > -inf).all())


def test_draw_survives_a_sum_that_does_not_rise(monkeypatch):
    """A parallel sum, as on a GPU, rounds each element by itself: here by up to 1e-15, as u comes by an edge."""
    plain = Tensor.cumsum
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: plain(x, dim) * (1 + 1e-15 * (2 * torch.rand_like(x) - 1)))
    scores = torch.full((2000, 30), -torch.inf)
    scores[:, [3, 4, 20]] = 0.0
    u = torch.tensor([1 / 3, 2 / 3, 1 - 1e-15, math.nextafter(1.0, 0.0)], dtype=torch.float64).repeat(500)
    assert set(draw(scores, u).tolist()) == {3, 4, 20}


def test_draw_gives_0_for_a_row_that_is_no_distribution():
    scores = torch.randn(5, 7)
    scores[1, 3] = torch.nan
    scores[3] = -torch.inf
    u = torch.full((5,), 0.9)
    got, good = draw(scores, u), [0, 2, 4]
    assert got[[1, 3]].tolist() == [0, 0]
    assert got[good].tolist() == draw(scores[good], u[good]).tolist()


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_frequencies_of_draws(given):
    """20,000 draws over 12 tokens: each frequency within 5 sigma of its probability."""
    n, vocab = 20_000, 12
    logits = torch.randn(1, vocab) * 1.5
    options = controls(n, vocab, do_sample=True, seed=99, **given)
    zeros = torch.zeros(n, vocab, dtype=torch.int32)
    token, *_ = sample(logits.expand(n, -1), torch.arange(n), zeros, options, NONE)
    probs = warp(logits.double(), controls(1, vocab, **given)).softmax(-1)[0]
    sigma = (probs * (1 - probs) / n).sqrt()
    found = torch.bincount(token, minlength=vocab).double() / n
    assert bool(((found - probs).abs() <= 5 * sigma).all())
    assert bool((found[probs == 0] == 0).all())
