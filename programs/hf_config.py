"""Hugging Face configs as mappings, in the form that transformers 5 gives them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["architecture", "class_defaults", "cut_layers", "normalized"]

# Fields with an entry a layer.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def normalized(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The fields as the config class of a model type reads them: old names replaced, defaults filled in.

    Raises `ValueError` where it refuses them.
    """
    make = _config_class(model_type)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of fields that a checkpoint has as it has them
            made: dict[str, Any] = make.from_dict(dict(fields) | {"model_type": model_type}).to_dict()
    except Exception as error:  # a config class may raise anything, and its own words say best what is wrong
        said = " ".join(str(error).split())
        raise ValueError(f"transformers' {make.__name__} refuses the config: {said}") from error
    return made


def class_defaults(model_type: str) -> dict[str, Any]:
    """Every field of a model type's config class with its default."""
    made: dict[str, Any] = _config_class(model_type)().to_dict()
    return made


def cut_layers(fields: Mapping[str, Any], layers: Sequence[int] | None) -> dict[str, Any]:
    """The fields of a model that keeps some layers alone.

    Where layers without experts are counted from the first on and others come before them, no count is right; `save`
    then finds that its config would not be the model's.
    """
    if layers is None:
        return dict(fields)
    cut: dict[str, Any] = {name: [fields[name][i] for i in layers] for name in _PER_LAYER if fields.get(name)}
    if fields.get("first_k_dense_replace"):
        dense = sum(i < fields["first_k_dense_replace"] for i in layers)
        cut["first_k_dense_replace"] = None if "mlp_layer_types" in cut else dense  # the list says it
    if "decoder_sparse_step" in fields:
        without, step = fields.get("mlp_only_layers") or [], fields["decoder_sparse_step"]
        dense_at = [j for j, i in enumerate(layers) if i in without or (i + 1) % step]
        cut |= {"mlp_only_layers": dense_at, "decoder_sparse_step": 1}
    return {**fields, **cut, "num_hidden_layers": len(layers)}


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def architecture(model_type: str) -> str:
    """The name of transformers' language model of a model type, such as "LlamaForCausalLM"."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name
