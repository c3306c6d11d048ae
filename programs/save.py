"""Write a model as a checkpoint that transformers loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..functional import Decoder, tree
from .checkpoint import Checkpoint
from .families import Family, find_wrapper
from .hf_config import architecture, normalized
from .model import Model, check_model
from .pieces import pieces
from .write import write_checkpoint

__all__ = ["save"]


def save(model: Model, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write config.json, the weights (safetensors, in files of `max_shard_size` at most), and where the model has them
    generation_config.json and the tokenizer. What `load` and transformers read from there is the same to the bit.

    Trained parameters are saved by `save(dataclasses.replace(model, params=params), folder)`. An existing checkpoint is
    replaced at once when the new one is complete; interrupted before that, it stays whole. Other files in the folder
    stay too. Raises `ValueError` and `TreeError` before anything is written.
    """
    check_model("save", model)
    if model.device.type == "meta":
        raise ValueError("save: the model has no weights, it was loaded with abstract=True\n    fix: load it without")
    if model.family is None:
        raise ValueError("save: the model came from no checkpoint, so no family says how to write it")
    _check_config(model, model.family)
    _check_loss(model.family, Path(folder).expanduser())
    tree.check(model.params, Decoder.abstract(model.config), what="model.params")
    leaves = tree.paths(model.params)
    tensors: dict[str, Callable[[], Tensor]] = {}
    for each in pieces(model.family, model.params).values():
        held = [leaves[path] for path in each[0].held.paths]
        tensors |= {piece.name: partial(piece.part, held) for piece in each}
    write_checkpoint(
        Path(folder).expanduser(),
        tensors,
        config=_config(model, model.family),
        generation=dict(model.generation) or None,
        tokenizer=model.tokenizer,
        max_shard_size=max_shard_size,
    )


def _check_loss(family: Family, folder: Path) -> None:
    """Tensors that `load` leaves out would be gone with the checkpoint that has them."""
    try:
        there = Checkpoint(folder)
    except ValueError:
        return  # none, or none that could be read
    wrapper = find_wrapper(str(there.config.get("model_type")))
    lost = family.leaves_out(there.shapes, there.config)
    if wrapper is not None:
        lost += sorted(set(there.shapes) - set(wrapper.names(there.shapes).values()) - set(lost))
    if lost:
        raise ValueError(
            f"save: {folder} has {len(lost)} tensors that were not read and would be lost, such as {lost[0]}\n"
            "    fix: another folder"
        )


def _check_config(model: Model, family: Family) -> None:
    """A config that was changed after loading would not be the one that is written, and one that transformers refuses
    would be read by nobody."""
    said = family.config(model.hf_config)
    names = [f.name for f in dataclasses.fields(said) if getattr(said, f.name) != getattr(model.config, f.name)]
    if names == ["layers"] and "first_k_dense_replace" in model.hf_config:
        raise ValueError(
            "save: config.json counts the layers without experts from the first on, and here others come before them\n"
            "    fix: load(layers=...) with those first, or save the parameters with the config they came with"
        )
    if names:
        raise ValueError(
            f"save: model.config differs from what was read, in {', '.join(names)}; config.json would not say so\n"
            "    fix: save the parameters with the config they came with"
        )
    try:
        normalized(model.hf_config, family.model_type)
    except ValueError as error:
        raise ValueError(f"save: {error}\n    fix: load(layers=...) with other layers, or all of them") from error


def _config(model: Model, family: Family) -> dict[str, Any]:
    fields: Mapping[str, Any] = model.hf_config
    if "transformers_version" not in fields:  # as a GGUF file has them: some, under old names
        fields = normalized(fields, family.model_type)
    # What is written is plain, however the file was packed that it came from.
    fields = {name: value for name, value in fields.items() if name != "quantization_config"}
    stops = list(model.eos_token_id)
    return {
        **fields,
        "architectures": fields.get("architectures") or [architecture(family.model_type)],
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": model.pad_token_id,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
