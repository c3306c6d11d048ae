"""A spec as DTensor's placements, where DTensor can say it.

DTensor splits a dimension by the axes of its mesh in their order, into pieces of ceil(n / P), and knows neither factors
of a dimension nor an order of its pieces. Anything else is refused here, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import shards
from .errors import SpecError
from .mesh import Axes, check_axes, size_of, text_of
from .spec import ELLIPSIS, Atom, Spec

__all__ = ["placements"]


def placements(spec: Spec, device_mesh: Any, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """`Spec.placements`: one placement for each dimension of the device mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = device_mesh.mesh_dim_names
    if names is None:
        numbers = " ".join(str(n) for n in device_mesh.shape)
        raise SpecError(
            f"a device mesh of {numbers} ranks whose dimensions have no names, and a spec names axes", spec.text,
            fix="init_device_mesh(..., mesh_dim_names=('dp', 'tp'))",
        )  # fmt: skip
    axes: Axes = tuple((name, int(n)) for name, n in zip(names, device_mesh.shape, strict=True))
    check_axes(axes, spec)
    sizes = shards.complete(sizes, spec.text)
    shards.check(spec, sizes, axes)
    found: dict[str, Any] = dict.fromkeys(spec.partial, Partial("sum"))
    after = False
    for i, dim in enumerate(spec.dims):
        after |= dim[0].name == ELLIPSIS
        for atom in dim:
            split = [axis for axis in atom.axes if size_of(axes, axis) > 1]
            if split:
                _check(spec, dim, atom, split, after, sizes, axes)
            if not after:
                found |= dict.fromkeys(atom.axes, Shard(i))
    return tuple(found.get(name, Replicate()) for name in names)


def _check(
    spec: Spec, dim: Sequence[Atom], atom: Atom, split: Sequence[str], after: bool, sizes: Mapping[str, int], axes: Axes
) -> None:
    """Raise `SpecError` where DTensor cannot say how an atom is split over axes of more than one rank."""

    def refuse(what: str, fix: str) -> None:
        raise SpecError(
            f"DTensor has no placement for this: {what}", spec.text, atom.span, mesh=text_of(axes, spec),
            known=shards.known(sizes), fix=fix,
        )  # fmt: skip

    name, slashes = atom.name, "/".join(atom.axes)
    if after:
        refuse(f'which dimension {name} is, after "...", is not known', 'a letter for each dimension in place of "..."')
    if atom.need:
        refuse(f"{name} is held as {atom.need} need it, by several ranks", f"a plain {name}/{slashes}, or Replicate")
    if atom.zigzag and size_of(axes, atom.axes[0]) > 1:
        refuse(f"{name} lies in head-tail order", f"{name}/{slashes}, without the order")
    if atom is not dim[0]:
        word = " ".join(a.name for a in dim)
        refuse(f"{name} is an inner factor of ({word})", f"split the dimension, or shard {dim[0].name}")
    order = sorted(split, key=[axis for axis, _ in axes].index)
    if order != list(split):
        right = "/".join(order)
        what = f"{name} is split by {split[0]} first, and the device mesh has {order[0]} before it"
        refuse(what, f"{name}/{right}, or a device mesh of {', '.join(split)}")
    totals, ranks = {sizes[name]}, math.prod(size_of(axes, axis) for axis in split)
    for axis in split:
        parts = size_of(axes, axis)
        lengths = {n: [b - a for a, b in (shards.balanced(n, parts, i) for i in range(parts))] for n in totals}
        for n, ours in lengths.items():
            theirs = _ceil_chunks(n, parts)
            if ours != theirs or (len(dim) > 1 and n % parts):
                piece = f"a piece of {n} {name}" if len(totals) > 1 or n != sizes[name] else f"{name}={n}"
                there = f"{_short(theirs)} there"
                if len(dim) > 1:
                    there = f"DTensor would cut ({' '.join(a.name for a in dim)}) as one"
                refuse(
                    f"{piece} over {axis}={parts} is {_short(ours)} here, and {there}",
                    f"pad {name} to {-(-sizes[name] // ranks) * ranks}",
                )
        totals = {n for some in lengths.values() for n in some}


def _ceil_chunks(n: int, parts: int) -> list[int]:
    """The lengths of DTensor's shards."""
    each = -(-n // parts)
    return [min(max(n - i * each, 0), each) for i in range(parts)]


def _short(lengths: Sequence[int]) -> str:
    texts = [str(n) for n in lengths]
    return f"[{', '.join(texts if len(texts) <= 8 else [*texts[:3], '...', *texts[-3:]])}]"
