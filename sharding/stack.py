"""The plan of a whole stack: its layers' attention, kind by kind, on one mesh, with what moves between them.

Layers of one kind do the same, so each kind is planned once. A layer is known by its sizes alone: latents make latent
attention, the width of a convolution a gated delta net.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import html
from .errors import SpecError
from .implied import recurrent
from .layouts import Layout
from .mesh import Mesh, text_of
from .plan import Plan, ends_of, span
from .rules import stays
from .schedules import schedule_of
from .shards import known
from .show import columns, ranks_text
from .spec import parse
from .trace import Event

__all__ = ["LETTERS", "NAMES", "Kind", "Stack", "part_of", "stack"]

# What a plan of each part asks for, of the letters that a layer has.
LETTERS = {"gdn": "DHKGEVWY", "mla": "DHLNRV", "attention": "DHKGEV"}
NAMES = {"gdn": "gated delta net", "mla": "latent attention", "attention": "attention"}


class Kind(NamedTuple):
    """Layers that are alike. part: which part of a layout serves them. sizes: those that tell them apart. reshards: how
    their activations move on the way in and out, empty where they lie there as between layers."""

    part: str
    layers: tuple[int, ...]
    sizes: dict[str, int]
    reshards: tuple[str, ...]
    plan: Plan

    @property
    def name(self) -> str:
        return NAMES.get(self.part, self.part)

    @property
    def times(self) -> int:
        """How often a step does it: once a layer, or once where it is of no layer."""
        return len(self.layers) or 1


@dataclass(frozen=True, repr=False)
class Stack:
    """What the attention of every layer sends, forward and backward, once each. Prints as text.

    kinds: in the order in which they come. between: how activations lie between layers.
    """

    title: str
    facts: tuple[str, ...]
    between: str
    kinds: tuple[Kind, ...]
    notes: tuple[str, ...]
    mesh: Mesh = field(compare=False)

    def events(self, rank: int = 0) -> list[Event]:
        """What a trace has of a rank's layers: forward from the first to the last, backward from the last to the
        first."""
        of_layer = {i: kind.plan.of(rank).events for kind in self.kinds for i in kind.layers}
        ways = [[e for e in of_layer[i] if not e.call.backward] for i in range(len(of_layer))]
        ways += [[e for e in of_layer[i] if e.call.backward] for i in reversed(range(len(of_layer)))]
        return list(itertools.chain(*ways))

    def bytes(self, rank: int = 0) -> tuple[int, int]:
        """What a rank sends and receives in a step, forward and backward together."""
        sent, received = ([k.times * k.plan.bytes(rank)[i] for k in self.kinds] for i in (0, 1))
        return sum(sent), sum(received)

    @property
    def exchanges(self) -> int:
        """How many collectives a step has."""
        return sum(kind.times * len(kind.plan.exchanges) for kind in self.kinds)

    @property
    def flops(self) -> tuple[int, int]:
        """Of all cores, forward: the least and the most of any rank."""
        return self._ends(lambda kind, found: kind.plan.of(found).flops)

    def _ends(self, of: Any) -> tuple[int, int]:
        """The least and the most of any rank, of all layers together: one rank of each class that plans tell apart."""
        classes: dict[tuple[int, ...], int] = {}
        places = [{r: i for i, c in enumerate(kind.plan.classes) for r in c.ranks} for kind in self.kinds]
        for rank in range(self.mesh.size):
            classes.setdefault(tuple(place[rank] for place in places), rank)
        found = [sum(kind.times * of(kind, rank) for kind in self.kinds) for rank in classes.values()]
        return ends_of(found)

    def _blocks(self) -> Iterator[list[str]]:
        for kind in self.kinds:
            n = len(kind.layers)
            layers = f": layer {kind.layers[0]}" if n == 1 else f": {n} layers, {ranks_text(kind.layers)}" if n else ""
            head = f"{kind.name}{layers}" + f"     each: {known(kind.sizes)}" * bool(kind.sizes)
            moved = list(kind.reshards) or ["reshard between layers: none"] * bool(n)
            rows = list(kind.plan.rows())
            table = columns(rows, [False] * 4 + [True] * 3) if kind.plan.exchanges else ["nothing moves"]
            yield [head, *(f"  {line}" for line in moved), *(f"  {line}" for line in table)]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("a step", "layers", "exchanges", "sends", "receives", "flops forward", "peak bytes")
        for kind in self.kinds:
            n, plan = len(kind.layers), kind.plan
            ends = [ends_of(r.bytes[i] for r in plan.classes) for i in (0, 1)]
            sums = [span((n * low, n * high)) for low, high in (*ends, plan.flops)]
            yield (kind.name, str(n), str(n * len(plan.exchanges)), *sums, f"{plan.peak:,}")
        ends = [self._ends(lambda kind, rank, i=i: kind.plan.bytes(rank)[i]) for i in (0, 1)]
        total = sum(len(kind.layers) for kind in self.kinds)
        peak = f"{max(kind.plan.peak for kind in self.kinds):,}"
        yield ("in all", str(total), str(self.exchanges), *map(span, ends), span(self.flops), peak)

    def __str__(self) -> str:
        rows = columns(list(self._rows()), [False] + [True] * 6)
        blocks = itertools.chain(*(["", *block] for block in self._blocks()))
        between = f"between layers activations lie as {self.between}"
        return "\n".join([self.title, "     ".join(self.facts), between, *blocks, "", *rows, *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html.figure([html.lines(str(self).splitlines())])


def stack(layout: Layout, mesh: Mesh, layers: Sequence[Mapping[str, int]], /, **options: Any) -> Stack:
    """What the attention of a whole stack will send: `layout.stack(mesh, [each.attention.sizes for each in cfg.layers],
    B=1, S=8192)`.

    layout: of every kind of layer that there is; `beside` joins two. layers: the sizes of each layer's attention, by
    letter. options: B and S, and what else `Layout.plan` takes of all layers alike (dtype, causal, window, cu_seqlens).
    Not in it: what stands between these layers (a sum behind an MLP over tp).

    Raises `TypeError` for layers that are no sizes, `SpecError` for a layer of a kind that the layout does not serve
    and for a size that layers say themselves, and as `Layout.plan` does.
    """
    _check_layers(layers, options)
    alike: dict[tuple[str, tuple[tuple[str, int], ...]], list[int]] = {}
    for i, each in enumerate(layers):
        part = part_of(each)
        sizes = tuple((letter, each[letter]) for letter in LETTERS[part] if letter in each)
        alike.setdefault((part, sizes), []).append(i)
    kinds = [
        _kind(layout, mesh, part, tuple(found), dict(sizes), options) for (part, sizes), found in alike.items()
    ]  # fmt: skip
    specs = [parse(text) for _, chain in layout.chains for text in chain]
    facts = [f"mesh: {text_of(mesh.axes, *specs)}", f"sizes: {known({letter: options[letter] for letter in 'BS'})}"]
    plain = next((kind.plan for kind in kinds if kind.part != "gdn"), kinds[0].plan)
    facts += plain.facts[2:]  # dtype, what queries see, options
    between = next(chain[0] for edge, chain in layout.chains if edge.rsplit(".", 1)[-1] == "x")
    notes = tuple(dict.fromkeys(f"{kind.name}: {note}" for kind in kinds for note in kind.plan.notes))
    title = f"{len(layers)} layers by {layout.name}"
    return Stack(title, tuple(facts), between, tuple(kinds), notes, mesh)


def _check_layers(layers: Any, options: Mapping[str, Any]) -> None:
    """Raise unless there are layers, each with sizes by letter, and no option is one of these."""
    fix = "\n    fix: [each.attention.sizes for each in cfg.layers]"
    if isinstance(layers, Mapping) or not isinstance(layers, Sequence):
        raise TypeError(
            f"stack(layers=...): sizes of each layer are needed, in a sequence, not {type(layers).__name__}{fix}"
        )
    if not layers:
        raise ValueError(f"stack(layers=...): at least one layer is needed{fix}")
    for i, each in enumerate(layers):
        if not isinstance(each, Mapping):
            fix = fix if hasattr(each, "attention") else "\n    fix: [each.sizes for each in layers]"
            raise TypeError(f"stack(layers=...): layers[{i}] is {type(each).__name__}, not sizes by letter{fix}")
        if said := [letter for letter in options if letter in each]:
            raise SpecError(
                f"stack({said[0]}={options[said[0]]}): layers[{i}] says {said[0]}={each[said[0]]} itself",
                fix=f"without {said[0]}, or other sizes of this layer",
            )


def part_of(sizes: Mapping[str, int]) -> str:
    """Which part of a layout serves a layer's attention of these sizes."""
    return "gdn" if "W" in sizes else "mla" if {"L", "N", "R"} <= {*sizes} else "attention"


def _kind(
    layout: Layout, mesh: Mesh, part: str, layers: tuple[int, ...], sizes: dict[str, int], options: dict[str, Any]
) -> Kind:
    own = layout.part(part)
    if "q" not in (chains := dict(own.chains)) or recurrent(chains) != (part == "gdn"):
        raise SpecError(
            f"layers[{layers[0]}]: {NAMES[part]}, {known(sizes)}, for which {layout.name} has no rules",
            mesh=str(mesh), fix="beside(attention, gdn), a layout of each",
        )  # fmt: skip
    plan = own.plan(mesh, **sizes, **options)
    moved = [("in", chains["x"]), ("out", chains["out"])] if {"x", "out"} <= {*chains} else []
    reshards = tuple(f"reshard {way}: {' -> '.join(chain)}" for way, chain in moved if not stays(chain, mesh.axes))
    asked = schedule_of(own, mesh.axes, sizes).letters + "D" + "Y" * (sizes.get("Y", 1) > 1)
    return Kind(part, layers, {letter: n for letter, n in sizes.items() if letter in asked}, reshards, plan)
