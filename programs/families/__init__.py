"""One adapter a family: a table of names and a function from config to config, no model code.

To add a family, write `families/<model_type>.py` with a `FAMILY` and name it in `_MODULES`. `parts` has what most
families share, `latent` and `mixture` what those with latent attention and with experts do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ...functional import GDN, Decoder, DecoderConfig, MoE, tree
from .fields import Fields
from .leaves import Leaves
from .wrapper import Wrapper

__all__ = ["Family", "Leaves", "Wrapper", "find_family", "find_wrapper", "known_families"]

# model_type -> module
_MODULES = {
    **{name: name for name in ("cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "glm4_moe_lite", "gpt_oss")},
    **{name: name for name in ("llama", "mistral", "mixtral", "nemotron", "olmo2", "phi", "phi3", "qwen2", "qwen3")},
    **{name: name for name in ("kimi_linear", "olmo_hybrid", "qwen3_moe", "qwen3_next", "smollm3")},
    "gemma3_text": "gemma3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
# model_type -> module, of models whose language model is of another family
_WRAPPERS = {"kimi_k25": "kimi_k25", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How checkpoints of one `model_type` are read and written.

    config: from the fields of the Hugging Face config to ours; raises `ValueError` for a field it cannot honour. What
        it does not read must be at its default.
    names: a module's name of a tensor -> pytree path, `{i}` standing for the layer; `Leaves` where the tensor holds
        several, which then are views of it, or files call it otherwise. In a path `dense` and `moe` are the `mlp` of a
        layer that has one block, and of one that has experts; `linear` and `full` the `attention` of one that has a
        gated delta net, and of one that has another. Of several paths those count that a layer has.
    inert: fields of its published configs that nothing looks at -> the value at which that is right, or a function of
        all fields to it.
    tied: name -> the name it repeats where the config ties them; a checkpoint may then carry both.
    further_layers: the config field that counts the layers that its files have beyond the others, which predict more
        tokens at once; they are left out. left_out: how the names of other tensors begin that its files may have.
    gguf_arch: the architecture's name in GGUF files. gguf_extra: config fields that follow from which tensors a GGUF
        file has. gguf_fields: GGUF metadata key -> config field.
    gguf_permuted: checkpoint names whose rows GGUF keeps in interleaved rotary order -> the config field that
        counts their heads.
    """

    model_type: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    names: Mapping[str, str | Leaves]
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    inert: Mapping[str, Any] = field(default_factory=dict)
    further_layers: str | None = None
    left_out: tuple[str, ...] = ()
    gguf_arch: str | None = None
    gguf_fields: Mapping[str, str] | None = None
    gguf_extra: Callable[[Collection[str]], dict[str, Any]] = field(default=lambda names: {})
    gguf_permuted: Mapping[str, str] | None = None

    def held(self, layers: int) -> dict[str, Leaves]:
        """name -> what the tensor holds, for so many layers, of whatever kind they are."""
        found = {}
        for name, path in self.names.items():
            leaves = Leaves((path,)) if isinstance(path, str) else path
            for i in range(layers if "{i}" in name else 1):
                found[name.replace("{i}", str(i))] = leaves.at(i)
        return found

    def tensors(self, params: Decoder) -> dict[str, Leaves]:
        """name -> what the tensor holds, of those that these parameters (or their shapes) have."""
        kinds = {}
        for i, each in enumerate(params.layers):
            kinds[f".layers[{i}].mlp"] = "moe" if isinstance(each.mlp, MoE) else "dense"
            kinds[f".layers[{i}].attention"] = "linear" if isinstance(each.attention, GDN) else "full"
        there = {}
        for path in tree.paths(params):
            there[path] = path
            block = ".".join(path.split(".")[:3])
            if block in kinds:
                there[block.rpartition(".")[0] + "." + kinds[block] + path.removeprefix(block)] = path
        found = {}
        for name, leaves in self.held(len(params.layers)).items():
            paths = tuple(there[path] for path in leaves.paths if path in there)
            if paths:
                found[name] = replace(leaves, paths=paths)
        return found

    def leaves_out(self, names: Collection[str], fields: Mapping[str, Any]) -> list[str]:
        """The tensors of layers beyond the others, as many as these fields of a config say there are, and others of no
        use."""
        further = 0 if self.further_layers is None else fields.get(self.further_layers) or 0
        count = fields.get("num_hidden_layers") or 0
        begins = (*self.left_out, *(f"model.layers.{i}." for i in range(count, count + further)))
        return [name for name in names if name.startswith(begins)] if begins else []

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
            names = [line.partition("=")[0] for line in unknown]
            if len(unknown) >= 6:
                fix = f"so many that this is no {self.model_type}"
            elif "quantization_config" in names:
                fix = "fix: a checkpoint whose weights are not packed, or abstract=True to plan without them"
            else:
                fix = f"fix: load(..., ignore={names!r}), if you know that they change nothing"
            raise ValueError(
                f"config fields that family {self.model_type} does not explain\n    "
                + "\n    ".join(unknown)
                + f"\n    {fix}"
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
    return sorted(_MODULES)


def find_family(model_type: str, argument: str = "model_type") -> Family:
    """The adapter of a `model_type`. Raises `ValueError` that lists the known ones."""
    if model_type not in _MODULES:
        known = ", ".join(known_families())
        fix = '\n    fix: like="llama", where its layers are those of a known family' if argument != "like" else ""
        raise ValueError(f'{argument} "{model_type}" is unknown\n    known: {known}{fix}')
    family: Family = import_module(f".{_MODULES[model_type]}", __name__).FAMILY
    return family


def find_wrapper(model_type: str) -> Wrapper | None:
    """How the language model lies in a model of that type, None where it is the whole."""
    if model_type not in _WRAPPERS:
        return None
    wrapper: Wrapper = import_module(f".{_WRAPPERS[model_type]}", __name__).WRAPPER
    return wrapper
