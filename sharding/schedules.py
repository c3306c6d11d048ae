"""What a layer does between its edges, as a plan needs to know it: what comes in, what is made of what, and when.

A layout's edges say which schedule is its own; the layers themselves stay unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from . import rules
from .errors import SpecError
from .layouts import Layout
from .mesh import Axes

__all__ = [
    "ATTENTION",
    "DELTA",
    "DELTA_SCAN",
    "LATENT",
    "MATERIALISED",
    "PACKED",
    "Schedule",
    "Step",
    "schedule_of",
    "with_cache",
]


class Step(NamedTuple):
    """send: edges handed over early. receive: edges that are needed now, and those sent before, `of`. project: a weight
    of which a projection is made, see `Wire.projection`. make: what that makes of another. meanwhile: what is projected
    from activations at that moment, an edge or not. core: an edge that is computed of others. pass: one that is sent
    and received at once."""

    what: Literal["send", "receive", "project", "make", "meanwhile", "core", "pass"]
    edges: tuple[str, ...]
    of: tuple[str, ...] = ()


class Schedule(NamedTuple):
    """inputs: the edges that begin with activations, parameters: with weights. letters: the sizes that a plan needs,
    more: those that it takes besides. widths: letters that are sums of others. wide: edges that are in fp32 at least,
    whatever their inputs are in. latent: keys and values are made of latents, for every head its own. recurrent: tokens
    change a state, and meet no other tokens but those that a convolution reaches."""

    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    steps: tuple[Step, ...]
    letters: str
    more: str = "GD"
    widths: tuple[tuple[str, tuple[str, ...]], ...] = ()
    wide: tuple[str, ...] = ()
    latent: bool = False
    recurrent: bool = False

    @property
    def edges(self) -> tuple[str, ...]:
        """Every edge, in the order in which it comes."""
        named = (edge for step in self.steps if step.what != "meanwhile" for edge in step.edges)
        return tuple(dict.fromkeys((*self.inputs, *self.parameters, *named)))

    def sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """With the letters that follow from others. Raises `SpecError` where they are given and differ."""
        found = dict(sizes)
        for letter, parts in self.widths:
            if all(part in found for part in parts):
                width = sum(found[part] for part in parts)
                if found.setdefault(letter, width) != width:
                    said = " ".join(f"{part}={found[part]}" for part in parts)
                    what = f"{letter}={found[letter]} and {said} disagree"
                    raise SpecError(what, fix=f"without {letter}, which is {width}")
        return found


ATTENTION = Schedule(
    inputs=("q", "k", "v"),
    parameters=(),
    steps=(
        Step("send", ("k", "v")),
        Step("receive", ("q",), ("k", "v")),
        Step("core", ("o",), ("q", "k", "v")),
        Step("pass", ("o",)),
    ),
    letters="BSHKEV",
)

LATENT = Schedule(
    inputs=("q", "kv_latent", "key_rope"),
    parameters=("kv_b",),
    steps=(
        Step("send", ("kv_latent", "key_rope")),
        Step("pass", ("kv_b",)),
        Step("send", ("q",)),
        Step("project", ("kv_b",)),
        Step("receive", (), ("kv_latent", "key_rope")),
        Step("make", ("kv",), ("kv_latent", "kv_b")),
        Step("receive", ("kv",), ("q",)),
        Step("core", ("o",), ("q", "kv", "key_rope")),
        Step("pass", ("o",)),
    ),
    letters="BSHLNRV",
    more="D",
    widths=(("E", ("N", "R")), ("NV", ("N", "V"))),
    latent=True,
)

# Where latents stay, and keys and values of heads travel.
PACKED = LATENT._replace(
    steps=(
        Step("send", ("kv_latent", "key_rope")),
        Step("pass", ("kv_b",)),
        Step("project", ("kv_b",)),
        Step("make", ("kv",), ("kv_latent", "kv_b")),
        Step("send", ("kv",)),
        Step("send", ("q",)),
        Step("receive", (), ("kv_latent", "key_rope", "kv", "q")),
        Step("core", ("o",), ("q", "kv", "key_rope")),
        Step("pass", ("o",)),
    )
)

# Latent attention in a layout that knows no latents: its keys and values are projected before anything moves.
MATERIALISED = ATTENTION._replace(letters=LATENT.letters, more=LATENT.more, widths=LATENT.widths, latent=True)

_CONVOLVED, _CONVOLUTIONS = ("q", "k", "v"), ("q_conv", "k_conv", "v_conv")
_GATES, _DECAYS = ("b", "a"), ("a_log", "dt_bias")
_SENT, _OWN = (*_CONVOLVED, *_GATES), (*_CONVOLUTIONS, *_DECAYS)
_READ = (*_SENT, *_OWN)
_STATES = ("summary", "tail", "rows")  # the last two with a cache

# A gated delta net by heads. N: values that a head's state has.
DELTA = Schedule(
    inputs=_SENT,
    parameters=_OWN,
    steps=(
        Step("send", _SENT),
        Step("meanwhile", ("z",)),
        Step("receive", _OWN, _SENT),
        Step("core", ("o",), _READ),
        Step("pass", ("o",)),
    ),
    letters="BSHKEVW",
    more="GYD",
    widths=(("N", ("V",)),),
    wide=("a_log", "dt_bias", *_STATES),
    recurrent=True,
)

# The same by tokens: what a shard does to a state goes to all, as E values more.
DELTA_SCAN = DELTA._replace(
    steps=(
        Step("send", _CONVOLVED),
        Step("meanwhile", _GATES),
        Step("receive", (*_GATES, *_DECAYS)),
        Step("receive", _CONVOLUTIONS, _CONVOLVED),
        Step("core", ("summary",), _READ),
        Step("send", ("summary",)),
        Step("meanwhile", ("z",)),
        Step("receive", (), ("summary",)),
        Step("core", ("o",), (*_READ, "summary")),
        Step("pass", ("o",)),
    ),
    widths=(("N", ("V", "E")),),
)


def with_cache(schedule: Schedule) -> Schedule:
    """The same with a cache: where states go to all, the end of each shard's convolution goes with them, and of which
    rows it has tokens."""

    def more(edges: tuple[str, ...]) -> tuple[str, ...]:
        at = edges.index("summary") if "summary" in edges else len(edges)
        return (*edges[:at], *(_STATES if at < len(edges) else ()), *edges[at + 1 :])

    steps = (step._replace(edges=more(step.edges), of=more(step.of)) for step in schedule.steps)
    return schedule._replace(steps=tuple(steps))


def schedule_of(layout: Layout, axes: Axes, letters: Iterable[str] = ()) -> Schedule:
    """letters: of the sizes that are known, by which plain attention has latents or none. Raises `SpecError` for a
    layout of neither kind of attention."""
    edges = dict(layout.chains)
    if all(edge in edges for edge in DELTA.edges):
        return DELTA_SCAN if len(edges.get("summary", ())) > 1 else DELTA
    if all(edge in edges for edge in LATENT.edges):
        early = rules.stays(edges["kv_latent"], axes) and not rules.stays(edges["kv"], axes)
        return PACKED if early else LATENT
    if all(edge in edges for edge in ATTENTION.edges):
        return MATERIALISED if {"L", "N", "R"} & {*letters} else ATTENTION
    lacking = [edge for edge in ATTENTION.edges if edge not in edges]
    raise SpecError(f"{layout.name} has no edge {', '.join(lacking)}, and a plan is of q, k, v and o")
