"""One adapter a family: a table of names and a function from config to config, no model code.

To add a family, write `families/<model_type>.py` with a `FAMILY` and name it in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ...functional import DecoderConfig

__all__ = ["Family", "find_family", "known_families"]

_MODULES = {"llama": "llama"}  # model_type -> module


@dataclass(frozen=True, kw_only=True)
class Family:
    """How checkpoints of one `model_type` are read.

    config: from the fields of the Hugging Face config to ours; raises `ValueError` for a field it cannot honour.
    names: checkpoint name -> pytree path, `{i}` standing for the layer.
    tied: name -> the name it repeats where the config ties them; a checkpoint may then carry both.
    gguf_arch: the architecture's name in GGUF files. gguf_extra: config fields that follow from which tensors a GGUF
        file has. gguf_fields: GGUF metadata key -> config field.
    gguf_permuted: checkpoint names whose rows GGUF keeps in interleaved rotary order -> the config field that
        counts their heads.
    """

    model_type: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    names: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    gguf_arch: str | None = None
    gguf_fields: Mapping[str, str] | None = None
    gguf_extra: Callable[[Collection[str]], dict[str, Any]] = field(default=lambda names: {})
    gguf_permuted: Mapping[str, str] | None = None

    def paths(self, layers: int) -> dict[str, str]:
        """checkpoint name -> pytree path, for so many layers."""
        found = {}
        for name, path in self.names.items():
            for i in range(layers if "{i}" in name else 1):
                found[name.replace("{i}", str(i))] = path.replace("{i}", str(i))
        return found


def find_gguf_family(arch: str) -> Family:
    """The adapter of a GGUF architecture. Raises `ValueError` that lists the known ones."""
    families = [find_family(name) for name in known_families()]
    for family in families:
        if family.gguf_arch == arch:
            return family
    known = ", ".join(str(family.gguf_arch) for family in families if family.gguf_arch)
    raise ValueError(f'GGUF architecture "{arch}" is unknown\n    known: {known}')


def known_families() -> list[str]:
    return sorted(_MODULES)


def find_family(model_type: str) -> Family:
    """The adapter of a `model_type`. Raises `ValueError` that lists the known ones."""
    if model_type not in _MODULES:
        known = ", ".join(known_families())
        raise ValueError(f'model_type "{model_type}" is unknown\n    known: {known}')
    family: Family = import_module(f".{_MODULES[model_type]}", __name__).FAMILY
    return family
