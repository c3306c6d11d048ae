"""What a rank has of a model, and what ranks tell each other beside the steps: whether any goes on, and the tokens of
all rows.

Letters: B batch, S tokens, D model width, Z vocabulary, T cache slots, P ranks, N numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import sharding as sh
from ..functional import tree
from ..functional.cache import Cache
from ..functional.wire import Own
from ..sharding.ports import Sized
from ..sharding.spec import Atom, Spec, parse
from ..sharding.wires import LayoutWire
from .agreement import Agreement
from .sizes import Sizes, by_channel
from .steps import State

__all__ = ["Ranks", "check_layout", "check_mesh", "check_ranks"]


class Ranks:
    """One rank among those of a mesh, by a layout.

    config: of the whole model. rows, tokens: the axes of more than one rank that split these, major to minor. split:
    how the layout writes its tokens, `S/u`.
    """

    def __init__(self, cfg: F.DecoderConfig, mesh: sh.Mesh, layout: sh.Layout, device: torch.device) -> None:
        self.mesh, self.layout, self.device = mesh, layout, device
        self.config = cfg
        lies = {atom.name: atom for atom in parse(layout["tokens"][0]).atoms}
        self._rows, tokens = Spec(((lies["B"],),)), lies["S"]
        self.rows, self.tokens = (tuple(axis for axis in lies[letter].axes if mesh[axis] > 1) for letter in ("B", "S"))
        self.split, self._wires = str(tokens), dict[int, Any]()
        self.agreement = Agreement(mesh, device, self.rows)

    @property
    def deals(self) -> bool:
        """Whether experts are dealt out over ranks, which is known step by step and cannot be compiled."""
        return any(self.mesh[axis] > 1 for axis in self.layout.split("X"))

    @functools.cached_property
    def _model(self) -> Any:
        """For all that holds of any number of tokens: one that every order allows."""
        return sh.shard(F.backbone, self.layout, self.mesh, S=2 * self.mesh.size)

    def own(self, rows: int) -> slice:
        """Which of all rows this rank has."""
        found: slice = self._rows.slices({"B": rows}, self.mesh, self.mesh.rank)[0]
        return found

    def sizes(self, sizes: Sizes) -> Sizes:
        """Those of a rank, of those of all: at least a row, which may stay idle."""
        mine = self.own(sizes.batch)
        return dataclasses.replace(sizes, batch=max(mine.stop - mine.start, 1))

    def parts(self, params: F.Decoder) -> dict[str, Any]:
        """Which part of each parameter of a whole model this rank has, by path."""
        lies = self.lies(params)
        return {path: each.spec.slices(each.sizes, self.mesh, self.mesh.rank) for path, each in lies.items()}

    def params(self, params: F.Decoder) -> F.Decoder:
        """This rank's shards of a whole model, views of its leaves where they are one range; or what already are."""
        lies = self._model.specs(params, self.config)
        specs, leaves = tree.paths(lies), tree.paths(params)
        shapes = {path: each.spec.local(each.sizes, self.mesh, self.mesh.rank) for path, each in specs.items()}
        if all(tuple(leaf.shape) == shapes[path] for path, leaf in leaves.items()):
            return params
        tree.check(params, F.Decoder.abstract(self.config), what="params")
        found: F.Decoder = sh.cut(params, lies, self.mesh)
        return found

    def lies(self, params: F.Decoder) -> dict[str, Sized]:
        """How each leaf does. params: whole, or a rank's."""
        return tree.paths(self._model.specs(params, self.config))

    def caches(self, sizes: Sizes, dtype: torch.dtype) -> tuple[Cache, ...]:
        """A cache a layer of the rank's own shapes, uninitialised but for states. sizes: of all ranks."""
        rank, rows, found = self.mesh.rank, self.sizes(sizes).batch, []
        for specs, like in zip(self.cache_specs(sizes), self._whole(sizes, dtype), strict=True):
            new = {}
            for (path, leaf), lies in zip(tree.paths(like).items(), tree.paths(specs).values(), strict=True):
                _, *shape = lies.spec.local({**lies.sizes, "B": sizes.batch, "T": leaf.shape[1]}, self.mesh, rank)
                new[path] = leaf.new_empty(rows, *shape)
            found.append(self._allocated(tree.replace(like, new)))
        return tuple(found)

    def cache_specs(self, sizes: Sizes) -> tuple[Any, ...]:
        """How the cache of each layer lies, a tree of what `Sized` says of each leaf. Raises where a layer has none."""
        given = {"params": F.Decoder.abstract(self.config), "cfg": self.config,
                 "cache": self._whole(sizes, torch.float32)}  # fmt: skip
        found: tuple[Any, ...] = self._model.in_specs({**given, "positions": torch.zeros(1, 1, dtype=torch.int64)})[
            "cache"
        ]
        return found

    def _whole(self, sizes: Sizes, dtype: torch.dtype) -> tuple[Cache, ...]:
        return sizes.caches(self.config, dtype, "meta")

    def _allocated(self, like: Cache) -> Cache:
        make = torch.zeros if isinstance(like, F.GDNCache) else torch.empty
        found = tree.map(lambda leaf: make(leaf.shape, dtype=leaf.dtype, device=self.device), like)
        return by_channel(found) if isinstance(found, F.GDNCache) else found

    def state(self, batch: int, dtype: torch.dtype) -> State:
        """Of so many rows, none of them active; logits of its own rows of the vocabulary."""
        rows = self.vocabulary
        return State.empty(batch, rows.stop - rows.start, dtype, self.device)

    def idle(self, arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Arguments of a phase, as `Sizes.idle` gives them, with this rank's own state where they begin with one."""
        first, *rest = arguments
        return (self.state(len(first.token), dtype), *rest) if isinstance(first, State) else arguments

    def wire(self, tokens: int) -> LayoutWire:
        """For calls of `tokens` tokens a row."""
        if tokens not in self._wires:
            wire = LayoutWire.of(self.layout, self.mesh, {"S": tokens}, device=self.device)
            self._wires[tokens] = wire.layer(Z=self.config.vocab_size)
        found: LayoutWire = self._wires[tokens]
        return found

    @functools.cached_property
    def choice(self) -> LayoutWire:
        """For the choice of one token a row, which ranks that have parts of a row's tokens make alike."""
        chains = {edge: [parse(text) for text in chain] for edge, chain in self.layout.chains}
        names: tuple[str, ...] = ("logits", "shares")
        edges = {edge: " -> ".join(map(_of_one_token, chains[edge])) for edge in names if edge in chains}
        wire = LayoutWire.of(sh.Layout(self.layout.name, edges), self.mesh, {"S": 1}, device=self.device)
        return wire.layer(Z=self.config.vocab_size)

    @property
    def vocabulary(self) -> Own:
        """The rows of it that this rank has."""
        return self.choice.own("Z") or Own(0, self.config.vocab_size, self.config.vocab_size)

    def mine(self, x: Tensor) -> Tensor:
        """Of `B S` the tokens that this rank has."""
        return self.wire(x.shape[1]).mine(x) if self.tokens else x

    # What ranks tell each other.

    def anywhere(self, live: bool) -> bool:
        """Whether it holds on any rank that has other rows."""
        if not self.rows:
            return live
        flag = torch.tensor([int(live)], device=self.device)
        return bool(sh.reshard(flag, f"P/{'/'.join(self.rows)} -> P", self.mesh, P=self._ranks(self.rows)).any())

    def beside(self, found: bool) -> list[tuple[int, bool]]:
        """Of each rank that has the same rows whether it found something, of whether this one did."""
        axes = tuple(axis for axis, n in self.mesh.axes if n > 1 and axis not in self.rows)
        if not axes:
            return [(self.mesh.rank, found)]
        flag = torch.tensor([int(found)], device=self.device)
        every = sh.reshard(flag, f"P/{'/'.join(axes)} -> P", self.mesh, P=self._ranks(axes)).tolist()
        return [(rank, bool(each)) for rank, each in zip(self.mesh.ranks(axes, self.mesh.rank), every, strict=True)]

    def of_all(self, x: Tensor, rows: int) -> Tensor:
        """x `B N` of this rank's rows -> of all."""
        if not self.rows:
            return x
        pair = f"B/{'/'.join(self.rows)} N -> B N"
        return sh.reshard(x.to(self.device), pair, self.mesh, B=rows).to(x.device)

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return len(self.mesh.ranks(axes, self.mesh.rank))


def check_mesh(mesh: Any, layout: Any) -> sh.Mesh:
    """Raise for what is no mesh of a rank's own, by which nothing could be told to other ranks."""
    if mesh is None:
        raise ValueError("build(mesh=...): mesh and layout go together\n    fix: both, or neither for one rank")
    if not isinstance(mesh, sh.Mesh):
        given = f"{type(mesh).__name__} and {type(layout).__name__}"
        raise TypeError(
            f"build(mesh=..., layout=...): a Mesh and a Layout are needed, not {given}\n"
            '    fix: mesh=ProcessGroup(device_mesh).mesh, layout=ulysses(tp="tp")'
        )
    if not mesh.bound:
        raise ValueError(
            f"build(mesh={mesh!r}): it is no rank's own, and a program is\n"
            "    fix: the mesh that the body of Threads is handed, or ProcessGroup(device_mesh).mesh"
        )
    return mesh


def check_layout(mesh: sh.Mesh, layout: Any, name: str = "layout") -> sh.Layout:
    """Raise for what is no layout. name: of the argument."""
    if layout is None:
        raise ValueError("build(layout=...): mesh and layout go together\n    fix: both, or neither for one rank")
    if not isinstance(layout, sh.Layout):
        raise TypeError(
            f"build(mesh=..., {name}=...): a Mesh and a Layout are needed, not {type(mesh).__name__} and "
            f'{type(layout).__name__}\n    fix: mesh=ProcessGroup(device_mesh).mesh, layout=ulysses(tp="tp")'
        )
    return layout


def check_ranks(
    cfg: F.DecoderConfig, mesh: sh.Mesh, layout: sh.Layout, sizes: Sizes, reads: sh.Layout | None = None
) -> None:
    """Raise `ValueError` and `SpecError` for a mesh and layouts over which no program of a model runs. reads: by which
    prompts are read, if it is another."""
    for name, each in (("layout", layout), ("prefill_layout", reads)):
        if each is not None:
            _check_parameters(name, each)
    tokens = next(atom.axes for atom in parse(layout["tokens"][0]).atoms if atom.name == "S")
    if split := [axis for axis in tokens if mesh[axis] > 1]:
        axis, this = split[0], "" if reads else f"prefill_layout={layout.name}, and "
        raise ValueError(
            f"build(layout=...): {layout.name} splits tokens over {'/'.join(split)}={mesh[axis]}, and a step of decode "
            f'has one\n    fix: {this}layout=... with rows over these ranks, dp="{axis}"; or call them tp in the mesh: '
            'prefill_layout=... of "tp", layout=... with tp="tp"'
        )
    # Ranks that share the tokens of prompts may have no row to decode; others would do nothing at all.
    rows = [axis for atom in parse((reads or layout)["tokens"][0]).atoms if atom.name == "B" for axis in atom.axes]
    ranks = len(mesh.ranks(tuple(axis for axis in rows if axis in dict(mesh.axes)), mesh.rank))
    if sizes.batch < ranks:
        raise ValueError(
            f"build(batch={sizes.batch}): fewer rows than the {ranks} ranks of {'/'.join(rows)}\n    fix: batch={ranks}"
        )
    for each, chunk in ((layout, 1), (reads, sizes.chunk)):
        if each is not None:
            model = sh.shard(F.backbone, each, mesh, S=chunk)
            model.in_specs({"params": F.Decoder.abstract(cfg), "cfg": cfg})


def _check_parameters(name: str, layout: sh.Layout) -> None:
    if parts := [axis for edge, chain in layout.chains if edge == "parameters" for axis in parse(chain[0]).axes]:
        raise ValueError(
            f"build({name}=...): {layout.name} keeps parameters in parts over {'/'.join(parts)}, which every step "
            "would gather\n    fix: the layout without parameters=..."
        )


def _of_one_token(spec: Spec) -> str:
    """The spec with tokens whole."""

    def whole(atom: Atom) -> Atom:
        return dataclasses.replace(atom, axes=(), zigzag=False) if atom.name == "S" else atom

    return str(Spec(tuple(tuple(map(whole, dim)) for dim in spec.dims), spec.partial))
