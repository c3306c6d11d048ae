"""Layouts of gated delta nets: heads move, or tokens stay and what a shard does to the state moves.

    gdn_scan       tokens stay; what a shard does to the state is a product and a sum, which all ranks get
    gdn_ulysses    tokens become heads and back; a rank has whole rows of its heads, with their convolutions and gates

Letters: B batch, S tokens, T of them convolved, K key heads, G value heads a key head, E and V widths, Y decays of a
head, N = V + E rows of a head's sum and product, I = 1, W width of the convolution, U = W - 1 tokens of its state,
C = 2 E + G V channels a key head, P ranks among which tokens lie.
"""

from __future__ import annotations

from dataclasses import replace

from .errors import SpecError
from .layouts import AROUND, Layout, _edges, _options
from .spec import Spec, parse, parse_pair
from .steps import steps

__all__ = ["beside", "gdn_scan", "gdn_ulysses"]


def gdn_ulysses(axis: str = "u", /, *, tp: str | None = None, dp: str | None = None, overlap: bool = False) -> Layout:
    """Tokens become heads: one all-to-all carries what a state is made of in, one carries what it says back. The gate
    of the output stays, as the output returns to its tokens.

    axis: splits the tokens; value heads follow their key head, and where there are fewer of those than ranks, value
    heads are dealt out and each rank receives the key heads that they need. tp: an axis that already splits heads. dp:
    one that splits the batch. overlap: see `Layout`. A cache lies by heads, as they do in the layer.
    """
    batch, tokens, tail = f"B/{dp}" if dp else "B", f"S/{axis}", f"/{axis}"
    heads = f"K/{tp}" if tp else "K"

    def moved(rest: str) -> str:
        """By heads; `@` stands for the axes that heads gain."""
        return f"{batch} {tokens} {rest.replace('@', '')} -> {batch} S {rest.replace('@', tail)}"

    def cut(spec: str) -> str:
        return f"{spec.replace('@', '')} -> {spec.replace('@', tail)}"

    own = {
        "q": moved(f"{heads}@ E"),
        "k": moved(f"{heads}@ E"),
        "v": moved(f"({heads}@ G) V"),
        "b": moved(f"({heads}@ G)"),
        "a": moved(f"({heads}@ G) Y"),
        "q_conv": cut(f"({heads}@ E) I W"),
        "k_conv": cut(f"({heads}@ E) I W"),
        "v_conv": cut(f"({heads}@ G V) I W"),
        "a_log": cut(f"({heads}@ G)"),
        "dt_bias": cut(f"({heads}@ G Y)"),
        "o": f"{batch} S ({heads}{tail} G) V -> {batch} {tokens} ({heads} G) V",
        **_cache(batch, heads + tail),
        **_whole(batch, "S"),
    }
    name = f'gdn_ulysses("{axis}"' + _options(tp=tp, dp=dp, overlap=overlap)
    return Layout(name, _around(dp, (axis,), tp) | _of_part(own), overlap)


def gdn_scan(*axes: str, tp: str | None = None, dp: str | None = None, overlap: bool = False) -> Layout:
    """Tokens stay. Each rank finds what its tokens do to a state, `H E (E+V)` numbers whatever S is; one all-gather
    brings that to all, and each begins with the state of those before it. W-1 tokens in front of a shard come from its
    neighbour, or from further where that has fewer.

    axes: those that split the tokens, major to minor, "cp" unless given. tp, dp, overlap: as in `gdn_ulysses`. Every
    rank has a cache whole, and gets that of the whole sequence: the end of the convolution goes with the summary.
    """
    axes = axes or ("cp",)
    batch, tokens = f"B/{dp}" if dp else "B", "S" + "".join(f"/{axis}" for axis in axes)
    heads, parts = f"K/{tp}" if tp else "K", "P" + "".join(f"/{axis}" for axis in axes)
    reached = {"q": f"{heads} E", "k": f"{heads} E", "v": f"({heads} G) V"}
    own = {
        **{edge: f"{batch} {tokens} {rest} -> {batch} S {rest}" for edge, rest in reached.items()},
        "b": f"{batch} {tokens} ({heads} G)",
        "a": f"{batch} {tokens} ({heads} G) Y",
        "q_conv": f"({heads} E) I W",
        "k_conv": f"({heads} E) I W",
        "v_conv": f"({heads} G V) I W",
        "a_log": f"({heads} G)",
        "dt_bias": f"({heads} G Y)",
        "summary": f"{parts} {batch} ({heads} G) N E -> P {batch} ({heads} G) N E",
        "tail": f"{parts} {batch} ({heads} C) U -> P {batch} ({heads} C) U",
        "rows": f"{parts} {batch} -> P {batch}",
        **_cache(batch, heads),
        "o": f"{batch} {tokens} ({heads} G) V",
        **_whole(batch, tokens),
    }
    name = f"gdn_scan({', '.join(map(repr, axes))}".replace("'", '"') + _options(tp=tp, dp=dp, overlap=overlap)
    return Layout(name, _around(dp, axes, tp) | _of_part(own), overlap)


def _around(dp: str | None, tokens: tuple[str, ...], tp: str | None) -> dict[str, str]:
    """Edges around the heads of a layer and around layers, as layouts of attention have them."""
    return {edge: text for edge, text in _edges("B S H E", dp, tokens, False, {}, tp).items() if edge in AROUND}


def _of_part(own: dict[str, str]) -> dict[str, str]:
    return {f"gdn.{edge}": text for edge, text in own.items()}


def _cache(batch: str, heads: str) -> dict[str, str]:
    """A cache, which comes in and goes out with the heads that a rank has."""
    return {
        "cache_q": f"{batch} ({heads} E) U",
        "cache_k": f"{batch} ({heads} E) U",
        "cache_v": f"{batch} ({heads} G V) U",
        "cache_state": f"{batch} ({heads} G) V E",
    }


def _whole(batch: str, tokens: str) -> dict[str, str]:
    """What every rank has whole, of the tokens whose state it computes and of those that it convolves."""
    mine, there = f"{batch} S -> {batch} {tokens}", f"{batch} T"
    return {"q_positions": mine, "q_segment_ids": mine, "k_positions": there, "k_segment_ids": there}


def beside(attention: Layout, gdn: Layout) -> Layout:
    """One layout for a model that has layers of both kinds: `beside(ulysses(), gdn_scan("u"))`.

    Between layers activations lie as those of attention come in. Where tokens of gated delta nets lie otherwise, in
    another order or over other axes, `x` of each of their layers moves in and its `out` back, by way of whole tokens
    where no one step leads there, as the layout then shows. Raises `SpecError` where rows or heads lie otherwise.
    """
    mine, own = dict(attention.chains), {e.removeprefix("gdn."): chain for e, chain in gdn.chains}
    for layout, wanted in ((gdn, True), (attention, False)):
        if any(edge.startswith("gdn.") for edge, _ in layout.chains) != wanted:
            raise SpecError(
                f"beside(attention, gdn): {layout.name} is in the place of the other",
                fix="a layout of attention, then one of gated delta nets",
            )
    outer, inner = parse(mine["x"][0]), parse(own["x"][0])
    if outer.letters != inner.letters:
        raise SpecError(
            f"{attention.name} beside {gdn.name}: activations are {outer} in one and {inner} in the other",
            fix='without dims="S B H E", an order that gated delta nets do not have',
        )
    for letter, option, edge in (("B", "dp", "x"), ("K", "tp", "k")):
        if edge in mine:  # latent attention has no K, and what splits its heads splits no others
            first, second = (next(x for x in parse(c[edge][0]).atoms if x.name == letter) for c in (mine, own))
            if first != second:
                raise SpecError(
                    f"{attention.name} beside {gdn.name}: {letter} lies as {first} in one and as {second} in the other",
                    fix=f'{option}="..." in both',
                )
    if outer != inner:
        own["x"] = _way(mine["x"][0], own["x"][0])
        own["out"] = (*own["out"][:-1], *_way(own["out"][-1], mine["out"][-1]))
    within = {edge: chain for edge, chain in own.items() if edge not in AROUND}
    within |= {edge: own[edge] for edge in ("x", "out") if own[edge] != mine[edge]}
    edges = {**mine, **{f"gdn.{edge}": chain for edge, chain in within.items()}}
    name, overlap = f"{attention.name} beside {gdn.name}", attention.overlap or gdn.overlap
    return Layout(name, tuple(edges.items()), overlap, attention.exchange, attention.keys)


def _way(a: str, b: str) -> tuple[str, ...]:
    """From one spec to another of the same dimensions, by whole tokens where one step does not lead there."""
    if len(steps(*parse_pair(f"{a} -> {b}"))) < 2:
        return a, b
    dims = tuple(tuple(replace(x, axes=(), zigzag=False) if x.name == "S" else x for x in dim) for dim in parse(a).dims)
    return a, str(Spec(dims)), b
