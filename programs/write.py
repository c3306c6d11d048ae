"""Write a Hugging Face folder: whole or not at all.

The new folder is filled beside the old one and takes its place in one step, so whatever fails or is killed before that
step leaves the old one as it was.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from .checkpoint import DTYPES, listed

__all__ = ["is_checkpoint_file", "write_checkpoint", "write_folder"]

_CHECKPOINT_FILES = re.compile(r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_TOKENIZER_FILES = re.compile(
    r"tokenizer\.(json|model)|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|"
    r"merges\.txt|spiece\.model|chat_template\.(jinja|json)|additional_chat_templates/[^/]*"
)


def is_checkpoint_file(name: str, *, tokenizer: bool = True) -> bool:
    """Whether a checkpoint may have a file of that name: an old one is stale after a save. tokenizer: its files too."""
    return bool(_CHECKPOINT_FILES.fullmatch(name) or (tokenizer and _TOKENIZER_FILES.fullmatch(name)))


def write_folder(folder: Path, fill: Callable[[Path], None], *, replaces: Callable[[str], bool]) -> None:
    """`fill(new)` writes into a new folder, which then takes the place of `folder` in one step.

    replaces: says of a file of the old folder (`"README.md"`, `"a/b.txt"`) that it belongs to what is replaced; all
        others are carried over, unless `fill` wrote one of that name.
    Raises `ValueError`, before any work, where that place cannot be written or holds something else than a checkpoint.
    """
    target = Path(folder).resolve()  # what a link points to is replaced, not the link
    _restore(target)
    _check_place(folder, target)
    for left in _leftovers(target):  # first, for a model that was killed halfway may fill the disk
        with _held(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    new = target.with_name(f".{target.name}.saving-{secrets.token_hex(8)}")
    new.mkdir()
    try:
        with _held(new):
            fill(new)
            _sync(new, files=True)
            if target.is_dir():
                _carry_over(target, new, replaces)
            _sync(new, files=False)
            _swap(new, target)
            _sync_one(target.parent)
    finally:
        # Before the swap what is half written lies here, after it the old folder.
        shutil.rmtree(new, ignore_errors=True)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Callable[[], Tensor]],
    *,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    tokenizer: Any | None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write what transformers' `from_pretrained` loads. A checkpoint that is there is replaced in one step, at the end.

    tensors: each is called twice, once for its size and once for its content. One shard is in memory at a time, and of
        it only what had to be copied: what is not contiguous, on another device, or shared with another name.
    generation: None writes none, and removes an old one. tokenizer: None writes none, and keeps an old one.
    Raises `ValueError` before anything is written.
    """
    _check_place(folder, _resolved(folder))
    shards = _split(tensors, max_shard_size)
    texts = {"config.json": _json("config", config)}
    if generation is not None:
        texts["generation_config.json"] = _json("generation", generation)
    if len(shards) > 1:
        sizes = sum(size for names in shards.values() for size in names.values())
        where = {name: file for file, names in shards.items() for name in names}
        weight_map = {name: where[name] for name in tensors}
        index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = _json("tensors", index)

    def fill(new: Path) -> None:
        for file, text in texts.items():
            (new / file).write_text(text, encoding="utf-8")
        for file, names in shards.items():
            _write_shard(new / file, {name: tensors[name] for name in names})
            # safetensors leaves files that nobody else may read.
            shutil.copymode(new / "config.json", new / file)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(new))

    write_folder(folder, fill, replaces=partial(is_checkpoint_file, tokenizer=tokenizer is not None))


def _split(tensors: Mapping[str, Callable[[], Tensor]], most: int | str) -> dict[str, dict[str, int]]:
    """file -> its tensors and their bytes."""
    from huggingface_hub import split_state_dict_into_shards_factory

    if isinstance(most, bool) or not isinstance(most, (int, str)) or (isinstance(most, int) and most < 1):
        raise ValueError(f'max_shard_size={most!r}: bytes or a text such as "5GB" are needed')
    if not tensors:
        raise ValueError("tensors: there are none to write")
    sizes, faults = {}, []
    for name, make in tensors.items():
        tensor = make()
        sizes[name] = tensor.numel() * tensor.element_size()
        if tensor.device.type == "meta":
            faults.append(f"{name}: on the meta device, it has no content")
        elif tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
            faults.append(f"{name}: {tensor.dtype} of layout {tensor.layout} cannot be stored")
    if faults:
        raise ValueError("tensors cannot be written\n    " + "\n    ".join(listed(faults)))
    try:
        split = split_state_dict_into_shards_factory(
            sizes, get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors", max_shard_size=most
        )
    except ValueError as error:
        raise ValueError(f'max_shard_size={most!r}: bytes or a text such as "5GB" are needed') from error
    return {file: {name: sizes[name] for name in names} for file, names in split.filename_to_tensors.items()}


def _write_shard(path: Path, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    taken: dict[int, list[tuple[int, int]]] = {}  # storage -> the stretches of it that are in the shard
    for name, make in tensors.items():
        tensor = make().detach().cpu().contiguous()
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        stretches = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
        # The library refuses names that share memory, and takes a view without elements for one that does.
        if start == stop or any(start < b and a < stop for a, b in stretches):
            tensor = tensor.clone()
        else:
            stretches.append((start, stop))
        shard[name] = tensor
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{path.name} cannot be written: {error}") from error


def _json(argument: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}: cannot be written as JSON: {error}") from error


def _resolved(folder: Path) -> Path:
    try:
        return Path(folder).resolve()
    except (RuntimeError, OSError) as error:
        raise ValueError(f'folder "{folder}": {error}\n    fix: choose another place') from error


def _check_place(folder: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f'folder "{folder}" is a file\n    fix: choose another place')
    if not target.parent.is_dir():
        raise ValueError(f'folder "{folder}": there is no folder {target.parent}\n    fix: mkdir -p {target.parent}')
    if Path.cwd().is_relative_to(target):
        raise ValueError(
            f'folder "{folder}": the working folder lies in it, and would be gone when it is replaced\n'
            "    fix: choose another place, or work elsewhere"
        )
    for place in (target.parent, target):
        if place.exists() and not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f'folder "{folder}": {place} is not writable\n    fix: choose another place')
    if target.is_dir() and not (target / "config.json").is_file():
        held = sorted(path.name for path in target.iterdir())
        if held:
            raise ValueError(
                f'folder "{folder}" holds {", ".join(listed(held, 3))}, but no config.json: it is no checkpoint, and '
                "is not replaced\n"
                "    fix: choose a new or an empty folder"
            )


def _carry_over(old: Path, new: Path, replaces: Callable[[str], bool], prefix: str = "") -> None:
    entries = list(os.scandir(old))
    if not entries:
        new.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        name, kept = prefix + entry.name, new / entry.name
        if entry.is_dir(follow_symlinks=False):
            _carry_over(Path(entry.path), kept, replaces, name + "/")
        elif not replaces(name) and not os.path.lexists(kept):
            new.mkdir(parents=True, exist_ok=True)
            try:
                os.link(entry.path, kept, follow_symlinks=False)
            except (OSError, NotImplementedError):
                shutil.copy2(entry.path, kept, follow_symlinks=False)
                _sync_one(kept)
    if new.is_dir():
        shutil.copymode(old, new)


def _swap(new: Path, target: Path) -> None:
    """`new` takes the place of `target`, which is then where `new` was, or gone."""
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        aside = new.with_name(new.name + ".old")
        try:
            os.rename(target, aside)
            os.rename(new, target)
        finally:
            if os.path.lexists(target):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, target)


def _exchange(a: Path, b: Path) -> bool:
    """Two folders swap names in one step; False where the system or its file system has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a), os.fsencode(b)
    if sys.platform == "darwin":
        call, given = getattr(libc, "renamex_np", None), (*names, 2)  # RENAME_SWAP
    else:
        here = -100  # AT_FDCWD
        call, given = getattr(libc, "renameat2", None), (here, names[0], here, names[1], 2)  # RENAME_EXCHANGE
    if call is None:
        return False
    if call(*given) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def _leftovers(target: Path) -> list[Path]:
    """What earlier saves of this folder left: killed ones, and those that are at it now."""
    pattern = re.compile(re.escape(f".{target.name}.saving-") + r"[0-9a-f]{16}(\.old)?")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]


def _restore(target: Path) -> None:
    """Undo a save that was killed between the two renames of `_swap`."""
    if not target.parent.is_dir():
        return
    for left in _leftovers(target):
        if left.suffix == ".old" and not os.path.lexists(target):
            left.rename(target)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold a folder, or learn that another save holds it. Of a process that was killed the system lets go."""
    import fcntl

    with ExitStack() as stack:
        free = False
        with suppress(OSError):  # held, gone by now, or on a file system without locks: there leftovers stay
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free


def _sync(folder: Path, *, files: bool) -> None:
    """To the disk: the folders below and, where asked, their files."""
    for root, _, names in os.walk(folder):
        for name in names if files else []:
            _sync_one(Path(root, name))
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
