"""A loaded model: a frozen config, a parameter pytree, and what generation should know of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..functional import Decoder, DecoderConfig, tree
from .families import Family

__all__ = ["Model", "check_model", "count_text"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What `load` returns.

    params: from a module its own parameters, the very objects. From an abstract load, meta tensors.
    family, hf_config: how `save` writes it, if it came from a checkpoint: the adapter, and the fields of the Hugging
    Face config for the layers that are there. generation: the fields of generation_config.json.
    tokenizer: a transformers tokenizer, or None. eos_token_id: what ends a row unless `generate` is told otherwise.
    """

    name: str
    config: DecoderConfig
    params: Decoder
    family: Family | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.params.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.params.embed.device

    @property
    def sampling(self) -> dict[str, Any]:
        """What generation_config.json says of sampling: `program.generate(prompts, **model.sampling)`."""
        names = ["repetition_penalty"]
        if self.generation.get("do_sample"):
            names += ["do_sample", "temperature", "top_k", "top_p", "min_p"]
        return {name: self.generation[name] for name in names if self.generation.get(name) is not None}

    @property
    def num_parameters(self) -> int:
        return sum(leaf.numel() for leaf in tree.leaves(self.params))

    def __repr__(self) -> str:
        size = f"{count_text(self.num_parameters)} parameters"
        return f"Model({self.name}, {len(self.config.layers)} layers, {size}, {self.dtype}, {self.device})"


def count_text(n: int) -> str:
    """`134.5 M`, `671.0 B`: a count."""
    return f"{n / 1e9:,.1f} B" if n >= 10e9 else f"{n / 1e6:,.1f} M" if n >= 50_000 else f"{n:,}"


def check_model(function: str, model: Any) -> None:
    """Raise `TypeError` for what is no `Model`, with the way to one."""
    if isinstance(model, Model):
        return
    fix = "programs.load(...) makes one, of a module, a folder or a name"
    if isinstance(model, Decoder):
        fix = "dataclasses.replace(model, params=params), with the model they came from"
    elif isinstance(getattr(model, "params", None), Decoder):  # what load_shards returns
        fix = "dataclasses.replace(programs.load(source, abstract=True), params=mine.params), if these are mine"
    raise TypeError(f"{function}: a programs.Model is needed, not {type(model).__name__}\n    fix: {fix}")
