"""The loop of generation, and what it returns.

Letters: B batch, n new tokens of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import functional as F
from .prompts import Prompts
from .sampling import StopStrings
from .sizes import Sizes
from .steps import State

__all__ = [
    "CHECK_EVERY",
    "Generation",
    "Streamer",
    "Timings",
    "Unheard",
    "assemble",
    "check_state",
    "check_streamer",
    "crossing",
    "now",
    "run_decode",
    "turned",
    "turns_of",
]

# Whether all rows have ended is read from the device once in so many steps: reading it waits for the device.
CHECK_EVERY = 16


class Streamer(Protocol):
    """As transformers' streamers: the prompt first, then each token as it comes."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


class Unheard:
    """A streamer that nobody listens to."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


class InStep:
    """A streamer of one rank among several. What it raises is raised when the call has ended: until then the others
    need this rank in each step, and would wait for it."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._failed: Exception | None = None

    def put(self, value: Tensor) -> None:
        if self._failed is None:
            try:
                self._streamer.put(value)
            except Exception as error:
                self._failed = error

    def end(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._streamer.end()


def check_streamer(streamer: Any) -> None:
    if isinstance(streamer, type) or not (streamer is None or hasattr(streamer, "put")):
        kind = "a class" if isinstance(streamer, type) else type(streamer).__name__
        raise TypeError(f"generate(streamer=...): an object with put and end is needed, not {kind}")


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
    without a tokenizer. finish_reason: "stop", "length", or "nan" where the logits were no distribution (the row ends
    with token 0 there). logprobs: of `tokens`, None unless asked for; what `score` and a training forward say of them,
    within 32 eps times the largest logit in fp32 and fp64, 16 eps in half precision. seeds: of the rows, None unless
    they were sampled; `seed=[seeds[i]]` draws row i again."""

    tokens: list[list[int]]
    sequences: Tensor
    attention_mask: Tensor
    lengths: list[int]
    text: list[str] | None
    finish_reason: list[str]
    logprobs: list[list[float]] | None
    seeds: list[int] | None
    timings: Timings


def turns_of(cfg: F.DecoderConfig) -> list[int]:
    """Where the angles of longrope change for a whole row, and a cache of the old ones is worth nothing."""
    ropes = [each.attention.rope for each in cfg.layers]
    turns = {rope.original_max_position_embeddings for rope in ropes if rope and rope.rope_type == "longrope"}
    return sorted(turn for turn in turns if turn is not None)


def crossing(turns: Sequence[int], rows: Sequence[list[int]], taken: int, n: int) -> bool:
    """Whether one of the n steps after those taken feeds a token with which the angles of a row change."""
    return any(taken <= turn - len(row) < taken + n for row in rows for turn in turns)


def turned(
    turns: Sequence[int], rows: Sequence[list[int]], state: State, taken: int, tokens: Tensor
) -> list[list[int]]:
    """The rows, with their new tokens, whose longrope angles all change with the token just fed; others empty.

    state: as that token was fed. turns: see `turns_of`. taken: steps done; tokens: `B n`, one more than that."""
    if not crossing(turns, rows, taken, 1):
        return [[] for _ in rows]
    new, live = tokens.tolist(), (state.position >= 0).tolist()
    return [row + new[i] if len(row) + taken in turns and live[i] else [] for i, row in enumerate(rows)]


def check_state(
    state: Any, session: int, sizes: Sizes, turns: Sequence[int], vocab_size: int, *, spent: bool
) -> tuple[list[int], list[int]]:
    """Raise `TypeError` and `ValueError` for a state that no step of a session can follow. -> its tokens and positions,
    `B` each. spent: whether a step overwrites what the state before it still needs."""
    last = "step" if spent else "prefill"
    if not isinstance(state, State):
        raise TypeError(
            f"decode(state=...): a State is needed, not {type(state).__name__}\n"
            f"    fix: what this program's last {last} returned"
        )
    if state.session != session:
        raise ValueError(f"decode: the state is not of this program's last {last}, whose cache it would read")
    for name, given in (("token", state.token), ("position", state.position)):
        if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.shape != (sizes.batch,):
            what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"decode(state=...): its {name} is {what}, and torch.int64 [{sizes.batch}] is needed, a number a row\n"
                f"    fix: dataclasses.replace(state, {name}=...)"
            )
    # Read at once: it waits for the device.
    positions, tokens = torch.stack((state.position, state.token.to(state.position.device))).tolist()
    if wrong := [(i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size]:
        row, token = wrong[0]
        raise ValueError(
            f"decode(state=...): token {token} in row {row}, and the vocabulary has {vocab_size}\n"
            f"    fix: 0 to {vocab_size - 1}, also in a row that has ended"
        )
    if max(positions) >= sizes.max_len:
        raise ValueError(f"decode: a row holds max_len={sizes.max_len} tokens; there is no slot for another")
    if turning := [turn for turn in turns if turn in positions]:
        raise ValueError(
            f"decode: a row passes the {turning[0]} tokens of longrope's original context, from where all its "
            "tokens turn by other angles\n    fix: prefill its prompt and new tokens again, or use generate"
        )
    return tokens, positions


def run_decode(
    step: Callable[[State, Tensor, int], tuple[State, Tensor, Tensor]],
    state: State,
    rows: Sequence[Sequence[int]],
    *,
    launch: int,
    max_new_tokens: int,
    ends: Sequence[int],
    texts: StopStrings,
    streamer: Streamer | None,
    anywhere: Callable[[bool], bool],
) -> tuple[Tensor, Tensor, int]:
    """Decode until every row has ended or has its tokens -> tokens and log-probabilities `B n`, steps executed.

    step: (state, the tokens so far `B n`, how many steps at most) -> state, tokens and log-probabilities, a column a
    step. launch: as many as it takes at once, where none of them is to be looked at before the others. rows: the
    prompts. ends: tokens that end a row, texts: text that does. With a streamer each step waits for its token anyway,
    so the end is seen at once. anywhere: whether some row goes on on any rank, of whether one does here.
    """
    tokens, logprobs = (x.new_empty(len(x), max_new_tokens) for x in (state.token, state.logprob))
    tokens[:, 0], logprobs[:, 0] = state.token, state.logprob
    every = CHECK_EVERY if streamer is None else 1
    if streamer is not None:
        streamer.put(tokens[: len(rows), 0].cpu())
    steps, stopped, seen = 0, set[int](), 0
    while steps < max_new_tokens - 1:
        if (ends or texts or streamer is not None) and steps % every == 0:
            live = state.position[: len(rows)] >= 0
            if texts:
                new = tokens[:, : steps + 1].tolist()
                stopped |= {i for i, row in enumerate(rows) if i not in stopped and texts.ends(row, new[i], seen)}
                seen = steps + 1
                live = live & torch.tensor([i not in stopped for i in range(len(rows))], device=live.device)
            if not anywhere(bool(live.any())):
                break
        left = min(max_new_tokens - 1 - steps, every - steps % every)
        state, new_tokens, new_logprobs = step(state, tokens[:, : steps + 1], launch if left >= launch else 1)
        done = slice(steps + 1, steps + 1 + new_tokens.shape[1])
        tokens[:, done], logprobs[:, done] = new_tokens, new_logprobs
        steps += new_tokens.shape[1]
        if streamer is not None:
            streamer.put(tokens[: len(rows), steps].cpu())
    if streamer is not None:
        streamer.end()
    found = slice(len(rows)), slice(steps + 1)
    return tokens[found].cpu(), logprobs[found].cpu(), steps


def trim(
    prompt: Sequence[int], tokens: list[int], logprobs: list[float], ends: Sequence[int], texts: StopStrings
) -> tuple[int, str]:
    """How many tokens a row keeps, up to the first that ends it, that one included, and why it ends."""
    reasons = ("nan" if p != p else "stop" if t in ends else "" for t, p in zip(tokens, logprobs, strict=True))
    found = next(((i + 1, reason) for i, reason in enumerate(reasons) if reason), (len(tokens), "length"))
    text = texts.ends(prompt, tokens[: found[0]], 0)
    return found if text is None or (text == found[0] and found[1] == "nan") else (text, "stop")


def assemble(
    prompts: Prompts,
    tokens: Tensor,
    logprobs: Tensor,
    *,
    texts: StopStrings,
    eos_token_id: Sequence[int],
    pad_token_id: int,
    return_logprobs: bool,
    seeds: list[int] | None,
    tokenizer: Any,
    timings: Callable[[int], Timings],
) -> Generation:
    """tokens, logprobs `B n`, whatever stands after a row's end dropped."""
    found, chances = tokens.tolist(), logprobs.tolist()
    kept = [trim(*each, eos_token_id, texts) for each in zip(prompts.rows, found, chances, strict=True)]
    lengths = [n for n, _ in kept]
    rows = [row[:n] for row, n in zip(found, lengths, strict=True)]
    width = max(lengths)
    new = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows], device="cpu")
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device="cpu")
    return Generation(
        tokens=rows,
        sequences=torch.cat((prompts.input_ids.to(new.dtype), new), 1),
        attention_mask=torch.cat((prompts.attention_mask, mask), 1),
        lengths=lengths,
        text=None if tokenizer is None else [tokenizer.decode(r, skip_special_tokens=True) for r in rows],
        finish_reason=[reason for _, reason in kept],
        logprobs=[p[:n] for p, n in zip(chances, lengths, strict=True)] if return_logprobs else None,
        seeds=seeds,
        timings=timings(sum(lengths)),
    )


def now(device: torch.device) -> float:
    """A clock that has waited for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
