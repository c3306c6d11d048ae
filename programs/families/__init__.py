"""One adapter a family: a table of names and a function from config to config, no model code.

To add a family, write `families/<model_type>.py` with a `FAMILY` and name it in `_MODULES`. `parts` has what most
families share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ...functional import DecoderConfig
from .fields import Fields

__all__ = ["Family", "find_family", "known_families"]

# model_type -> module
_MODULES = {
    **{name: name for name in ("cohere", "gemma", "gemma2", "gpt_oss", "llama", "mistral", "nemotron", "olmo2")},
    **{name: name for name in ("phi", "phi3", "qwen2", "qwen3", "smollm3")},
    "gemma3_text": "gemma3",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How checkpoints of one `model_type` are read and written.

    config: from the fields of the Hugging Face config to ours; raises `ValueError` for a field it cannot honour. What
        it does not read must be at its default.
    names: checkpoint name -> pytree path, `{i}` standing for the layer; several paths where the tensor is those leaves
        one below the other, which then are views of it.
    inert: fields of its published configs that nothing looks at -> the value at which that is right, or a function of
        all fields to it.
    tied: name -> the name it repeats where the config ties them; a checkpoint may then carry both.
    gguf_arch: the architecture's name in GGUF files. gguf_extra: config fields that follow from which tensors a GGUF
        file has. gguf_fields: GGUF metadata key -> config field.
    gguf_permuted: checkpoint names whose rows GGUF keeps in interleaved rotary order -> the config field that
        counts their heads.
    """

    model_type: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    names: Mapping[str, str | tuple[str, ...]]
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    inert: Mapping[str, Any] = field(default_factory=dict)
    gguf_arch: str | None = None
    gguf_fields: Mapping[str, str] | None = None
    gguf_extra: Callable[[Collection[str]], dict[str, Any]] = field(default=lambda names: {})
    gguf_permuted: Mapping[str, str] | None = None

    def paths(self, layers: int) -> dict[str, tuple[str, ...]]:
        """checkpoint name -> pytree paths, for so many layers."""
        found = {}
        for name, path in self.names.items():
            paths = (path,) if isinstance(path, str) else path
            for i in range(layers if "{i}" in name else 1):
                found[name.replace("{i}", str(i))] = tuple(each.replace("{i}", str(i)) for each in paths)
        return found

    def read_config(
        self, fields: Mapping[str, Any], defaults: Mapping[str, Any], ignore: Collection[str] = ()
    ) -> DecoderConfig:
        """Ours, from the fields of a checkpoint's config; defaults: those of the family's config class. ignore: fields
        that the caller answers for.

        Raises `ValueError` for a field that nothing here explains and that is not at its default, as for one that the
        family cannot honour.
        """
        seen = Fields(fields)
        try:
            cfg = self.config(seen)
        except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"config of family {self.model_type}: a field is missing or malformed ({type(error).__name__}: {error})"
            ) from error
        stray = [name for name in ignore if name not in fields]
        if stray:
            raise ValueError(f"load(ignore=...): the config has no {', '.join(stray)}")
        unknown = seen.unexplained(defaults, self.inert, ignore)
        if unknown:
            raise ValueError(
                f"config fields that family {self.model_type} does not explain\n    "
                + "\n    ".join(unknown)
                + (
                    f"\n    fix: load(..., ignore={[line.partition('=')[0] for line in unknown]!r}), "
                    "if you know that they change nothing"
                    if len(unknown) < 6
                    else f"\n    so many that this is no {self.model_type}"
                )
            )
        return cfg


def find_gguf_family(arch: str) -> Family:
    """The adapter of a GGUF architecture. Raises `ValueError` that lists the known ones."""
    families = [find_family(name) for name in known_families()]
    for family in families:
        if family.gguf_arch == arch:
            return family
    known = ", ".join(str(family.gguf_arch) for family in families if family.gguf_arch)
    raise ValueError(f'GGUF architecture "{arch}" is unknown\n    known: {known}')


def known_families() -> list[str]:
    """Those whose checkpoints load whole; of gpt_oss the attention alone is there."""
    return sorted(set(_MODULES) - {"gpt_oss"})


def find_family(model_type: str, argument: str = "model_type") -> Family:
    """The adapter of a `model_type`. Raises `ValueError` that lists the known ones."""
    if model_type not in _MODULES:
        known = ", ".join(known_families())
        fix = '\n    fix: like="llama", where its layers are those of a known family' if argument != "like" else ""
        raise ValueError(f'{argument} "{model_type}" is unknown\n    known: {known}{fix}')
    family: Family = import_module(f".{_MODULES[model_type]}", __name__).FAMILY
    return family
