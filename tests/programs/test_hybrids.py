"""Checkpoints of models with gated delta nets: what is left out of them, and which of their layers make a model."""

from __future__ import annotations

import json

import pytest
import torch
from meshfn import programs
from safetensors.torch import load_file, save_file

from ..families import family
from .test_load import same


def with_others(folder, *names, rename=lambda name: name):
    """More tensors in a checkpoint, as published ones have them."""
    file = folder / "model.safetensors"
    tensors = {rename(name): x for name, x in load_file(file).items()}
    save_file(tensors | {name: torch.ones(2) for name in names}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_what_predicts_further_tokens_is_left_out_and_not_lost(name, tmp_path):
    family(name).save_pretrained(tmp_path)
    plain = programs.load(tmp_path)
    with_others(tmp_path, "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
    model = programs.load(tmp_path)
    assert same(model.params, plain.params)
    with pytest.raises(ValueError, match=r"has 2 tensors that were not read and would be lost, such as mtp\.fc"):
        programs.save(model, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_that_sees_is_read_as_its_language_model(name, tmp_path):
    """As published: its config within another, its tensors beside those of two other parts, each counted once."""
    module = family(name)
    module.save_pretrained(tmp_path)
    plain = programs.load(tmp_path)
    config = tmp_path / "config.json"
    whole = {"model_type": name, "text_config": json.loads(config.read_text()), "tie_word_embeddings": False}
    config.write_text(json.dumps(whole))
    others = ("mtp.fc.weight", "model.visual.patch_embed.proj.bias")
    with_others(tmp_path, *others, rename=lambda name: name.replace("model.", "model.language_model."))
    model = programs.load(tmp_path)
    assert same(model.params, plain.params)
    with pytest.raises(ValueError, match=r"has 2 tensors that were not read and would be lost"):
        programs.save(model, tmp_path)


def test_layers_that_transformers_takes_for_no_model_are_not_saved(tmp_path):
    """Olmo Hybrid needs one layer of each kind; nothing is written that nobody could load."""
    family("olmo_hybrid").save_pretrained(tmp_path / "whole")
    part = programs.load(tmp_path / "whole", layers=[0])
    with pytest.raises(
        ValueError, match=r"(?s)save: transformers' OlmoHybridConfig refuses .* at least one attention.*fix"
    ):
        programs.save(part, tmp_path / "part")
    assert not (tmp_path / "part").exists()
