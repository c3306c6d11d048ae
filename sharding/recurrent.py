"""Layouts of gated delta nets: heads move, or tokens stay and what a shard does to the state moves.

    gdn_ulysses    tokens become heads and back; a rank has whole rows of its heads, with their convolutions and gates

Letters: B batch, S tokens, K key heads, G value heads a key head, E and V widths, Y decays of a head, I = 1, W width of
the convolution.
"""

from __future__ import annotations

from .layouts import Layout, _edges, _options

__all__ = ["gdn_ulysses"]


def gdn_ulysses(
    axis: str = "u", /, *, tp: str | None = None, dp: str | None = None, overlap: bool = False
) -> Layout:
    """Tokens become heads: one all-to-all carries what a state is made of in, one carries what it says back. The gate
    of the output stays, as the output returns to its tokens.

    axis: splits the tokens; value heads follow their key head, and where there are fewer of those than ranks, value
    heads are dealt out and each rank receives the key heads that they need. tp: an axis that already splits heads. dp:
    one that splits the batch. overlap: see `Layout`.
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
        "q_positions": f"{batch} S",
        "q_segment_ids": f"{batch} S",
    }
    name = f'gdn_ulysses("{axis}"' + _options(tp=tp, dp=dp, overlap=overlap)
    return Layout(name, found | {f"gdn.{edge}": text for edge, text in own.items()}, overlap)
