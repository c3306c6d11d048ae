"""Hugging Face configs as mappings, in the form that transformers 5 gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["architecture", "class_defaults", "cut_layers", "normalized"]

# Fields with an entry a layer.
_PER_LAYER = ("layer_types", "no_rope_layers")


def normalized(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The fields as the config class of a model type reads them: old names replaced, defaults filled in.

    Raises `ValueError` where it refuses them.
    """
    make = _config_class(model_type)
    try:
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
    """The fields of a model that keeps some layers alone."""
    if layers is None:
        return dict(fields)
    cut = {name: [fields[name][i] for i in layers] for name in _PER_LAYER if fields.get(name)}
    return {**fields, **cut, "num_hidden_layers": len(layers)}


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def architecture(model_type: str) -> str:
    """The name of transformers' language model of a model type, such as "LlamaForCausalLM"."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name
