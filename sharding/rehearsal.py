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
from .schedules import Schedule, schedule_of
from .shards import Ranges
from .spec import Atom, parse
from .steps import one_step
from .trace import Event, Trace
from .wires import LayoutWire

__all__ = ["Rank", "rehearse"]


def summed(edges: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> bool:
    """Whether the sum after the last projection is in the plan: where there is one, and the model's width is known."""
    return len(edges.get("out", ())) > 1 and "D" in sizes


Needs = tuple[Traffic | None, ...]  # of each group of ranks among which keys are gathered
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
    """What every rank does, by classes. sizes: of the letters of the layout's schedule. cu: boundaries of documents.

    Ranks that exchange alike are rehearsed once; those of them that compute alike make one class.
    """
    schedule = schedule_of(layout)
    edges = dict(rules.resolve(layout.name, layout.chains, mesh.axes, (sizes["H"], sizes["K"])))
    if not summed(edges, sizes):
        edges.pop("out", None)
    cu = cu or (0, sizes["S"])
    work, needs = _work_of(edges, mesh, sizes, sight, cu), _needs_of(edges, mesh, sizes, layout, schedule, sight, cu)
    alike: dict[object, dict[tuple[Work, Needs], list[int]]] = {}
    keys = _keys(schedule, edges, mesh.axes, sizes)
    for rank in range(mesh.size):
        moved = needs(rank)
        # What is sent of keys differs from rank to rank, and what happens to it does not.
        how = tuple(None if t is None else (t.sent > 0, t.received > 0, t.given > 0, t.wanted > 0) for t in moved)
        exchanged = (tuple(key(rank) for key in keys), how)
        alike.setdefault(exchanged, {}).setdefault((work(rank), moved), []).append(rank)
    found = []
    groups = _groups(edges, layout, schedule)
    for classes in alike.values():
        (_, first), ranks = next(iter(classes.items()))
        run = _run(layout, schedule, mesh, ranks[0], sizes, dtype, sight, cu)
        for ((queries, seen, pairs), moved), ranks in classes.items():
            events, held = run.events, run.held
            for (axes, names), one, other in zip(groups, first, moved, strict=True):
                if one is not None and other is not None and one != other:
                    events, held = _of_other_keys(events, held, axes, names, one, other)
            if held.made is not None and run.tokens is None:  # as many as are seen
                more = (seen - run.projected) * held.token[held.made]
                held = held._replace(
                    seen=held.seen + more, after={**held.after, held.made: held.after[held.made] + more}
                )
            flops = 2 * run.rows * (run.heads * pairs * (sizes["E"] + sizes["V"]) + run.multiplied(seen))
            memory = _memory(events, held)
            found.append(Rank(tuple(ranks), queries, seen, run.heads, run.kv_heads, flops, memory, events))
    return found


def _keys(
    schedule: Schedule, edges: Mapping[str, tuple[str, ...]], axes: Axes, sizes: Mapping[str, int]
) -> list[Callable[[int], object]]:
    """What tells ranks apart in each step of each edge."""
    found = []
    for name in (*schedule.edges, *(["out"] if "out" in edges else [])):
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


def _groups(
    edges: Mapping[str, tuple[str, ...]], layout: Layout, schedule: Schedule
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The axes over which only needed keys are gathered, with the edges that are gathered together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in layout.keys if layout.exchange == "needed" else ():
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
        groups: dict[tuple[int, ...], list[Traffic]] = {}

        def needs(
            rank: int, gathered: tuple[str, ...] = gathered, keys: Atom = keys,
            groups: dict[tuple[int, ...], list[Traffic]] = groups,
        ) -> Traffic | None:  # fmt: skip
            ranks = mesh.ranks(gathered, rank)
            if ranks not in groups:
                wanted = documents.of_group(edges["q"][-1], mesh.axes, ranks, size, cu, sight)
                holds = [shards.held(keys, sizes, mesh.axes, mesh.coordinates(r)) for r in ranks]
                groups[ranks] = documents.traffic(holds, wanted)
            # Where nobody wants anything of another, there is no exchange.
            return groups[ranks][ranks.index(rank)] if any(t.received for t in groups[ranks]) else None

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


class _Held(NamedTuple):
    """Bytes: of what came in, of each edge before and after its exchanges, of all that is kept for backward besides, of
    what the core gives and of the result; of the buffers of each launch, sent and received; of a key token in each edge
    that keys have, and in what is made of it. made: the edge that is projected on the way."""

    ins: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    seen: int
    given: int
    result: int
    buffers: tuple[tuple[int, int], ...]
    token: Mapping[str, int]
    made: str | None


class _Ran(NamedTuple):
    """projection: multiplications of a token in what is projected on the way. tokens: how many of them, None where it
    is those that are seen; projected: how many here."""

    rows: int
    heads: int
    kv_heads: int
    projection: int
    tokens: int | None
    projected: int
    held: _Held
    events: tuple[Event, ...]

    def multiplied(self, seen: int) -> int:
        """The multiplications of a row in what is projected."""
        return self.projection * (seen if self.tokens is None else self.tokens)


def _run(
    layout: Layout, schedule: Schedule, mesh: Mesh, rank: int, sizes: Mapping[str, int], dtype: torch.dtype,
    sight: Sight, cu: Boundaries,
) -> _Ran:  # fmt: skip
    """One rank's part, on tensors without memory."""
    dry = Dry(mesh.axes, rank)
    trace = Trace(Mesh(**dict(mesh.axes)).at(rank, dry))
    wire = LayoutWire.of(layout, trace.mesh, {"S": sizes["S"]}, cu=cu, device="meta").layer(
        H=sizes["H"], K=sizes["K"], causal=sight[0], window=sight[1]
    )
    (rows,) = parse(rules.rows(layout["q"][0])).local(sizes, mesh, rank)
    sizes = {**sizes, "B": rows}
    here: dict[str, Tensor] = {}
    before: dict[str, int] = {}
    after: dict[str, int] = {}

    def local(name: str) -> tuple[int, ...]:
        return parse(wire.edges[name][0]).local(sizes, mesh, rank)

    for name in (*schedule.inputs, *schedule.parameters):
        here[name] = torch.empty(local(name), dtype=dtype, device="meta", requires_grad=True)
    first = [here[name] for name in schedule.inputs]
    ins, kept = _bytes(*first), [*first]
    sent: dict[tuple[str, ...], Any] = {}
    projection, tokens, projected = 0, None, 0
    for step in schedule.steps:
        given = {name: here[name] for name in step.edges if name in here}
        if step.what in ("send", "receive", "pass"):
            before |= {name: _size(x) for name, x in given.items()}
        if step.what == "send":
            sent[step.edges] = wire.send(**given)
        elif step.what == "receive":
            found = wire.receive(sent.pop(step.of, None), **given)
            here |= dict(zip((*step.edges, *step.of), found, strict=True))
        elif step.what == "pass":
            here[step.edges[0]] = wire.pass_(**given)
        else:
            (name,), of = step.edges, [here[each] for each in step.of]
            if step.what == "make":
                keys = of[0].shape[rules.place(wire.edges[step.of[0]][-1], "S")]
                sizes = {**sizes, "T": keys}
                whole = any(atom.name == "T" for atom in parse(wire.edges[name][0]).atoms)
                tokens = None if whole else keys
                projection, projected = of[1].shape[0] * of[1].shape[1], keys
            here[name] = _Core.apply(local(name), *of)
            kept += of
            core = here[name]
        if step.what != "core":
            after |= {name: _size(here[name]) for name in (*step.edges, *step.of) if name in here}
    out = result = here["o"]
    if summed(wire.edges, sizes):
        made = _Core.apply(local("out"), out)
        result = wire.pass_(out=made)
        before["out"], after["out"] = _size(made), _size(result)
    torch.autograd.grad(result, first, result.new_empty(result.shape))
    heads = wire.heads().local
    assert heads is not None
    kv_heads = heads
    if "k" in here:
        kv_heads = here["k"].shape[rules.place(wire.edges["k"][-1], "K")]
    buffers = tuple((_size(sent), _size(received)) for sent, received in dry.buffers)
    token = {}
    for name in {*layout.keys, *(schedule.made.edges if schedule.made else ())} & {*here}:
        x, spec = here[name], parse(wire.edges[name][-1])
        at = next(i for i, dim in enumerate(spec.dims) if dim[0].name in ("S", "T"))
        token[name] = _size(x) // max(x.shape[at], 1)
    held = _Held(
        ins, before, after, _bytes(*kept) - ins, _bytes(core, out, result), _bytes(result), buffers, token,
        schedule.made.edges[0] if schedule.made else None,
    )  # fmt: skip
    return _Ran(rows, heads, kv_heads, projection, tokens, projected, held, tuple(trace.events))


class _Core(torch.autograd.Function):
    """What stands between the exchanges: a result of the right shape, and gradients of everything."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *xs: Tensor) -> Tensor:
        ctx.save_for_backward(*xs)
        return xs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors)


def _of_other_keys(
    events: tuple[Event, ...],
    held: _Held,
    axes: tuple[str, ...],
    names: tuple[str, ...],
    first: Traffic,
    other: Traffic,
) -> tuple[tuple[Event, ...], _Held]:
    """What was rehearsed with some traffic of keys, as it is with another."""
    found, buffers, launches = [], list(held.buffers), itertools.count()
    token = sum(held.token[name] for name in names)
    for event in events:
        at = next(launches) if event.what == "launch" else -1
        if event.axes == axes and set(event.call.edges) == set(names):
            back = event.call.backward
            if at >= 0:
                sent, received = (t * token for t in (other.sent, other.received))
                event = replace(event, sent=received if back else sent, received=sent if back else received)
                ends = (other.given * token, other.wanted * token)
                buffers[at] = ends[::-1] if back else ends
        found.append(event)
    more = other.wanted - first.wanted
    of_keys = {name: held.after[name] + more * held.token[name] for name in names}
    held = held._replace(after={**held.after, **of_keys}, seen=held.seen + more * token, buffers=tuple(buffers))
    return tuple(found), held


def _memory(events: Sequence[Event], sizes: _Held) -> tuple[tuple[str, int], ...]:
    """Bytes of edges and buffers after each event. What came in stays; a buffer lives from launch to wait, or stays as
    what came; backward finds what is kept (all that the core and a projection read, and o) and the gradient of the
    output."""
    held, turned = sizes.ins, False
    made = {sizes.made} - {None}
    found = [("inputs", held)]
    flying: dict[tuple[str, ...], tuple[int, int]] = {}
    launches = iter(sizes.buffers)
    for event in events:
        names = event.call.edges
        if event.call.backward and not turned:
            turned, held = True, sizes.ins + sizes.seen + sizes.given + sizes.result
            found.append(("core, gradient of the output", held))
        if event.what == "launch":
            held += sum(sizes.before[name] for name in names if name in made)  # it was projected by then
            made -= {*names}
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
