"""Trees of shards to and from `torch.distributed.checkpoint`.

Imported when it is used: it takes torch.distributed with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..functional import TreeError, tree
from ..sharding import Mesh, SpecError, TransportError
from ..sharding.shards import ranges_of
from .agreement import Agreement
from .checkpoint import listed

__all__ = ["restore", "save"]


class _Lying(NamedTuple):
    """One leaf. shape: global. boxes: where its parts stand, as offsets and sizes, with the part itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[tuple[int, ...], Tensor]]


def save(params: Any, specs: Any, mesh: Mesh, folder: Path) -> None:
    _check_together(mesh)
    with _told("save_shards", params, mesh, folder):
        _check_tensors("save_shards", params)
        lying = _lying(params, specs, mesh, first=True)
    with _alone(mesh, "save_shards", f'"{folder}" holds what it held before') as told:
        writer = _Writer(folder)
        state_dict_saver.save(dict(tree.paths(params)), storage_writer=writer, planner=_Saving(lying), **told)


def restore(params: Any, specs: Any, mesh: Mesh, folder: Path) -> Any:
    with _told("restore_shards", params, mesh, folder):
        _check_tensors("restore_shards", params)
        new = tree.map(torch.empty_like, params)
        lying = _lying(new, specs, mesh, first=False)
        _check_folder(lying, folder)
    with _alone(mesh, "restore_shards", "nothing was changed") as told:
        state_dict_loader.load(dict(tree.paths(new)), checkpoint_id=folder, planner=_Loading(lying), **told)
    return new


def _check_folder(lying: dict[str, _Lying], folder: Path) -> None:
    """Raise `ValueError` and `TreeError` where a folder has no such leaves."""
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f'restore_shards(folder="{folder}"): no checkpoint that save_shards wrote is there\n'
            "    fix: the folder that save_shards was given; a Hugging Face folder is for load_shards"
        )
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    faults = []
    for path, each in lying.items():
        found = there.get(path)
        if not isinstance(found, TensorStorageMetadata):
            faults.append(f"{path}: missing, it is {each.shape} in all")
        elif tuple(found.size) != each.shape:
            faults.append(f"{path}: {each.shape} in all, but the checkpoint has {tuple(found.size)}")
        elif found.properties.dtype != each.dtype:
            faults.append(f"{path}: {each.dtype}, but the checkpoint has {found.properties.dtype}")
    faults += [f"{path}: not expected, the checkpoint has it" for path in there if path not in lying]
    if faults:
        raise TreeError(f'the checkpoint "{folder.name}" does not match\n    ' + "\n    ".join(listed(faults)))


def _check_tensors(function: str, params: Any) -> None:
    """Raise `TypeError` for a tree that has other leaves than tensors, as what `load_shards` returns has."""
    for path, leaf in tree.paths(params).items():
        if not isinstance(leaf, Tensor):
            fix = "\n    fix: its .params" if hasattr(params, "params") else ""
            raise TypeError(
                f"{function}(params=...): a tree of tensors is needed, and {path} of a {type(params).__name__} is a "
                f"{type(leaf).__name__}{fix}"
            )


def _check_together(mesh: Mesh) -> None:
    """Raise `ValueError` where ranks are no processes: torch would take each for the only one, and the last would write
    over the others."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks < mesh.size:
        raise ValueError(
            f"save_shards(mesh=...): {mesh.size} ranks, and torch.distributed has {ranks}, so that their files would "
            "not go together\n    fix: torchrun, with ProcessGroup(device_mesh).mesh; a mesh of one rank needs neither"
        )


@contextlib.contextmanager
def _told(function: str, params: Any, mesh: Mesh, folder: Path) -> Iterator[None]:
    """What one rank refuses within, or is told otherwise than others, is an error on all of them."""
    tensors = (leaf.device for leaf in tree.leaves(params) if isinstance(leaf, Tensor))
    agreement = Agreement(mesh, next(tensors, torch.device("cpu")))
    try:
        yield
    except Exception:
        agreement.refuse(function)
        raise
    leaves = {path: leaf.dtype for path, leaf in tree.paths(params).items()}
    agreement.check(function, {"folder": str(folder), "params": leaves})


@contextlib.contextmanager
def _alone(mesh: Mesh, function: str, left: str) -> Iterator[dict[str, Any]]:
    """How torch is told who takes part, and that a mesh is of one rank, which it would warn of. left: what is there
    where a peer ends in between."""
    group = getattr(mesh.transport, "group", None)
    told: dict[str, Any] = {"no_dist": mesh.size == 1}
    if group is not None and mesh.size > 1:
        told["process_group"] = group(*(axis for axis, _ in mesh.axes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # `_Writer` keeps it until the end
        try:
            yield told
        except RuntimeError as error:
            raise TransportError(
                f"rank {mesh.rank}: {function} failed: a peer is gone, or was slower than the time limit; {left}\n"
                f"    mesh: {mesh}\n    {str(error).splitlines()[0]}"
            ) from error


class _Writer(FileSystemWriter):
    """Writes beside the checkpoint that is there, whose files go when the new one is complete: what says which files
    belong to it takes the place of the old in one step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, self.fs = folder, _Files()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        token, named = secrets.token_hex(8), super().prepare_global_plan(plans)
        of = [type(plan.storage_data)(f"{token}{plan.storage_data.prefix}") for plan in named]
        return [dataclasses.replace(plan, storage_data=names) for plan, names in zip(named, of, strict=True)]

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        # Not of the metadata: torch 2.11 writes another copy of it.
        own = {each.storage_data.relative_path for of_rank in results for each in of_rank}
        for file in self.folder.glob("*.distcp"):
            if file.name not in own and _DATA.fullmatch(file.name):
                file.unlink()


# As torch names them, behind what `_Writer` puts in front.
_DATA = re.compile(r"([0-9a-f]{16})?__\d+_\d+\.distcp")


class _Files(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Nothing: a file is removed only to give its name to another, which takes it in one step."""


def _lying(params: Any, specs: Any, mesh: Mesh, *, first: bool) -> dict[str, _Lying]:
    """first: of what several ranks have, the first one's alone."""
    found, lies = {}, tree.paths(specs)
    for path, x in tree.paths(params).items():
        spec, sizes = lies[path].spec, dict(lies[path].sizes)
        local = spec.local(sizes, mesh, mesh.rank)
        if tuple(x.shape) != local:
            raise SpecError(
                f"{path.lstrip('.')} is {tuple(x.shape)}, and this rank's shard is {local}", str(spec), mesh=str(mesh)
            )
        one = Mesh(**{axis: 1 for axis, _ in mesh.axes})
        at = mesh.coordinates(mesh.rank)
        mine = not first or not any(at[axis] for axis in at if axis not in spec.axes)
        boxes = list(_boxes(x.detach(), spec.slices(sizes, mesh, mesh.rank))) if mine else []
        found[path] = _Lying(spec.local(sizes, one, 0), x.dtype, boxes)
    return found


def _boxes(x: Tensor, index: tuple[Any, ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Each range of ranges of a global tensor, with what of the shard stands there."""
    parts: list[tuple[tuple[int, ...], Tensor]] = [((), x)]
    for dim, some in enumerate(index):
        ranges = ranges_of(some)
        lies = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
        where = [*zip(lies, ranges, strict=False)]
        parts = [
            ((*offset, start), part.narrow(dim, at, stop - start))
            for offset, part in parts
            for at, (start, stop) in where
        ]
    yield from parts


class _Saving(SavePlanner):
    def __init__(self, lying: dict[str, _Lying]) -> None:
        self.boxes = {
            MetadataIndex(path, offset): part for path, each in lying.items() for offset, part in each.boxes
        }  # fmt: skip
        self.lying = lying

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(index.offset or ()), part.shape),
                TensorProperties(dtype=part.dtype), torch.Size(self.lying[index.fqn].shape),
            ))
            for index, part in self.boxes.items()
        ]  # fmt: skip
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.boxes[write_item.index]


class _Loading(LoadPlanner):
    def __init__(self, lying: dict[str, _Lying]) -> None:
        self.lying = lying
        self.boxes = {(path, tuple(offset)): part for path, each in lying.items() for offset, part in each.boxes}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for path, each in self.lying.items():
            chunks = [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in each.boxes]
            items += create_read_items_for_chunk_list(path, self.metadata.state_dict_metadata[path], chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise TypeError(f"{read_item.dest_index.fqn}: a tensor is needed, and the checkpoint has something else")

    def resolve_tensor(self, read_item: Any) -> Tensor:
        part = self.boxes[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)]
        for dim, (start, n) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, n)
        return part

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        pass
