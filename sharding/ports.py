"""Global tensors to shards and back, in one process: the two ends of a simulation.

A port says how one tensor crosses. `scatter` and `gather` are linear and each other's adjoint: a port of an input hands
every rank its shard, and sums over the ranks what comes back; a port of an output takes each element from the first
rank that holds it (or the sum over a pending axis), and hands that rank alone what comes back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..functional import tree
from . import shards
from .errors import SpecError
from .mesh import Mesh, check_axes, size_of, text_of
from .spec import Atom, Spec, parse
from .transport import summable

__all__ = ["Leaf", "Port", "Sized", "differentiable", "enter", "gather", "leave", "matched", "scatter"]

WHOLE = parse("...")


@dataclass(frozen=True)
class Sized:
    """A spec whose letters have sizes of their own, since in a tree each layer has its own heads and widths."""

    spec: Spec
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return str(self.spec)


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments or of the results, with its spec and the name that errors give it. sizes: its own, if
    its letters are not those of the others."""

    value: Any
    spec: Spec | None
    name: str
    sizes: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Port:
    """How one tensor crosses.

    shape: global. sizes: by letter. first: whether an element counts on its first holder alone. lead: how many
    dimensions stand before those of the spec. differentiable: whether its dtype is.
    """

    spec: Spec
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    mesh: Mesh
    first: bool
    differentiable: bool
    lead: int = 0

    def behind(self, n: int) -> Port:
        """The port of the tensor with one more dimension, of n, in front."""
        return replace(self, shape=(n, *self.shape), lead=self.lead + 1)

    def alone(self) -> Port:
        """The port of one sample of a batch."""
        return replace(self, shape=self.shape[1:], lead=self.lead - 1)

    def local(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        return tuple(sum(count for _, _, count in dim) for dim in self._pieces(rank, first=False))

    def blocks(self, rank: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """What of a rank's shard counts, as pairs of indices, of the global tensor and of the shard."""
        at = self.mesh.coordinates(rank)
        if self.first and any(at[axis] for axis in at if axis not in self.spec.axes):
            return
        for pieces in itertools.product(*self._pieces(rank, first=self.first)):
            yield tuple(slice(g, g + n) for g, _, n in pieces), tuple(slice(a, a + n) for _, a, n in pieces)

    def _pieces(self, rank: int, *, first: bool) -> list[list[shards.Piece]]:
        at, axes = self.mesh.coordinates(rank), self.mesh.axes
        found = [[(0, 0, n)] for n in self.shape]
        named = self.spec.named
        dims = shards.dims_of(self.spec, range(self.lead, len(self.shape)))
        for i, dim in zip(dims, named, strict=True):
            if any(atom.axes for atom in dim):
                parts = [_part(atom, self.sizes, axes, at, first) if atom.axes else None for atom in dim]
                found[i] = shards.pieces(dim, parts, self.sizes)
        return found


def _part(
    atom: Atom, sizes: Mapping[str, int], axes: tuple[tuple[str, int], ...], at: Mapping[str, int], first: bool
) -> tuple[shards.Ranges, shards.Ranges]:
    """What a rank holds of a letter, and which of it counts."""
    mine = shards.held(atom, sizes, axes, at)
    if not first or atom.need is None:
        return mine, mine
    places = itertools.product(*(range(size_of(axes, axis)) for axis in atom.axes))
    before = [dict(zip(atom.axes, place, strict=True)) for place in places]
    here = before.index({axis: at.get(axis, 0) for axis in atom.axes})
    return mine, shards.first_holders([shards.held(atom, sizes, axes, place) for place in before[: here + 1]])[-1]


def scatter(x: Tensor, port: Port) -> list[Tensor]:
    """Each rank's shard, in memory of its own; zero where it is not the first holder and only that one counts."""
    found = []
    for rank in range(port.mesh.size):
        shard = x.new_zeros(port.local(rank))
        for there, here in port.blocks(rank):
            shard[here] = x[there]
        found.append(shard)
    return found


def gather(locals: Sequence[Tensor], port: Port) -> Tensor:
    """The global tensor."""
    summed = not port.first or bool(port.spec.partial)
    dtype = locals[0].dtype
    half = summed and dtype in (torch.float16, torch.bfloat16)
    x = locals[0].new_zeros(port.shape, dtype=torch.float32 if half else dtype)
    for rank, shard in enumerate(locals):
        for there, here in port.blocks(rank):
            if summed:
                x[there] += shard[here]
            else:
                x[there] = shard[here]
    return x.to(dtype)


def matched(value: Any, spec: Any, name: str) -> list[Leaf]:
    """The leaves of a tree, in order, with their specs. Raises `SpecError` where the specs have another structure."""
    if isinstance(spec, Sized):
        return [replace(leaf, sizes=spec.sizes) for leaf in matched(value, spec.spec, name)]
    if spec is None or isinstance(spec, (str, Spec)):
        found = tree.paths(value)
        if spec is None:
            return [
                Leaf(leaf, WHOLE if isinstance(leaf, Tensor) else None, name + path) for path, leaf in found.items()
            ]
        ((path, leaf),) = found.items() if len(found) == 1 else [("", value)]
        if path or not isinstance(leaf, Tensor):
            what = f"a tree of {len(found)} leaves" if path or len(found) != 1 else type(leaf).__name__
            raise SpecError(
                f'{name} is {what}, and its spec "{spec}" is of one tensor',
                fix="a tree of specs (params.specs()), or None: every rank gets all of it",
            )
        return [Leaf(leaf, parse(spec), name)]
    if not isinstance(spec, (tuple, list, dict, tree.Tree)):
        raise TypeError(f"{name}: a spec is a string, a tree of strings or None, not {type(spec).__name__}")
    if isinstance(spec, (tuple, list)) and type(spec) is type(value) and len(spec) == len(value):
        pairs = enumerate(zip(value, spec, strict=True))
        return [leaf for i, (v, s) in pairs for leaf in matched(v, s, f"{name}[{i}]")]
    specs, leaves = tree.paths(spec), tree.paths(value)
    if list(specs) != list(leaves):
        missing = ", ".join(name + path for path in leaves if path not in specs)
        more = ", ".join(name + path for path in specs if path not in leaves)
        both = [f"without a spec: {missing}"] * bool(missing) + [f"in the specs alone: {more}"] * bool(more)
        raise SpecError(f"{name}: its specs have another structure; {'; '.join(both)}", fix="one spec a tensor")
    return [leaf for path in leaves for leaf in matched(leaves[path], specs[path], name + path)]


def enter(leaves: Sequence[Leaf], mesh: Mesh, sizes: Mapping[str, int]) -> list[Port]:
    """Ports of arguments. Letters are bound by the tensors' own sizes, together with those given."""
    known = dict(sizes)
    for leaf in leaves:
        assert leaf.spec is not None
        check_axes(mesh.axes, leaf.spec)
        options = [letter for letter in leaf.spec.letters if letter in ("timeout", "latency", "fault")]
        if options:
            raise SpecError(f'"{options[0]}" is an option of simulate, and cannot be a letter there', leaf.spec.text)
        if leaf.spec.partial:
            at = leaf.spec.text.index("+")
            raise SpecError(
                f"{leaf.name}: a whole value is needed here, not a pending sum", leaf.spec.text,
                (at, len(leaf.spec.text.rstrip())), mesh=text_of(mesh.axes, leaf.spec),
                fix="drop it: the value is whole outside, and every rank gets its shard of it",
            )  # fmt: skip
    before = None
    while before != known:  # a letter that one tensor shows may factor a dimension of another
        before = known
        for leaf in leaves:
            if leaf.sizes is None:
                assert leaf.spec is not None
                known = shards.bind(leaf.spec, leaf.value.shape, known, mesh.axes, leaf.name)
    ports = []
    for leaf in leaves:
        assert leaf.spec is not None
        shape, own = tuple(leaf.value.shape), known
        if leaf.sizes is not None:
            own = shards.bind(leaf.spec, shape, leaf.sizes, mesh.axes, leaf.name)
        shards.check(leaf.spec, own, mesh.axes)
        for dim in leaf.spec.dims:
            for atom in dim if any(a.axes for a in dim) else ():
                shards.size(leaf.spec, atom, atom.name, own, mesh.axes, leaf.name + ": ")
        ports.append(Port(leaf.spec, shape, own, mesh, False, differentiable(leaf.value)))
    return ports


def leave(of_ranks: Sequence[Sequence[Leaf]], mesh: Mesh, sizes: Mapping[str, int], lead: int) -> list[Port]:
    """Ports of results, from what each rank returned. lead: batch dimensions in front of those that specs name.

    Raises `SpecError` where a rank's shard is not what the spec says, or where copies differ.
    """
    found = []
    for of_result in zip(*of_ranks, strict=True):
        first, tensors = of_result[0], [leaf.value for leaf in of_result]
        assert first.spec is not None
        shape, known = _global_shape(first, mesh, {**sizes, **(first.sizes or {})}, lead)
        port = Port(first.spec, shape, known, mesh, True, differentiable(first.value), lead)
        for rank, x in enumerate(tensors):
            if tuple(x.shape) != port.local(rank) or x.dtype != tensors[0].dtype:
                raise SpecError(
                    f"{first.name} does not fit its spec: rank {rank} returned {_numbers(x.shape)} {x.dtype}, and "
                    f"{_numbers(port.local(rank))} {tensors[0].dtype} is its shard".replace("torch.", ""),
                    first.spec.text, mesh=text_of(mesh.axes, first.spec), known=shards.known(known),
                )  # fmt: skip
        if first.spec.partial and not summable(tensors[0].dtype):
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            raise SpecError(
                f"{first.name}: a pending sum of {dtype} cannot be added up", first.spec.text, fix="x.int()"
            )
        _check_copies(tensors, port, first.name)
        found.append(port)
    return found


def _global_shape(
    leaf: Leaf, mesh: Mesh, sizes: Mapping[str, int], lead: int
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Of a result, from the first rank's shard, whose pieces are the largest, and the sizes known."""
    spec, x = leaf.spec, leaf.value
    assert spec is not None
    check_axes(mesh.axes, spec)
    known = shards.complete(sizes, spec.text)
    named = spec.named
    inner = x.shape[lead:]
    if len(inner) < len(named) or (len(inner) > len(named) and len(named) == len(spec.dims)):
        what = f"{leaf.name} has {len(inner)} dimensions ({_numbers(inner)}), its spec {len(named)}"
        raise SpecError(what, spec.text, mesh=text_of(mesh.axes, spec))
    shape, at = list(x.shape), mesh.coordinates(0)
    for i, dim in zip(shards.dims_of(spec, range(lead, x.dim())), named, strict=True):
        unknown = [atom for atom in dim if atom.name not in known]
        if any(atom.axes for atom in dim):
            for atom in unknown:
                if atom.axes or len(unknown) > 1:
                    shards.size(spec, atom, atom.name, known, mesh.axes, leaf.name + ": ")  # raises
            shards.check(replace(spec, dims=(tuple(a for a in dim if a.name in known),), partial=()), known, mesh.axes)
            parts = [atom for atom in dim if atom.name in known]
            held = [shards.local(atom, known, mesh.axes, at) for atom in parts]
            if unknown:
                known[unknown[0].name] = x.shape[i] // max(math.prod(held), 1)
            shape[i] = math.prod(known[atom.name] for atom in dim)
        elif not unknown:
            shape[i] = math.prod(known[atom.name] for atom in dim)
        elif len(dim) == 1:
            known = shards.complete({**known, dim[0].name: x.shape[i]}, spec.text)
    return tuple(shape), known


def _numbers(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape) or "a scalar"


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of this dtype has a gradient."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def _check_copies(locals: Sequence[Tensor], port: Port, name: str) -> None:
    """Raise `SpecError` where ranks that hold the same part of an output hold different values."""
    axes = [axis for axis, size in port.mesh.axes if size > 1 and axis not in port.spec.axes]
    if not axes:
        return
    for rank, shard in enumerate(locals):
        at = port.mesh.coordinates(rank)
        other = next(
            r
            for r in range(rank + 1)
            if all(v == (0 if a in axes else at[a]) for a, v in port.mesh.coordinates(r).items())
        )
        try:
            torch.testing.assert_close(shard, locals[other], equal_nan=True)
        except AssertionError as error:
            detail = str(error).splitlines()
            differ = next((line for line in detail if line.startswith("Greatest absolute")), detail[0])
            raise SpecError(
                f"{name} is whole over {', '.join(axes)} in its spec, but ranks {other} and {rank} return different "
                f"values ({differ.strip()})", port.spec.text or str(port.spec), mesh=text_of(port.mesh.axes, port.spec),
                fix=f'"{port.spec} +{"+".join(axes)}" if it is a pending sum; else a reshard before it is returned',
            ) from None  # fmt: skip
