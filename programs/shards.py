"""A rank's part of a model: its own slices of a Hugging Face folder, and checkpoints that all ranks write together.

model = sh.shard(F.next_token_loss, layout, mesh, S=4096)
mine = programs.load_shards("folder", model)                       # config, params, specs, bytes read
programs.save_shards(mine.params, mine.specs, mesh, "checkpoint")  # by torch.distributed.checkpoint
params = programs.restore_shards(mine.params, mine.specs, mesh, "checkpoint")  # on this mesh or another
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import Decoder, DecoderConfig, TreeError, tree
from ..sharding import Mesh, Sharded
from .checkpoint import Checkpoint, find_folder
from .families import find_wrapper
from .load import PACKAGED, check_device, load
from .pieces import Piece, pieces

__all__ = ["Shards", "load_shards", "restore_shards", "save_shards"]


class Shards(NamedTuple):
    """config: of the whole model. params: this rank's shards. specs: how they lie, as `sharding.cut` and
    `sum_gradients` take them. read: bytes of weights that were read."""

    config: DecoderConfig
    params: Decoder
    specs: Any
    read: int


def load_shards(
    source: str | Path, model: Sharded, *, mesh: Mesh | None = None, dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Shards:  # fmt: skip
    """This rank's shards of a checkpoint, of which nothing else is read.

    source: a Hugging Face folder, or the name of a cached one. model: what `sharding.shard` made of a whole model; its
    layout says who has what. mesh: this rank's own, where the model was made with none. dtype, device: as in `load`.
    Raises what `load` raises, and `SpecError` where the layout does not fit, before any weight is read.
    """
    if not isinstance(model, Sharded):
        raise TypeError(
            f"load_shards(model=...): what sharding.shard made is needed, not {type(model).__name__}\n"
            "    fix: sh.shard(F.next_token_loss, layout, mesh, S=...)"
        )
    place = check_device("load_shards", device)
    folder = find_folder(str(source))
    if folder is None:
        fix = "a Hugging Face folder or the name of a cached one"
        if str(source) in PACKAGED or str(source).endswith(".gguf"):
            fix = f'programs.save(programs.load("{source}"), folder), once; then load_shards(folder, model)'
        raise ValueError(f'source "{source}" is no folder\n    fix: {fix}')
    at = model.mesh if mesh is None else mesh
    rank = at.rank  # raises where it is none in particular
    whole = load(source, abstract=True, dtype=dtype)
    assert whole.family is not None  # of a checkpoint
    specs = model.in_specs({"params": whole.params, "cfg": whole.config})["params"]
    lies = tree.paths(specs)
    parts = {path: each.spec.slices(each.sizes, at, rank) for path, each in lies.items()}
    reader = _Reader(Checkpoint(folder), whole.params, parts, place)
    wanted = pieces(whole.family, whole.params, there=reader.own)
    new: dict[str, Tensor] = {}
    for each in wanted.values():
        new |= reader.leaves(each)
    for twin, other in whole.family.tied.items() if whole.config.tie_word_embeddings else ():
        reader.check_tied(twin, other)
    return Shards(whole.config, tree.replace(whole.params, new), specs, reader.read)


class _Reader:
    """own: the family's name of a tensor -> the file's. read: bytes so far."""

    def __init__(self, file: Checkpoint, params: Decoder, parts: dict[str, Any], device: torch.device | str) -> None:
        wrapper = find_wrapper(str(file.config.get("model_type")))
        self.file, self.parts, self.device, self.read = file, parts, device, 0
        self.own = {name: name for name in file.shapes} if wrapper is None else wrapper.names(file.shapes)
        self.shapes = {path: tuple(leaf.shape) for path, leaf in tree.paths(params).items()}
        self.dtypes = {path: leaf.dtype for path, leaf in tree.paths(params).items()}

    def leaves(self, each: Sequence[Piece]) -> dict[str, Tensor]:
        """A rank's shards of the leaves that these pieces hold."""
        held = each[0].held
        if each[0].leaf is None:
            shapes = [self.shapes[path] for path in held.paths]
            return {
                path: self._taken(
                    each[0].name, path, lambda x, k=k, path=path: held.cut(x, shapes)[k][self.parts[path]]
                )
                for k, path in enumerate(held.paths)
            }
        if each[0].expert is not None:
            return {path: self._experts(each, k, path) for k, path in enumerate(held.paths)}
        if all(self.file.shapes[self.own[piece.name]] == piece.shape for piece in each):
            return {
                path: self._taken(piece.name, path, lambda x, path=path: x[self.parts[path]])
                for piece, path in zip(each, held.paths, strict=True)
            }
        # Parted at other rows than the leaves are, as some convolutions are: small, and read whole.
        whole = torch.cat([self._taken(piece.name, held.paths[0], lambda x: x) for piece in each])
        cut = held.cut(whole, [self.shapes[path] for path in held.paths])
        return {path: x[self.parts[path]].clone() for path, x in zip(held.paths, cut, strict=True)}

    def _experts(self, each: Sequence[Piece], k: int, path: str) -> Tensor:
        """The experts of this rank alone."""
        of_experts, *inner = self.parts[path]
        mine = range(self.shapes[path][0])[of_experts]
        names = {piece.expert: piece.name for piece in each if piece.leaf == k}
        return torch.stack([self._taken(names[e], path, lambda x: x[tuple(inner)]) for e in mine])

    def _taken(self, name: str, path: str, part: Any) -> Tensor:
        found = self.file.tensor(self.own[name], dtype=self.dtypes[path], device=self.device, part=part)
        self.read += found.numel() * self.file.dtypes[self.own[name]].itemsize
        return found

    def check_tied(self, twin: str, other: str) -> None:
        """Raise `TreeError` where a file has two tensors that the config ties, and they differ here."""
        if twin in self.own and other in self.own:
            a, b = (self._taken(name, ".embed", lambda x: x[self.parts[".embed"]]) for name in (twin, other))
            if not torch.equal(a, b):
                raise TreeError(
                    f"the config ties {self.own[twin]} to {self.own[other]}, but the file holds two different tensors\n"
                    "    fix: tie_word_embeddings: false in config.json"
                )


def save_shards(params: Any, specs: Any, mesh: Mesh, folder: str | Path) -> None:
    """Write what all ranks have, by `torch.distributed.checkpoint`: each what it is the first to have. Every rank makes
    this call.

    params: a tree of this rank's shards: parameters, or an optimiser's moments of them. specs: how they lie, as
    `Sharded.specs` says. mesh: this rank's own. A checkpoint that is there stays until the new one is complete.
    Raises `SpecError` for shards that are not what the specs say, `ValueError` where another rank raises or is told
    otherwise, and where ranks are threads, of which the last would write over the others; `TransportError` where a peer
    is gone or slower than the time limit.
    """
    from .distributed import save

    save(params, specs, mesh, Path(folder).expanduser())


def restore_shards(params: Any, specs: Any, mesh: Mesh, folder: str | Path) -> Any:
    """What `save_shards` wrote, on whatever mesh, as shards on this one. Every rank makes this call, and reads its own.

    params: a tree of shards as they lie here, whose values do not matter and stay. Raises `TreeError` that lists what
    the folder lacks, before anything is read; and as `save_shards` does.
    """
    from .distributed import restore

    return restore(params, specs, mesh, Path(folder).expanduser())
