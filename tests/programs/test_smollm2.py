"""The real model: tokens of transformers, text, and the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs.cli import main
from meshfn.programs.load import _packaged_file

PROMPTS = ["The capital of France is", "Once upon a time, there was a little", "def fibonacci(n):\n    "]


class Real(NamedTuple):
    module: Any
    model: programs.Model


@pytest.fixture(scope="session")
def real() -> Real:
    from transformers import AutoModelForCausalLM

    path = _packaged_file("smollm2-135m")
    assert path is not None
    module = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    return Real(module, programs.load("smollm2-135m"))


def test_weights_are_those_that_transformers_reads(real):
    theirs = programs.load(real.module)
    assert theirs.config == real.model.config
    for (path, a), b in zip(F.tree.paths(real.model.params).items(), F.tree.leaves(theirs.params), strict=True):
        assert torch.equal(a, b), path


def test_64_greedy_tokens_of_transformers_compiled(real):
    program = programs.build(real.model, batch=3, max_len=128, chunk=32)
    got = program.generate(PROMPTS, max_new_tokens=64, eos_token_id=())
    rows = [real.model.tokenizer(p)["input_ids"] for p in PROMPTS]
    longest = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[2] * (longest - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows]),
    }
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    expected = real.module.generate(**inputs, **options)
    assert got.sequences.tolist() == expected.tolist()
    assert got.text is not None
    assert got.text[0].startswith(" Paris.")
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)


def test_command_line_streams_text(capsys):
    arguments = ["generate", "--model", "smollm2-135m", "--max-new-tokens", "4", "--no-compile"]
    assert main([*arguments, "--prompt", "The capital of France is"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The capital of France is Paris.")
    assert "decode 3 steps, 4 tokens kept" in err


@pytest.mark.parametrize("options", [[], ["--do-sample", "--seed", "3", "--top-p", "0.9"]])
def test_command_line_answers(real, capsys, monkeypatch, options):
    monkeypatch.setattr(programs, "load", lambda name, **given: real.model)  # loading it again costs ten seconds
    arguments = ["generate", "--model", "smollm2-135m", "--max-new-tokens", "6", "--no-compile", "--chat", *options]
    assert main([*arguments, "--prompt", "What is the capital of France?"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The capital of France is")
    assert ("seed 3" in err) == bool(options)


def test_the_readme_s_snippet_prints_what_it_says(real, capsys, monkeypatch):
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n```\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    code, output = found.groups()
    # Loading and compiling the same model again would cost half a minute.
    monkeypatch.setattr(programs, "load", {"smollm2-135m": real.model}.get)
    exec(code.replace("max_len=256)", "max_len=256, compile=False)"), {})
    assert capsys.readouterr().out == output
