"""How a user asks for tokens that are drawn, penalized or stopped: transformers' names, checked before any work."""

from __future__ import annotations

import difflib
import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..functional.sampling import Controls, fold_seed

__all__ = [
    "SamplingOptions",
    "StopStrings",
    "check_options",
    "prompt_counts",
    "read_controls",
    "row_seeds",
]

# What a decoder puts in place of bytes that are no text, or not yet.
UNDECODED = "\ufffd"
# How many tokens at a window's start may decode otherwise than in the whole: parts of a character, a leading space.
EDGE = 4


class SamplingOptions(TypedDict, total=False):
    """How `generate` chooses tokens; see `read_controls`."""

    do_sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | Sequence[int] | None


# What transformers' generate has under another name, or not for us to say.
_ELSEWHERE = {
    "max_length": "max_new_tokens=..., without the prompt",
    "generator": "seed=...",
    "generation_config": "**model.sampling, and options after it",
    "tokenizer": "leave it out, the model has its own",
    "output_scores": "return_logprobs=True",
    "return_dict_in_generate": "leave it out, a Generation is what is returned",
}


def check_options(options: Mapping[str, Any], others: Sequence[str]) -> None:
    """Raise `TypeError` for a name that is none of `SamplingOptions`. others: what `generate` takes beside them."""
    known = [*others, *SamplingOptions.__annotations__]
    for name in options:
        if name not in SamplingOptions.__annotations__:
            near = difflib.get_close_matches(name, known, 1)
            fix = _ELSEWHERE.get(name) or (f"{near[0]}=..." if near else None)
            said = f"\n    fix: {fix}" if fix else ""
            raise TypeError(f"generate: {name} unknown\n    known: {', '.join(known)}{said}")


def read_controls(
    *,
    rows: int,
    vocab_size: int,
    device: torch.device | str,
    batch: int,
    do_sample: Any = False,
    temperature: Any = 1.0,
    top_k: Any = 50,
    top_p: Any = 1.0,
    min_p: Any = None,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    seed: Any = None,
) -> tuple[Controls, list[int]]:
    """Options with the names, meanings and ranges of transformers' generate -> controls of `batch` rows, those after
    the first `rows` off, and the seeds of the first.

    presence_penalty, frequency_penalty: OpenAI's, over prompt and generated tokens. None switches an option off.
    seed: one integer for all, from which each row takes its own; a list, a row each; None for a fresh one. With
    `seed=[seeds[i]]` row i alone is drawn again.
    Raises `ValueError` or `TypeError`, naming the option.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if not isinstance(do_sample, bool):
        raise TypeError(f"generate(do_sample={do_sample!r}): True or False is needed, not {type(do_sample).__name__}")
    cold = "do_sample=False for the most likely tokens" if do_sample else "leave it out, do_sample=False needs none"
    values = {
        "temperature": _number("temperature", temperature, 1.0, above=0.0, fix=cold),
        "top_p": _number("top_p", top_p, 1.0, least=0.0, most=1.0),
        "min_p": _number("min_p", min_p, 0.0, least=0.0, most=1.0),
        "repetition_penalty": _number("repetition_penalty", repetition_penalty, 1.0, above=0.0),
        "presence_penalty": _number("presence_penalty", presence_penalty, 0.0),
        "frequency_penalty": _number("frequency_penalty", frequency_penalty, 0.0),
        "top_k": min(_top_k(top_k) or vocab_size, vocab_size),
        "do_sample": do_sample,
    }
    seeds = row_seeds(seed, rows)
    if not do_sample:
        if seed is not None:
            raise ValueError(f"generate(seed={seed!r}): no token is drawn\n    fix: do_sample=True, or leave it out")
        # As transformers' defaults have them they may be passed all the same.
        idle = {"temperature": (1.0,), "top_p": (1.0,), "min_p": (0.0,), "top_k": (min(50, vocab_size), vocab_size)}
        for name, silent in idle.items():
            if values[name] not in silent:
                raise ValueError(
                    f"generate({name}={given[name]!r}): it changes nothing where no token is drawn\n"
                    "    fix: do_sample=True, or leave it out"
                )
    off = Controls.off(batch, vocab_size, device)
    new = {}
    for name, value in [*((name, [value] * rows) for name, value in values.items()), ("seed", seeds)]:
        old = getattr(off, name)
        new[name] = torch.cat((torch.tensor(value, dtype=old.dtype, device=old.device), old[rows:]))
    return Controls(**new), seeds


def prompt_counts(rows: Sequence[Sequence[int]], batch: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """-> `B Z`, int32, how often each token stands in each row; zeros in the rows that `batch` has more."""
    counts = torch.zeros(batch, vocab_size, dtype=torch.int32, device="cpu")
    for count, row in zip(counts, rows, strict=False):
        count += torch.bincount(torch.tensor(row, dtype=torch.int64, device="cpu"), minlength=vocab_size)
    return counts.to(device)


class StopStrings:
    """Text that ends a row: with the token that completes one of the strings, as transformers' StopStringCriteria."""

    def __init__(self, stop_strings: str | Sequence[str] | None, tokenizer: Any) -> None:
        self.strings = _stop_strings(stop_strings)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.strings), default=0)
        if self.strings and tokenizer is None:
            raise ValueError(
                "generate(stop_strings=...): text needs a tokenizer, and this model has none\n"
                "    fix: eos_token_id=[...] for single tokens"
            )

    def __bool__(self) -> bool:
        return bool(self.strings)

    def ends(self, prompt: Sequence[int], new: Sequence[int], start: int) -> int | None:
        """How many of the new tokens a row keeps, where the first `start` of them are known to end nothing: the least n
        above it with which a string is complete, its end in the text of the new tokens. None where there is none."""
        if not self.strings:
            return None
        ids, first = [*prompt, *new], len(prompt) + start
        low, settled = self._window(ids, first)
        for end in range(first + 1, len(ids) + 1):
            text = self._text(ids[low:end])
            if any(text.find(s, max(0, settled - len(s) + 1)) >= 0 for s in self.strings):
                return end - len(prompt)
            settled = max(settled, len(text.rstrip(UNDECODED)))
            # Decoding what the window has grown to must not cost more and more.
            if end - first > 2 * (first - low) + 64:
                first = end
                low, settled = self._window(ids, first)
        return None

    def _window(self, ids: list[int], end: int) -> tuple[int, int]:
        """Where to begin to decode, so that any string that ends after token `end` is seen whole, and how many
        characters from there the tokens before `end` have settled: those of a character begun are not."""
        width = self._longest + EDGE
        while width < end:
            edge = ids[end - width : end - width + EDGE]
            if len(self._text(ids[end - width : end])) - len(self._text(edge)) >= self._longest:
                break
            width *= 2
        low = max(0, end - width)
        # The last few ends, for a decoder that takes back a character when part of another follows.
        ends = range(max(low, end - EDGE + 1), end + 1)
        return low, max(len(self._text(ids[low:at]).rstrip(UNDECODED)) for at in ends)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _number(
    name: str,
    value: Any,
    off: float,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    fix: str | None = None,
) -> float:
    """A finite number in its range, and not so large or small that fp32 would lose the scores."""
    if value is None:
        return off
    told = f"generate({name}={value!r})"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{told}: a number is needed, not {type(value).__name__}\n    fix: {name}={off}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    fault = None
    if not math.isfinite(number):
        fault = "must be finite"
    elif above is not None and number <= above:
        fault = f"must be above {above:g}"
    elif least is not None and most is not None:
        if not least <= number <= most:
            fault = f"must be between {least:g} and {most:g}"
    elif number and not 1e-30 <= abs(number) <= 1e30:
        fault = "is so extreme that scores in fp32 would overflow; 1e-30 to 1e30 is enough"
    if fault is not None:
        raise ValueError(f"{told}: {fault}\n    fix: {fix or f'{name}={off}, or None, to switch it off'}")
    return number


def _top_k(value: Any) -> int:
    if value is None:
        return 0
    fix = "    fix: top_k=0, or None, to switch it off"
    if isinstance(value, float) and value.is_integer():
        fix = f"    fix: top_k={int(value)}"
    if not _is_integer(value):
        raise TypeError(f"generate(top_k={value!r}): an integer is needed, not {type(value).__name__}\n{fix}")
    if int(value) < 0:
        raise ValueError(f"generate(top_k={value!r}): must not be negative\n{fix}")
    return int(value)


def row_seeds(value: Any, rows: int) -> list[int]:
    """The seed of each row: see `read_controls`."""
    if value is None:
        value = secrets.randbits(63)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if _is_integer(value):
        return [fold_seed(_seed("seed", value), i) for i in range(rows)]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"generate(seed={value!r}): an integer, or a list of them, one a row, is needed, "
            f"not {type(value).__name__}\n    fix: seed=0"
        )
    if len(value) != rows:
        raise ValueError(
            f"generate(seed=[...]): {len(value)} seeds for {rows} rows\n    fix: one a row, or a single integer for all"
        )
    return [_seed(f"seed[{i}]", each) for i, each in enumerate(value)]


def _seed(name: str, value: Any) -> int:
    if not _is_integer(value):
        raise TypeError(f"generate({name}={value!r}): an integer is needed, not {type(value).__name__}")
    if not 0 <= int(value) < 2**63:
        raise ValueError(
            f"generate({name}={value!r}): must be in [0, 2**63)\n    fix: {name} % 2**63, {int(value) % 2**63}"
        )
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, Sequence):
        raise TypeError(
            f"generate(stop_strings={value!r}): a string or a list of strings is needed, not {type(value).__name__}"
        )
    if not strings:
        raise ValueError("generate(stop_strings=...): the list is empty\n    fix: leave it out")
    for i, string in enumerate(strings):
        told = "generate(stop_strings=...)" if isinstance(value, str) else f"generate(stop_strings[{i}])"
        if not isinstance(string, str):
            raise TypeError(f"{told}: a string is needed, not {string!r}")
        if not string:
            raise ValueError(f"{told}: an empty string would end every row at once\n    fix: leave it out")
        if UNDECODED in string:
            raise ValueError(
                f"{told}: U+FFFD stands for bytes that are no text, and would match half a character\n"
                "    fix: the text before it"
            )
    return tuple(dict.fromkeys(strings))


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
