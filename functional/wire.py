"""The seam between stages of a layer: named edges that a layout may move.

A layer is a few pure stages (project, core, project out). What passes from one to the next passes through a `Wire`
under a name, and the layer declares with `@edges` what each name holds. `identity` moves nothing and costs nothing;
the sharding package supplies wires that exchange shards. A layer knows no layout, a layout knows no layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .norm import linear
from .shapes import ShapeError

__all__ = [
    "Heads",
    "Identity",
    "Own",
    "Wire",
    "asking",
    "check_heads",
    "choices_of",
    "edges",
    "edges_of",
    "identity",
    "optional_of",
]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")


class Heads(NamedTuple):
    """Which heads this rank computes, as a core must know it.

    offset: the first local query head, counted globally. local: how many are local. None where all of them are.
    kv_index: for each local query head the local key/value head it reads; None where it is the plain grouping.
    groups: how many key/value heads are local.
    """

    offset: int | None = None
    local: int | None = None
    kv_index: Tensor | None = None
    groups: int | None = None


def check_heads(
    function: str, names: tuple[str, str], own: Mapping[str, int], whole: Mapping[str, int], local: Heads
) -> None:
    """Raise `ShapeError` for weights of other heads than a rank has: those that a layout says, or else some that are
    grouped as the config's. names: of the heads H and K. own, whole: how many there are, in the weights and in the
    config. local: of a rank's weights."""
    if local.local is None or local.groups is None:
        wanted, fits = "the config", own["H"] * whole["K"] == own["K"] * whole["H"]
    else:
        wanted = f"this rank {local.local} and {local.groups} of the config's"
        fits = (own["H"], own["K"]) == (local.local, local.groups)
    if not fits:
        raise ShapeError(
            f"{function}: the weights have {own['H']} {names[0]} and {own['K']} {names[1]} heads, {wanted} "
            f"{whole['H']} and {whole['K']}"
        )


class Own(NamedTuple):
    """What a rank's weights have of a letter: from start to before stop, of size in all."""

    start: int
    stop: int
    size: int


class Wire(Protocol):
    """Carries edges. An edge that is None (an option not used) stays None."""

    @property
    def moves(self) -> bool:
        """Whether anything may move. Then a layer sends what it has as early as it can, and computes on meanwhile."""
        ...

    def layer(self, *, causal: bool = False, window: int | None = None, **sizes: int) -> Wire:
        """The wire of a layer whose letters have these sizes in all (H, K, F, W), and whose queries see keys by these
        rules."""
        ...

    def heads(self, *, sent: bool = False, of: str = "q") -> Heads:
        """What a core is told of its heads after `receive`. sent: of those that queries have before they move. of: the
        edge that has query heads."""
        ...

    def gather(self, params: C, /, *names: str, **sizes: int) -> C:
        """A node of parameters as it is computed with: those of its own leaves that a layout keeps in parts (`D/dp`)
        are whole in it. names: of these alone. sizes: of the letters that may lie in parts, in all."""
        ...

    def deal(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Rows `M D`, sorted by expert, with how many each expert has, `X` -> the rows of all ranks for the experts of
        this one, how many each rank sent to each of them, `P X`, and what takes results of these rows back to where
        the rows came from. Only where `own("X")` is some."""
        ...

    def send(self, **named: Tensor | None) -> Any:
        """Hand over edges that `receive` will return; may launch an exchange, may only hold them."""
        ...

    def receive(self, *sent: Any, **named: Tensor | None) -> tuple[Any, ...]:
        """The edges named here, in their order, then those of each `sent`, in theirs, as the next stage needs them."""
        ...

    def pass_(self, **named: Tensor) -> Tensor:
        """`send` and `receive` of a single edge at once."""
        ...

    def projection(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """x `... D` -> `... F`, by a weight `F D`. Where exchanges overlap, the weight gradient is computed while
        those gradients fly of what is received between this and the call."""
        ...

    def all_of(self, **named: Tensor | None) -> Tensor | None:
        """Of a value that every rank has of all tokens of its rows (`q_positions`), all of it; None where there is
        none."""
        ...

    def place(self, name: str) -> int:
        """Which of the parts of an edge that are gathered this rank's own is."""
        ...

    def own(self, letter: str) -> Own | None:
        """Which of a letter this rank's weights have, of as many as `layer` was told (Z of the vocabulary, X of the
        experts); None where they have all."""
        ...

    def stays(self, name: str) -> bool:
        """Whether an edge is received as it was sent. One that moves must be sent, as what others meet it with has
        moved too."""
        ...

    def scope(self, name: str) -> Wire:
        """The wire of a part (`"attention"` of a layer), whose edges have their own names."""
        ...


class Identity:
    """One rank: every edge is what it was."""

    moves = False

    def layer(self, *, causal: bool = False, window: int | None = None, **sizes: int) -> Identity:
        return self

    def heads(self, *, sent: bool = False, of: str = "q") -> Heads:
        return Heads()

    def gather(self, params: C, /, *names: str, **sizes: int) -> C:
        return params

    def deal(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        return rows, counts[None], lambda x: x

    def send(self, **named: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(named.values())

    def receive(self, *sent: Any, **named: Tensor | None) -> tuple[Any, ...]:
        return (*named.values(), *itertools.chain(*sent))

    def pass_(self, **named: Tensor) -> Tensor:
        return next(iter(named.values()))  # not stored under a name, which Dynamo would give the graph's node

    def projection(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return functools.partial(linear, weight=weight)

    def all_of(self, **named: Tensor | None) -> Tensor | None:
        return next(iter(named.values()))

    def place(self, name: str) -> int:
        return 0

    def own(self, letter: str) -> Own | None:
        return None

    def stays(self, name: str) -> bool:
        return True

    def scope(self, name: str) -> Identity:
        return self


identity = Identity()


class _Watched:
    """A wire that knows whether it was asked for anything."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self.asked = wire, False

    def __getattr__(self, name: str) -> Any:
        self.asked = True
        return getattr(self._wire, name)


def asking(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The layer, which under a layout raises `ValueError` if it asks nothing of its wire. One that declares its edges
    does ask; and what a graph is made of is not watched."""
    if hasattr(layer, "edges") or torch.compiler.is_compiling():
        return layer

    def run(*args: Any, wire: Any, **given: Any) -> Any:
        if wire is identity:
            return layer(*args, wire=wire, **given)
        watched = _Watched(wire)
        found = layer(*args, wire=watched, **given)
        if not watched.asked:
            raise ValueError(
                "decoder(layer=...): it asks nothing of its wire, so that under a layout a rank would see its own "
                "tokens and weights alone\n"
                "    fix: hand wire on, F.layer(..., wire=wire) or F.mlp(..., wire=wire.scope('mlp'))"
            )
        return found

    return run


def edges(
    parts: Mapping[str, Callable[..., Any]] | None = None,
    either: Mapping[str, type] | None = None,
    optional: Iterable[str] = (),
    /,
    **specs: str,
) -> Callable[[F], F]:
    """Declare the edges of a layer: `name="B S (K G) E"`, in letters, sizes global.

    parts: the functions it calls through `wire.scope(name)`, by that name; their edges follow as `name.edge`.
    either: parts that stand for each other, with the class of parameters by which a layer has one or the other. A
    layout need serve one of them alone; it then refuses parameters of the others.
    optional: edges that a layout may leave out: what they bring is then not passed.
    """
    declared, without = dict(specs), list(optional)
    choices = [dict(either)] if either else []
    for part, fn in (parts or {}).items():
        declared |= {f"{part}.{edge}": spec for edge, spec in edges_of(fn).items()}
        choices += [{f"{part}.{name}": kind for name, kind in choice.items()} for choice in choices_of(fn)]
        without += [f"{part}.{edge}" for edge in optional_of(fn)]

    def wrap(fn: F) -> F:
        fn.edges, fn.choices, fn.optional = declared, tuple(choices), tuple(without)  # type: ignore[attr-defined]
        return fn

    return wrap


def optional_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The edges that a layout may leave out."""
    found: tuple[str, ...] = getattr(fn, "optional", ())
    return found


def choices_of(fn: Callable[..., Any]) -> tuple[Mapping[str, type], ...]:
    """The parts that stand for each other, a group each: their names, and the class of their parameters."""
    found: tuple[Mapping[str, type], ...] = getattr(fn, "choices", ())
    return found


def edges_of(fn: Callable[..., Any]) -> Mapping[str, str]:
    """The edges that a layer declared, by name."""
    found: Mapping[str, str] | None = getattr(fn, "edges", None)
    if found is None:
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(f"{name} declares no edges, so no layout can serve it\n    fix: decorate it with @edges(...)")
    return found
