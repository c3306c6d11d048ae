"""The wire of a layout: carries each edge of a layer from one spec to the next.

What is received at once and goes the same way over the same axes is packed into one collective. Without overlap,
`send` holds and `receive` does all; with overlap `send` launches, and `receive` launches what it can before it waits.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..functional.wire import Heads, Own, identity
from . import documents, rules, shards
from .dealt import deal
from .errors import SpecError
from .exchange import local
from .functorch import transform_level
from .implied import convolved, split_by
from .late import LateProjection
from .layouts import WHOLE, Layout
from .mesh import Axes, Mesh, constant_axes, place_of, ranks_of, size_of
from .moves import Planned
from .reshard import Flight, call_of, check_transport, exchanged, noted, planned
from .shards import Ranges
from .steps import COLLECTIVES
from .transport import Call
from .whole import check_heads

__all__ = ["LayoutWire"]

C = TypeVar("C")


@dataclass(frozen=True, eq=False)
class LayoutWire:
    """One rank's end. whole: what every rank has all of, by edge. cu: boundaries of documents. ordered: whether
    positions ascend with tokens within a document, so that causality says which keys are needed. sizes: those known so
    far. edges: the specs of each edge. sight: what a query of the layer sees. part: the name of the part that it is in.
    moves: whether a layer sends what it has early; else what it projects of one x is one product.
    """

    layout: Layout
    mesh: Mesh
    axes: Axes
    rank: int
    sizes: Mapping[str, int]
    edges: Mapping[str, tuple[str, ...]]
    whole: Mapping[str, Tensor | None] = field(default_factory=dict)
    cu: tuple[int, ...] | None = None
    ordered: bool = True
    sight: documents.Sight = (False, None)
    device: Any = None
    part: str = ""
    moves: bool = True

    _site = ""  # what a call says of where it is made, if not the line

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh, sizes: Mapping[str, int], **rest: Any) -> Self:
        """The wire before a layer has said what it is."""
        axes = constant_axes(mesh)
        known = {letter: operator.index(n) for letter, n in sizes.items()}
        edges = dict(_resolved(layout, axes, None, rest.get("part", "")))
        return cls(layout, mesh, axes, operator.index(mesh.rank), known, edges, **rest)

    def layer(self, *, causal: bool = False, window: int | None = None, **sizes: int) -> Self:
        """Raises `SpecError` where the layout was made for other sizes, or cannot hold these heads."""
        said = {letter: operator.index(n) for letter, n in sizes.items()}
        for letter, count in said.items():
            made = self.sizes.get(letter, count)
            if made != count:
                raise SpecError(
                    f"{self.layout.name} was made for {letter}={made}, and this layer has {letter}={count}",
                    known=shards.known(self.sizes), mesh=str(self.mesh),
                    fix=f"shard(..., {letter}={count}), or without it where layers differ",
                )  # fmt: skip
        sight = documents.sight_of(causal, window)
        if "H" not in said:
            return replace(self, sizes={**self.sizes, **said}, sight=sight)
        H, K = said["H"], said["K"]
        check_heads(self.whole.get("mask"), H)
        known = {**self.sizes, **said, "G": H // K if K else 1}
        edges = dict(_resolved(self.layout, self.axes, (H, K), self.part))
        return replace(self, sizes=known, edges=edges, sight=sight)

    def heads(self, *, sent: bool = False, of: str = "q") -> Heads:
        sizes = tuple((letter, self.sizes[letter]) for letter in "HKG")
        chains = [self.edges[of], self.edges.get("k", self.edges[of])]  # of latents no head has keys of its own
        queries, keys = (chain[0 if sent else -1] for chain in chains)
        found = rules.heads(queries, keys, self.axes, self.rank, sizes)
        index = None if found.kv_index is None else torch.tensor(found.kv_index, device=self.device)
        return Heads(found.offset, found.local, index, found.groups)

    def all_of(self, **named: Tensor | None) -> Tensor | None:
        ((name, x),) = named.items()
        return None if x is None else self.whole.get(name)

    def place(self, name: str) -> int:
        return place_of(self.axes, rules.split_over(self._chain(name)[0]), self.rank)

    def gather(self, params: C, /, *names: str, **sizes: int) -> C:
        found = [
            (f.name, getattr(params, f.name), rules.kept(self.layout.chains, f.metadata["spec"]))
            for f in fields(params)  # type: ignore[arg-type]
            if "spec" in f.metadata and (not names or f.name in names)
        ]
        kept = [(name, x, chain) for name, x, chain in found if x is not None and chain]
        if not kept:
            return params
        wire = replace(self, sizes={**self.sizes, **sizes})
        whole = wire.receive([_Edge(f"parameters.{name}", x, chain) for name, x, chain in kept])
        return replace(params, **{name: x for (name, _, _), x in zip(kept, whole, strict=True)})  # type: ignore[type-var]

    def deal(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        if torch.compiler.is_compiling():
            raise RuntimeError("how many rows an expert gets is known when it gets them, which cannot be compiled")
        over = tuple(axis for axis in split_by(self.layout.chains, "X") if size_of(self.axes, axis) > 1)
        first = f"P/{'/'.join(over)} X"
        (by_expert,) = self.receive([_Edge("counts", counts[None], (first, "P X"))])
        group, own = ranks_of(self.axes, over, self.rank), self.own("X")
        assert own is not None
        found, back = deal(rows, self._chosen(by_expert, rows, group), group, over, self.mesh, self._site)
        return found, by_expert[:, own.start : own.stop], back

    def _chosen(self, by_expert: Tensor, rows: Tensor, group: tuple[int, ...]) -> list[list[int]]:
        """How many rows each rank of a group has for each expert."""
        found: list[list[int]] = by_expert.tolist()
        return found

    def own(self, letter: str) -> Own | None:
        size = self.sizes[letter]
        found = rules.own(self.layout.chains, letter, self.axes, self.rank, size)
        return None if found is None else Own(*found, size)

    def stays(self, name: str) -> bool:
        return name not in self.edges or rules.stays(self._chain(name), self.axes)

    def scope(self, name: str) -> Self:
        return replace(self, part=name, edges=dict(_resolved(self.layout, self.axes, None, name)))

    def send(self, **named: Tensor | None) -> list[_Edge]:
        edges = [self._edge(name, x) for name, x in named.items()]
        if self.layout.overlap and not torch.compiler.is_compiling():
            for group in self._groups(edges):
                self._launch(group)
        return edges

    def receive(self, *sent: Any, **named: Tensor | None) -> tuple[Any, ...]:
        edges = [*(self._edge(name, x) for name, x in named.items()), *itertools.chain(*sent)]
        flying = [edge.flight for edge in edges if edge.flight is not None]
        if self.layout.overlap and not torch.compiler.is_compiling():
            flying = list(dict.fromkeys(flying))
            flying += [self._launch(group) for group in self._groups(edges)]
            while flying:
                group = self._wait(flying.pop(0))
                flying += [self._launch(more) for more in self._groups(group)]
        else:
            while groups := self._groups(edges):
                for group in groups:
                    self._exchange(group)
        return tuple(self._seen(edge) for edge in edges)

    def pass_(self, **named: Tensor) -> Tensor:
        ((name, x),) = named.items()
        edge = self._edge(name, x)
        while groups := self._groups([edge]):
            self._exchange(groups[0])
        found = self._seen(edge)
        if found is None:
            raise TypeError(f"{name}: a tensor is needed, not None")
        return found

    def projection(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        # A compiler orders gradients itself, transforms have no later, and other classes know their own derivative.
        usual = torch.compiler.is_compiling() or transform_level() or type(weight) not in (Tensor, Parameter)
        return LateProjection(weight) if self.layout.overlap and not usual else identity.projection(weight)

    def mine(self, x: Tensor) -> Tensor:
        """What of a whole value of a layer's tokens, `B S`, comes in with this rank's shard."""
        text = next(self.edges[name][0] for name in ("tokens", "x", "q") if name in self.edges)
        pairs = tuple((letter, n) for letter, n in self.sizes.items() if letter == "S")
        for _, _, _, ranges in rules.cut(rules.tokens(text), self.axes, self.rank, pairs):
            x = shards.select(x, 1, ranges)
        return x

    def _chain(self, name: str) -> tuple[str, ...]:
        """The specs of an edge of this part."""
        if name not in self.edges:
            raise SpecError(
                f'{self.layout.name} has no edge "{name}", which this layer passes', mesh=str(self.mesh),
                fix=f'Layout(..., {{..., "{name}": "its spec"}})',
            )  # fmt: skip
        return self.edges[name]

    def _holds_keys(self, name: str) -> bool:
        """Whether an edge has a row for each key token; those of a part of its own are known to that part."""
        return name in self.layout.keys and f"{self.part}.{name}" not in dict(self.layout.chains)

    def _edge(self, name: str, x: Tensor | None) -> _Edge:
        if x is None and name not in self.edges:  # an optional one, of which there is nothing
            return _Edge(name, None, ())
        chain = self._chain(name)
        if name in WHOLE:
            if x is not None and self.whole.get(name) is None:
                raise SpecError(
                    f"{self.layout.name}: this layer passes a {name} of its own, which is not known as a whole",
                    mesh=str(self.mesh), fix=f"hand it over from outside, all of it, by the argument of {name}",
                )  # fmt: skip
            return _Edge(name, self.whole.get(name), chain)
        if x is not None and len(chain) == 1 and all(letter in self.sizes for letter in rules.split(chain[0])):
            planned(x, f"{chain[0]} -> {chain[0]}", self.mesh, self._sizes(chain), name=name)  # raises unless it fits
        return _Edge(name, x, chain)

    def _groups(self, edges: Iterable[_Edge]) -> list[list[_Edge]]:
        """Edges that have somewhere to go, by what can be one collective. Local steps are taken on the way."""
        found: dict[Any, list[_Edge]] = {}
        for edge in edges:
            if edge.x is None or edge.flight is not None or edge.name in WHOLE:
                continue
            chain = edge.chain
            while edge.at + 1 < len(chain) and edge.plan is None:
                edge.pair = f"{chain[edge.at]} -> {chain[edge.at + 1]}"
                plan = planned(edge.x, edge.pair, self.mesh, self._sizes(chain), self._wanted(edge), edge.name)
                if plan.move.kind in COLLECTIVES:
                    edge.plan = plan
                else:
                    edge.x = local(edge.x, plan.move)
                    edge.at += 1
            if edge.plan is not None:
                move = edge.plan.move
                found.setdefault((move.kind, move.axes, edge.x.dtype), []).append(edge)
        return list(found.values())

    def _sizes(self, chain: tuple[str, ...]) -> dict[str, int]:
        letters = rules.letters(chain)
        found = {letter: size for letter, size in self.sizes.items() if letter in letters}
        if "P" in letters:  # one part a rank
            found["P"] = math.prod([size_of(self.axes, axis) for axis in rules.split_over(chain[0])])
        return found

    def _exchange(self, group: list[_Edge]) -> None:
        check_transport(self.mesh)
        xs, moves, backs = _parts(group)
        ys = noted(exchanged(xs, moves, backs, self._call(group, xs), self.mesh), self.mesh)
        for edge, y in zip(group, ys, strict=True):
            edge.arrived(y)

    def _call(self, group: list[_Edge], xs: tuple[Tensor, ...]) -> Call:
        """What an exchange is for; peers that were told other things of what queries see are found by it."""
        text = "; ".join(f"{edge.name}: {edge.pair}" for edge in group)
        made = call_of(xs, text, tuple(edge.name for edge in group))
        made = made._replace(site=self._site) if self._site else made
        return made if torch.compiler.is_compiling() else made._replace(seen=(*self.sight, self.cu))

    def _launch(self, group: list[_Edge]) -> _Flying:
        xs, moves, backs = _parts(group)
        flight = Flight(moves, backs, self._call(group, xs), self.mesh)
        flying = _Flying(flight, flight.launch(xs), group)
        for edge in group:
            edge.flight = flying
        return flying

    def _wait(self, flying: _Flying) -> list[_Edge]:
        for edge, y in zip(flying.group, noted(flying.flight.wait(flying.token), self.mesh), strict=True):
            edge.arrived(y)
        return flying.group

    def _wanted(self, edge: _Edge) -> tuple[Ranges, ...] | None:
        """For each rank of the group in which keys are gathered, those that it wants; None for all of them."""
        axes = rules.gathered(edge.chain)
        if axes and convolved(edge.name, self.edges):
            return tuple(self._reached(edge.chain[0], rank) for rank in ranks_of(self.axes, axes, self.rank))
        if self.layout.exchange == "all" or not self._holds_keys(edge.name) or not axes:
            return None
        size = self.sizes["S"]
        ranks = ranks_of(self.axes, axes, self.rank)
        return documents.of_group(self.edges["q"][-1], self.axes, ranks, size, self.cu or (0, size), self.sight)

    def _reached(self, text: str, rank: int) -> Ranges:
        return rules.reached(text, self.axes, rank, self.sizes["S"], self.sizes["W"])

    def keys(self) -> Ranges | None:
        """Which keys this rank's queries may see, where it is known that they are fewer than all."""
        if convolved("q", self.edges):
            own = self._reached(self.edges["q"][0], self.rank) if len(rules.gathered(self.edges["q"])) else None
            return None if own is None or _is_all(own, self.sizes["S"]) else own
        if not self.ordered or "q" not in self.edges or "S" not in self.sizes:
            return None
        size = self.sizes["S"]
        (found,) = documents.of_group(
            self.edges["q"][-1], self.axes, (self.rank,), size, self.cu or (0, size), self.sight
        )
        return None if _is_all(found, size) else found

    def _seen(self, edge: _Edge) -> Tensor | None:
        """An edge as the next stage needs it: of keys, those that some query may see."""
        x, name = edge.x, edge.name
        if x is None:
            return x
        if self._holds_keys(name):
            sent = self.layout.exchange == "needed" and rules.gathered(edge.chain)  # then no others came
            keys = None if sent else self.keys()
            return x if keys is None else shards.select(x, rules.place(edge.chain[-1], "S"), keys)
        if name not in WHOLE:
            return x
        for dim, letter, size, ranges in rules.cut(edge.chain[-1], self.axes, self.rank, _pairs(self.sizes)):
            found = self.keys() if letter == "T" else ranges
            if found is not None and x.shape[dim] == size:  # else it is 1, for all alike
                x = shards.select(x, dim, found)
        return x


def _pairs(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


@dataclass
class _Edge:
    """One edge on its way. chain: its specs. at: in which of them it lies. pair, plan: of the next step, where that is
    a collective. flight: the one that it is in."""

    name: str
    x: Tensor | None
    chain: tuple[str, ...]
    at: int = 0
    pair: str = ""
    plan: Planned | None = None
    flight: _Flying | None = None

    def arrived(self, y: Tensor) -> None:
        self.x, self.plan, self.flight = y, None, None
        self.at += 1


@dataclass(eq=False)
class _Flying:
    flight: Flight
    token: Tensor
    group: list[_Edge]


def _parts(group: list[_Edge]) -> tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[Any, ...]]:
    xs, plans = [edge.x for edge in group if edge.x is not None], [edge.plan for edge in group if edge.plan is not None]
    return tuple(xs), tuple(plan.move for plan in plans), tuple(plan.adjoint for plan in plans)


def _resolved(layout: Layout, axes: Axes, heads: tuple[int, int] | None, part: str) -> rules.Edges:
    return rules.of_rows(rules.resolve(layout.name, rules.of_part(layout.chains, part), axes, heads))


def _is_all(ranges: Ranges, size: int) -> bool:
    # Number by number: Dynamo of torch 2.11 compares no tuples of tuples.
    return len(ranges) == 1 and ranges[0][0] == 0 and ranges[0][1] == size
