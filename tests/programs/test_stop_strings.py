"""Stop strings, by hand and against transformers' criterion, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.programs.load import _packaged_file, _tokenizer_of
from meshfn.programs.sampling import StopStrings
from transformers import StopStringCriteria


def message(fn, *args, **given):
    with pytest.raises((ValueError, TypeError)) as error:
        fn(*args, **given)
    return f"{type(error.value).__name__}: {error.value}"


def test_messages_of_stop_strings():
    found = [
        message(StopStrings, "a", None),
        message(StopStrings, 3, object()),
        message(StopStrings, [], object()),
        message(StopStrings, "", object()),
        message(StopStrings, ["a", ""], object()),
        message(StopStrings, ["a", 5], object()),
        message(StopStrings, "\ufffd", object()),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
ValueError: generate(stop_strings=...): text needs a tokenizer, and this model has none
    fix: eos_token_id=[...] for single tokens

TypeError: generate(stop_strings=3): a string or a list of strings is needed, not int

ValueError: generate(stop_strings=...): the list is empty
    fix: leave it out

ValueError: generate(stop_strings=...): an empty string would end every row at once
    fix: leave it out

ValueError: generate(stop_strings[1]): an empty string would end every row at once
    fix: leave it out

TypeError: generate(stop_strings[1]): a string is needed, not 5

ValueError: generate(stop_strings=...): U+FFFD stands for bytes that are no text, and would match half a character
    fix: the text before it""",
    )


def test_no_stop_strings_need_no_tokenizer():
    stop = StopStrings(None, None)
    assert not stop
    assert stop.ends([1], [2, 3], 0) is None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    path = _packaged_file("smollm2-135m")
    assert path is not None
    return _tokenizer_of(path)


def pieces(tokenizer: Any, *texts: str) -> list[int]:
    """One token a text."""
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert all(len(each) == 1 for each in ids), ids
    return [each[0] for each in ids]


def test_stop_strings_by_hand(tokenizer):
    st, op, stop, opens, s, to, space_stop = pieces(tokenizer, "st", "op", "stop", "open", "s", "to", " stop")
    ends = StopStrings("stop", tokenizer).ends
    assert ends([s], [st, op, s], 0) == 2
    assert ends([s], [s, stop], 0) == 2
    assert ends([s], [to, opens, st, opens], 0) == 4, "it may end within a token"
    assert ends([s], [space_stop], 0) == 1, "and begin within one"
    assert ends([s, st], [op], 0) == 1, "it may begin in the prompt"
    assert ends([stop], [s, s], 0) is None, "one in the prompt is no end"
    assert ends([stop], [op], 0) is None
    assert ends([stop], [stop, s], 0) == 1
    assert ends([s], [stop, s, s, stop, s], 1) == 4, "the first `start` tokens are known"
    assert ends([s], [stop, s], 1) is None
    assert ends([s], [st, op], 1) == 2
    assert ends([s], [], 0) is None
    assert StopStrings(["op", "zzz", "st"], tokenizer).ends([s], [s, st, op], 0) == 2
    assert StopStrings("stop" * 30, tokenizer).ends([stop] * 20, [stop] * 20, 0) == 10


def test_stop_strings_of_characters_in_several_tokens(tokenizer):
    text = "日🙂é"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 4
    s = pieces(tokenizer, "s")
    for cut in range(len(ids)):
        prompt, new = s + ids[:cut], ids[cut:]
        assert StopStrings("日🙂é", tokenizer).ends(prompt, new + s, 0) == len(new)
    whole = [tokenizer.decode(ids[: n + 1]).count("\ufffd") == 0 for n in range(len(ids))]
    first = whole.index(True) + 1
    long = ids * 5
    assert StopStrings(text * 5, tokenizer).ends(s * 50 + long[:-1], long[-1:], 0) == 1
    assert StopStrings("日", tokenizer).ends(s, ids, 0) == first
    assert StopStrings("日", tokenizer).ends(s + ids[:first], ids[first:], 0) is None
    assert StopStrings("日", tokenizer).ends(s + ids[: first - 1], ids[first - 1 :], 0) == 1, (
        "half of it is the prompt's"
    )


def reference(criterion: Any, prompt: list[int], new: list[int], start: int) -> int | None:
    for n in range(start + 1, len(new) + 1):
        if bool(criterion(torch.tensor([prompt + new[:n]]), None)):
            return n
    return None


def test_stop_strings_equal_transformers(tokenizer):
    """Random sequences of tokens that are parts of the strings, of bytes, and of anything."""
    strings = ["stop", "\n\n", "ana", " the end", "日本", "é!", "<|im_end|>", "🙂"]
    parts = [
        tokenizer(text[i:j])["input_ids"]
        for text in strings
        for i in range(len(text))
        for j in range(i + 1, len(text) + 1)
    ]
    parts += [[tokenizer.convert_tokens_to_ids(t)] for t in (*"ĥĹ¥Ã©æðŁĻĤ", "ĠæĹ")]
    choice = random.Random(0)
    vocabulary = sorted({t for ids in parts for t in ids if t is not None})
    found = []
    for names in (strings, strings[2:3], strings[4:6]):
        criterion, ours = StopStringCriteria(tokenizer, names), StopStrings(names, tokenizer)
        for _ in range(150):
            row = [choice.choice(vocabulary) if choice.random() < 0.9 else choice.randrange(49152) for _ in range(24)]
            at, start = choice.randrange(1, 12), choice.randrange(4)
            expected = reference(criterion, row[:at], row[at:], start)
            assert ours.ends(row[:at], row[at:], start) == expected, (names, row, at, start)
            found.append(expected)
    assert min(found.count(None), len(found) - found.count(None)) > 60


def test_stop_strings_check_by_check_and_far_on(tokenizer):
    """As a program asks, 16 tokens at a time, after a long text: each check decodes a window, not all there is."""
    s, stop = pieces(tokenizer, "s", "stop")
    row = tokenizer("日本 is far, a café is near. " * 60)["input_ids"]
    new = row + [stop] + row

    decoded = []

    class Counting:
        def decode(self, ids, **given):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **given)

    ours = StopStrings(["stop", "never this"], Counting())
    ends = [ours.ends(row, new[:at], max(0, at - 16)) for at in range(16, len(new) + 16, 16)]
    assert [n for n in ends if n is not None] == [len(row) + 1]
    assert ours.ends(row, new, 0) == len(row) + 1
    assert max(decoded) < 150
    assert len(decoded) < 3 * len(new)
    assert ours.ends([s] * 5000, [stop], 0) == 1


class Metaspace:
    """A decoder as SentencePiece's: it strips the first space, and bytes that are no text yet are U+FFFD each."""

    vocabulary = ("▁a", "▁b", "c", *(bytes([b]) for b in "é€".encode()))

    def decode(self, ids, **given):
        out, run = "", b""
        for token in [*(self.vocabulary[i] for i in ids), ""]:
            if isinstance(token, bytes):
                run += token
                continue
            try:
                out += run.decode()
            except UnicodeDecodeError:
                out += "\ufffd" * len(run)
            out, run = out + token.replace("▁", " "), b""
        return out.removeprefix(" ")


def test_stop_strings_under_a_decoder_that_looks_around():
    a, b, c, *parts = range(8)
    stop = StopStrings([" b", "é", "€"], Metaspace())
    assert stop.ends([a] * 50, [c, c, b], 0) == 3
    assert stop.ends([a] * 50, [b], 0) == 1
    assert stop.ends([b], [c], 0) is None
    assert stop.ends([a], [c, *parts], 0) == 3
    assert stop.ends([a], [c, *parts], 3) == 6
    # With a part of the next character this decoder takes the one before it back, until the rest has come.
    alone = StopStrings("é", Metaspace())
    assert alone.ends([a], [c, *parts], 3) is None
    assert alone.ends([a, *parts[:4]], parts[4:], 0) is None
    assert stop.ends([a, *parts[:3]], [parts[3], c], 0) is None
