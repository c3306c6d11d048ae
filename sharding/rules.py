"""A layout joined to a mesh and to the heads of a layer: which specs hold there, and what cannot be.

All of it is plain Python from whole numbers, the same on every rank, and raises before anything moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from . import shards
from .constant import constant
from .errors import SpecError
from .fixes import fewer, fitting, hybrid
from .implied import lead, recurrent, split_by
from .layouts import AROUND, OUTBOUND, WHOLE, gathers
from .mesh import Axes, check_axes, coordinates, size_of, text_of
from .shards import Ranges
from .spec import Atom, Spec, parse

__all__ = [
    "LocalHeads",
    "batch",
    "by_query_head",
    "cut",
    "dealt",
    "gathered",
    "heads",
    "kept",
    "letters",
    "of_part",
    "of_rows",
    "own",
    "place",
    "reached",
    "resolve",
    "split",
    "split_over",
    "tokens",
]

Edges = tuple[tuple[str, tuple[str, ...]], ...]
Sizes = tuple[tuple[str, int], ...]

# Axes that split tokens, by the meaning that every mesh gives them.
_TOKENS = ("g", "u", "cp")


class LocalHeads(NamedTuple):
    """offset, local: of the query heads. kv_index: the local key/value head of each, None where grouping says it.
    groups: how many of those are local."""

    offset: int
    local: int
    kv_index: tuple[int, ...] | None
    groups: int


@constant
def of_part(edges: Edges, part: str) -> Edges:
    """The edges that a part of a layer has: its own, `part.edge`, under their bare names, and those of no part beside
    them. One that says where its output lies says all that is within it."""
    own = {edge.removeprefix(f"{part}."): chain for edge, chain in edges if part and edge.startswith(f"{part}.")}
    found = {edge: chain for edge, chain in edges if "." not in edge and ("o" not in own or edge in AROUND)}
    return tuple({**found, **own}.items())


@constant
def resolve(name: str, edges: Edges, axes: Axes, heads: tuple[int, int] | None) -> Edges:
    """The specs of every edge on a mesh, for a layer of (H, K) heads.

    Where there are fewer key/value heads than ranks among which they are dealt, query heads are dealt out instead, and
    each rank holds the key/value heads that they need; so do its weights lie. Raises `SpecError` where there are fewer
    query heads than ranks.
    """
    found = {edge: [parse(text) for text in chain] for edge, chain in edges}
    for chain in found.values():
        for spec in chain:
            check_axes(axes, spec)
    if heads is not None and lead(found) in found and _dealt(name, found, axes, heads):
        found = {edge: [by_query_head(spec) for spec in chain] for edge, chain in found.items()}
    return tuple((edge, tuple(map(str, chain))) for edge, chain in found.items())


@constant
def dealt(name: str, edges: Edges, axes: Axes, heads: tuple[int, int]) -> bool:
    """Whether query heads of a layer of (H, K) heads are dealt out one by one, and with them its weights."""
    found = {edge: [parse(text) for text in chain] for edge, chain in edges}
    return lead(found) in found and _dealt(name, found, axes, heads)


@constant
def heads(queries: str, keys: str, axes: Axes, rank: int, sizes: Sizes) -> LocalHeads:
    """Which heads a rank computes. queries, keys: the specs of its queries and of its keys."""
    known, at = shards.complete(dict(sizes)), coordinates(axes, rank)
    each = known["G"]
    mine, theirs = (
        shards.held(next(atom for atom in parse(text).atoms if atom.name in ("K", "H")), known, axes, at)
        for text in (queries, keys)
    )
    by_group = any(atom.name == "K" for atom in parse(queries).atoms)
    (a, b) = next(iter(mine), (0, 0))
    first, last = (a * each, b * each) if by_group else (a, b)
    (low, high) = next(iter(theirs), (0, 0))
    wanted = [h // each for h in range(first, last)]
    lacking = sorted({n for n in wanted if not low <= n < high})
    if lacking:
        raise SpecError(
            f"rank {rank} has query heads {first}:{last} and key/value heads {low}:{high}; {lacking[0]} is missing",
            keys, mesh=text_of(axes, parse(queries), parse(keys)), fix="keys split as their queries are: K/u, or K@H/u",
        )  # fmt: skip
    index = tuple(n - low for n in wanted)
    per = (last - first) // (high - low) if high > low else 0
    plain = per * (high - low) == last - first and index == tuple(n // per for n in range(last - first) if per)
    return LocalHeads(first, last - first, None if plain else index, high - low)


def _dealt(name: str, edges: Mapping[str, list[Spec]], axes: Axes, heads: tuple[int, int]) -> bool:
    """Whether query heads are dealt out one by one, there being fewer key/value heads than ranks; in a gated delta net
    value heads, there being fewer key heads."""
    queries, (count, groups) = edges[lead(edges)], heads
    before, after = (_axes_of_heads(spec) for spec in (queries[0], queries[-1]))
    outer, all_of_it = (math.prod(size_of(axes, axis) for axis in some) for some in (before, after))
    ranks, over = all_of_it // outer, after[len(before) :]
    most = "value heads" if recurrent(edges) else "query heads"
    if groups >= outer and groups // outer >= ranks:
        return False
    per = f" ({count} over {'/'.join(before)}={outer})" if outer > 1 and count >= outer else ""
    if count < outer:
        raise SpecError(
            f"{name}: H={count} {most if 'k' in edges else 'heads'} over {'/'.join(before)}={outer}, which splits them "
            "before",
            str(queries[0]), mesh=text_of(axes, queries[0]), fix=fewer(axes, before, over, heads),
        )  # fmt: skip
    if count // outer < ranks:
        raise SpecError(
            f"{name}: H={count // outer} {most}{per} are fewer than {'/'.join(over)}={ranks} ranks",
            str(queries[-1]), mesh=text_of(axes, queries[-1]),
            fix=fitting(name, edges, axes, over, heads, outer, ranks),
        )  # fmt: skip
    if "tail" in edges and groups < outer:
        raise SpecError(
            f"{name}: K={groups} key heads over {'/'.join(before)}={outer}: value heads are dealt out then, and the "
            "ends of convolutions are handed on by key heads",
            str(queries[0]), mesh=text_of(axes, queries[0]), fix=f"{'/'.join(before)}={groups}, or gdn_ulysses",
        )  # fmt: skip
    return True


def _axes_of_heads(spec: Spec) -> tuple[str, ...]:
    return next((atom.axes for atom in spec.atoms if atom.name in ("K", "H")), ())


def by_query_head(spec: Spec) -> Spec:
    """`(K/u G)` as `H/u`, and `K/u` as `K@H/u`."""
    dims: list[tuple[Atom, ...]] = []
    for dim in spec.dims:
        names = [atom.name for atom in dim]
        if names[:2] == ["K", "G"]:
            dims.append((replace(dim[0], name="H"), *dim[2:]))
        elif names[0] == "K" and dim[0].axes:
            dims.append((replace(dim[0], need="H"), *dim[1:]))
        else:
            dims.append(dim)
    return Spec(tuple(dims), spec.partial)


@constant
def complete(name: str, edges: Edges, keys: tuple[str, ...], axes: Axes) -> bool:
    """Raise `SpecError` for a layout that leaves a rank without keys that its queries may see: one that does not use an
    axis over which tokens are split, or that leaves keys split. Such a layout may be a part of another."""
    parts = dict.fromkeys(edge.split(".")[0] for edge, _ in edges if "." in edge)
    if parts:  # each sees its own edges, and those that are no part's
        for each in (of_part(edges, part) for part in (*parts, "")):
            complete(name, each, () if recurrent(dict(each)) else keys, axes)
        return True
    found = {edge: [parse(text) for text in chain] for edge, chain in edges}
    used = {axis for chain in found.values() for spec in chain for axis in spec.axes}
    for axis, size in axes:
        if size > 1 and axis in _TOKENS and axis not in used:
            here = [a for a in _TOKENS if a in used and size_of(axes, a) > 1]
            fix = f"Mesh without {axis}, or " + (
                hybrid(name, found, here[0], axis) if here == ["u"] and axis != "u" else
                hybrid(name, found, axis, here[0]) if here and axis == "u" else
                f"a layout that names {axis}"
            )  # fmt: skip
            alone = "begin without a state" if recurrent(found) else "attend to itself alone"
            raise SpecError(
                f"{name} does not use {axis}={size}, over which tokens are split: each part would {alone}",
                mesh=text_of(axes), fix=fix,
            )  # fmt: skip
    for edge in keys:
        for spec in found.get(edge, [])[-1:]:
            left = [axis for atom in spec.atoms if atom.name in "ST" for axis in atom.axes if size_of(axes, axis) > 1]
            if left:
                raise SpecError(
                    f"{name}: {edge} stays split over {', '.join(left)}, so a query would see only some of its keys",
                    str(spec), (0, len(str(spec))), mesh=text_of(axes, spec),
                    fix=f"one more spec for {edge}, in which S is whole",
                )  # fmt: skip
    if "kv_latent" in keys and not _whole(found.get("q", [])[-1:], axes):
        for spec in found.get("kv", []):
            for atom in (atom for atom in spec.atoms if atom.name == "S"):
                raise SpecError(
                    f"{name}: kv is made of the latents that a rank's queries see, and S in it is all tokens",
                    str(spec), atom.span, mesh=text_of(axes, found["q"][-1], spec), fix="T, as many as are seen",
                )  # fmt: skip
    _alike(name, found, axes)
    return True


def _whole(specs: list[Spec], axes: Axes) -> bool:
    """Whether tokens lie whole on every rank."""
    return all(size_of(axes, axis) == 1 for s in specs for a in s.atoms if a.name == "S" for axis in a.axes)


def _alike(name: str, edges: Mapping[str, list[Spec]], axes: Axes) -> None:
    """Raise `SpecError` where edges that meet lie differently: arguments outside a layer, queries and what goes with
    them inside."""
    if "q" not in edges:
        return
    made = ("kv",) if "kv_latent" in edges else ()  # within the layer
    outside = {e: chain[-1 if e in OUTBOUND else 0] for e, chain in edges.items() if e not in (*WHOLE, *made)}
    inside = {e: edges[e][0 if e == "o" else -1] for e in (*_WITH_QUERIES, "o") if e in edges}
    # Activations lie alike around a layer, and within it as x comes to lie.
    for other, spec in outside.items():
        met = "x" if "x" in edges and other in AROUND else "q"
        _same(name, met, edges[met][0], other, spec, ("S",), axes)
    for other, end in (("x", -1), ("out", 0)):
        if other in edges:
            _same(name, "q", edges["q"][0], other, edges[other][end], ("S",), axes)
    met = "b" if recurrent(edges) else "q"  # a q that is convolved has tokens more
    for other, spec in inside.items():
        _same(name, met, edges[met][-1], other, spec, ("S", "K", "H"), axes)
    for other in made if "kv" in edges else ():
        _same(name, "kv_latent", edges["kv_latent"][-1], other, edges[other][0], ("S",), axes)
    # Of latent attention: heads are made by rows of kv_b, and met by queries of the same ones.
    for one, a, other, b in (("kv_b", -1, "kv", 0), ("q", -1, "kv", -1)):
        if one in edges and other in edges:
            mine, theirs = edges[one][a], edges[other][b]
            over = [[x for x in _axes_of_heads(spec) if size_of(axes, x) > 1] for spec in (mine, theirs)]
            if over[0] != over[1]:
                raise SpecError(
                    f"{name}: {one} and {other} meet, but heads lie over {' '.join(over[0]) or 'no axis'} in one and "
                    f"over {' '.join(over[1]) or 'no axis'} in the other",
                    str(theirs), mesh=text_of(axes, mine, theirs), fix="the same axes in both",
                )  # fmt: skip


_WITH_QUERIES = ("q_positions", "q_segment_ids", "mask", "sinks")


def _same(name: str, edge: str, a: Spec, other: str, b: Spec, letters: tuple[str, ...], axes: Axes) -> None:
    for letter in letters:
        mine, theirs = (next((atom for atom in spec.atoms if atom.name == letter), None) for spec in (a, b))
        if mine is None or theirs is None:
            continue
        here, there = ((*(x for x in atom.axes if size_of(axes, x) > 1), atom.zigzag) for atom in (mine, theirs))
        if here != there:
            raise SpecError(
                f"{name}: {edge} and {other} meet, but {letter} lies as {mine} in one and as {theirs} in the other",
                str(b), mesh=text_of(axes, a, b), fix=f"{mine} in {other} too",
            )  # fmt: skip


@constant
def of_rows(edges: Edges) -> Edges:
    """The specs of edges for a rank's own rows of the batch, which no layout moves: how many there are in all is not
    needed."""

    def own(spec: Spec) -> Spec:
        dims = tuple(tuple(replace(a, axes=()) if a.name == "B" else a for a in dim) for dim in spec.dims)
        return Spec(dims, spec.partial)

    return tuple((edge, tuple(str(own(parse(text))) for text in chain)) for edge, chain in edges)


@constant
def letters(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Every letter of an edge, and what its heads need."""
    found = {atom.name for text in chain for atom in parse(text).atoms}
    return tuple(sorted(found | ({"H", "K", "G"} if found & {"H", "K", "G"} else set())))


@constant
def split(text: str) -> tuple[str, ...]:
    """The letters that a spec splits, with those whose sizes they need."""
    atoms = [atom for atom in parse(text).atoms if atom.axes]
    return tuple(dict.fromkeys(name for atom in atoms for name in (atom.name, *(("H", "G") if atom.need else ()))))


@constant
def split_over(text: str) -> tuple[str, ...]:
    """The axes that split the first dimension of a spec."""
    return parse(text).dims[0][0].axes


@constant
def reached(text: str, axes: Axes, rank: int, tokens: int, width: int) -> Ranges:
    """The tokens of a rank's shard, and those in front that a convolution of that width reaches."""
    cuts = cut(str(next(atom for atom in parse(text).atoms if atom.name == "S")), axes, rank, (("S", tokens),))
    own = cuts[0][3] if cuts else ((0, tokens),)
    return tuple((max(a - width + 1, 0), b) for a, b in own if b > a)


@constant
def gathered(chain: tuple[str, ...]) -> tuple[str, ...]:
    """The axes over which an edge's tokens are gathered; none where they are not."""
    return next(iter(gathers(chain)), ())


@constant
def own(edges: Edges, letter: str, axes: Axes, rank: int, size: int) -> tuple[int, int] | None:
    """Which of a letter a rank's weights have; None where the layout splits it over no ranks."""
    over = split_by(edges, letter)
    if math.prod(size_of(axes, axis) for axis in over) == 1:
        return None
    ranges = shards.held(Atom(letter, over), {letter: size}, axes, coordinates(axes, rank))
    return next(iter(ranges), (0, 0))


@constant
def kept(edges: Edges, spec: str) -> tuple[str, ...]:
    """The two specs of a parameter that is kept in parts and gathered to be computed with, of the letters alone by
    which it is kept; none where it is not. spec: as its field says."""
    rule = dict(edges).get("parameters")
    if rule is None:
        return ()
    first, last = ({a.name: a for a in parse(text).atoms} for text in (rule[0], rule[-1]))

    def lies(dim: tuple[Atom, ...], as_in: Mapping[str, Atom], i: int) -> str:
        held = dim[0].name in first and set(first[dim[0].name].axes) <= set(dim[0].axes)
        return str(as_in[dim[0].name]) if held and len(dim) == 1 else f"n{i}"

    dims = parse(spec).dims
    found = tuple(" ".join(lies(dim, side, i) for i, dim in enumerate(dims)) for side in (first, last))
    return found if found[0] != found[1] else ()


@constant
def stays(chain: tuple[str, ...], axes: Axes) -> bool:
    """Whether an edge lies on a mesh in the end as it does at first."""

    def held(text: str) -> list[tuple[str, ...]]:
        return [tuple(axis for axis in atom.axes if size_of(axes, axis) > 1) for atom in parse(text).atoms]

    return held(chain[0]) == held(chain[-1])


@constant
def place(text: str, letter: str) -> int:
    """Which dimension of a spec a letter is."""
    return next(i for i, dim in enumerate(parse(text).dims) if any(atom.name == letter for atom in dim))


@constant
def tokens(text: str) -> str:
    """The spec of the tokens alone, of one with other dimensions."""
    return str(next(atom for atom in parse(text).atoms if atom.name == "S"))


def rows(text: str) -> str:
    """The spec of the batch alone."""
    return str(next(atom for atom in parse(text).atoms if atom.name == "B"))


@constant
def batch(text: str) -> tuple[int, int]:
    """Which dimension the batch is, -1 for none, and how many there are."""
    dims = parse(text).dims
    return next((i for i, dim in enumerate(dims) if dim[0].name == "B"), -1), len(dims)


@constant
def cut(text: str, axes: Axes, rank: int, sizes: Sizes) -> tuple[tuple[int, str, int, Ranges], ...]:
    """What a rank takes of something whole: for each dimension that is split, its index, letter, size and ranges."""
    at, known = coordinates(axes, rank), {**shards.complete(dict(sizes))}
    known["T"] = known.get("S", 0)
    found = []
    for i, dim in enumerate(parse(text).dims):
        letter = dim[0].name
        if letter == "B" or not (letter == "T" or any(atom.axes for atom in dim)):
            continue
        parts = [shards.held(atom, known, axes, at) if atom.axes else None for atom in dim]
        pieces = shards.pieces(dim, [None if p is None else (p, p) for p in parts], known)
        whole = math.prod(known[atom.name] for atom in dim)
        found.append((i, letter, whole, tuple((start, start + n) for start, _, n in pieces)))
    return tuple(found)
