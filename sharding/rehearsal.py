"""A layout rehearsed: its own wire on tensors without memory, forward and backward, once for each class of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import documents, moves, rules, shards
from .classes import Dry, key_of
from .documents import Boundaries, Sight
from .layouts import Layout
from .mesh import Axes, Mesh
from .shards import Ranges
from .spec import Atom, parse
from .steps import one_step
from .trace import Event, Trace
from .wires import LayoutWire

__all__ = ["EDGES", "Rank", "rehearse"]

EDGES = ("q", "k", "v", "o")


def summed(edges: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> bool:
    """Whether the sum after the last projection is in the plan: where there is one, and the model's width is known."""
    return len(edges.get("out", ())) > 1 and "D" in sizes


Work = tuple[int, int, int]  # queries, keys, pairs of the two that see each other


class Rank(NamedTuple):
    """What ranks of one class do. queries, keys: tokens that the core sees, of so many heads. flops: of the pairs of a
    query and a key that see each other, forward. memory: bytes held after each event. events: as a trace has them."""

    ranks: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    kv_heads: int
    flops: int
    memory: tuple[tuple[str, int], ...]
    events: tuple[Event, ...]

    @property
    def bytes(self) -> tuple[int, int]:
        """Sent and received, forward and backward together."""
        return sum(e.sent for e in self.events), sum(e.received for e in self.events)

    @property
    def peak(self) -> int:
        """The most bytes that it holds at once."""
        return max(n for _, n in self.memory)


def rehearse(
    layout: Layout, mesh: Mesh, sizes: Mapping[str, int], dtype: torch.dtype, sight: Sight, cu: Boundaries | None
) -> list[Rank]:
    """What every rank does, by classes. sizes: of B, S, H, K, G, E and V. cu: boundaries of documents.

    Ranks that exchange alike are rehearsed once; those of them that compute alike make one class.
    """
    edges = dict(rules.resolve(layout.name, layout.chains, mesh.axes, (sizes["H"], sizes["K"])))
    if not summed(edges, sizes):
        edges.pop("out", None)
    cu = cu or (0, sizes["S"])
    work, needs = _work_of(edges, mesh, sizes, sight, cu), _needs_of(edges, mesh, sizes, layout, sight, cu)
    alike: dict[object, dict[Work, list[int]]] = {}
    keys = _keys(edges, mesh.axes, sizes)
    for rank in range(mesh.size):
        exchanged = (tuple(key(rank) for key in keys), needs(rank))
        alike.setdefault(exchanged, {}).setdefault(work(rank), []).append(rank)
    found = []
    for classes in alike.values():
        first = next(iter(classes.values()))[0]
        run = _run(layout, mesh, first, sizes, dtype, sight, cu)
        for (queries, seen, pairs), ranks in classes.items():
            flops = 2 * run.rows * run.heads * pairs * (sizes["E"] + sizes["V"])
            found.append(Rank(tuple(ranks), queries, seen, run.heads, run.kv_heads, flops, run.memory, run.events))
    return found


def _keys(edges: Mapping[str, tuple[str, ...]], axes: Axes, sizes: Mapping[str, int]) -> list[Callable[[int], object]]:
    """What tells ranks apart in each step of each edge."""
    found = []
    for name in (*EDGES, *(["out"] if "out" in edges else [])):
        for a, b in itertools.pairwise(edges[name]):
            text, left = f"{a} -> {b}", parse(a)
            letters = rules.letters((a,))
            given = tuple((letter, n) for letter, n in sizes.items() if letter in letters)

            def move(rank: int, text: str = text, given: Any = given, ndim: int = len(left.dims)) -> moves.Move:
                return moves.move(text, axes, rank, given, ndim, ()).move

            found.append(key_of(left, parse(b), one_step(text, axes), sizes, axes, move))
    return found


def _work_of(
    edges: Mapping[str, tuple[str, ...]], mesh: Mesh, sizes: Mapping[str, int], sight: Sight, cu: Boundaries
) -> Callable[[int], Work]:
    atom = atom_of(edges["q"][-1], "S")

    def work(queries: Ranges) -> Work:
        seen = documents.needed(queries, cu, sight)
        return shards.length(queries), shards.length(seen), documents.pairs(queries, cu, sight)

    return _by_place(atom, mesh, lambda rank: work(shards.held(atom, sizes, mesh.axes, mesh.coordinates(rank))))


def _needs_of(
    edges: Mapping[str, tuple[str, ...]], mesh: Mesh, sizes: Mapping[str, int], layout: Layout, sight: Sight,
    cu: Boundaries,
) -> Callable[[int], object]:  # fmt: skip
    """How many tokens a rank sends of its keys and gets of others', where only those are sent that are needed."""
    gathered, size = rules.gathered(edges["k"]), sizes["S"]
    if layout.exchange == "all" or not gathered:
        return lambda rank: None
    pair = f"{rules.tokens(edges['k'][-2])} -> {rules.tokens(edges['k'][-1])}"

    def needs(rank: int) -> object:
        ranks = mesh.ranks(gathered, rank)
        wanted = documents.of_group(edges["q"][-1], mesh.axes, ranks, size, cu, sight)
        found = moves.move(pair, mesh.axes, rank, (("S", size),), 1, (), wanted).move
        sides = [side for side in (found.source, found.target) if side is not None]
        return found.kind, *(
            (side.size, sum(side.lengths), side.lengths[found.me : found.me + 1], side.layout) for side in sides
        )

    return _by_place(atom_of(edges["q"][-1], "S"), mesh, needs)


P = TypeVar("P")


def _by_place(atom: Atom, mesh: Mesh, of: Callable[[int], P]) -> Callable[[int], P]:
    """A function of a rank that depends on its place over the axes of an atom alone, worked out once for each."""
    seen: dict[tuple[int, ...], P] = {}

    def found(rank: int) -> P:
        at = mesh.coordinates(rank)
        place = tuple(at.get(axis, 0) for axis in atom.axes)
        if place not in seen:
            first = 0
            for name, size in mesh.axes:
                first = first * size + (at[name] if name in atom.axes else 0)
            seen[place] = of(first)
        return seen[place]

    return found


def atom_of(text: str, letter: str) -> Atom:
    """The factor of a spec with this name."""
    return next(atom for atom in parse(text).atoms if atom.name == letter)


class _Ran(NamedTuple):
    rows: int
    heads: int
    kv_heads: int
    memory: tuple[tuple[str, int], ...]
    events: tuple[Event, ...]


def _run(
    layout: Layout, mesh: Mesh, rank: int, sizes: Mapping[str, int], dtype: torch.dtype, sight: Sight, cu: Boundaries
) -> _Ran:
    """One rank's part, on tensors without memory."""
    dry = Dry(mesh.axes, rank)
    trace = Trace(Mesh(**dict(mesh.axes)).at(rank, dry))
    wire = LayoutWire.of(layout, trace.mesh, {"S": sizes["S"]}, cu=cu, device="meta").layer(
        H=sizes["H"], K=sizes["K"], causal=sight[0], window=sight[1]
    )
    (rows,) = parse(rules.rows(layout["q"][0])).local(sizes, mesh, rank)
    sizes = {**sizes, "B": rows}
    shapes = {name: parse(wire.edges[name][0]).local(sizes, mesh, rank) for name in ("q", "k", "v")}
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes.values())
    sent = wire.send(k=k, v=v)
    seen = wire.receive(sent, q=q)
    core = _Core.apply(parse(wire.edges["o"][0]).local(sizes, mesh, rank), *seen)
    out = result = wire.pass_(o=core)
    if summed(wire.edges, sizes):
        result = wire.pass_(out=_Core.apply(parse(wire.edges["out"][0]).local(sizes, mesh, rank), out))
    torch.autograd.grad(result, (q, k, v), result.new_empty(result.shape))
    heads = wire.heads().local
    assert heads is not None
    kv_heads = seen[1].shape[rules.place(wire.edges["k"][-1], "K")]
    memory = _memory(trace.events, dry.buffers, (q, k, v), seen, core, out, result)
    return _Ran(rows, heads, kv_heads, memory, tuple(trace.events))


class _Core(torch.autograd.Function):
    """What stands between the exchanges: a result of the right shape, and gradients of everything."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *xs: Tensor) -> Tensor:
        ctx.save_for_backward(*xs)
        return xs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors)


def _memory(
    events: Sequence[Event], buffers: Sequence[tuple[Tensor, Tensor]], ins: Sequence[Tensor], seen: Sequence[Tensor],
    core: Tensor, out: Tensor, result: Tensor,
) -> tuple[tuple[str, int], ...]:  # fmt: skip
    """Bytes of edges and buffers after each event. What came in stays; a buffer lives from launch to wait, or stays as
    what came; backward finds what the core keeps (its q, k, v and o) and the gradient of the output."""
    before = {"q": ins[0], "k": ins[1], "v": ins[2], "o": core, "out": result}
    after = {"q": seen[0], "k": seen[1], "v": seen[2], "o": out, "out": result}
    held, turned = _bytes(*ins), False
    found = [("inputs", held)]
    flying: dict[tuple[str, ...], tuple[int, int]] = {}
    launches = iter(buffers)
    for event in events:
        names = event.call.edges
        if event.call.backward and not turned:
            turned, held = True, _bytes(*ins, *seen, core, out, result) + _bytes(result)
            found.append(("core, gradient of the output", held))
        if event.what == "launch":
            sent, received = map(_bytes, next(launches))
            flying[names] = event.copies * sent, received
            held += sum(flying[names])
        else:
            sent, received = flying.pop(names)
            ends = before if event.call.backward else after
            held -= sent + event.copies * received
            held += event.copies * sum(ends[name].numel() * ends[name].element_size() for name in names)
        found.append((f"{event.what} {event.call.title}", held))
    return tuple(found)


def _bytes(*xs: Tensor) -> int:
    """Of tensors, each memory once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in xs}.values())
