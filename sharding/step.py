"""The plan of a whole step of training: every collective of a model with its bytes, and what a rank holds.

The model's own function is run on tensors without memory, forward and backward, behind the layout's own wire, once for
each kind of rank; then the gradients are summed as a trainer does. So a plan cannot differ from what runs, but for what
only values say: which experts tokens choose.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..functional import tree
from . import documents, rules, shards, whole
from .batch import BUCKET, pending_axes, sum_gradients
from .classes import Dry
from .errors import SpecError
from .mesh import Mesh, size_of, text_of
from .meter import Meter
from .plan import Plan, ends_of, exchanges_of, span
from .rehearsal import Rank
from .shards import known
from .show import columns
from .spec import parse
from .stack import LETTERS, NAMES, Kind, Stack, part_of
from .trace import Event, Trace
from .wires import LayoutWire

if TYPE_CHECKING:
    from .shard import Sharded

__all__ = ["Step", "step"]

EMBEDDING, HEAD, GRADIENTS = "embedding", "head and loss", "sums of gradients"


@dataclass(frozen=True, repr=False)
class Step(Stack):
    """What a step of training a whole model sends and holds. Prints as text.

    kinds: embedding, layers that are alike, head and loss, sums of gradients, in this order. Their peak bytes are the
    most that a rank holds at any moment of theirs, with everything that it holds of the others: parameters, what
    autograd keeps, gradients. runs: all of a step, ranks by what they do.
    """

    runs: tuple[Rank, ...] = field(default=(), compare=False)

    def events(self, rank: int = 0) -> list[Event]:
        """What a trace has of a rank."""
        return list(next(run for run in self.runs if rank in run.ranks).events)

    @property
    def peak(self) -> int:
        """The most bytes that a rank holds at once: of tensors, each memory once, with buffers of exchanges."""
        return max(run.peak for run in self.runs)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("a step", "layers", "exchanges", "sends", "receives", "peak bytes")
        for kind in self.kinds:
            sums = [ends_of(kind.times * r.bytes[i] for r in kind.plan.classes) for i in (0, 1)]
            count = str(kind.times * len(kind.plan.exchanges))
            yield (kind.name, str(len(kind.layers) or ""), count, *map(span, sums), f"{kind.plan.peak:,}")
        ends = [ends_of(run.bytes[i] for run in self.runs) for i in (0, 1)]
        total = str(sum(len(kind.layers) for kind in self.kinds))
        yield ("in all", total, str(self.exchanges), *map(span, ends), f"{self.peak:,}")

    def __str__(self) -> str:
        rows = columns(list(self._rows()), [False] + [True] * 5)
        blocks = itertools.chain(*(["", *block] for block in self._blocks()))
        between = f"between layers activations lie as {self.between}"
        notes = [line for note in self.notes for line in textwrap.wrap(note, 118, subsequent_indent="    ")]
        return "\n".join([self.title, "     ".join(self.facts), between, *blocks, "", *rows, *notes])


def step(model: Sharded, params: tree.Tree, cfg: Any, given: Mapping[str, int], cu_seqlens: Any) -> Step:
    """`Sharded.step`."""
    layout, mesh = model.layout, Mesh(**dict(model.mesh.axes))
    if not any(edge.startswith("layers.") for edge in model.declared):
        raise SpecError(f"{model.name} is no whole model, of which there is a step", fix="Layout.plan, of a layer")
    strange = next((letter for letter in given if letter != "B"), None)
    if strange:
        raise SpecError(f"a step has no place for {strange}={given[strange]}", fix="B alone")
    if "B" not in given:
        raise SpecError("a step lacks a size: B", mesh=text_of(mesh.axes), fix="B=..., globally")
    sizes = {"B": shards.whole("B", given["B"]), "S": model.sizes["S"]}
    cu = None if cu_seqlens is None else documents.boundaries(cu_seqlens, sizes["S"])
    named = {"params": params, "cfg": cfg}
    specs = model.in_specs(named)["params"]
    asked = _Asked(model, cfg, tree.paths(params), tree.paths(specs), tree.structure(params), sizes, cu)
    # A thread has none of its caller's modes: no_grad, inference, transforms, hooks of autograd, fake tensors.
    with ThreadPoolExecutor(1) as apart:
        made = apart.submit(lambda: [_run(asked, mesh, ranks) for ranks in _alike(asked, mesh)]).result()
    groups: dict[Any, list[int]] = {}
    for i, each in enumerate(cfg.layers):
        groups.setdefault(each, []).append(i)
    kinds = [_kind(EMBEDDING, (), {}, made, mesh, EMBEDDING)]
    for each, layers in groups.items():
        kinds.append(_layers(each, tuple(layers), made, mesh))
    kinds += [_kind(name, (), {}, made, mesh, name) for name in (HEAD, GRADIENTS)]
    runs = tuple(Rank(m.ranks, 0, 0, 0, 0, 0, (("a step", max(m.held.values())),), (), m.events) for m in made)
    texts = [parse(text) for _, chain in layout.chains for text in chain]
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in asked.leaves.values())
    facts = [f"mesh: {text_of(mesh.axes, *texts)}", f"sizes: {known(sizes)}", ", ".join(dtypes)]
    facts += [] if cu is None else [f"{len(set(cu)) - 1} documents"]
    facts += [f'exchange="{layout.exchange}"'] if layout.exchange != "all" else []
    between = next(chain[0] for edge, chain in layout.chains if edge.rsplit(".", 1)[-1] == "x")
    title = f"a step of {model.name}, {len(cfg.layers)} layers by {layout.name}"
    return Step(title, tuple(facts), between, tuple(kinds), tuple(_notes(asked, mesh)), mesh, runs)


class _Asked(NamedTuple):
    """leaves, specs: of the parameters, by path. sizes: B and S."""

    model: Sharded
    cfg: Any
    leaves: dict[str, Tensor]
    specs: dict[str, Any]
    structure: Any
    sizes: Mapping[str, int]
    cu: Any

    def local(self, path: str, mesh: Mesh, rank: int) -> tuple[int, ...]:
        lies = self.specs[path]
        found: tuple[int, ...] = lies.spec.local(lies.sizes, mesh, rank)
        return found

    def tokens(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        return parse(self.model.layout["tokens"][0]).local(self.sizes, mesh, rank)


class _Made(NamedTuple):
    """What ranks of one class do. held: the most bytes in each part of the model."""

    ranks: tuple[int, ...]
    events: tuple[Event, ...]
    held: dict[str, int]


def _alike(asked: _Asked, mesh: Mesh) -> list[tuple[int, ...]]:
    """Ranks by what they do: where their tokens stand, the shapes of all that they have, and whether they add up one
    element more than others of a sum."""
    found: dict[Any, list[int]] = {}
    tokens = set()  # where a rank's tokens stand among others, and its heads where they are uneven
    for atom in (a for _, chain in asked.model.layout.chains for text in chain for a in parse(text).atoms):
        ranks = math.prod(mesh[axis] for axis in atom.axes)
        heads = [each.attention.sizes.get(atom.name, 0) for each in asked.cfg.layers] if atom.name in "KH" else []
        if atom.name == "S" or any(n % ranks for n in heads):
            tokens |= {*atom.axes}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        shapes = {path: asked.local(path, mesh, rank) for path in asked.leaves}
        rows = asked.tokens(mesh, rank)
        uneven = _unevenly_summed(asked, mesh, shapes, rows)
        place = tuple(n for axis, n in at.items() if axis in tokens | uneven)
        found.setdefault((tuple(shapes.values()), rows, place), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _unevenly_summed(
    asked: _Asked, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]], rows: tuple[int, ...]
) -> set[str]:
    """The axes over which some sum is of a number of elements that its ranks cannot share alike."""
    sums: dict[Any, list[int]] = {}
    for path, shape in shapes.items():
        over = pending_axes(asked.specs[path].spec, mesh)
        sums.setdefault((over, asked.leaves[path].dtype), []).append(math.prod(shape))
    found = set()
    for (over, dtype), counts in sums.items():
        ranks = math.prod(mesh[axis] for axis in over)
        together = sum(counts) * dtype.itemsize <= BUCKET and not sum(counts) % ranks
        if not together and any(n % ranks for n in counts):
            found |= {*over}
    pending = {axis for _, chain in asked.model.layout.chains for axis in parse(chain[0]).partial} & {*dict(mesh.axes)}
    return found | {axis for axis in pending if math.prod(rows) * asked.cfg.sizes["D"] % mesh[axis]}


def _run(asked: _Asked, mesh: Mesh, ranks: tuple[int, ...]) -> _Made:
    rank = ranks[0]
    trace = Trace(Mesh(**dict(mesh.axes)).at(rank, Dry(mesh.axes, rank)))
    model, log = asked.model, _Log()
    some = any(x.requires_grad for x in asked.leaves.values())  # else all are trained, as of shapes alone
    leaves = {
        path: torch.empty(asked.local(path, mesh, rank), dtype=x.dtype, device="meta").requires_grad_(
            x.requires_grad if some else x.dtype.is_floating_point
        )
        for path, x in asked.leaves.items()
    }
    shape = asked.tokens(mesh, rank)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    told = {} if asked.cu is None else {"cu_seqlens": asked.cu}
    all_of_it = whole.take(dict(told), model.layout, asked.sizes["S"], shape[0], torch.device("meta"))
    wire = _Marking.of(
        model.layout, trace.mesh, model.sizes, whole=all_of_it.edges, cu=all_of_it.cu, ordered=all_of_it.ordered,
        device=torch.device("meta"), log=log, batch=asked.sizes["B"],
    )  # fmt: skip
    known_of_it = {"positions": all_of_it.positions, "segment_ids": all_of_it.edges["q_segment_ids"]}
    given = {name: wire.mine(x) for name, x in known_of_it.items() if x is not None}
    params = tree.unflatten(asked.structure, leaves.values())
    targets = (tokens,) * any(edge == "targets" for edge in model.declared)
    with Meter(lambda: len(log.parts), [*leaves.values(), tokens], ()) as meter:
        end = model.fn(params, tokens, asked.cfg, *targets, wire=wire, **given)[0]
        log.parts.append(HEAD)
        trained = {path: x for path, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad(end, list(trained.values()), torch.empty_like(end), allow_unused=True)
        del end
        log.parts.append(GRADIENTS)
        first = len(trace.events)
        there = {path: g for path, g in zip(trained, grads, strict=True) if g is not None}
        sum_gradients(there, {path: asked.specs[path] for path in there}, trace.mesh)
    sums = [replace(event, call=event.call._replace(site=GRADIENTS)) for event in trace.events[first:]]
    held: dict[str, int] = {}
    for moment, n in meter.found:
        part = log.parts[moment - 1]
        held[part] = max(held.get(part, 0), n)
    return _Made(ranks, (*trace.events[:first], *sums), held)


class _Log:
    """parts: where a step is, from moment to moment. layers: how many have begun."""

    def __init__(self) -> None:
        self.parts, self.layers = [EMBEDDING], 0


@dataclass(frozen=True, eq=False)
class _Marking(LayoutWire):
    """A wire that notes where in a model a tensor passes, forward and backward. batch: B."""

    log: Any = None
    batch: int = 0
    path: str = ""

    @property
    def _site(self) -> str:  # type: ignore[override]
        return self.path or (HEAD if self.log.layers else EMBEDDING)

    def scope(self, name: str) -> _Marking:
        path = self.path
        if name == "layers":
            path = f"layers[{self.log.layers}]"
            self.log.layers += 1
        return replace(super().scope(name), path=path)

    def gather(self, params: Any, /, *names: str, **sizes: int) -> Any:
        self.log.parts.append(self._site)
        return super().gather(params, *names, **sizes)

    def pass_(self, **named: Tensor) -> Tensor:
        ((name, x),) = named.items()
        x = _Mark.apply(x, self.log.parts, self._site) if name == "x" else x
        y = super().pass_(**{name: x})
        return _Mark.apply(y, self.log.parts, self._site) if name in ("out", "embedded") else y

    def _chosen(self, by_expert: Tensor, rows: Tensor, group: tuple[int, ...]) -> list[list[int]]:
        """Each expert as often as any other."""
        text, sizes = self.edges["x"][0], {"B": self.batch, "S": self.sizes["S"]}
        text = next(chain[0] for edge, chain in self.layout.chains if edge == "tokens")
        shapes = {r: math.prod(parse(text).local(sizes, Mesh(**dict(self.axes)), r)) for r in (*group, self.rank)}
        each = rows.shape[0] // max(shapes[self.rank], 1) or 1
        experts = by_expert.shape[1]
        sides = [[shards.balanced(shapes[r] * each, experts, i) for i in range(experts)] for r in group]
        return [[b - a for a, b in of_rank] for of_rank in sides]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: list[str], part: str) -> Tensor:
        ctx.rest = parts, part
        parts.append(part)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts, part = ctx.rest
        parts.append(part)
        return grad, None, None


def _layers(cfg: Any, layers: tuple[int, ...], made: Sequence[_Made], mesh: Mesh) -> Kind:
    part = part_of(cfg.attention.sizes)
    sizes = {letter: n for letter, n in cfg.attention.sizes.items() if letter in LETTERS[part]}
    sizes |= {letter: n for letter, n in cfg.mlp.sizes.items() if letter in "FX"}
    name = f"{NAMES[part]}, {'experts' if 'X' in sizes else 'mlp'}"
    return _kind(name, layers, sizes, made, mesh, *(f"layers[{i}]" for i in layers))


def _kind(
    name: str, layers: tuple[int, ...], sizes: dict[str, int], made: Sequence[_Made], mesh: Mesh, *parts: str
) -> Kind:
    """A part of a step, as it is in all ranks. parts: those of its layers, which all do what the first does."""
    classes = []
    for each in made:
        events = tuple(e for e in each.events if e.call.site == parts[0])
        held = max((each.held.get(part, 0) for part in parts), default=0)
        if name == GRADIENTS:  # they are summed behind backward
            events = tuple(replace(e, call=e.call._replace(backward=True)) for e in events)
        classes.append(Rank(each.ranks, 0, 0, 0, 0, 0, ((name, held),), (), events))
    plan = Plan(name, (), exchanges_of(classes), tuple(classes), ((), ()), (), 0.0, (), ("", ""), (0, 0), mesh)
    return Kind(name, layers, sizes, (), plan)


def _notes(asked: _Asked, mesh: Mesh) -> Iterator[str]:
    """Parameters that lie whole over an axis by which their field says that they may be split, and what was assumed."""
    fields = tree.paths(tree.unflatten(asked.structure, asked.leaves.values()).specs())
    left: dict[tuple[str, str], dict[str, int]] = {}
    for path, text in fields.items():
        for atom in parse(text).atoms:
            for axis in atom.axes:
                if size_of(mesh.axes, axis) > 1 and axis not in asked.specs[path].spec.axes:
                    x = asked.leaves[path]
                    found = left.setdefault((atom.name, axis), {})
                    short = re.sub(r"\[\d+\]", "[*]", path.lstrip("."))
                    found[short] = found.get(short, 0) + x.numel() * x.element_size()
    for (letter, axis), paths in left.items():
        fix = {"D": f'spread(layout, parameters="{axis}")', "X": f'spread(layout, experts="{axis}")'}.get(
            letter, f"a layout that splits {letter} by {axis}"
        )
        yield (
            f"whole over {axis}={size_of(mesh.axes, axis)}, though their fields say {letter}/{axis}: "
            f"{', '.join(paths)}; {sum(paths.values()):,} bytes; fix: {fix}"
        )
    if rules.own(asked.model.layout.chains, "X", mesh.axes, 0, 1) is not None:
        yield "rows of experts: as if each were chosen as often as any other; what runs follows the router"
