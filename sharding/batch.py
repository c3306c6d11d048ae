"""What a trainer needs around a sharded model: its part of a batch and of the parameters, and sums of gradients.

    batch = shard_batch(tokens, labels, None, cu_seqlens, model, mesh)     # model: shard(F.next_token_loss, ...)
    total, _ = model(params, batch.tokens, cfg, batch.labels, cu_seqlens=cu_seqlens)
    (counted_once(total, model, mesh) / batch.count).backward()            # of all tokens of all ranks
    grads = sum_gradients(grads, model.specs(params, cfg), mesh)

The sum of all ranks' losses has the dense gradient: each token counts on one rank. Nothing is divided by a degree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..functional import tree
from . import documents, shards
from .errors import SpecError
from .layouts import Layout
from .mesh import Mesh, check_axes
from .ports import Leaf, enter, matched
from .reshard import call_of, exchanged, planned
from .spec import Spec, parse

__all__ = ["Batch", "counted_once", "cut", "pending_axes", "shard_batch", "sum_gradients"]

IGNORE = -100
BUCKET = 2**28  # bytes that are summed at once

T = TypeVar("T")


class Batch(NamedTuple):
    """A rank's part of a batch.

    tokens, labels: `B S` as the spec says; labels are the targets, shifted. positions: of these tokens, `B|1 S` or
    `M B S`, for rotary tables of one's own; what `shard` returns wants the global ones, or none. count: how many
    targets there are in the whole batch, on all ranks.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    count: Tensor  # type: ignore[assignment]  # which tuples have as a method


def shard_batch(
    tokens: Tensor, labels: Tensor | None, positions: Tensor | None, cu_seqlens: Any, spec: Any, mesh: Mesh
) -> Batch:
    """A rank's part of global tokens `B S`, with targets that were shifted before they were cut.

    labels: `B S`, the label of each token itself (as in transformers; -100 is left out); the tokens unless given. The
    target of a token is the label of the next one, and a document's last token has none. positions: `B|1 S` or `M B S`;
    0 .. S-1, in each document, unless given. cu_seqlens: boundaries of packed documents, or None. spec: of the tokens,
    `"B/dp S/g:zigzag/u"`; or the model that takes them, what `shard` returned, or its layout. mesh: this rank's own.

    Raises `SpecError` and `ValueError` where shapes, boundaries and spec do not go together.
    """
    made_for = getattr(spec, "sizes", {}).get("S")
    spec = _spec_of(spec)
    if [atom.name for atom in spec.atoms] != ["B", "S"] or spec.partial or len(spec.dims) != 2:
        raise SpecError("shard_batch: a batch of tokens has two dimensions, B and S", spec.text or str(spec))
    check_axes(mesh.axes, spec)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        shape = f"{tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"shard_batch(tokens=...): B S is needed, not {shape}")
    rows, size = tokens.shape
    if made_for not in (None, size):
        raise ValueError(f"shard_batch(tokens=...): S={int(size)} tokens a row, and the model is of S={made_for}")
    labels = tokens if labels is None else labels
    for name, x in (("tokens", tokens), ("labels", labels), ("positions", positions)):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"shard_batch({name}=...): a tensor is needed, not {type(x).__name__}")
    if labels.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        dtype = str(labels.dtype).removeprefix("torch.")
        raise TypeError(
            f"shard_batch(labels=...): signed integers are needed, not {dtype}, since {IGNORE} leaves a target out\n"
            "    fix: .long()"
        )
    if labels.shape != tokens.shape:
        raise ValueError(f"shard_batch(labels=...): {tuple(labels.shape)}, the tokens are {tuple(tokens.shape)}")
    cu = documents.boundaries(cu_seqlens if cu_seqlens is not None else (0, size), size)
    if positions is None:
        positions = documents.positions_within(cu, tokens.device)
    if positions.dim() not in (2, 3) or positions.shape[-1] != size or positions.shape[-2] not in (1, rows):
        raise ValueError(
            f"shard_batch(positions=...): {tuple(positions.shape)}; B|1 S or M B|1 S is needed, with B={rows} S={size}"
        )
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    last = [end - 1 for start, end in itertools.pairwise(cu) if end > start]
    targets[:, last] = IGNORE
    sizes = {"B": int(rows), "S": int(size)}
    shards.check(spec, sizes, mesh.axes)

    def mine(x: Tensor) -> Tensor:
        for dim, letter, whole, ranges in _cuts(spec, mesh, sizes):
            at = x.dim() - 2 + dim
            if letter == "S" or x.shape[at] == whole:
                x = shards.select(x, at, ranges)
        return x

    return Batch(mine(tokens), mine(targets), mine(positions), (targets != IGNORE).sum())


def _spec_of(spec: Any) -> Spec:
    """Of tokens: said, or as a layout has them."""
    layout = getattr(spec, "layout", spec)
    return parse(layout["tokens"][0] if isinstance(layout, Layout) else spec)


def _cuts(spec: Spec, mesh: Mesh, sizes: dict[str, int]) -> Iterator[tuple[int, str, int, shards.Ranges]]:
    at = mesh.coordinates(mesh.rank)
    for dim, atom in enumerate(spec.atoms):
        if atom.axes:
            yield dim, atom.name, sizes[atom.name], shards.held(atom, sizes, mesh.axes, at)


def cut(x: T, specs: Any, mesh: Mesh, **sizes: int) -> T:
    """This rank's shard of a global tensor, or of a tree of them: `cut(params, model.specs(params, cfg), mesh)`.

    specs: one, or a tree of them as `simulate` takes. sizes: of letters that no tensor shows. Views where a shard is
    one range of each dimension.
    """
    leaves = matched(x, specs, "x")
    ports = iter(enter([leaf for leaf in leaves if isinstance(leaf.value, Tensor)], mesh, sizes))
    values = []
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor) or leaf.spec is None:
            values.append(leaf.value)
            continue
        values.append(leaf.value[leaf.spec.slices(next(ports).sizes, mesh, mesh.rank)])
    return tree.unflatten(tree.structure(x), values)  # type: ignore[no-any-return]


def pending_axes(spec: str | Spec, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the gradient of a tensor with this spec is a pending sum: those that do not split it.

    On processes `mesh.transport.group(*axes)` is the group of torch that sums it.
    """
    spec = parse(spec)
    check_axes(mesh.axes, spec)
    return tuple(axis for axis, size in mesh.axes if size > 1 and axis not in spec.axes)


def sum_gradients(grads: T, specs: Any, mesh: Mesh) -> T:
    """Gradients of parameters, each summed over the axes that do not split it: what one rank with all tokens has.

    specs: a tree of specs as the parameters lie, `model.specs(params, cfg)`, or one for all. Those that are summed over
    the same axes travel together; those of key/value heads that some ranks share (`K@H/tp`) as all heads, each in its
    place. Nothing is divided. Every rank makes this call.
    """
    if isinstance(specs, (str, Spec)):
        specs = tree.map(lambda _: specs, grads)
    leaves = matched(grads, specs, "grads")
    groups: dict[Any, list[int]] = {}
    values, shared = [leaf.value for leaf in leaves], dict[int, list[_Place]]()
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf.value, Tensor) or leaf.spec is None:
            continue
        axes = pending_axes(leaf.spec, mesh)
        if places := list(_shared(leaf, mesh)):
            shared[i] = places
            over = {axis for place in places for axis in place.axes}
            axes = tuple(axis for axis, _ in mesh.axes if axis in over or axis in axes)
            values[i] = _among_all(leaf.value, places)
        if axes:
            groups.setdefault((axes, leaf.value.dtype), []).append(i)
    with torch.no_grad():
        for (axes, _), members in groups.items():
            pair = f"... +{'+'.join(axes)} -> ..."
            for bucket in _buckets(members, values):
                xs = tuple(values[i] for i in bucket)
                plans = [planned(x, pair, mesh, {}) for x in xs]
                moves = tuple(plan.move for plan in plans)
                backs = tuple(plan.adjoint for plan in plans)
                for i, y in zip(
                    bucket, exchanged(xs, moves, backs, call_of(xs, pair, ("gradients",)), mesh), strict=True
                ):
                    values[i] = y
    for i, places in shared.items():
        for place in places:
            values[i] = shards.select(values[i], place.dim, place.ranges)
    return tree.unflatten(tree.structure(grads), values)  # type: ignore[no-any-return]


class _Place(NamedTuple):
    """Where in a dimension of `size` a rank's rows are, some of which other ranks over some axes have too."""

    dim: int
    size: int
    ranges: shards.Ranges
    axes: tuple[str, ...]


def _shared(leaf: Leaf, mesh: Mesh) -> Iterator[_Place]:
    """The dimensions of a leaf that lie as other letters need them."""
    assert leaf.spec is not None
    for i, dim in enumerate(leaf.spec.dims):
        axes = tuple(axis for atom in dim if atom.need for axis in atom.axes if mesh[axis] > 1)
        if axes:
            sizes = shards.complete(leaf.sizes or {})
            at = mesh.coordinates(mesh.rank)
            size = math.prod(shards.size(leaf.spec, atom, atom.name, sizes, mesh.axes) for atom in dim)
            held = [shards.held(atom, sizes, mesh.axes, at) if atom.axes else None for atom in dim]
            found = shards.pieces(dim, [None if ranges is None else (ranges, ranges) for ranges in held], sizes)
            yield _Place(i, size, tuple((start, start + n) for start, _, n in found), axes)


def _among_all(x: Tensor, places: list[_Place]) -> Tensor:
    """x in its place among zeros."""
    for place in places:
        whole = x.new_zeros(*x.shape[: place.dim], place.size, *x.shape[place.dim + 1 :])
        start = 0
        for a, b in place.ranges:
            whole.narrow(place.dim, a, b - a).copy_(x.narrow(place.dim, start, b - a))
            start += b - a
        x = whole
    return x


def _buckets(members: list[int], values: list[Any]) -> Iterator[list[int]]:
    """Some at a time, so that no buffer is as large as all gradients together."""
    found: list[int] = []
    held = 0
    for i in members:
        size = values[i].numel() * values[i].element_size()
        if found and held + size > BUCKET:
            yield found
            found, held = [], 0
        found.append(i)
        held += size
    if found:
        yield found


def counted_once(loss: Tensor, spec: Any, mesh: Mesh) -> Tensor:
    """A loss where this rank is the first of those that compute the same one, and a zero of the same graph elsewhere.

    spec: of the tokens, as `shard_batch` takes it. Ranks that differ in other axes (tp) have the same tokens and the
    same loss; counted by each, their sum, and with it every gradient, would be as many times too large.
    """
    at = mesh.coordinates(mesh.rank)
    return loss if not any(at[axis] for axis in pending_axes(_spec_of(spec), mesh)) else loss * 0
