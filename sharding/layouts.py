"""Layouts: for each edge of a layer, how it lies on the mesh and where it moves.

A layout is data: edge name -> specs, one after the other, each step one reshard. It knows no layer, only the names of
edges (`functional.edges`); `shard` joins the two. Keys and values have as many tokens as queries (T = S).

    ulysses     tokens become heads and back (Jacobs et al. 2023, arXiv:2309.14509)
    all_gather  queries stay, keys and values are gathered (as in Llama 3, Grattafiori et al. 2024, arXiv:2407.21783)
    hybrid      the first around the second (as USP, Fang and Zhao 2024, arXiv:2405.07719, with a gather inside)
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from .errors import SpecError, nearest
from .implied import chain_of, check_scan, convolved, keys_of, recurrent, split_by, with_queries
from .mesh import check_names
from .show import columns
from .spec import Atom, Spec, parse
from .steps import steps

if TYPE_CHECKING:
    from .mesh import Mesh
    from .plan import Plan
    from .stack import Stack

__all__ = ["AROUND", "EDGES", "OF_MODELS", "WHOLE", "Layout", "all_gather", "compose", "gathers", "hybrid", "ulysses"]

# Edge -> its specs, as text: constants, which trace.
Edges = tuple[tuple[str, tuple[str, ...]], ...]
Exchange = Literal["all", "needed"]

# Edges that hold what every rank has whole, and cuts itself.
WHOLE = ("q_positions", "k_positions", "q_segment_ids", "k_segment_ids", "mask")

# Edges around the heads of a layer, and around layers.
AROUND = (
    "x", "out", "h", "embedded", "logits", "tokens", "targets", "weights", "rope", "rope_positions", "shares", "loss",
)  # fmt: skip

# Edges of a whole model that a part of one, or logits without a loss, have no need of.
OF_MODELS = ("shares", "experts", "parameters")

# Edges that leave a layer: where layouts are composed, the inner one moves them first.
OUTBOUND = ("o", "out", "h", "embedded", "logits", "shares", "loss")


@dataclass(frozen=True, repr=False)
class Layout:
    """Where the edges of a layer lie and move: `Layout("mine", {"q": "B S/u (K G) E -> B S (K/u G) E", ...})`.

    edges: name -> specs joined by `->`, each step one reshard; one spec alone stays as it is. The first is how the
    argument of that name comes in, the last how the stage behind it sees it. What is whole in the first spec of
    `q_positions`, `k_positions`, `q_segment_ids`, `k_segment_ids` and `mask` is cut, not moved: every rank has all of
    it. Key tokens are `T` there.
    overlap: what a layer sends early is launched at once; in a compiled function the compiler orders exchanges.
    exchange: "all" gathers every key; "needed" sends those that some query of the receiver may see (by causality,
    window and documents). Either way only these are attended to. keys: the edges that hold a row for each key token; of
    k, v, kv_latent, kv and key_rope it is known, so only others must be named.

    An edge of a part of a layer may be named with it, `"attention.q"`; else one rule serves all parts.
    """

    name: str
    edges: Mapping[str, str] | Edges
    overlap: bool = False
    exchange: Exchange = "all"
    keys: tuple[str, ...] = ()
    chains: Edges = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.exchange not in ("all", "needed"):
            raise ValueError(f'{self.name}: exchange={self.exchange!r}; it is "all" or "needed"')
        given = self.edges.items() if isinstance(self.edges, Mapping) else self.edges
        chains = {name: chain_of(specs) for name, specs in given}
        found = tuple(
            {**chains, **{n: c for n, c in with_queries(chains, self.exchange).items() if n not in chains}}.items()
        )
        object.__setattr__(self, "keys", keys_of(self.name, chains, self.keys))
        if self.exchange == "needed" and "q" in chains:
            last = parse(chains["q"][-1])
            if not any(atom.axes for atom in last.atoms if atom.name == "S"):
                raise SpecError(
                    f'{self.name}: exchange="needed", and a rank has queries of every token, which need every key',
                    " -> ".join(chains["q"]), fix='exchange="all", or a gather axis, over which queries stay split',
                )  # fmt: skip
        check_scan(self.name, chains)
        for edge, chain in found:
            steps_to_gather = len(gathers(chain))
            if edge in self.keys and self.exchange == "needed" and steps_to_gather > 1:
                raise SpecError(
                    f'{self.name}: exchange="needed" gathers {edge} in one step, and this takes {steps_to_gather}',
                    " -> ".join(chain), fix='one spec in which all of S is split, then one in which none is',
                )  # fmt: skip
        object.__setattr__(self, "edges", found)
        object.__setattr__(self, "chains", found)

    def __getitem__(self, edge: str) -> tuple[str, ...]:
        """The specs of an edge."""
        found = dict(self.chains)
        if edge not in found:
            guess = nearest(edge, found)
            raise KeyError(f'{self.name} has no edge "{edge}"' + (f'\n    did you mean "{guess}"?' if guess else ""))
        return found[edge]

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that it names."""
        return tuple(dict.fromkeys(a for _, chain in self.chains for text in chain for a in parse(text).axes))

    def split(self, letter: str) -> tuple[str, ...]:
        """The axes that split a letter where arguments come in: so do parameters lie."""
        return split_by(self.chains, letter)

    def part(self, name: str) -> Layout:
        """The edges of a part alone, under their bare names: its own, and those of no part."""
        from .rules import of_part

        edges = of_part(self.chains, name)
        # Of a state there are no keys of which some would do.
        return Layout(self.name, edges, self.overlap, "all" if recurrent(dict(edges)) else self.exchange)

    def plan(self, mesh: Mesh, **sizes: Any) -> Plan:
        """What attention in this layout will send, compute and keep: see `sharding.plan`."""
        from .plan import plan

        return plan(self, mesh, **sizes)

    def stack(self, mesh: Mesh, layers: Sequence[Mapping[str, int]], **sizes: Any) -> Stack:
        """What the attention of every layer of a model will send: see `sharding.stack`."""
        from .stack import stack

        return stack(self, mesh, layers, **sizes)

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        quiet: dict[str, list[str]] = {"stay as they come": [], "whole on every rank": []}
        for name, chain in self.chains:
            specs = [parse(text) for text in chain]
            dealt = name == "experts" and specs[0].axes
            if len(specs) == 1 and not dealt and name not in ("q", "k", "v", "o", "x"):
                whole = name.rpartition(".")[2] in WHOLE
                quiet["whole on every rank" if whole else "stay as they come"].append(name)
                continue
            note = f"rows go there and back, all-to-all over {'/'.join(dealt)}" if dealt else _note(name, specs)
            if self.exchange == "needed" and name in self.keys:
                note = note.replace("all-gather", "only what is needed, all-to-all")
            if convolved(name, dict(self.chains)):
                note = note.replace("all-gather", "W-1 tokens in front, all-to-all")
            rows.append((f"  {name}", " -> ".join(chain), note))
        more = [f"{', '.join(names)}: {what}" for what, names in quiet.items() if names]
        wrapped = [f"  {line}" for text in more for line in textwrap.wrap(text, 100)]
        return "\n".join([self.name, *columns(rows, [False] * 3), *wrapped])

    def __repr__(self) -> str:
        return str(self)


def gathers(chain: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes of each step of an edge in which tokens lose axes that nothing else gains."""
    found = []
    for a, b in itertools.pairwise(map(parse, chain)):
        before, after = (next((atom.axes for atom in s.atoms if atom.name == "S"), ()) for s in (a, b))
        lost = tuple(axis for axis in before if axis not in after and axis not in b.axes)
        found += [lost] if lost else []
    return found


def _note(name: str, specs: list[Spec]) -> str:
    """What happens to an edge."""
    if len(specs) == 1:
        return "stays"
    if name.rpartition(".")[2] in WHOLE:
        return "whole on every rank, then a slice"
    found = [step for a, b in itertools.pairwise(specs) for step in steps(a, b)]
    return ", then ".join("a slice" if s.kind == "slice" else f"{s.kind} over {'/'.join(s.axes)}" for s in found)


def ulysses(
    axis: str = "u", /, *, tp: str | None = None, dp: str | None = None, zigzag: bool = False, dims: str = "B S H E",
    overlap: bool = False,
) -> Layout:  # fmt: skip
    """Tokens become heads: one all-to-all carries queries, keys and values in, one carries the output back.

    axis: splits the tokens; query heads follow their key/value head, and where there are fewer of those than ranks,
    query heads are dealt out and each rank receives the key/value heads that they need.
    tp: an axis that already splits the heads. dp: one that splits the batch, or several, "dp/cp". zigzag: tokens come
    in head-tail order.
    dims: the order in which q, k, v and o have their dimensions, "B S H E" or "S B H E". overlap: see `Layout`.
    """
    name = f'ulysses("{axis}"' + _options(tp=tp, dp=dp, zigzag=zigzag, dims=dims, overlap=overlap)
    return Layout(name, _edges(dims, dp, (axis,), zigzag, {"u": axis}, tp), overlap)


def all_gather(
    axis: str = "g", /, *, tp: str | None = None, dp: str | None = None, zigzag: bool = False, dims: str = "B S H E",
    overlap: bool = False, exchange: Exchange = "all",
) -> Layout:  # fmt: skip
    """Queries stay, keys and values are gathered over an axis. Arguments as those of `ulysses`; exchange: see `Layout`.

    With a causal mask the last rank does most of the work; zigzag evens it out.
    """
    name = f'all_gather("{axis}"' + _options(
        tp=tp, dp=dp, zigzag=zigzag, dims=dims, overlap=overlap, exchange=exchange
    )  # fmt: skip
    return Layout(name, _edges(dims, dp, (axis,), zigzag, {"g": axis}, tp), overlap, exchange)


def hybrid(
    *, ulysses: str = "u", gather: str = "g", tp: str | None = None, dp: str | None = None, zigzag: bool = False,
    dims: str = "B S H E", overlap: bool = False, exchange: Exchange = "all",
) -> Layout:  # fmt: skip
    """Ulysses around a gather: tokens `S/g/u`, heads over one axis, keys and values gathered over the other.

    More ranks than heads take part. Arguments as those of `ulysses` and `all_gather`.
    """
    if ulysses == gather:
        raise ValueError(f'hybrid(ulysses="{ulysses}", gather="{gather}"): two axes are needed')
    name = f'hybrid(ulysses="{ulysses}", gather="{gather}"' + _options(
        tp=tp, dp=dp, zigzag=zigzag, dims=dims, overlap=overlap, exchange=exchange
    )  # fmt: skip
    outer = Layout("ulysses", _edges(dims, dp, (ulysses,), False, {"u": ulysses}, tp))
    inner = Layout("all_gather", _edges(dims, dp, (gather,), zigzag, {"g": gather}, tp), exchange=exchange)
    return replace(compose(outer, inner), name=name, overlap=overlap)


def _options(**given: Any) -> str:
    plain = {"tp": None, "dp": None, "zigzag": False, "dims": "B S H E", "overlap": False, "exchange": "all"}
    words = [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in given.items() if v != plain[k]]
    return "".join(f", {word}" for word in words) + ")"


def _edges(
    dims: str, dp: str | None, tokens: tuple[str, ...], zigzag: bool, role: Mapping[str, str], tp: str | None
) -> dict[str, str]:
    """Every edge of attention and of the layers around it. role: what the axis of the tokens does."""
    if dims not in ("B S H E", "S B H E"):
        raise ValueError(f'dims="{dims}": "B S H E" or "S B H E", the order of q, k, v and o')
    of_rows = () if dp is None else tuple(dp.split("/"))
    check_names(*tokens, *of_rows, *(() if tp is None else (tp,)))
    u, g = role.get("u"), role.get("g")
    axes = "".join(f"/{axis}" + ":zigzag" * (zigzag and i == 0) for i, axis in enumerate(tokens))
    batch, S, heads = "B" + f"/{dp}" * bool(dp), "S" + axes, "K" + f"/{tp}" * bool(tp)
    after = f"/{u}" * bool(u)

    def order(tokens: str, rest: str) -> str:
        return f"{batch} {tokens} {rest}" if dims == "B S H E" else f"{tokens} {batch} {rest}"

    q_seen = S if g else "S"
    attention = {
        "x": order(S, "D"),
        "q": f"{order(S, f'({heads} G) E')} -> {order(q_seen, f'({heads}{after} G) E')}",
        "k": f"{order(S, f'{heads} E')} -> {order('S', f'{heads}{after} E')}",
        "v": f"{order(S, f'{heads} V')} -> {order('S', f'{heads}{after} V')}",
        "o": f"{order(q_seen, f'({heads}{after} G) V')} -> {order(S, f'({heads} G) V')}",
        "out": f"{order(S, 'D')} +{tp} -> {order(S, 'D')}" if tp else order(S, "D"),
    }
    pending = "+".join((*tokens, *of_rows))
    around = {
        "h": order(S, f"F/{tp}" if tp else "F"),
        "embedded": f"{order(S, 'D')} +{tp} -> {order(S, 'D')}" if tp else order(S, "D"),
        "logits": order(S, f"Z/{tp}" if tp else "Z"),
        **dict.fromkeys(("tokens", "targets", "weights"), f"{batch} {S}"),
        "rope": f"{batch} {S} R",
        "rope_positions": f"M {batch} {S}",
        "loss": f"+{pending}",
    }
    if tp:  # what each part of the vocabulary says of a token
        around["shares"] = f"P/{tp} {batch} {S} N -> P {batch} {S} N"
    return attention | around


def compose(outer: Layout, inner: Layout) -> Layout:
    """One layout around another: what the outer one hands over is what the inner one takes."""
    a, b = ({e: c for e, c in each.chains if not e.startswith("cache_")} for each in (outer, inner))  # implied anew
    if set(a) != set(b):
        more = ", ".join(sorted(set(a) ^ set(b)))
        raise SpecError(f"{outer.name} around {inner.name}: only one of them has {more}")
    found = {}
    for name in a:
        first, last = [parse(text) for text in a[name]], [parse(text) for text in b[name]]
        if name in OUTBOUND:
            chain = [_merged(first[0], spec) for spec in last] + [_merged(spec, last[-1]) for spec in first[1:]]
        else:
            chain = [_merged(spec, last[0]) for spec in first] + [_merged(first[-1], spec) for spec in last[1:]]
        found[name] = tuple(map(str, chain))
    exchange = "needed" if "needed" in (outer.exchange, inner.exchange) else "all"
    name = f"{outer.name} around {inner.name}"
    edges = tuple((edge, chain) for edge, chain in found.items())
    keys = tuple(edge for edge in (*outer.keys, *inner.keys) if edge not in ("kv_latent", "kv"))
    return Layout(name, edges, outer.overlap or inner.overlap, cast(Exchange, exchange), keys)


def _merged(outer: Spec, inner: Spec) -> Spec:
    """Each letter split by the inner layout's axes, then by the outer's."""
    by_name = {atom.name: atom for atom in inner.atoms}
    if [a.name for a in outer.atoms] != [a.name for a in inner.atoms]:
        raise SpecError(f'"{outer}" around "{inner}": their dimensions differ')

    def both(atom: Atom) -> Atom:
        within = by_name[atom.name]
        shared = [axis for axis in within.axes if axis in atom.axes]
        # An axis that both name (tp) already splits the letter before either begins.
        axes = (*shared, *(x for x in (*within.axes, *atom.axes) if x not in shared))
        if atom.zigzag and axes[0] != atom.axes[0]:
            raise SpecError(f'"{atom}" within "{within}": head-tail order is the inner layout\'s to say')
        return replace(atom, axes=axes, zigzag=within.zigzag or atom.zigzag)

    dims = tuple(tuple(both(atom) for atom in dim) for dim in outer.dims)
    return Spec(dims, tuple(sorted({*outer.partial, *inner.partial})))


# The edges of the layers here: a layout may have more of them than a function passes.
EDGES = (*(edge for edge, _ in ulysses().chains), *OF_MODELS)
