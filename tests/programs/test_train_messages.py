"""What a step of training refuses, before any work; and how it reads a batch."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.programs.train_batch import read_batch

from ..families import family

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return programs.load(family("llama", num_hidden_layers=1))


def read(**given):
    found = read_batch({"input_ids": IDS, **given}, CPU)
    positions = found["positions"]
    return found["targets"].tolist()[0], None if positions is None else positions.tolist()[0]


def test_targets_are_the_next_labels():
    """Within a document, between tokens that are there, and where labels or a mask say so."""
    assert read() == ([6, 7, 8, 9, 10, -100], None)
    assert read(labels=torch.tensor([[1, -100, 3, 4, 5, 6]])) == ([-100, 3, 4, 5, 6, -100], None)
    assert read(loss_mask=torch.tensor([[1, 0, 0, 1, 1, 0]]).bool())[0] == [-100, -100, 8, 9, -100, -100]
    mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert read(attention_mask=mask) == ([-100, -100, 8, 9, -100, -100], [-1, -1, 0, 1, 2, -1])
    documents = torch.tensor([[3, 3, 1, 1, 1, 1]])
    assert read(segment_ids=documents) == ([6, -100, 8, 9, 10, -100], [0, 1, 0, 1, 2, 3])
    both = read(segment_ids=documents, attention_mask=torch.tensor([[0, 1, 1, 1, 0, 0]]))
    assert both == ([-100, -100, 8, -100, -100, -100], [-1, 0, 0, 1, -1, -1])
    assert read(positions=torch.tensor([[0, 1, 2, 0, 1, -1]]))[0] == [6, 7, 8, 9, -100, -100]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([IDS], "batch: a mapping with input_ids is needed, not list"),
        ({"tokens": IDS}, "batch: input_ids is missing\n    it has: tokens"),
        ({"input_ids": IDS[0]}, r'batch\["input_ids"\]: B S is needed, not \(6,\)'),
        ({"input_ids": IDS.float()}, r'batch\["input_ids"\]: integers are needed, not torch.float32'),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r'batch\["labels"\]: B S = \(1, 6\) is needed, not \(1, 5\)'),
        (
            {"input_ids": IDS, "position_ids": IDS},
            r'batch\["position_ids"\]: not known by this name\n    fix: positions',
        ),
        ({"input_ids": IDS, "labels": IDS, "loss_mask": IDS}, "labels and loss_mask say the same"),
        (
            {"input_ids": IDS, "attn_mask": IDS},
            r'batch\["attn_mask"\]: the loss of the next token does not read it\n'
            r'    known: input_ids, .*\n    fix: did you mean "attention_mask"\?',
        ),
        ({"input_ids": IDS, "rewards": IDS}, r"fix: leave it out, or train_step\(..., loss\) with one that reads it"),
        ({"input_ids": IDS.to("meta")}, 'on meta, the parameters are on cpu\n    fix: .to\\("cpu"\\)'),
    ],
)
def test_batches_that_are_none(batch, message, model):
    step = programs.train_step(model.config, ADAM, compile=False)
    state = step.init(model.params)
    with pytest.raises((ValueError, TypeError), match=message):
        step(model.params, state, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": 3}, "what makes one of leaves is needed, not int\n    fix: functools.partial"),
        ({"optimizer": lambda leaves: leaves}, "it makes a list, and no torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss as often as it likes"),
        ({"optimizer": lambda leaves: ADAM(leaves[1:])}, "it leaves out .embed, of 12 leaves"),
        ({"microbatches": 0}, "microbatches"),
        ({"microbatches": 4}, r"train_step\(microbatches=4\): does not divide 1 rows\n    fix: microbatches=1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"dtype": torch.int8}, r"dtype=torch.int8\): layers cannot compute in it\n    known: float32"),
        (
            {"loss": lambda params, batch: 0},
            r"it is called as loss\(params, cfg, batch, forward\), and this cannot be: too many positional arguments",
        ),
        ({"loss": lambda *_: 3.0}, "it returned float; a sum over tokens is needed"),
        ({"loss": lambda *_: torch.zeros(())}, "it returned one without a gradient"),
        ({"loss": lambda params, *_: params.embed.sum(0)}, r"it returned a tensor of \(48,\)"),
        ({"loss": lambda params, *_: (params.embed.sum(), {"loss": params.embed.sum()})}, '"loss" is no scalar tensor'),
    ],
)
def test_arguments_that_are_refused_change_nothing(options, message, model):
    held = [leaf.detach().clone() for leaf in F.tree.leaves(model.params)]

    def run():
        step = programs.train_step(model.config, **{"optimizer": ADAM, "compile": False, **options})
        step(model.params, step.init(model.params), {"input_ids": IDS})

    with pytest.raises((ValueError, TypeError), match=message):
        run()
    assert all(map(torch.equal, held, F.tree.leaves(model.params)))


def test_parameters_and_states_of_others(model):
    step = programs.train_step(model.config, ADAM, compile=False)
    state = step.init(model.params)
    with pytest.raises(TypeError, match=r"a DecoderConfig is needed, not Model\n    fix: model.config"):
        programs.train_step(model, ADAM)
    with pytest.raises(F.TreeError, match=r"\.head"):
        step(dataclasses.replace(model.params, head=None), state, {"input_ids": IDS})
    still = F.tree.map(lambda leaf: leaf.detach(), model.params)
    with pytest.raises(ValueError, match=r"no leaf requires a gradient\n    fix: params = F.tree.map"):
        step.init(still)
    some = dataclasses.replace(still, embed=still.embed.requires_grad_())
    with pytest.raises(ValueError, match=r"opt_state is of other leaves than params: .head and 10 more"):
        step(some, state, {"input_ids": IDS})
    with pytest.raises(ValueError, match="opt_state is a dict of state and param_groups"):
        step(model.params, {}, {"input_ids": IDS})
    with pytest.raises(ValueError, match="a training step has no cache"):
        programs.train_step(model.config, ADAM, with_cache, compile=False)(model.params, state, {"input_ids": IDS})


def with_cache(params, cfg, batch, forward):
    cache = F.empty_caches([each.attention for each in cfg.layers], 1, 9, dtype=torch.float32)
    return forward(F.decoder, params, batch["input_ids"], cfg, positions=torch.arange(6)[None], cache=cache)[0].sum()
