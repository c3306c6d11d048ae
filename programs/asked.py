"""What a call of `generate` asks for, read and checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

from ..functional.shapes import check_positive
from .generate import Streamer, check_streamer
from .model import Model
from .prompts import Prompts, end_tokens, repeated
from .sampling import StopStrings, check_options

__all__ = ["Asked", "read_asked"]

# What `generate` takes beside the options of sampling.
_ARGUMENTS = (
    *("prompts", "input_ids", "attention_mask", "max_new_tokens", "eos_token_id", "pad_token_id"),
    *("stop_strings", "num_return_sequences", "return_logprobs", "streamer"),
)


@dataclass(frozen=True)
class Asked:
    """read: the prompts, a row for each sequence to return. ends, texts: tokens and text that end a row. pad_token_id:
    as it was given. options: of sampling. The others as `generate` takes them."""

    read: Prompts
    max_new_tokens: int
    ends: tuple[int, ...]
    pad_token_id: int | None
    texts: StopStrings
    return_logprobs: bool
    streamer: Streamer | None
    options: Mapping[str, Any]


def read_asked(
    model: Model,
    rows: int,
    read: Callable[..., Prompts],
    *,
    prompts: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    stop_strings: str | Sequence[str] | None,
    num_return_sequences: int,
    return_logprobs: bool,
    streamer: Streamer | None,
    options: Mapping[str, Any],
) -> Asked:
    """rows: at most, of a program. read: from prompts to rows of tokens. The others: those of `Program.generate`, which
    says what they mean and what is raised."""
    if (prompts is None) == (input_ids is None):
        raise ValueError("generate: pass prompts, or input_ids")
    check_positive("generate", max_new_tokens=max_new_tokens, num_return_sequences=num_return_sequences)
    check_options(options, _ARGUMENTS)
    check_streamer(streamer)
    vocab = model.config.vocab_size
    if pad_token_id is not None and (not isinstance(pad_token_id, Integral) or not 0 <= pad_token_id < vocab):
        raise ValueError(f"generate(pad_token_id={pad_token_id!r}): a token id below {vocab} is needed")
    ends = model.eos_token_id if eos_token_id is None else end_tokens(eos_token_id, vocab)
    texts = StopStrings(stop_strings, model.tokenizer)
    found = read(input_ids if prompts is None else prompts, attention_mask, max_new_tokens, pad_token_id, ends)
    found = repeated(found, num_return_sequences, rows)
    if streamer is not None and len(found.rows) > 1:
        raise ValueError(f"generate(streamer=...): one row at a time, not {len(found.rows)}")
    if num_return_sequences > 1 and not options.get("do_sample"):
        raise ValueError(
            f"generate(num_return_sequences={num_return_sequences}): the most likely tokens are always the same\n"
            "    fix: do_sample=True"
        )
    return Asked(found, max_new_tokens, ends, pad_token_id, texts, return_logprobs, streamer, options)
