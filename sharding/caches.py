"""Caches under a layout: how each lies on a rank, and which layouts keep none.

A cache lies as its layer's edges `cache_...` say: by heads where keys or states are met by heads, whole where every
rank has what it is made of. Where needed keys alone travel, a rank lacks those that its queries do not see, which a
cache must have for the tokens to come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.tree import Tree, paths, replace, sizes_of
from . import rules
from .implied import recurrent
from .layouts import Edges, Layout
from .mesh import Mesh
from .ports import Sized
from .reshard import planned
from .spec import parse

__all__ = ["Kept", "check", "held", "kept_by", "specs", "why_none"]


class Kept(NamedTuple):
    """What one layer keeps. path: of its parameters, empty for a layer of its own. kind: their class. cfg: its config.
    chains: its edges, by bare names. leaves: of its cache; none where the layout keeps none."""

    path: str
    kind: str
    cfg: Any
    chains: Edges
    leaves: frozenset[str]


def kept_by(
    given: Mapping[str, Any], declared: Iterable[str], layout: Layout, part: str, choices: Iterable[Mapping[str, type]]
) -> list[Kept]:
    """Layer by layer. given: arguments, by name. declared: the edges of the function that the layout serves. part: the
    part of the layout that the function is. choices: as `functional.wire.choices_of` gives them."""
    params = next((x for x in given.values() if isinstance(x, Tree)), None)
    cfg = next((x for x in given.values() if hasattr(x, "sizes") and not isinstance(x, Tree)), None)
    kinds = {kind: name for each in choices for name, kind in each.items()}
    layers = list(_layers(params, cfg, kinds, "")) if kinds else [("", part, type(params).__name__, cfg)]
    found = []
    for path, name, kind, own in layers:
        edges = [edge.rsplit(".", 1) for edge in declared if edge.rsplit(".", 1)[-1].startswith("cache_")]
        leaves = frozenset(edge[-1].removeprefix("cache_") for edge in edges if edge[0] == name or len(edge) == 1)
        chains = rules.of_part(layout.chains, name.rsplit(".", 1)[-1])
        found.append(Kept(path, kind, own, chains, leaves))
    return found


def _layers(node: Any, cfg: Any, kinds: Mapping[type, str], path: str) -> Iterator[tuple[str, str, str, Any]]:
    """Of every part with a cache its path, the name of its edges, its class and its config."""
    if type(node) in kinds:
        yield path, kinds[type(node)], type(node).__name__, cfg
    elif isinstance(node, Tree):
        for field in dataclasses.fields(node):  # type: ignore[arg-type]
            inner = getattr(node, field.name)
            if not isinstance(inner, Tensor):
                yield from _layers(inner, getattr(cfg, field.name, None), kinds, f"{path}.{field.name}".lstrip("."))
    elif isinstance(node, tuple) and isinstance(cfg, tuple):
        for i, (each, of_each) in enumerate(zip(node, cfg, strict=True)):
            yield from _layers(each, of_each, kinds, f"{path}[{i}]")


def check(name: str, given: Mapping[str, Any], kept: list[Kept], layout: Layout, mesh: Mesh, *, own: bool) -> None:
    """Raise for caches that a layout does not keep, or that are others: before anything moves. own: whether they are
    this rank's. What a layer of its own is given, it compares itself."""
    caches = given["cache"]
    for each in kept:
        if not each.leaves:
            what, fix = why_none(dict(each.chains), layout)
            where = f"{each.path} is of class {each.kind}, and " if each.path else ""
            raise ValueError(f"{name}(cache=...) under a layout: {where}{what}\n    fix: {fix}")
    if given.get("positions") is None and not all(recurrent(dict(each.chains)) for each in kept):
        raise ValueError(f"{name}(positions=...): needed with a cache, which does not say how full it is")
    if not isinstance(caches, (tuple, list)) or len(caches) != len(kept):
        return  # the function says what it needs
    if given.get("mask") is not None:
        raise ValueError(
            f"{name}(mask=...) with a cache under a layout: S S says nothing of the tokens before\n"
            "    fix: positions of -1 for padding"
        )
    for i, (cache, each) in enumerate(zip(caches, kept, strict=True)):
        leaves = paths(cache) if isinstance(cache, Tree) else {}
        if {path.removeprefix(".") for path in leaves} != each.leaves:
            raise TypeError(
                f"{name}(cache=...): cache[{i}] is a {type(cache).__name__}, and {each.path} is of class {each.kind}\n"
                "    fix: empty_caches(configs, ...) makes one a layer"
            )
        for path, spec in paths(specs(cache, each, layout, mesh)).items() if own else ():
            ((_, chain),) = rules.of_rows((("cache", (str(spec.spec),)),))
            letters = rules.letters(chain)
            sizes = {letter: n for letter, n in spec.sizes.items() if letter in letters}
            planned(leaves[path], f"{chain[0]} -> {chain[0]}", mesh, sizes, name=f"{name}(cache=...): cache[{i}]{path}")


def specs(cache: Any, kept: Kept, layout: Layout, mesh: Mesh) -> Any:
    """How a cache lies, when it comes in and when it goes out; None, whole, for one that the layer refuses."""
    if not isinstance(cache, Tree):
        return None
    sizes = sizes_of(cache, kept.cfg)
    names = {path: path.removeprefix(".") for path in sizes}
    if {*names.values()} != kept.leaves:
        return None
    of_layer = kept.cfg.sizes
    found = dict(rules.resolve(layout.name, kept.chains, mesh.axes, (of_layer["H"], of_layer.get("K", of_layer["H"]))))
    return replace(cache, {path: Sized(parse(found[f"cache_{name}"][0]), sizes[path]) for path, name in names.items()})


def held(
    edges: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], mesh: Mesh, rank: int, dtype: torch.dtype
) -> int:
    """Bytes of one layer's cache on a rank. edges: as they are on the mesh, with those of a cache. sizes: global, of
    their letters."""
    total = 0
    for name, chain in edges.items():
        if name.startswith("cache_"):
            wide = torch.promote_types(dtype, torch.float32) if name == "cache_state" else dtype
            total += math.prod(parse(chain[0]).local(sizes, mesh, rank)) * wide.itemsize
    return total


def why_none(chains: Mapping[str, tuple[str, ...]], layout: Layout) -> tuple[str, str]:
    """Why a layout keeps no cache of a layer, and what to do."""

    def split(edge: str, at: int) -> tuple[str, ...]:
        atoms = parse(chains[edge][at]).atoms if edge in chains else ()
        return next((atom.axes for atom in atoms if atom.name == "S"), ())

    if layout.exchange == "needed" and "q" in chains:
        return f"{layout.name} sends needed keys alone, so that a rank lacks some of the others", 'exchange="all"'
    if stay := split("kv_latent", -1):
        what = f"latents of {layout.name} stay split over {'/'.join(stay)}"
        return f"{what}, so that no rank has all of them", f'mla_latent("{stay[-1]}"), or no cache'
    return "a cache is not split over ranks", "without it"
