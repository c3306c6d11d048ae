"""A layout rehearsed: its own wire on tensors without memory, forward and backward, once for each class of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import documents, moves, rules, shards
from .affine import Span, Sum
from .classes import Dry, key_of
from .documents import Boundaries, Sight, Traffic
from .implied import convolved, lead
from .layouts import Layout
from .mesh import Axes, Mesh
from .meter import Meter
from .schedules import Schedule, schedule_of, with_cache
from .shards import Ranges
from .spec import Atom, parse
from .stages import forward
from .steps import one_step
from .trace import Event, Trace
from .wires import LayoutWire

__all__ = ["Rank", "moves_around", "rehearse"]


def moves_around(edges: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What moves as wide as the model is: what comes in, and what goes out behind the last projection. It is in a plan
    where that width, D, is known."""
    return [name for name in ("x", "out") if len(edges.get(name, ())) > 1]


Needs = tuple[Traffic | None, ...]  # of each group of ranks among which keys are gathered


class Work(NamedTuple):
    """Of the core: queries, keys, pairs of the two that see each other. ranges: of keys, 0 for all of them, else 1 (a
    view of those that came) or more (a copy)."""

    queries: int
    keys: int
    pairs: int
    ranges: int


class Rank(NamedTuple):
    """What ranks of one class do. queries, keys: tokens that the core sees, of so many heads. flops: of the pairs of a
    query and a key that see each other, forward. events: as a trace has them. memory: the most bytes held at once from
    the inputs on, until each event, and until the gradients of the inputs are there. computed: what is computed between
    events: behind how many of them, whether in backward, and what."""

    ranks: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    kv_heads: int
    flops: int
    memory: tuple[tuple[str, int], ...]
    computed: tuple[tuple[int, bool, str], ...]
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
    layout: Layout, mesh: Mesh, sizes: Mapping[str, int], dtype: torch.dtype, sight: Sight, cu: Boundaries | None,
    cached: bool,
) -> list[Rank]:  # fmt: skip
    """What every rank does, by classes. sizes: of the letters of the layout's schedule. cu: boundaries of documents.
    cached: whether there is a cache.

    Of ranks that exchange alike a few are rehearsed, and what the others hold and send follows from how many keys each
    has. Those that compute alike too make one class.
    """
    schedule = schedule_of(layout, mesh.axes)
    schedule = with_cache(schedule) if cached else schedule
    recurrent = schedule.recurrent
    edges = dict(rules.resolve(layout.name, layout.chains, mesh.axes, (sizes["H"], sizes["K"])))
    around = moves_around(edges) if "D" in sizes else []
    cu = cu or (0, sizes["S"])
    work = _state_work(edges, mesh, sizes) if recurrent else _work_of(edges, mesh, sizes, sight, cu)
    needs = _needs_of(edges, mesh, sizes, layout, schedule, sight, cu)
    alike: dict[object, dict[tuple[Work, Needs], list[int]]] = {}
    keys = _keys((*schedule.edges, *around), edges, mesh.axes, sizes)
    for rank in range(mesh.size):
        done, moved = work(rank), needs(rank)
        # How many keys are sent and seen differs from rank to rank, and from two on the same happens to them.
        how = tuple(t and (*(min(n, 2) for n in t.tokens), t.once) for t in moved)
        exchanged = (tuple(key(rank) for key in keys), how, min(done.keys, 2), done.ranges, recurrent and done)
        alike.setdefault(exchanged, {}).setdefault((done, moved), []).append(rank)
    found = []
    for classes in alike.values():
        runs: list[_Ran] = []
        span = Span()
        for (done, moved), ranks in classes.items():
            counts = (1, done.keys, *(n for t in moved if t for n in t.tokens))
            if (of := span.weights(counts)) is None:
                runs.append(_run(layout, schedule, mesh, ranks[0], sizes, dtype, sight, cu))
                held, events = runs[-1].held, runs[-1].events
            else:
                held, events = _combined(runs, of)
            run = runs[0]
            # Of a state: read for the key, written, read for the query.
            each = 3 * sizes["E"] * sizes["N"] if recurrent else sizes["E"] + sizes["V"]
            flops = 2 * run.rows * (run.heads * done.pairs * each + run.multiplied(done.keys))
            memory = _memory(held, events)
            found.append(Rank(
                tuple(ranks), done.queries, done.keys, run.heads, run.kv_heads, flops, memory, run.computed, events
            ))  # fmt: skip
    return found


def _keys(
    names: Sequence[str], edges: Mapping[str, tuple[str, ...]], axes: Axes, sizes: Mapping[str, int]
) -> list[Callable[[int], object]]:
    """What tells ranks apart in each step of each edge, and in those that stay."""
    found = []
    for name in names:
        chain = edges[name]
        for a, b in itertools.pairwise(chain) if len(chain) > 1 else [chain * 2]:
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
        ranges = 0 if seen == ((0, sizes["S"]),) else max(len(seen), 1)
        return Work(shards.length(queries), shards.length(seen), documents.pairs(queries, cu, sight), ranges)

    return _by_place(atom, mesh, lambda rank: work(shards.held(atom, sizes, mesh.axes, mesh.coordinates(rank))))


def _state_work(edges: Mapping[str, tuple[str, ...]], mesh: Mesh, sizes: Mapping[str, int]) -> Callable[[int], Work]:
    """Of a gated delta net: tokens whose state a rank computes, those that it convolves; each meets one state."""
    atom = atom_of(edges["b"][-1], "S")

    def work(rank: int) -> Work:
        own = shards.length(shards.held(atom, sizes, mesh.axes, mesh.coordinates(rank)))
        seen = shards.length(rules.reached(edges["b"][-1], mesh.axes, rank, sizes["S"], sizes["W"]))
        return Work(own, seen, own, 0)

    return _by_place(atom, mesh, work)


def _groups(
    edges: Mapping[str, tuple[str, ...]], layout: Layout, schedule: Schedule
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The axes over which only needed keys are gathered, with the edges that are gathered together."""
    found: dict[tuple[str, ...], list[str]] = {}
    reached = [name for name in schedule.inputs if convolved(name, schedule.parameters)]
    for name in (*reached, *(layout.keys if layout.exchange == "needed" and not reached else ())):
        if name in schedule.edges and (axes := rules.gathered(edges[name])):
            found.setdefault(axes, []).append(name)
    return [(axes, tuple(names)) for axes, names in found.items()]


def _needs_of(
    edges: Mapping[str, tuple[str, ...]], mesh: Mesh, sizes: Mapping[str, int], layout: Layout, schedule: Schedule,
    sight: Sight, cu: Boundaries,
) -> Callable[[int], Needs]:  # fmt: skip
    """How many tokens of keys a rank sends and gets in each group, where only those are sent that are needed."""
    size, each = sizes["S"], []
    for gathered, names in _groups(edges, layout, schedule):
        keys = atom_of(edges[names[0]][-2], "S")
        groups: dict[tuple[int, ...], dict[int, Traffic]] = {}

        def needs(
            rank: int, gathered: tuple[str, ...] = gathered, keys: Atom = keys, first: str = edges[names[0]][0],
            groups: dict[tuple[int, ...], dict[int, Traffic]] = groups,
        ) -> Traffic | None:  # fmt: skip
            wanted: Sequence[Ranges]
            outside = tuple(n for axis, n in mesh.coordinates(rank).items() if axis not in gathered)
            if outside not in groups:
                ranks = mesh.ranks(gathered, rank)
                if schedule.recurrent:
                    wanted = [rules.reached(first, mesh.axes, r, size, sizes["W"]) for r in ranks]
                else:
                    wanted = documents.of_group(edges["q"][-1], mesh.axes, ranks, size, cu, sight)
                holds = [shards.held(keys, sizes, mesh.axes, mesh.coordinates(r)) for r in ranks]
                found = documents.traffic(holds, wanted)
                # Where nobody wants anything of another, there is no exchange.
                groups[outside] = dict(zip(ranks, found, strict=True)) if any(t.received for t in found) else {}
            return groups[outside].get(rank)

        each.append(_by_place(keys, mesh, needs))
    return lambda rank: tuple(of(rank) for of in each)


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
    """projection: multiplications of a token in what is projected on the way. tokens: how many of them, None where it
    is those that are seen. held: as a meter found it, by events. computed: as `Rank` has it."""

    rows: int
    heads: int
    kv_heads: int
    projection: int
    tokens: int | None
    held: Sequence[tuple[int, int]]
    events: tuple[Event, ...]
    computed: tuple[tuple[int, bool, str], ...]

    def multiplied(self, seen: int) -> int:
        """The multiplications of a row in what is projected."""
        return self.projection * (seen if self.tokens is None else self.tokens)


def _run(
    layout: Layout, schedule: Schedule, mesh: Mesh, rank: int, sizes: Mapping[str, int], dtype: torch.dtype,
    sight: Sight, cu: Boundaries,
) -> _Ran:  # fmt: skip
    """One rank's part, on tensors without memory."""
    trace = Trace(Mesh(**dict(mesh.axes)).at(rank, Dry(mesh.axes, rank)))
    wire = LayoutWire.of(layout, trace.mesh, {"S": sizes["S"]}, cu=cu, device="meta").layer(
        H=sizes["H"], K=sizes["K"], causal=sight[0], window=sight[1],
        **{letter: sizes[letter] for letter in "W" if letter in sizes},
    )  # fmt: skip
    (rows,) = parse(rules.rows(layout["q"][0])).local(sizes, mesh, rank)
    sizes = {**sizes, "B": rows}
    here: dict[str, Tensor] = {}
    inputs = ("x",) if "D" in sizes and "x" in moves_around(wire.edges) else schedule.inputs
    for name in (*inputs, *schedule.parameters):
        shape = parse(wire.edges[name][0]).local(sizes, mesh, rank)
        kind = torch.promote_types(dtype, torch.float32) if name in schedule.wide else dtype
        here[name] = torch.empty(shape, dtype=kind, device="meta", requires_grad=True)
    first = [here[name] for name in inputs]
    weights = [here[name] for name in schedule.parameters]
    meter = Meter(lambda: len(trace.events), first, weights)
    computed: list[tuple[int, bool, str]] = []

    def note(what: str, backward: bool) -> None:
        computed.append((len(trace.events), backward, what))

    with meter:
        end, kv_heads, projection, tokens = forward(
            wire, schedule, mesh, rank, sizes, here, note, moves_around(wire.edges) if "D" in sizes else []
        )
        torch.autograd.grad(end, [*first, *weights], end.new_empty(0))
    heads = wire.heads(of=lead(wire.edges)).local
    assert heads is not None
    kv_heads = heads if kv_heads is None else kv_heads
    return _Ran(rows, heads, kv_heads, projection, tokens, meter.found, tuple(trace.events), tuple(computed))


def _combined(runs: Sequence[_Ran], of: Sum) -> tuple[list[tuple[int, int]], tuple[Event, ...]]:
    """What ranks hold and send that were not rehearsed: all of it grows with tokens of keys."""
    held = [(same[0][0], of([n for _, n in same])) for same in zip(*(run.held for run in runs), strict=True)]
    events = (
        replace(same[0], sent=of([e.sent for e in same]), received=of([e.received for e in same]))
        for same in zip(*(run.events for run in runs), strict=True)
    )
    return held, tuple(events)


def _memory(held: Sequence[tuple[int, int]], events: Sequence[Event]) -> tuple[tuple[str, int], ...]:
    """The most bytes until each event, from the one before on."""
    names = [*(f"{event.what} {event.call.title}" for event in events), "gradients of the inputs"]
    most = [0] * len(names)
    for part, nbytes in held:
        most[part] = max(most[part], nbytes)
    return ("inputs", held[0][1]), *zip(names, most, strict=True)
