"""What a user may pass as prompts, made into rows of token ids; every fault is found here, before any work. And who has
which of these rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .sizes import EOS_LIMIT

__all__ = ["AllRows", "Prompts", "Rows", "cut", "end_tokens", "filler", "lengths", "read_prompts", "repeated"]


@dataclass(frozen=True)
class Prompts:
    """rows: token ids, one list a row. input_ids, attention_mask: `B S`, the rectangle they stand in."""

    rows: list[list[int]]
    input_ids: Tensor
    attention_mask: Tensor


class Rows(Protocol):
    """Which rows of a call are computed here, and what ranks that have others tell each other; see `Ranks`."""

    def own(self, rows: int) -> slice: ...
    def anywhere(self, live: bool) -> bool: ...
    def of_all(self, x: Tensor, rows: int) -> Tensor: ...


class AllRows:
    """Of a program of one rank."""

    def own(self, rows: int) -> slice:
        return slice(rows)

    def anywhere(self, live: bool) -> bool:
        return live

    def of_all(self, x: Tensor, rows: int) -> Tensor:
        return x


def read_prompts(
    prompts: Any,
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    vocab_size: int,
    batch: int,
    max_len: int,
    max_new_tokens: int = 0,
    pad_token_id: int = 0,
    padding: int | None = None,
) -> Prompts:
    """prompts: a string, a list of strings, a list of token ids or of lists of them, `input_ids` `B S`, or what a
    tokenizer returns. attention_mask: `B S`, 1 where a token is one; zeros may stand on either side. padding: the
    token that `input_ids` without a mask are padded with, as transformers infers it.

    Raises `ValueError` (`TypeError` for what is none of these), naming the row and the numbers.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise ValueError(f"prompts: a mapping needs input_ids, it has {', '.join(map(str, prompts)) or 'nothing'}")
        attention_mask = prompts.get("attention_mask", attention_mask)
        prompts = prompts["input_ids"]
    if hasattr(prompts, "__array__") and not isinstance(prompts, Tensor):
        prompts = torch.as_tensor(prompts)
    if (
        isinstance(prompts, Tensor)
        and attention_mask is None
        and padding is not None
        and bool((prompts == padding).any())
    ):
        attention_mask = prompts != padding
    if isinstance(prompts, Tensor):
        mask = None if attention_mask is None else torch.as_tensor(attention_mask)
        rows = _masked(_from_tensor(prompts), mask, tuple(prompts.shape))
    else:
        rows = _from_lists(prompts, tokenizer)
        if attention_mask is not None:
            if len({len(row) for row in rows}) != 1:
                raise ValueError("attention_mask: rows of different lengths need none\n    fix: leave it out")
            rows = _masked(rows, torch.as_tensor(attention_mask), (len(rows), len(rows[0])))
    _check(rows, vocab_size, batch, max_len, max_new_tokens)
    if isinstance(prompts, Tensor):
        mask = torch.ones_like(prompts) if attention_mask is None else torch.as_tensor(attention_mask)
        return Prompts(rows, prompts.cpu(), mask.to("cpu", torch.int64))
    longest = max(map(len, rows))
    # Left padding, as transformers wants it for generation, so that new tokens follow the prompt in every row.
    ids = torch.tensor([[pad_token_id] * (longest - len(r)) + r for r in rows], device="cpu")
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device="cpu")
    return Prompts(rows, ids, mask)


def repeated(prompts: Prompts, times: int, batch: int) -> Prompts:
    """Each row so many times, next to each other, as transformers' num_return_sequences does."""
    rows = [row for row in prompts.rows for _ in range(times)]
    if len(rows) > batch:
        raise ValueError(
            f"generate(num_return_sequences={times}): {len(prompts.rows)} prompts make {len(rows)} rows, but the "
            f"program was built for batch={batch}\n    fix: batch={len(rows)}"
        )
    return Prompts(
        rows, prompts.input_ids.repeat_interleave(times, 0), prompts.attention_mask.repeat_interleave(times, 0)
    )


def cut(
    rows: list[list[int]], batch: int, chunk: int, most: int = 0
) -> Iterator[tuple[list[list[int]], list[list[int]], list[int]]]:
    """Rows in chunks, as many as the longest row or `most` tokens take, for each: tokens and positions, `batch` rows of
    `chunk`, padded with 0 and -1, and where in the chunk a row ends, -1 where it does not."""
    rows = rows + [[]] * (batch - len(rows))
    for start in range(0, max(most, *map(len, rows)), chunk):
        parts = [row[start : start + chunk] for row in rows]
        tokens = [part + [0] * (chunk - len(part)) for part in parts]
        positions = [[*range(start, start + len(part)), *[-1] * (chunk - len(part))] for part in parts]
        ends = [bool(part) and start + len(part) == len(row) for part, row in zip(parts, rows, strict=True)]
        yield tokens, positions, [len(part) - 1 if end else -1 for part, end in zip(parts, ends, strict=True)]


def lengths(rows: list[list[int]], most: int, device: torch.device) -> Tensor:
    """`most`, the tokens of each row, 0 where there is no row."""
    return torch.tensor([*map(len, rows), *[0] * (most - len(rows))], device=device)


def _from_lists(prompts: Any, tokenizer: Any) -> list[list[int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts: strings, lists of token ids or input_ids are needed, not {type(prompts).__name__}")
    if not prompts:
        raise ValueError("prompts: the batch is empty\n    fix: pass at least one prompt")
    if all(_is_integer(p) for p in prompts):
        prompts = [prompts]
    if all(isinstance(p, str) for p in prompts):
        if tokenizer is None:
            raise ValueError(
                "prompts: strings need a tokenizer, and this model has none\n    fix: pass lists of token ids"
            )
        return [list(tokenizer(p)["input_ids"]) for p in prompts]
    rows = []
    for i, prompt in enumerate(prompts):
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise TypeError(f"prompts[{i}]: a list of token ids is needed among others, not {type(prompt).__name__}")
        for j, token in enumerate(prompt):
            if isinstance(token, Mapping):
                raise TypeError(
                    f"prompts[{i}][{j}]: a message of a chat is no token id\n"
                    "    fix: model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
                )
            if not _is_integer(token):
                raise TypeError(f"prompts[{i}][{j}]: a token id is an integer, not {token!r}")
        rows.append([int(t) for t in prompt])
    return rows


def _from_tensor(input_ids: Tensor) -> list[list[int]]:
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        shape = tuple(input_ids.shape)
        raise ValueError(f"input_ids: integers of shape B S are needed, not {input_ids.dtype} of shape {shape}")
    return [[int(t) for t in row] for row in input_ids.tolist()]


def _masked(rows: list[list[int]], mask: Tensor | None, shape: tuple[int, ...]) -> list[list[int]]:
    """The tokens that a mask `B S` of ones and zeros keeps."""
    if mask is None:
        return rows
    if tuple(mask.shape) != shape:
        raise ValueError(f"attention_mask and input_ids have different shapes: {tuple(mask.shape)} and {shape}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask: zeros and ones are needed, 1 where a token is one")
    kept = []
    for i, (row, keep) in enumerate(zip(rows, mask.tolist(), strict=True)):
        places = [j for j, m in enumerate(keep) if m]
        if places and places[-1] - places[0] + 1 != len(places):
            raise ValueError(
                f"attention_mask[{i}]: zeros between ones; padding may stand on either side only\n"
                "    fix: pass attention_mask, where pad_token_id is a token like others"
            )
        kept.append([row[j] for j in places])
    return kept


def _check(rows: list[list[int]], vocab_size: int, batch: int, max_len: int, max_new_tokens: int) -> None:
    if not rows:
        raise ValueError("prompts: the batch is empty\n    fix: pass at least one prompt")
    if len(rows) > batch:
        raise ValueError(
            f"prompts: {len(rows)} rows, but the program was built for batch={batch}\n    fix: batch={len(rows)}"
        )
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{i}]: the prompt is empty\n    fix: pass at least one token")
        for j, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompts[{i}][{j}]: token id {token} is outside the vocabulary of {vocab_size}")
        if len(row) + max_new_tokens > max_len:
            new = f" and max_new_tokens={max_new_tokens}" if max_new_tokens else ""
            need = len(row) + max_new_tokens
            raise ValueError(f"prompts[{i}]: {len(row)} tokens{new} exceed max_len={max_len}\n    fix: max_len={need}")


def filler(asked: int | None, of_model: int | None, ends: Sequence[int] | None) -> int:
    """The token that fills a rectangle: the call's, the model's, or one that ends rows."""
    return next((p for p in (asked, of_model, *(ends or ())) if p is not None), 0)


def end_tokens(value: Any, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id`: one id, several or None, each once. Raises `TypeError` for what is none of these, `ValueError`
    for a token that no row could end with, and for more than a step has room for."""
    if value is None:
        return ()
    values = [value] if _is_integer(value) else value
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(_is_integer, values)):
        raise TypeError(f"eos_token_id: an integer or a list of them is needed, not {value!r}")
    found = tuple(dict.fromkeys(int(v) for v in values))
    if outside := [v for v in found if not 0 <= v < vocab_size]:
        raise ValueError(
            f"eos_token_id: token id {outside[0]} is outside the vocabulary of {vocab_size}, and would end no row\n"
            "    fix: eos_token_id=() for none"
        )
    if len(found) > EOS_LIMIT:
        raise ValueError(f"eos_token_id: {len(found)} tokens, at most {EOS_LIMIT}")
    return found


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return hasattr(value, "__index__") and getattr(value, "shape", ()) == () and not isinstance(value, bool)
