"""Every family as a program: rings, ragged rows, chunks, positions beyond the original context, saved and read again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from transformers import AutoModelForCausalLM

from ..families import FAMILIES, family

# Longer than a chunk of 8, than every window and than every original context; then shorter than some of them.
LENGTHS = (21, 9, 3)
NEW = 12


def expected(module, row, **options):
    """transformers' own tokens. A copy: its dynamic rope remembers the longest row it has seen."""
    out = copy.deepcopy(module).generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False, **options)
    return out[0, len(row) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_rows_in_chunks_generate_as_transformers(name):
    module = family(name)
    model = programs.load(module)
    rows = [torch.randint(1, 97, (n,)).tolist() for n in LENGTHS]
    program = programs.build(model, batch=3, max_len=40, chunk=8, compile=False)
    for leaf in F.tree.leaves(program.cache):
        leaf.fill_(torch.nan)
    found = program.generate(rows, max_new_tokens=NEW)
    # Where longrope's angles change for a whole row, not every version of transformers gives up its cache.
    options = {"use_cache": False} if name == "phi3-long" else {}
    assert found.tokens == [expected(module, row, **options) for row in rows]
    # Again over a cache that is full of the last call, the rows in other places.
    assert program.generate(rows[::-1], max_new_tokens=NEW).tokens == found.tokens[::-1]
    stacks = zip(model.config.layers, program.cache, strict=True)
    kept = [(each.attention, cache) for each, cache in stacks if not isinstance(cache, F.GDNCache)]
    windows = [attention.window for attention, _ in kept]
    slots = [F.tree.leaves(cache)[0].shape[1] for _, cache in kept]
    assert slots == [65 if w is None else w + 1 for w in windows]


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_transformers(name):
    module = family(name)
    rows = [torch.randint(1, 97, (n,)).tolist() for n in LENGTHS]
    program = programs.build(programs.load(module), batch=3, max_len=40, chunk=8, compile=False)
    for row, found in zip(rows, program.score(rows), strict=True):
        logprobs = copy.deepcopy(module)(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(
            found, logprobs.gather(-1, torch.tensor(row[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_as_near_as_transformers(name, dtype):
    """At most 1.5 times the error of transformers' own run in half precision, against double. With experts, of half of
    the tokens: where rounding tips a choice between two of them, an error says nothing."""
    module = family(name)
    tokens = torch.randint(1, 97, (4, 19))
    exact = copy.deepcopy(module).double()(tokens).logits
    half = module.to(dtype)
    model = programs.load(half)
    sparse = any(isinstance(each.mlp, F.MoEConfig) for each in model.config.layers)

    def error(logits):
        each = (logits.double() - exact).norm(dim=-1)
        return each.median() if sparse else each.norm()

    with torch.no_grad():
        assert error(F.decoder(model.params, tokens, model.config)[0]) <= 1.5 * error(half(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_bitwise(name, tmp_path):
    """transformers' folder, read by us, written by us, read by transformers and by us again."""
    module = family(name)
    module.generation_config.eos_token_id = [5, 7]
    module.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    model = programs.load(tmp_path / "theirs")
    assert model.eos_token_id == (5, 7)
    programs.save(model, tmp_path / "ours", max_shard_size="30kB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tensors = module.state_dict()
    assert list(tensors) == list(again.state_dict())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    assert again.generation_config.eos_token_id == [5, 7]
    theirs, config = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("theirs", "ours"))
    assert {k: config.get(k) for k in theirs} == theirs | {"eos_token_id": [5, 7]}
    reread = programs.load(tmp_path / "ours")
    assert reread.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(F.tree.leaves(model.params), F.tree.leaves(reread.params), strict=True)
    )
    tokens = torch.randint(1, 97, (1, 9))
    mine = F.decoder(reread.params, tokens, reread.config)[0]
    torch.testing.assert_close(mine, module(tokens).logits, rtol=1e-4, atol=1e-4)
