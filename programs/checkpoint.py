"""Hugging Face folders: the config and the safetensors headers at once, a tensor when it is asked for.

Weights are read by the safetensors library, never from a pickle.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["DTYPES", "Checkpoint", "find_folder", "listed"]

# The format's name -> ours. Formats of less than a byte are left out: torch has no tensor of their shape.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
# Any of these is enough for AutoTokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def find_folder(source: str) -> Path | None:
    """An existing folder, or a hub name (`"owner/name"`) in the local cache; None for what is neither. No network.

    Raises `ValueError` for a hub name that is not in the cache.
    """
    if os.path.isdir(source):
        return Path(source)
    # "models/x.gguf" has a hub name's form too, and whoever writes it means a file.
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source, re.ASCII) and not source.endswith(".gguf")
    if not named or os.path.exists(source):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        # The file and not the snapshot: a snapshot that lacks shards is found, and what it lacks is said.
        config = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return None
    if isinstance(config, str):
        return Path(config).parent
    raise ValueError(
        f'source "{source}" is neither a folder nor in the local cache of the hub\n    fix: hf download {source}'
    )


class Checkpoint:
    """An open folder. Everything but the weights is read, and every fault found, when it is made.

    config, generation: config.json, and generation_config.json ({} where there is none).
    shapes, dtypes: of every tensor, by name, in the index's order where there is an index.
    weights: False asks for the config alone; `shapes` is then empty where the weights are not there, or not all.
    Raises `ValueError` that lists all faults.
    """

    def __init__(self, folder: Path, *, weights: bool = True) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f'checkpoint "{folder}" is not a folder')
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.dtypes: Mapping[str, torch.dtype] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}
        faults: list[str] = []
        absent: list[str] = []  # faults as well, unless the config alone is asked for
        config = _read_json(self.folder / "config.json", faults)
        if config is None:
            faults.append("config.json: missing")
        self.config: dict[str, Any] = config or {}
        self.generation: dict[str, Any] = _read_json(self.folder / "generation_config.json", faults) or {}
        self.has_tokenizer = any((self.folder / name).is_file() for name in _TOKENIZERS)
        found = self._read_headers(faults, absent)
        if faults or (weights and absent):
            raise ValueError(f'checkpoint "{folder}" cannot be read\n    ' + "\n    ".join(faults + absent))
        self._files: dict[str, Path] = {}
        if not absent:
            self.shapes = {name: entry.shape for name, entry in found.items()}
            self.dtypes = {name: entry.dtype for name, entry in found.items()}
            self._files = {name: entry.file for name, entry in found.items()}

    def tensor(
        self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
        part: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """One tensor in memory of its own, in the file's dtype unless given. part: a view of it, to copy no more than
        that; as the file is mapped, no more is read."""
        if name not in self._files:
            raise ValueError(f'checkpoint "{self.folder}" has no tensor "{name}"')
        path = self._files[name]
        if not path.is_file() or _stamp(path) != self._stamps[path]:
            raise ValueError(
                f'checkpoint "{self.folder}": {path.name} changed after it was opened\n    fix: load again'
            )
        # What safetensors returns lies in the mapped file: it counts as resident for as long as the file is open, and
        # reading it after somebody truncated the file kills the process. So it is copied, and the file closed again.
        with safe_open(path, framework="pt") as file:
            mapped: Tensor = file.get_tensor(name) if part is None else part(file.get_tensor(name))
            lies = torch.contiguous_format
            copy = mapped.to(device=device, dtype=dtype or mapped.dtype, copy=True, memory_format=lies)
            del mapped
        return copy

    def _read_headers(self, faults: list[str], absent: list[str]) -> dict[str, _Entry]:
        index = self._read_index(faults)
        headers: dict[str, dict[str, _Entry]] = {}
        for file in dict.fromkeys(index.values()) if index else self._unindexed(absent):
            path = self.folder / file
            if not path.is_file():
                names = [f'"{name}"' for name, where in index.items() if where == file]
                absent.append(f"{file}: missing, the index has it for {', '.join(listed(names, 3))}")
            elif _starts_with(path, _LFS):
                absent.append(f"{file}: a git-lfs pointer, not the weights\n        fix: git lfs pull")
            else:
                self._stamps[path] = _stamp(path)
                problems, headers[file] = _read_header(path)
                faults += [f"{file}: {problem}" for problem in listed(problems)]
                if problems:
                    del headers[file]
        lost = [
            f'"{name}": the index has it in {file}, which has no such tensor'
            for name, file in index.items()
            if file in headers and name not in headers[file]
        ]
        files: dict[str, list[str]] = {name: [] for name in index}
        for file, header in headers.items():
            for name in header:
                files.setdefault(name, []).append(file)
        twice = [f'"{name}": in two files, {where[0]} and {where[1]}' for name, where in files.items() if where[1:]]
        faults += listed(lost) + listed(twice)
        return {name: headers[where[0]][name] for name, where in files.items() if where}

    def _read_index(self, faults: list[str]) -> dict[str, str]:
        """tensor -> file; empty where there is no index."""
        index = _read_json(self.folder / _INDEX, faults)
        if index is None:
            return {}
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            faults.append(f"{_INDEX}: weight_map, from tensor to file, is missing or malformed")
            return {}
        files = dict.fromkeys(names.values())
        outside = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
        faults += [f"{_INDEX}: {file} is outside of the folder" for file in listed(outside)]
        if _SINGLE not in files and (self.folder / _SINGLE).is_file():
            # transformers reads the one and other readers the other: two models, of which one is stale.
            faults.append(
                f"{_SINGLE}: there, and {_INDEX} names {', '.join(listed(list(files), 3))} instead\n"
                "        fix: remove whichever is stale"
            )
        return {name: file for name, file in names.items() if file not in outside}

    def _unindexed(self, absent: list[str]) -> list[str]:
        if (self.folder / _SINGLE).is_file():
            return [_SINGLE]
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files and not (self.folder / _INDEX).is_file():
            pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            absent.append(
                f"no safetensors file, but {', '.join(listed(pickles, 3))}: pickles, which are not read\n"
                "        fix: in transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
                if pickles
                else "no safetensors file"
            )
        return files


class _Entry(NamedTuple):
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def _read_header(path: Path) -> tuple[list[str], dict[str, _Entry]]:
    """What is wrong with a file, and its tensors. Parsed here first: the library's errors name no sizes or tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        needed = 8 + length if size >= 8 else 8
        if size < needed:
            return [f"size {size}, but its header alone takes {needed}: truncated, or no safetensors file"], {}
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        wanted = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        dtypes = {name: str(entry["dtype"]) for name, entry in entries.items()}
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ["its header is malformed: no safetensors file, or a corrupt one"], {}
    if size != wanted:
        return [f"size {size}, but its header says {wanted}: {'truncated' if size < wanted else 'corrupt'}"], {}
    unknown = [
        f'"{name}" has dtype {dtype}, which is not supported' for name, dtype in dtypes.items() if dtype not in DTYPES
    ]
    if unknown:
        return unknown, {}
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        return [f"corrupt: {error}"], {}
    return [], {name: _Entry(path, DTYPES[dtype], shapes[name]) for name, dtype in dtypes.items()}


def _read_json(path: Path, faults: list[str]) -> dict[str, Any] | None:
    """None where there is no file; {} and a fault where it holds something else than a JSON object."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        faults.append(f"{path.name}: not JSON: {error}")
        return {}
    if isinstance(value, dict):
        return value
    faults.append(f"{path.name}: a JSON object is needed, not {type(value).__name__}")
    return {}


def _starts_with(path: Path, prefix: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def listed(lines: list[str], most: int = 10) -> list[str]:
    """The first of them, and how many more there are."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
