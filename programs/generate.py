"""The loop of generation, and what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .prompts import Prompts

__all__ = ["Generation", "Streamer", "Timings"]

# Whether all rows have ended is read from the device once in so many steps: reading it waits for the device.
CHECK_EVERY = 16


class Streamer(Protocol):
    """As transformers' streamers: the prompt first, then each token as it comes."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Timings:
    """Seconds; `build` is the program's, spent once. steps: decode steps executed. kept: tokens returned, of all rows.

    The first token of a row comes from prefill, so a row of n tokens took n - 1 steps; steps after a row's end count
    as steps and keep nothing.
    """

    build: float
    prefill: float
    decode: float
    prompt_tokens: int
    steps: int
    rows: int
    kept: int

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill if self.prefill else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens kept, those of prefill not counted, a second of decode."""
        return (self.kept - self.rows) / self.decode if self.decode else 0.0

    def __str__(self) -> str:
        return (
            f"build {self.build:.1f} s   prefill {self.prompt_tokens} tokens, {self.prefill:.2f} s "
            f"({self.prefill_tokens_per_second:.1f} tokens/s)   decode {self.steps} steps, {self.kept} tokens kept, "
            f"{self.decode:.2f} s ({self.decode_tokens_per_second:.1f} tokens/s)"
        )


@dataclass(frozen=True)
class Generation:
    """tokens: the new tokens, a list a row, an end-of-sequence token included. sequences, attention_mask: prompt and
    new tokens as one rectangle, as transformers returns them. lengths: of `tokens`. text: decoded `tokens`, None
    without a tokenizer. finish_reason: "stop" or "length". logprobs: of `tokens`, None unless asked for."""

    tokens: list[list[int]]
    sequences: Tensor
    attention_mask: Tensor
    lengths: list[int]
    text: list[str] | None
    finish_reason: list[str]
    logprobs: list[list[float]] | None
    timings: Timings


def run_decode(
    step: Callable[[Any, int], Any],
    state: Any,
    *,
    start: int,
    max_new_tokens: int,
    rows: int,
    stop: Sequence[int],
    streamer: Streamer | None,
) -> tuple[Tensor, Tensor, int]:
    """Decode until every row has ended or has its tokens -> tokens and log-probabilities `B n`, steps executed.

    step: (state, tokens that the longest row holds) -> state. start: that number after prefill.
    stop: tokens that end a row. With a streamer each step waits for its token anyway, so the end is seen at once.
    """
    tokens, logprobs = [state.token], [state.logprob]
    every = CHECK_EVERY if streamer is None else 1
    if streamer is not None:
        streamer.put(state.token[:rows].cpu())
    steps = 0
    while steps < max_new_tokens - 1:
        if stop and steps % every == 0 and not bool((state.position >= 0).any()):
            break
        state = step(state, start + steps + 1)
        steps += 1
        tokens.append(state.token)
        logprobs.append(state.logprob)
        if streamer is not None:
            streamer.put(state.token[:rows].cpu())
    if streamer is not None:
        streamer.end()
    return torch.stack(tokens, 1)[:rows].cpu(), torch.stack(logprobs, 1)[:rows].cpu(), steps


def trim(tokens: Tensor, eos_token_id: Sequence[int]) -> list[int]:
    """How many tokens each row keeps: up to its first end-of-sequence token, that one included."""
    kept = []
    for row in tokens.tolist():
        ends = [i for i, t in enumerate(row) if t in eos_token_id]
        kept.append(ends[0] + 1 if ends else len(row))
    return kept


def assemble(
    prompts: Prompts,
    tokens: Tensor,
    logprobs: Tensor | None,
    *,
    eos_token_id: Sequence[int],
    pad_token_id: int,
    tokenizer: Any,
    timings: Callable[[int], Timings],
) -> Generation:
    """tokens, logprobs `B n`, whatever stands after a row's end dropped."""
    lengths = trim(tokens, eos_token_id)
    rows = [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)]
    width = max(lengths)
    new = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows], device="cpu")
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device="cpu")
    return Generation(
        tokens=rows,
        sequences=torch.cat((prompts.input_ids.to(new.dtype), new), 1),
        attention_mask=torch.cat((prompts.attention_mask, mask), 1),
        lengths=lengths,
        text=None if tokenizer is None else [tokenizer.decode(r, skip_special_tokens=True) for r in rows],
        finish_reason=["stop" if r[-1] in eos_token_id else "length" for r in rows],
        logprobs=None if logprobs is None else [p[:n] for p, n in zip(logprobs.tolist(), lengths, strict=True)],
        timings=timings(sum(lengths)),
    )


def now(device: torch.device) -> float:
    """A clock that has waited for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
