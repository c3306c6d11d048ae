"""The plan of a layout: every exchange of an attention layer with its bytes, before any of them happens.

A plan is what the layout's own wire does on tensors without memory, forward and backward, once for each kind of rank.
So it cannot differ from what runs, and thousands of ranks plan as fast as a few.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import caches, documents, html, rules, shards
from .errors import SpecError
from .layouts import Layout
from .mesh import Mesh, size_of, text_of
from .rehearsal import Rank, moves_around, rehearse
from .schedules import MATERIALISED, schedule_of
from .show import columns, ranks_text
from .spec import parse

__all__ = ["Exchange", "Plan", "diff", "ends_of", "exchanges_of", "plan", "span"]

RANGES = 8  # of ranks that are listed


class Exchange(NamedTuple):
    """One collective. edges: what it carries. pairs: how. sends, receives: bytes to and from others, the least and the
    most of any rank. copies: of the payload, before and after. backward: whether it is one of gradients."""

    edges: tuple[str, ...]
    kind: str
    axes: tuple[str, ...]
    pairs: tuple[str, ...]
    sends: tuple[int, int]
    receives: tuple[int, int]
    copies: tuple[int, int]
    backward: bool


@dataclass(frozen=True, repr=False)
class Plan:
    """What attention in a layout sends, computes and keeps. Prints as text; a notebook shows a table.

    facts: mesh, sizes, dtype, what queries see, options. exchanges: in the order of their launch, forward and then
    backward. classes: ranks by what they do. order: launches, waits, the core, where a scan takes in the states before
    it, and what a gated delta net projects while something flies (unless its rows lie with those of what flies),
    forward and backward. pending: for each input the axes over which its gradient is a pending sum. volume:
    elements that the busiest rank receives forward, for each token of a rank's share. notes: what is not in it. tokens:
    what `Rank.queries` and `Rank.keys` are numbers of. cache: bytes of one layer's on a rank, the least and the most.
    """

    title: str
    facts: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    classes: tuple[Rank, ...]
    order: tuple[tuple[str, ...], tuple[str, ...]]
    pending: tuple[tuple[str, tuple[str, ...]], ...]
    volume: float
    notes: tuple[str, ...]
    tokens: tuple[str, str]
    cache: tuple[int, int]
    mesh: Mesh = field(compare=False)

    @property
    def forward(self) -> tuple[Exchange, ...]:
        return tuple(e for e in self.exchanges if not e.backward)

    @property
    def backward(self) -> tuple[Exchange, ...]:
        return tuple(e for e in self.exchanges if e.backward)

    def of(self, rank: int) -> Rank:
        """What a rank does."""
        return next(found for found in self.classes if rank in found.ranks)

    @property
    def flops(self) -> tuple[int, int]:
        """Of the core and of what is projected on the way, forward: the least and the most of any rank."""
        return ends_of(r.flops for r in self.classes)

    @property
    def peak(self) -> int:
        """The most bytes that a rank holds at once, from when the inputs of its edges are there until their gradients
        are, as autograd keeps and frees memory; a view counts nothing.

        Counted: the inputs, and their gradients once made, to the end; every edge, its gradient, and copies that pack
        or unpack; of each exchange a buffer sent, until it is waited for, and one received, from its launch on; what a
        projection between exchanges makes, and the gradient of its weight; what each stage reads, until its gradients
        are made (the one behind the last edge reads the result). Not counted: what a core keeps inside, weights and the
        gradients of others, what comes before and behind the edges, and what a transport needs beside those two buffers
        (gloo keeps the two largest).
        """
        return max(r.peak for r in self.classes)

    def bytes(self, rank: int = 0) -> tuple[int, int]:
        """What a rank sends and receives, forward and backward together."""
        return self.of(rank).bytes

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table of exchanges: what carries what, how, and bytes and copies."""
        yield ("", "", "collective", "", "sends", "receives", "copies")
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            for i, e in enumerate(part):
                over = f"{e.kind} over {'/'.join(e.axes)}"
                numbers = (span(e.sends), span(e.receives), f"{e.copies[0]} + {e.copies[1]}")
                yield (name if i == 0 else "", _named(e.edges), over, _moved(e), *numbers)

        ends = [span(ends_of(r.bytes[i] for r in self.classes)) for i in (0, 1)]
        yield ("in all", "", "", "", *ends, "")

    def _work(self) -> Iterator[tuple[str, ...]]:
        yield ("ranks", *self.tokens, "heads", "flops", "peak bytes")
        found: dict[tuple[str, ...], list[int]] = {}
        for r in self.classes:
            heads = f"{r.heads} reading {r.kv_heads}"
            facts = (str(r.queries), str(r.keys), heads, f"{r.flops:,}", f"{r.peak:,}")
            found.setdefault(facts, []).extend(r.ranks)
        rows = [(ranks_text(sorted(r)), *row) for row, r in sorted(found.items(), key=lambda item: min(item[1]))]
        if len(rows) > RANGES:  # the first and the last: with a causal mask those with the least and the most to do
            more = (f"... {len(rows) - RANGES + 1} more", "", "", "", span(self.flops), f"up to {self.peak:,}")
            rows = [*rows[: RANGES - 2], more, rows[-1]]
        yield from rows

    def _below(self) -> list[str]:
        moved = ["nothing moves"] if not self.exchanges else []
        orders = [f"order, {name}: {' > '.join(order)}" for name, order in zip(_WAYS, self.order, strict=True)]
        whole = [name for name, axes in self.pending if not axes]
        sums: dict[tuple[str, ...], list[str]] = {}
        for name, axes in self.pending:
            sums.setdefault(axes, []).append(name)
        said = [f"{', '.join(names)} a pending sum over {', '.join(axes)}" for axes, names in sums.items() if axes]
        said = [f"{', '.join(whole)} whole"] * bool(whole) + said
        gradients = f"gradients: {'; '.join(said)}; parameters over every axis that does not split them"
        return [
            line
            for text in (*moved, *orders, *self.notes, gradients)
            for line in textwrap.wrap(text, 118, subsequent_indent="    ")
        ]

    def __str__(self) -> str:
        exchanges, work = list(self.rows()), list(self._work())
        table = [columns(exchanges, [False] * 4 + [True] * 3), [""]] if self.exchanges else []
        rows = columns(work, [False, True, True, True, True, True])
        return "\n".join(
            [self.title, "     ".join(self.facts), "", *itertools.chain(*table), *rows, "", *self._below()]
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        exchanges, work = list(self.rows()), list(self._work())
        return html.figure([
            html.lines([self.title, "     ".join(self.facts)]),
            html.table(exchanges[0], exchanges[1:], [False] * 4 + [True] * 3),
            html.table(work[0], work[1:], [False] + [True] * 5),
            html.lines(self._below()),
        ])  # fmt: skip

    def plot(self) -> Any:
        """A figure of bytes sent and memory held, event by event, of the rank that holds most. Needs matplotlib."""
        from .plot import plot

        return plot(self)


_WAYS = ("forward", "backward")


def plan(
    layout: Layout, mesh: Mesh, /, *, dtype: torch.dtype = torch.float32, causal: bool = False,
    window: int | None = None, cu_seqlens: Any = None, cache: int | None = None, **sizes: int,
) -> Plan:  # fmt: skip
    """What attention in a layout will do: `print(hybrid().plan(mesh, B=2, S=96, H=9, K=3, E=64))`.

    mesh: any; nothing runs. dtype: of q, k and v. causal, window, cu_seqlens: what a query sees, for arithmetic and for
    `exchange="needed"`. cache: how many slots it has (that of a gated delta net has none, and takes any number); tokens
    before are not in flops, nor the cache in peak bytes. sizes: global; B, S, E and two of H, K, G; V where values are
    wider or narrower than keys; D of the model, for a sum over tp. Of latent attention B, S, H, L, N, R and V; in a
    layout that knows no latents a rank first projects keys and values of its own tokens, which counts among its flops.

    Raises `SpecError` where the layout, the mesh and the sizes do not go together, or a size is missing.
    """
    layout = layout if "q" in dict(layout.chains) else layout.part("gdn")
    schedule = schedule_of(layout, mesh.axes, sizes)
    latent, recurrent = schedule.latent, schedule.recurrent
    usual = {"K": sizes["H"]} if latent and "H" in sizes else {"V": sizes["E"]} if "E" in sizes and not latent else {}
    sizes = schedule.sizes(shards.complete({**usual, **({"Y": 1} if recurrent else {}), **sizes}))
    sight = documents.sight_of(causal, window)
    known = {*schedule.letters, *schedule.more, "K", "G", *(letter for letter, _ in schedule.widths)}
    strange = {letter: n for letter, n in sizes.items() if letter not in known}
    if strange:
        asked = ", ".join(schedule.letters + schedule.more)
        whole = "" if recurrent else "layout.stack(mesh, [sizes of each layer], B=..., S=...) for gated delta nets, or "
        whole = whole if any(edge.startswith("gdn.") for edge, _ in layout.chains) else ""
        raise SpecError(f"a plan has no place for {shards.known(strange)}", fix=f"{whole}{asked[:-3]} or D")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"a plan is of tensors with gradients, and dtype={dtype!r} has none\n    fix: torch.float32")
    missing = [letter for letter in schedule.letters if letter not in sizes]
    if missing:
        raise SpecError(
            f"a plan lacks sizes: {', '.join(missing)}", known=shards.known(sizes),
            fix=", ".join(f"{letter}=..." for letter in missing) + ", globally",
        )  # fmt: skip
    if latent and sizes["K"] != sizes["H"]:
        raise SpecError(f"latent attention has keys of every head, and H={sizes['H']} K={sizes['K']}", fix="without K")
    if sizes["K"] < 1 or sizes["H"] < 1:
        raise SpecError(f"a plan needs heads, and H={sizes['H']} K={sizes['K']}")
    if recurrent:
        over = rules.split_over(dict(layout.chains)["summary"][0]) if "summary" in dict(layout.chains) else ()
        sizes |= {"I": 1, "P": math.prod(n for axis, n in mesh.axes if axis in over)}
    cu = None if cu_seqlens is None else documents.boundaries(cu_seqlens, sizes["S"])
    rules.complete(layout.name, layout.chains, layout.keys, mesh.axes)
    edges = dict(rules.resolve(layout.name, layout.chains, mesh.axes, (sizes["H"], sizes["K"])))
    for name in schedule.edges:
        for text in edges[name]:
            shards.check(parse(text), {**sizes, "T": sizes["S"]}, mesh.axes)
    if cache is not None:
        if isinstance(cache, bool) or not isinstance(cache, int) or cache < 1:
            raise TypeError(f"plan(cache={cache!r}): how many slots it has, at least 1")
        if cu is not None:
            raise ValueError("plan(cu_seqlens=...) with a cache\n    fix: give each document a row of the cache")
        if not any(name.startswith("cache_") for name in edges):
            what, fix = caches.why_none(edges, layout)
            raise SpecError(f"plan(cache={cache}): {what}", mesh=str(mesh), fix=fix)
        slots = {"T": cache if window is None else min(cache, window), "LR": sizes.get("L", 0) + sizes.get("R", 0)}
        if recurrent:
            slots |= {"U": sizes["W"] - 1, "C": 2 * sizes["E"] + sizes["H"] // sizes["K"] * sizes["V"]}
            sizes |= slots
    # A thread has none of its caller's modes: no_grad, inference, transforms, hooks of autograd, fake tensors.
    with ThreadPoolExecutor(1) as apart:
        made = apart.submit(rehearse, layout, mesh, sizes, dtype, sight, cu, cache is not None).result()
    if schedule is MATERIALISED:
        made = [_projected(r, parse(edges["k"][0]).local(sizes, mesh, r.ranks[0]), sizes) for r in made]
    exchanges = exchanges_of(made)
    own = (*schedule.inputs, *schedule.parameters, *(() if latent or recurrent else ("sinks",)))
    inputs = [name for name in ("x", *own) if name in edges]
    split = {name: parse(edges[name][0]).axes for name in inputs}
    large = [axis for axis, n in mesh.axes if n > 1]
    pending = tuple((name, tuple(axis for axis in large if axis not in split[name])) for name in inputs)
    notes: tuple[str, ...] = ()
    kept = (0, 0)
    if cache is not None:
        kept = ends_of(caches.held(edges, {**sizes, **slots}, mesh, r.ranks[0], dtype) for r in made)
        notes += (f"cache: {span(kept)} bytes on a rank, and as many for the new one; not in peak bytes",)
    if schedule is MATERIALISED:
        notes += ("keys and values materialised from latents, each rank's own: in its flops, not in its bytes",)
    if not recurrent and any(edge.startswith("gdn.") for edge, _ in layout.chains):
        notes += (
            "not counted: gated delta nets, which layout.stack(mesh, [sizes of each layer], ...) plans beside it",
        )
    for name in moves_around(edges) if "D" not in sizes else ():
        what = "the sum of out" if len(parse(edges[name][0]).partial) else f"the move of {name}"
        notes += (f"not counted: {what}, {' -> '.join(edges[name])}, for want of D=",)
    specs = [parse(text) for chain in edges.values() for text in chain]
    usual = {} if latent else {"V": sizes["E"], "Y": 1}  # where these are others they are shown
    shown = [n for n in (*schedule.letters, "Y", "D") if n in sizes and usual.get(n) != sizes[n]]
    used = shards.known({letter: sizes[letter] for letter in shown})
    sees = "causal" if causal else "every key is seen"
    sees += f", window {window}" * (window is not None)
    sees = "a state is carried" if recurrent else sees
    sees += f", {len(set(cu)) - 1} documents" if cu is not None else ""
    options = [f'exchange="{layout.exchange}"'] if layout.exchange != "all" else []
    parts = math.prod(size_of(mesh.axes, x) for a in parse(edges["q"][0]).atoms if a.name in "BS" for x in a.axes)
    share = sizes["B"] * sizes["S"] / parts
    kind = str(dtype).removeprefix("torch.")
    return Plan(
        layout.name,
        (f"mesh: {text_of(mesh.axes, *specs)}", f"sizes: {used}", kind, sees, *options),
        exchanges,
        tuple(made),
        _orders(made[0]),
        pending,
        max(_received(r) for r in made) / dtype.itemsize / share if share else 0.0,
        notes,
        ("tokens", "convolved") if recurrent else ("queries", "keys"),
        kept,
        mesh,
    )


def _projected(rank: Rank, keys: tuple[int, ...], sizes: Mapping[str, int]) -> Rank:
    """With the up-projection of its own tokens. keys: `B S K E`, in any order, as they are before they move."""
    rows = math.prod(keys) // sizes["E"] if sizes["E"] else 0
    return rank._replace(flops=rank.flops + 2 * rows * sizes["L"] * sizes["NV"])


def _received(rank: Rank) -> int:
    """Bytes, forward."""
    return sum(e.received for e in rank.events if not e.call.backward)


def diff(a: Plan, b: Plan) -> str:
    """Two plans line by line: what only the first has behind `-`, only the second behind `+`; empty where they agree,
    whatever the layouts are called."""
    import difflib

    lines = [[re.sub(" {2,}", "  ", line) for line in str(p).splitlines()[1:]] for p in (a, b)]
    if lines[0] == lines[1]:
        return ""
    found = difflib.ndiff(lines[0], lines[1])
    return "\n".join([f"- {a.title}", f"+ {b.title}", *(line.rstrip() for line in found if line[0] in "-+")])


def _orders(rank: Rank) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Launches and waits, with the core where it stands among them, where the states before it are taken in, and what
    is projected while something flies."""
    happens = [
        (event.call.backward, i, 1, f"{event.what} {','.join(event.call.edges)} ({'/'.join(event.axes)})")
        for i, event in enumerate(rank.events)
    ]
    happens += [(backward, i, 0, what) for i, backward, what in rank.computed]
    found: tuple[list[str], list[str]] = ([], [])
    flying = 0
    for backward, _, _, what in sorted(happens, key=lambda each: each[:3]):
        flying += what.startswith("launch ") - what.startswith("wait ")
        if flying or not what.startswith("project "):
            found[backward].append(what)
    return tuple(found[0]), tuple(found[1])


def exchanges_of(made: Sequence[Rank]) -> tuple[Exchange, ...]:
    found = []
    for of_ranks in zip(*(r.events for r in made), strict=True):
        first = of_ranks[0]
        if first.what != "launch":
            continue
        wait = [next(e for e in r.events if e.what == "wait" and e.call[:1] == first.call[:1]
                     and e.call.backward == first.call.backward) for r in made]  # fmt: skip
        pairs = tuple(part.split(": ", 1)[-1] for part in first.call.text.split("; "))
        found.append(Exchange(
            first.call.edges, first.kind, first.axes, pairs, ends_of(e.sent for e in of_ranks),
            ends_of(e.received for e in of_ranks), (max(e.copies for e in of_ranks), max(e.copies for e in wait)),
            first.call.backward,
        ))  # fmt: skip
    return tuple(found)


def _named(edges: Sequence[str]) -> str:
    """`q, k, v`, or `parameters q, k, v`."""
    parameters = [edge.removeprefix("parameters.") for edge in edges if edge.startswith("parameters.")]
    return "parameters " + ", ".join(parameters) if parameters else ", ".join(edges)


def _moved(exchange: Exchange) -> str:
    """`S/u -> S, K -> K/u`: what changes of the letters of an exchange."""
    found: dict[str, None] = {}
    for pair in exchange.pairs:
        sides = [parse(text.strip()).atoms for text in pair.split("->")]
        for a, b in zip(*reversed(sides) if exchange.backward else sides, strict=True):
            if a != b:
                found[f"{a} -> {b}"] = None
    return ", ".join(found)


def ends_of(values: Any) -> tuple[int, int]:
    """The least and the most."""
    values = list(values)
    return (min(values), max(values)) if values else (0, 0)


def span(ends: tuple[int, int]) -> str:
    """The least and the most as one cell of a table."""
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"
