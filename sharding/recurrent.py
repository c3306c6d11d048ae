"""Layouts of gated delta nets: heads move, or tokens stay and what a shard does to the state moves.

    gdn_scan       tokens stay; what a shard does to the state is a product and a sum, which all ranks get
    gdn_ulysses    tokens become heads and back; a rank has whole rows of its heads, with their convolutions and gates

Letters: B batch, S tokens, K key heads, G value heads a key head, E and V widths, Y decays of a head, I = 1, W width of
the convolution, U = W - 1 tokens of its state, C = 2 E + G V channels a key head, P ranks among which tokens lie.
"""

from __future__ import annotations

from .errors import SpecError
from .layouts import AROUND, Layout, _edges, _options
from .spec import parse_pair
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

    around = _edges("B S H E", dp, (axis,), False, {"u": axis}, tp)
    found = {edge: text for edge, text in around.items() if edge not in ("q", "k", "v", "o")}
    own = {
        "q": moved(f"{heads}@ E"),
        "k": moved(f"{heads}@ E"),
        "v": moved(f"({heads}@ G) V"),
        "b": moved(f"({heads}@ G)"),
        "a": moved(f"({heads}@ G) Y"),
        "q_conv": cut(f"({heads}@ E) I W"),
        "k_conv": cut(f"({heads}@ E) I W"),
        "v_conv": cut(f"(({heads}@ G) V) I W".replace("((", "(").replace(") V)", " V)")),
        "a_log": cut(f"({heads}@ G)"),
        "dt_bias": cut(f"({heads}@ G Y)"),
        "o": f"{batch} S ({heads}{tail} G) V -> {batch} {tokens} ({heads} G) V",
        "summary": f"P {batch} ({heads}{tail} G) N E",
        "tail": f"P {batch} ({heads}{tail} C) U",
        "rows": f"P {batch}",
        **_cache(batch, heads + tail),
        **_whole(batch, "S"),
    }
    name = f'gdn_ulysses("{axis}"' + _options(tp=tp, dp=dp, overlap=overlap)
    return Layout(name, found | {f"gdn.{edge}": text for edge, text in own.items()}, overlap)


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
    around = _edges("B S H E", dp, axes, False, {}, tp)
    found = {edge: text for edge, text in around.items() if edge not in ("q", "k", "v", "o")}
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
    return Layout(name, found | {f"gdn.{edge}": text for edge, text in own.items()}, overlap)


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
    here, there = f"{batch} {tokens}", f"{batch} T"
    whole = f"{batch} S"
    mine = f"{whole} -> {here}" if here != whole else whole
    return {"q_positions": mine, "q_segment_ids": mine, "k_positions": there, "k_segment_ids": there}


def beside(attention: Layout, gdn: Layout) -> Layout:
    """One layout for a model that has layers of both kinds: `beside(ulysses(), gdn_scan("u"))`.

    Between layers activations lie as those of attention come in. Where those of gated delta nets lie otherwise, their
    `x` moves in and their `out` back, in each of those layers, as the layout then shows. Raises `SpecError` where one
    step does not lead from one to the other.
    """
    mine, own = dict(attention.chains), {e.removeprefix("gdn."): chain for e, chain in gdn.chains}
    if "a_log" not in own or "a_log" in mine:
        which = gdn if "a_log" not in own else attention
        raise SpecError(f"beside(attention, gdn): {which.name} is in the place of the other", fix="attention first")
    outer, inner = mine["x"][0], own["x"][0]
    if outer != inner:
        for pair in (f"{outer} -> {inner}", f"{own['out'][-1]} -> {mine['out'][-1]}"):
            if len(found := steps(*parse_pair(pair))) > 1:
                raise SpecError(
                    f"{attention.name} beside {gdn.name}: activations lie as {outer} in one and as {inner} in the "
                    f"other, and {len(found)} steps lead from one to the other",
                    pair, fix="layouts that split tokens over the same axes",
                )  # fmt: skip
        own["x"], own["out"] = (outer, *own["x"]), (*own["out"], mine["out"][-1])
    others = {edge for edge in AROUND if edge not in ("x", "out") or mine.get(edge) == own[edge]}  # are the model's
    kept = {edge: chain for edge, chain in own.items() if edge not in others}
    edges = {**mine, **{f"gdn.{edge}": chain for edge, chain in kept.items()}}
    name, overlap = f"{attention.name} beside {gdn.name}", attention.overlap or gdn.overlap
    return Layout(name, tuple(edges.items()), overlap, attention.exchange, attention.keys)
