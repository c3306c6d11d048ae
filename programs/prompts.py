"""What a user may pass as prompts, made into rows of token ids; every fault is found here, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Prompts", "read_prompts"]


@dataclass(frozen=True)
class Prompts:
    """rows: token ids, one list a row. input_ids, attention_mask: `B S`, the rectangle they stand in."""

    rows: list[list[int]]
    input_ids: Tensor
    attention_mask: Tensor


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
) -> Prompts:
    """prompts: a string, a list of strings, a list of token ids or of lists of them, `input_ids` `B S`, or what a
    tokenizer returns. attention_mask: `B S`, 1 where a token is one; zeros may stand on either side.

    Raises `ValueError` (`TypeError` for what is none of these), naming the row and the numbers.
    """
    if isinstance(prompts, Mapping) or hasattr(prompts, "input_ids"):
        attention_mask = prompts.get("attention_mask", attention_mask)
        prompts = prompts["input_ids"]
    if isinstance(prompts, Tensor):
        rows = _from_tensor(prompts, attention_mask)
    elif attention_mask is not None:
        raise ValueError("attention_mask goes with input_ids as a tensor B S; lists of tokens need none")
    else:
        rows = _from_lists(prompts, tokenizer)
    _check(rows, vocab_size, batch, max_len, max_new_tokens)
    if isinstance(prompts, Tensor):
        mask = torch.ones_like(prompts) if attention_mask is None else attention_mask
        return Prompts(rows, prompts.cpu(), mask.to("cpu", torch.int64))
    longest = max(map(len, rows))
    # Left padding, as transformers wants it for generation, so that new tokens follow the prompt in every row.
    ids = torch.tensor([[pad_token_id] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    return Prompts(rows, ids, mask)


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
        if isinstance(prompt, Tensor) and prompt.dim() == 1:
            prompt = prompt.tolist()
        if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not all(_is_integer(t) for t in prompt):
            raise TypeError(f"prompts[{i}]: a list of token ids is needed among others, not {type(prompt).__name__}")
        rows.append([int(t) for t in prompt])
    return rows


def _from_tensor(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        shape = tuple(input_ids.shape)
        raise ValueError(f"input_ids: integers of shape B S are needed, not {input_ids.dtype} of shape {shape}")
    if attention_mask is None:
        return [[int(t) for t in row] for row in input_ids.tolist()]
    if attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask and input_ids have different shapes: {shapes}")
    rows = []
    for i, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
        kept = [j for j, m in enumerate(mask) if m]
        if kept and kept[-1] - kept[0] + 1 != len(kept):
            raise ValueError(f"attention_mask[{i}]: zeros between ones; padding may stand on either side only")
        rows.append([int(ids[j]) for j in kept])
    return rows


def _check(rows: list[list[int]], vocab_size: int, batch: int, max_len: int, max_new_tokens: int) -> None:
    if not rows:
        raise ValueError("prompts: the batch is empty\n    fix: pass at least one prompt")
    if len(rows) > batch:
        raise ValueError(f"prompts: {len(rows)} rows, but the program was built for batch={batch}")
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{i}]: the prompt is empty\n    fix: pass at least one token")
        for j, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompts[{i}][{j}]: token id {token} is outside the vocabulary of {vocab_size}")
        if len(row) + max_new_tokens > max_len:
            new = f" and max_new_tokens={max_new_tokens}" if max_new_tokens else ""
            need = len(row) + max_new_tokens
            raise ValueError(
                f"prompts[{i}]: {len(row)} tokens{new} exceed max_len={max_len}\n    fix: build(max_len={need})"
            )


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_floating_point()
    return hasattr(value, "__index__") and not isinstance(value, bool)
