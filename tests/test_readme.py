"""What the README shows is what happens; its snippet runs in programs/test_smollm2.py."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from meshfn import functional as F
from meshfn import programs

from .families import Letters, family

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_a_layer_of_your_own():
    code = snippet("F.Attention.init")
    found = {"torch": torch, "F": F}
    exec(code, found)
    assert isinstance(found["params"], F.Attention)


def snippet(word):
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in c)
    return code


def test_training():
    model = programs.load(family("llama"))
    program = programs.build(model, max_len=20, compile=False)
    before = program.score([[1, 2, 3]])[0]
    found = {"torch": torch, "F": F, "model": model, "program": program, "ids": torch.tensor([[1, 2, 3]] * 4)}
    exec(snippet("next_token_loss"), found)
    assert program.score([[1, 2, 3]])[0].sum() > before.sum()
    torch.testing.assert_close(found["value"], -before.mean(), rtol=1e-4, atol=1e-4)


def test_checkpoints(tmp_path):
    family("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    code = snippet("like=").replace("HuggingFaceTB/SmolLM2-135M", str(tmp_path))
    params = programs.load(tmp_path, dtype=torch.bfloat16).params
    exec(code, {"torch": torch, "dataclasses": dataclasses, "programs": programs, "folder": tmp_path, "params": params})
    assert programs.load(tmp_path).dtype == torch.bfloat16


def test_sampling():
    model = dataclasses.replace(programs.load(family("llama")), tokenizer=Letters())
    program = programs.build(model, batch=4, max_len=50, compile=False)
    code = "generation = " + snippet("num_return_sequences").strip()
    found = {"program": program, "prompts": [[1, 2, 3]]}
    exec(code, found)
    generation = found["generation"]
    assert len({tuple(row) for row in generation.tokens}) == 4
    again = program.generate([[1, 2, 3]], do_sample=True, temperature=0.8, top_p=0.95, seed=[generation.seeds[2]])
    assert again.tokens == [generation.tokens[2]]


def test_the_error_is_as_shown():
    q, k = torch.ones(2, 5, 9, 64), torch.ones(2, 5, 3, 32)
    with pytest.raises(F.ShapeError) as error:
        F.dot_product_attention(q, k, k)
    assert f"ShapeError: {error.value}\n" in README


def test_sharding(capsys):
    code = snippet("sh.simulate")
    exec(code, {})
    printed = capsys.readouterr().out
    shown = README.split(code)[1].split("```\n")[2]
    assert printed == shown
