"""Layouts of latent attention: what is small travels, and what is large is made where it is used.

    mla_latent    queries by heads; latent and rotary key gathered, once; a rank projects keys and values of its heads
    mla_packed    queries, and keys and values of a head side by side, in one exchange; the rotary key gathered
    mla_gather    queries stay; latent and rotary key gathered; keys and values of all heads projected on every rank

(PyTorch torchtitan #4760 packs; the others follow DeepSeek-AI 2024, arXiv:2405.04434, whose cache is the latent.)

Letters: B batch, S tokens, T key tokens, H heads, L latent, R rotary key, NV rows of a head in `kv_b`, E and V widths.
"""

from __future__ import annotations

from .layouts import Exchange, Layout, _edges, _options
from .mesh import check_names
from .spec import Atom

__all__ = ["mla_gather", "mla_latent", "mla_packed"]


def mla_latent(
    ulysses: str = "u", gather: str | None = None, /, *, tp: str | None = None, dp: str | None = None,
    zigzag: bool = False, overlap: bool = False, exchange: Exchange = "all",
) -> Layout:  # fmt: skip
    """Tokens become heads for queries alone; the latent and the rotary key go to all ranks that share the tokens, once,
    before the up-projection, of which each computes its heads (rows of `kv_b`, whose gradient is a pending sum).

    ulysses: the axis that splits tokens and then heads. gather: one more that splits tokens, over which queries stay.
    tp: an axis that already splits heads. dp: one that splits the batch. zigzag: tokens come in head-tail order over
    the first axis that splits them, which with a gather axis evens out causal work. overlap, exchange: see `Layout`;
    "needed" is for a gather axis.
    """
    tokens = (gather, ulysses) if gather else (ulysses,)
    S, seen = _tokens(tokens, zigzag), _tokens(tokens[:-1], zigzag)
    name = f'mla_latent("{ulysses}"' + (f', "{gather}"' if gather else "")
    return _layout(
        name, tp, dp, tokens, overlap, exchange, zigzag,
        q=(f"{S} H{{tp}} E", f"{seen} H{{tp}}/{ulysses} E"),
        o=(f"{seen} H{{tp}}/{ulysses} V", f"{S} H{{tp}} V"),
        kv_latent=(f"{S} L", "S L"),
        key_rope=(f"{S} R", "S R"),
        kv_b=("(H{tp} NV) L", f"(H{{tp}}/{ulysses} NV) L"),
        kv=(f"T H{{tp}}/{ulysses} NV",),
    )  # fmt: skip


def mla_packed(
    ulysses: str = "u", gather: str | None = None, /, *, tp: str | None = None, dp: str | None = None,
    zigzag: bool = False, overlap: bool = False, exchange: Exchange = "all",
) -> Layout:  # fmt: skip
    """Tokens become heads for queries, and for keys without their rotary part and values, which lie side by side: one
    exchange carries all three. The rotary key, which no head owns, is gathered. Arguments: those of `mla_latent`; with
    a gather axis keys and values are gathered over it too, by heads."""
    tokens = (gather, ulysses) if gather else (ulysses,)
    S, seen = _tokens(tokens, zigzag), _tokens(tokens[:-1], zigzag)
    name = f'mla_packed("{ulysses}"' + (f', "{gather}"' if gather else "")
    by_heads = (f"{S} H{{tp}} NV", f"{seen} H{{tp}}/{ulysses} NV")
    return _layout(
        name, tp, dp, tokens, overlap, exchange, zigzag,
        q=(f"{S} H{{tp}} E", f"{seen} H{{tp}}/{ulysses} E"),
        o=(f"{seen} H{{tp}}/{ulysses} V", f"{S} H{{tp}} V"),
        kv_latent=(f"{S} L",),
        key_rope=(f"{S} R", "S R"),
        kv_b=("(H{tp} NV) L",),
        kv=(*by_heads, f"S H{{tp}}/{ulysses} NV") if gather else by_heads,
    )  # fmt: skip


def mla_gather(
    gather: str = "g", /, *, tp: str | None = None, dp: str | None = None, zigzag: bool = False, overlap: bool = False,
    exchange: Exchange = "all",
) -> Layout:  # fmt: skip
    """Queries stay; latent and rotary key are gathered, and every rank projects keys and values of all heads: the
    least to send, and the most to compute. Arguments as those of `mla_latent`."""
    S = _tokens((gather,), zigzag)
    return _layout(
        f'mla_gather("{gather}"', tp, dp, (gather,), overlap, exchange, zigzag,
        q=(f"{S} H{{tp}} E",),
        o=(f"{S} H{{tp}} V",),
        kv_latent=(f"{S} L", "S L"),
        key_rope=(f"{S} R", "S R"),
        kv_b=("(H{tp} NV) L",),
        kv=("T H{tp} NV",),
    )  # fmt: skip


def _tokens(axes: tuple[str, ...], zigzag: bool) -> str:
    check_names(*axes)
    return str(Atom("S", axes, zigzag))


def _layout(
    name: str, tp: str | None, dp: str | None, tokens: tuple[str, ...], overlap: bool, exchange: Exchange,
    zigzag: bool, **edges: tuple[str, ...],
) -> Layout:  # fmt: skip
    """edges: specs without their batch."""
    split, batch = f"/{tp}" if tp else "", f"B/{dp}" if dp else "B"
    around = _edges("B S H E", dp, tokens, zigzag, {}, tp)
    found = {edge: text for edge, text in around.items() if edge not in ("q", "k", "v", "o")}
    for edge, chain in edges.items():
        specs = [spec.replace("{tp}", split) for spec in chain]
        found[edge] = " -> ".join(specs if edge == "kv_b" else [f"{batch} {spec}" for spec in specs])
    full = name + _options(tp=tp, dp=dp, zigzag=zigzag, overlap=overlap, exchange=exchange)
    return Layout(full, found, overlap, exchange)
