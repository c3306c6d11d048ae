"""The parameter pytree from the tensors of a source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..functional import Decoder, DecoderConfig, TreeError, tree
from .beside import groups, lay
from .checkpoint import listed
from .families import Family
from .pieces import Piece, pieces

__all__ = ["Progress", "Source", "assemble"]

# step, how far, out of how many
Progress = Callable[[str, int, int], None]

# Faults come by the hundred where experts are not as they should be: so many lines at most, of what should be there and
# of what should not.
_MOST_LINES = (12, 8)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where tensors come from, by name, in the names of the family's modules or files.

    shapes: of all there are. read: one of them as it shall be in memory; dtype: how that is. Both are told whether it
        may stay in fp32 where half precision is asked for.
    device: of what is read. files: whether it may have experts one by one.
    shown: what the source itself calls a tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, bool], Tensor]
    dtype: Callable[[str, bool], torch.dtype]
    device: torch.device
    files: bool = False
    shown: Callable[[str], str] = str


def assemble(
    family: Family, cfg: DecoderConfig, layers: Sequence[int] | None, source: Source, progress: Progress
) -> tuple[DecoderConfig, Decoder]:
    """The config and the pytree of some layers (all unless given). Every fault is found before a tensor is read.

    What the source has in one tensor is that tensor, or views of it. What it has in pieces is joined in one storage as
    it is read, piece by piece. On a GPU weights that read one input lie side by side.
    """
    count = len(cfg.layers)
    kept = range(count) if layers is None else layers
    beyond = [i for i in kept if i >= count]
    if beyond:
        raise ValueError(f"load(layers=...): {beyond} are asked for, and the model has {count}")
    whole = Decoder.abstract(cfg)
    wanted = pieces(family, whole, there=source.shapes, files=source.files)
    _check(family, wanted, source)

    cfg = replace(cfg, layers=tuple(cfg.layers[i] for i in kept))
    place = {f".layers[{i}].": f".layers[{j}]." for j, i in enumerate(kept)}
    shapes, fp32 = {path: leaf.shape for path, leaf in tree.paths(whole).items()}, tree.fp32_paths(whole)
    here = {name: paths for name, each in wanted.items() if (paths := _placed(each[0].held.paths, place))}
    total, done = sum(len(wanted[name]) for name in here), 0
    new: dict[str, Tensor] = {}
    for name, paths in here.items():
        held, first = wanted[name][0].held, wanted[name][0]
        keep_fp32 = any(path in fp32 for path in held.paths)
        each = [shapes[path] for path in held.paths]
        if first.leaf is None:
            progress("loading weights", done := done + 1, total)
            leaves = held.cut(source.read(first.name, keep_fp32), each)
        else:
            storage = _storage(wanted[name], held.shape(each), source, keep_fp32)
            leaves, row = held.cut(storage, each), 0
            for piece in wanted[name]:
                progress("loading weights", done := done + 1, total)
                if source.device.type == "meta":
                    continue
                # Wherever the rows of a tensor were parted: transformers writes three equal parts of convolutions.
                rows = source.shapes[piece.name][0]
                into = piece.part(leaves) if piece.expert is not None else storage[row : row + rows]
                into.copy_(source.read(piece.name, keep_fp32))
                row += rows
        new |= dict(zip(paths, leaves, strict=True))
    params = Decoder.abstract(cfg)
    if source.device.type == "cuda":
        lay(new, groups(params))
    return cfg, tree.replace(params, new)


def _storage(parts: Sequence[Piece], shape: tuple[int, ...], source: Source, keep_fp32: bool) -> Tensor:
    """Room for all pieces of a tensor, in a dtype that loses nothing of any."""
    dtypes = {source.dtype(piece.name, keep_fp32) for piece in parts}
    return torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes), device=source.device)


def _check(family: Family, wanted: Mapping[str, Sequence[Piece]], source: Source) -> None:
    """Raise `TreeError` with all that is missing, misshapen or not expected, as the source calls it."""
    every = [piece for each in wanted.values() for piece in each]
    parted = [each for each in wanted.values() if each[0].leaf is not None and each[0].expert is None]
    whole = {piece.name for each in parted if _parts_fit(each, source.shapes) for piece in each}
    faults = []
    for piece in every:
        if piece.name in whole:
            continue
        what = f"{piece.described} ({source.shown(piece.name)})"
        if piece.name not in source.shapes:
            faults.append(f"{what}: missing, {piece.spec} = {piece.shape}")
        elif source.shapes[piece.name] != piece.shape:
            faults.append(f"{what}: {piece.spec} = {piece.shape}, but the tensor has {source.shapes[piece.name]}")
    used = {*family.tied, *(piece.name for piece in every)}
    strays = [
        f"{source.shown(name)}: not expected, it has {shape}"
        for name, shape in source.shapes.items()
        if name not in used
    ]
    if faults or strays:
        lines = listed(faults, _MOST_LINES[0]) + listed(strays, _MOST_LINES[1])
        # The same names without their first part: a base model.
        bare = {piece.name.removeprefix("model.") for piece in every} & set(source.shapes)
        fix = "\n    fix: pass the ...ForCausalLM module, with its head" if len(bare) > len(source.shapes) // 2 else ""
        raise TreeError(
            f"checkpoint and config of family {family.model_type} differ\n    " + "\n    ".join(lines) + fix
        )


def _parts_fit(parts: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether they have all the rows of a tensor together."""
    if any(piece.name not in shapes for piece in parts):
        return False
    there, wanted = [shapes[piece.name] for piece in parts], [piece.shape for piece in parts]
    widths = {shape[1:] for shape in (*there, *wanted)}
    return len(widths) == 1 and sum(shape[0] for shape in there) == sum(shape[0] for shape in wanted)


def _placed(paths: tuple[str, ...], place: Mapping[str, str]) -> tuple[str, ...]:
    """The paths of leaves of one layer in the place that it has now, none where it is left out."""
    if not paths[0].startswith(".layers["):
        return paths
    begin = paths[0].partition("]")[0] + "]."
    return tuple(place[begin] + path.removeprefix(begin) for path in paths) if begin in place else ()
