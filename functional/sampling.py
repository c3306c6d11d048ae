"""From logits to the next token: the most likely one, or one drawn.

A drawn token is a function of the row's logits, seed and position alone, so a row draws the same in every batch and in
every process. Options are tensors, one value a row, so that changing one compiles nothing anew.

Letters: B batch, Z vocabulary, N end-of-sequence tokens.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from .primitive import primitive
from .shapes import check_shapes
from .tree import Tree, dim, pytree

__all__ = [
    "Controls",
    "advance",
    "draw",
    "fold_seed",
    "greedy",
    "lowest_of_the_largest",
    "penalize",
    "sample",
    "sample_advance",
    "uniform",
    "warp",
]

Word = TypeVar("Word", int, Tensor)

_MASK = 0xFFFFFFFF
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_WARPERS = ("temperature", "top_k", "top_p", "min_p")


@pytree
class Controls(Tree):
    """How each row chooses its tokens. `off` has the values that change nothing; they do so to the bit.

    do_sample: bool. top_k, seed: int64, the seed not negative. top_p: fp64, since 1 - top_p is compared: in fp32 that
    has lost the digits that decide. The others: fp32.
    """

    do_sample: Tensor = dim("B")
    temperature: Tensor = dim("B")
    top_k: Tensor = dim("B")
    top_p: Tensor = dim("B")
    min_p: Tensor = dim("B")
    repetition_penalty: Tensor = dim("B")
    presence_penalty: Tensor = dim("B")
    frequency_penalty: Tensor = dim("B")
    seed: Tensor = dim("B")

    @classmethod
    def off(cls, batch: int, vocab_size: int, device: torch.device | str = "cpu") -> Controls:
        """The most likely token of the logits as they are, in every row."""

        def rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        return cls(
            do_sample=rows(False, torch.bool),
            temperature=rows(1),
            top_k=rows(vocab_size, torch.int64),
            top_p=rows(1, torch.float64),
            min_p=rows(0),
            repetition_penalty=rows(1),
            presence_penalty=rows(0),
            frequency_penalty=rows(0),
            seed=rows(0, torch.int64),
        )


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits `... Z` -> the most likely token `...` and its log-probability `...` in fp32 at least.

    Among equals the lowest token wins, on every device. A row that is no distribution (a NaN or +inf in it, or nothing
    but -inf) gives token 0 and a NaN.
    """
    wide = _wide(logits)
    token = lowest_of_the_largest(logits)
    logprob = wide.gather(-1, token[..., None])[..., 0] - wide.logsumexp(-1)
    return torch.where(logprob.isnan(), 0, token), logprob


@primitive
def sample_advance(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a step: choose, move on, notice the end.

    logits `B Z`, positions `B` of the tokens to come (-1: the row has ended), eos_token_id `N`
    -> token `B`, its log-probability `B`, positions `B`, -1 where the row ends with this token: an end-of-sequence
    token, or one with a log-probability of NaN (see `greedy`).
    """
    token, logprob = greedy(logits)
    return token, logprob, advance(token, logprob, positions, eos_token_id)


def sample(
    logits: Tensor,
    positions: Tensor,
    counts: Tensor,
    controls: Controls,
    eos_token_id: Tensor,
    *,
    u: Tensor | None = None,
    draws: bool = True,
    penalizes: bool = True,
    nucleus: bool = True,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The end of a step with options: penalize, warp and draw (or take the largest), move on, notice the end.

    logits `B Z`, positions `B` of the tokens to come (-1: the row has ended), counts `B Z`, how often each token stands
    in prompt and generated tokens, eos_token_id `N`
    -> token `B`, logprob `B`, positions `B`, counts `B Z` with the token added where positions were not -1.
    logprob is the model's own, of the logits before any option, in fp32 at least. Rows end as in `sample_advance`.
    u: `B`, what a row draws by, `uniform` of its seed and position unless given.
    draws, penalizes: False says that no row has do_sample, a penalty, and saves what these cost; without penalties
    counts stay as they are. nucleus, most: see `warp`.
    """
    check_shapes("sample", logits=(logits, "B Z"), positions=(positions, "B"), **_rows(controls, "do_sample", "seed"))
    scores = penalize(logits, counts, controls) if penalizes else _wide(logits)
    token = lowest_of_the_largest(scores)
    if draws:
        warped = warp(scores, controls, nucleus=nucleus, most=most)
        u = uniform(controls.seed, positions) if u is None else u
        token = torch.where(controls.do_sample, draw(warped, u), token)
    wide = _wide(logits)
    total = wide.logsumexp(-1)
    # Finite for every distribution, whatever the options made of it.
    token = torch.where(total.isfinite(), token, 0)
    logprob = torch.where(total.isfinite(), wide.gather(-1, token[:, None])[:, 0] - total, torch.nan)
    if penalizes:
        active = (positions >= 0).to(counts.dtype)
        counts = counts.scatter_add(-1, token[:, None], active[:, None])
    return token, logprob, advance(token, logprob, positions, eos_token_id), counts


def penalize(logits: Tensor, counts: Tensor, controls: Controls) -> Tensor:
    """logits `B Z`, counts `B Z` of each token in prompt and generated tokens -> scores `B Z`, in fp32 at least.

    Of each token that has a count: divided by repetition_penalty, multiplied where negative (Keskar et al. 2019, as
    transformers), then less presence_penalty, then less frequency_penalty times its count.
    """
    check_shapes("penalize", logits=(logits, "B Z"), counts=(counts, "B Z"), **_rows(controls, *_PENALTIES))
    scores, seen = _wide(logits), counts > 0
    repetition = controls.repetition_penalty[:, None]
    scores = torch.where(seen, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
    scores = scores - torch.where(seen, controls.presence_penalty[:, None], 0.0)
    return scores - controls.frequency_penalty[:, None] * counts


def warp(scores: Tensor, controls: Controls, *, nucleus: bool = True, most: int | None = None) -> Tensor:
    """scores `B Z` -> scores `B Z` over the temperature, -inf where top_k, top_p or min_p leave the token out.

    The order and the edges are transformers': all that equal the k-th largest stay; top_p drops the least likely
    tokens whose probabilities add up to 1 - top_p at most, but never the last, and among equals the lowest first
    (transformers leaves that to its sort); min_p drops what is less likely than min_p times the most likely. Each sees
    what the one before it left.
    nucleus: False says that every top_p is 1; then nothing is sorted. most: says that no top_k is above it, or as 0
    that none drops anything.
    """
    check_shapes("warp", scores=(scores, "B Z"), **_rows(controls, *_WARPERS))
    vocab_size = scores.shape[-1]
    scores = scores / controls.temperature[:, None]
    if most != 0:
        best = scores.topk(vocab_size if most is None else most).values
        least = best.gather(-1, controls.top_k.clamp(1, best.shape[-1])[:, None] - 1)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if nucleus:
        # After top_k, as in transformers: what it dropped is equal, which sorts fast.
        ascending, order = scores.sort(stable=True, dim=-1)
        below = ascending.softmax(-1).cumsum(-1)
        drop = below <= (1 - controls.top_p.double()).to(scores.dtype)[:, None]
        # Without this a top_p of 1 would drop tokens whose probability rounds to 0.
        drop = drop & (controls.top_p < 1)[:, None]
        drop = drop & (torch.arange(vocab_size, device=scores.device) < vocab_size - 1)
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < controls.min_p[:, None] * probs.amax(-1, keepdim=True), -torch.inf)


def draw(scores: Tensor, u: Tensor) -> Tensor:
    """scores `B Z`, logarithms of weights, u `B` in [0, 1) -> token `B`, the first whose cumulative weight exceeds u
    times the whole, in the order of the vocabulary and in fp64.

    A token of weight 0 is never drawn. +inf, an overflow, stands for the largest weight. A row with a NaN in it, or
    with nothing but -inf, gives token 0.
    """
    check_shapes("draw", scores=(scores, "B Z"), u=(u, "B"))
    index = torch.arange(scores.shape[-1], device=scores.device)
    top = scores.amax(-1, keepdim=True)
    # 1 at the top in so many words: +inf - +inf is a NaN.
    weights = torch.where(scores == top, 1.0, (scores.double() - top.double()).exp())
    cumulative = weights.cumsum(-1)
    # A parallel sum need not rise monotonically, nor reach its end; so weights decide who may be drawn, and the last of
    # these takes what is left.
    possible = weights > 0
    last = torch.where(possible, index, -1).amax(-1, keepdim=True)
    over = possible & ((cumulative > u.double()[:, None] * cumulative[:, -1:]) | (index == last))
    token = torch.where(over, index, scores.shape[-1]).amin(-1)
    return torch.where(top[:, 0] > -torch.inf, token, 0)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """seed and counter, int64, of shapes that go together -> as many numbers in [0, 1), fp64, multiples of 2^-53:
    Philox4x32-10 with the seed as its key."""
    zero = torch.zeros_like(counter)
    a, b, _, _ = _philox((counter & _MASK, counter >> 32 & _MASK, zero, zero), (seed & _MASK, seed >> 32 & _MASK))
    return ((a >> 5) * 2**26 + (b >> 6)).double() * 2.0**-53


def fold_seed(seed: int, i: int) -> int:
    """The seed, 63 bits, of row i under one seed for all; it has a counter of its own among those of `uniform`."""
    a, b, _, _ = _philox((i & _MASK, i >> 32 & _MASK, 1, 0), (seed & _MASK, seed >> 32 & _MASK))
    return (a << 32 | b) >> 1


def _philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 (Salmon et al. 2011) on words of 32 bits, each in an int64 or a Python integer."""
    a, b, c, d = counter
    k, l = key  # noqa: E741
    for _ in range(10):
        a_high, a_low = _product(a, 0xD2511F53)
        c_high, c_low = _product(c, 0xCD9E8D57)
        a, b, c, d = c_high ^ b ^ k, c_low, a_high ^ d ^ l, a_low
        k, l = (k + 0x9E3779B9) & _MASK, (l + 0xBB67AE85) & _MASK  # noqa: E741
    return a, b, c, d


def _product(x: Word, by: int) -> tuple[Word, Word]:
    """The high and the low word of a product of two words, by halves: the whole would overflow an int64."""
    low, high = (x & 0xFFFF) * by, (x >> 16) * by
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK


def advance(token: Tensor, logprob: Tensor, positions: Tensor, eos_token_id: Tensor) -> Tensor:
    """positions `B` of the tokens to come, -1 where a row ends with its token, as `sample_advance` says."""
    ends = (token[:, None] == eos_token_id).any(-1) | logprob.isnan()
    return torch.where(ends, -1, positions)


def lowest_of_the_largest(scores: Tensor) -> Tensor:
    """The lowest index at which the maximum stands, which argmax leaves open; 0 where it is a NaN."""
    scores = _as_stored(scores)
    top = scores.amax(-1, keepdim=True)
    index = torch.arange(scores.shape[-1], device=scores.device)
    token = torch.where(scores == top, index, scores.shape[-1]).amin(-1)
    return torch.where(top[..., 0].isnan(), 0, token)


def _as_stored(x: Tensor) -> Tensor:
    """x, under a compiler rounded to its dtype. That may keep half precision in fp32, and compare what it stored,
    which is rounded, with the largest of what was not, which then equals none. To look at the bits it has to round;
    and -0 becomes 0, since it would leave out a view there and back."""
    if x.dtype.itemsize > 2 or not torch.compiler.is_compiling():
        return x
    bits = x.detach().view(torch.int16)
    return torch.where(bits == torch.iinfo(torch.int16).min, 0, bits).view(x.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _rows(controls: Controls, *names: str) -> dict[str, tuple[Tensor | None, str]]:
    return {f"controls.{name}": (getattr(controls, name), "B") for name in names}
