"""What the edges of a layout imply: which hold keys, what goes with queries, and that states follow tokens."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from .errors import SpecError, nearest
from .spec import Atom, parse, parse_pair
from .steps import steps

__all__ = ["chain_of", "check_scan", "convolved", "keys_of", "lead", "recurrent", "split_by", "with_queries"]


def recurrent(edges: Container[str]) -> bool:
    """Whether they are those of a gated delta net, which has a state, and no keys to look up."""
    return "a_log" in edges


def convolved(edge: str, edges: Container[str]) -> bool:
    """Whether there are weights of a convolution of it, which reaches some tokens in front of a shard and no others."""
    return f"{edge}_conv" in edges


def split_by(edges: Sequence[tuple[str, tuple[str, ...]]], letter: str) -> tuple[str, ...]:
    """The axes that split a letter where arguments come in: so do parameters lie. Caches, the output of heads and what
    is made of latents lie as heads do within a layer."""
    names = {edge: edge.rsplit(".", 1)[-1] for edge, _ in edges}
    outside = [each for each in edges if names[each[0]] not in ("o", "kv") and not names[each[0]].startswith("cache_")]
    first = [parse(chain[0]) for _, chain in outside]
    atoms = [atom for spec in first for atom in spec.atoms if atom.name == letter]
    return max((atom.axes for atom in atoms), key=len, default=())


def lead(edges: Container[str]) -> str:
    """The edge that has the most heads: queries, or the values of a gated delta net."""
    return "v" if recurrent(edges) else "q"


def chain_of(specs: str | tuple[str, ...]) -> tuple[str, ...]:
    """Specs as they are written in canonical form, each of the same dimensions as the first."""
    texts = specs.split("->") if isinstance(specs, str) else specs
    found = [parse(text.strip()) for text in texts]
    for a, b in itertools.pairwise(found):
        steps(*parse_pair(f"{a} -> {b}"))  # raises where no steps lead from one to the next
    return tuple(str(spec) for spec, _ in itertools.groupby(found))


def keys_of(name: str, chains: Mapping[str, tuple[str, ...]], more: tuple[str, ...]) -> tuple[str, ...]:
    """The edges that hold a row for each key token. Of latents and of what is made of them those that are first to hold
    all tokens: where keys and values move, as S, these."""
    edges = {edge.rsplit(".", 1)[-1]: chain for edge, chain in chains.items() if not edge.startswith("gdn.")}
    if recurrent(edges):
        return more
    moved = "kv" in edges and any(atom.name == "S" and atom.axes for atom in parse(edges["kv"][0]).atoms)
    first, other = ("kv", "kv_latent") if moved else ("kv_latent", "kv")
    latent = first if "kv_latent" in edges else ""
    known = tuple(edge for edge in ("k", "v", latent, "key_rope") if edge in edges)
    for edge in more:
        if edge not in edges:
            guess = nearest(edge, edges)
            fix = f'did you mean "{guess}"?' if guess else "an edge of it, or no keys"
            raise SpecError(f'{name}: keys names "{edge}", which is no edge of it', fix=fix)
        if edge == other and latent:
            raise SpecError(
                f'{name}: keys names "{other}", and of kv_latent and kv, which is made of it, {latent} is the first to '
                "hold all key tokens",
                " -> ".join(edges[latent]), fix="no keys, as they are known of these edges",
            )  # fmt: skip
    return tuple(dict.fromkeys((*known, *more)))


def check_scan(name: str, chains: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `SpecError` where the parts of which states are handed on do not lie as tokens do, one after the other."""
    for edge, chain in chains.items():
        part, _, last = edge.rpartition("summary")
        if last or len(chain) < 2 or f"{part}q" not in chains:
            continue
        tokens = next(atom for atom in parse(chains[f"{part}q"][0]).atoms if atom.name == "S")
        parts = parse(chain[0]).dims[0][0]
        if tokens.zigzag:
            raise SpecError(
                f"{name}: a state goes from one token to the next, and in head-tail order a rank has two pieces that "
                "are far apart",
                " -> ".join(chains[f"{part}q"]), tokens.span, fix=f"S/{'/'.join(tokens.axes)}, in plain order",
            )  # fmt: skip
        if tokens.axes != parts.axes:
            raise SpecError(
                f"{name}: {edge} hands states on over {'/'.join(parts.axes) or 'no axis'}, and tokens lie over "
                f"{'/'.join(tokens.axes) or 'no axis'}",
                " -> ".join(chain), parts.span, fix="/".join(("P", *tokens.axes)),
            )  # fmt: skip


def with_queries(chains: Mapping[str, tuple[str, ...]], exchange: str) -> dict[str, tuple[str, ...]]:
    """The edges that go with queries, as their specs say it: positions, documents, mask, a parameter of each head."""
    if "q" not in chains or recurrent(chains):  # its layouts say where these lie, and it has no mask
        return {}
    first, last = parse(chains["q"][0]), parse(chains["q"][-1])
    heads = [next((dim for dim in spec.dims if dim[0].name in ("K", "H")), ()) for spec in (first, last)]
    batch, before, seen = (
        next((str(atom) for atom in spec.atoms if atom.name == letter), "")
        for letter, spec in (("B", first), ("S", first), ("S", last))
    )
    if not (all(heads) and batch and before):
        return {}
    split = [_written(dim) for dim in heads]
    whole = _written(tuple(replace(atom, axes=(), need=None, zigzag=False) for atom in heads[0]))
    tokens, mask = (f"{batch} S", f"{batch} {seen}"), (f"{batch} {whole} S T", f"{batch} {split[1]} {seen} T")
    keys = (f"{batch} T",)
    found = {
        "q_positions": tokens, "k_positions": keys, "q_segment_ids": tokens, "k_segment_ids": keys, "mask": mask,
        "sinks": (split[0], split[1]), **_cached(chains, exchange),
    }  # fmt: skip
    return {name: chain_of(chain) for name, chain in found.items()}


def _cached(chains: Mapping[str, tuple[str, ...]], exchange: str) -> dict[str, tuple[str, ...]]:
    """How caches lie, where a rank has all tokens of what they are made of: as these lie in the end, with slots for
    tokens. Where only needed keys travel, it lacks those that its queries do not see."""
    made = {"k": ("cache_k", {"S": "T"}), "v": ("cache_v", {"S": "T"}), "kv_latent": ("cache_latent", _LATENT)}
    last = {edge: parse(chains[edge][-1]) for edge in made if edge in chains}
    if exchange == "needed" or any(a.axes for spec in last.values() for a in spec.atoms if a.name == "S"):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for edge, (name, other) in made.items():
        if edge in last:
            dims = (tuple(replace(a, name=other.get(a.name, a.name)) for a in dim) for dim in last[edge].dims)
            found[name] = (" ".join(map(_written, dims)),)
    return found


_LATENT = {"S": "T", "L": "LR"}  # the rotary key lies beside it


def _written(dim: tuple[Atom, ...]) -> str:
    return str(dim[0]) if len(dim) == 1 else f"({' '.join(map(str, dim))})"
