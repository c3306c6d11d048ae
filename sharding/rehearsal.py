"""A layout rehearsed: its own wire on tensors without memory, forward and backward, once for each class of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import documents, moves, rules, shards
from .classes import Dry, key_of
from .documents import Boundaries, Sight, Traffic
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
    alike: dict[object, dict[tuple[Work, Traffic | None], list[int]]] = {}
    keys = _keys(edges, mesh.axes, sizes)
    for rank in range(mesh.size):
        moved = needs(rank)
        # What is sent of keys differs from rank to rank, and what happens to it does not.
        how = None if moved is None else (moved.sent > 0, moved.received > 0, moved.given > 0, moved.wanted > 0)
        exchanged = (tuple(key(rank) for key in keys), how)
        alike.setdefault(exchanged, {}).setdefault((work(rank), moved), []).append(rank)
    found = []
    for classes in alike.values():
        (_, first), ranks = next(iter(classes.items()))
        run = _run(layout, mesh, ranks[0], sizes, dtype, sight, cu)
        for ((queries, seen, pairs), moved), ranks in classes.items():
            events, memory = run.events, _memory(run.events, run.held)
            if moved is not None and first is not None and moved != first:
                events, held = _of_other_keys(run, rules.gathered(edges["k"]), first, moved)
                memory = _memory(events, held)
            flops = 2 * run.rows * run.heads * pairs * (sizes["E"] + sizes["V"])
            found.append(Rank(tuple(ranks), queries, seen, run.heads, run.kv_heads, flops, memory, events))
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
) -> Callable[[int], Traffic | None]:  # fmt: skip
    """How many tokens of keys a rank sends and gets, where only those are sent that are needed."""
    gathered, size = rules.gathered(edges["k"]), sizes["S"]
    if layout.exchange == "all" or not gathered:
        return lambda rank: None
    queries, keys = atom_of(edges["q"][-1], "S"), atom_of(edges["k"][-2], "S")
    groups: dict[tuple[int, ...], list[Traffic]] = {}

    def needs(rank: int) -> Traffic | None:
        ranks = mesh.ranks(gathered, rank)
        if ranks not in groups:
            wanted = documents.of_group(edges["q"][-1], mesh.axes, ranks, size, cu, sight)
            holds = [shards.held(keys, sizes, mesh.axes, mesh.coordinates(r)) for r in ranks]
            groups[ranks] = documents.traffic(holds, wanted)
        # Where nobody wants anything of another, there is no exchange.
        return groups[ranks][ranks.index(rank)] if any(t.received for t in groups[ranks]) else None

    return _by_place(queries, mesh, needs)


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


class _Held(NamedTuple):
    """Bytes: of what came in, of each edge before and after its exchanges, of all that the core sees
    besides, of what it gives and of the result; and of the buffers of each launch, sent and received."""

    ins: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    seen: int
    given: int
    result: int
    buffers: tuple[tuple[int, int], ...]


class _Ran(NamedTuple):
    rows: int
    heads: int
    kv_heads: int
    token: int  # bytes of its keys and values
    held: _Held
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
    before = dict(zip(("q", "k", "v", "o", "out"), map(_size, (q, k, v, core, result)), strict=True))
    after = dict(zip(("q", "k", "v", "o", "out"), map(_size, (*seen, out, result)), strict=True))
    buffers = tuple((_size(sent), _size(received)) for sent, received in dry.buffers)
    given = _bytes(core, out, result)
    ins = _bytes(q, k, v)
    held = _Held(ins, before, after, _bytes(q, k, v, *seen) - ins, given, _bytes(result), buffers)
    token = rows * kv_heads * (sizes["E"] + sizes["V"]) * dtype.itemsize
    return _Ran(rows, heads, kv_heads, token, held, tuple(trace.events))


class _Core(torch.autograd.Function):
    """What stands between the exchanges: a result of the right shape, and gradients of everything."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *xs: Tensor) -> Tensor:
        ctx.save_for_backward(*xs)
        return xs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors)


def _of_other_keys(run: _Ran, axes: tuple[str, ...], first: Traffic, other: Traffic) -> tuple[tuple[Event, ...], _Held]:
    """What was rehearsed with some traffic of keys, as it is with another."""
    events, buffers, launches = [], list(run.held.buffers), itertools.count()
    for event in run.events:
        at = next(launches) if event.what == "launch" else -1
        if event.axes == axes and set(event.call.edges) == {"k", "v"}:
            back = event.call.backward
            if at >= 0:
                sent, received = (t * run.token for t in (other.sent, other.received))
                event = replace(event, sent=received if back else sent, received=sent if back else received)
                ends = (other.given * run.token, other.wanted * run.token)
                buffers[at] = ends[::-1] if back else ends
        events.append(event)
    more = other.wanted - first.wanted
    after = {**run.held.after}
    after["k"], after["v"] = (after[name] * other.wanted // max(first.wanted, 1) for name in ("k", "v"))
    held = run.held._replace(after=after, seen=run.held.seen + more * run.token, buffers=tuple(buffers))
    return tuple(events), held


def _memory(events: Sequence[Event], sizes: _Held) -> tuple[tuple[str, int], ...]:
    """Bytes of edges and buffers after each event. What came in stays; a buffer lives from launch to wait, or stays as
    what came; backward finds what the core keeps (its q, k, v and o) and the gradient of the output."""
    held, turned = sizes.ins, False
    found = [("inputs", held)]
    flying: dict[tuple[str, ...], tuple[int, int]] = {}
    launches = iter(sizes.buffers)
    for event in events:
        names = event.call.edges
        if event.call.backward and not turned:
            turned, held = True, sizes.ins + sizes.seen + sizes.given + sizes.result
            found.append(("core, gradient of the output", held))
        if event.what == "launch":
            sent, received = next(launches)
            flying[names] = event.copies * sent, received
            held += sum(flying[names])
        else:
            sent, received = flying.pop(names)
            ends = sizes.before if event.call.backward else sizes.after
            held += event.copies * (sum(ends[name] for name in names) - received) - sent
        found.append((f"{event.what} {event.call.title}", held))
    return tuple(found)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes(*xs: Tensor) -> int:
    """Of tensors, each memory once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in xs}.values())
