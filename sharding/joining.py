"""Whether a function and a layout go together: the edges that one passes and the other has rules for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from .errors import SpecError, nearest
from .layouts import EDGES, Layout
from .spec import parse
from .steps import COLLECTIVES, steps

__all__ = ["check_edges", "check_letters", "letters_of", "rule_of"]

Chains = Mapping[str, tuple[str, ...]]


def rule_of(chains: Chains, edge: str) -> str | None:
    """Which edge of a layout a declared one is: by its part and its name, or by its name alone."""
    *_, part, name = ("", *edge.split("."))
    return next((rule for rule in (f"{part}.{name}", name) if rule in chains), None)


def check_edges(declared: Mapping[str, str], layout: Layout, name: str) -> None:
    """Raise `SpecError` unless every edge of a function has a rule of its dimensions, and every rule that moves
    something or that nobody knows has an edge. declared: edge -> its letters, empty where the function does not say
    them."""
    chains = dict(layout.chains)
    lacking = [_name(edge) for edge in declared if rule_of(chains, edge) is None]
    if lacking:
        raise SpecError(
            f"{layout.name} has no rule for {', '.join(dict.fromkeys(lacking))}, which {name} passes",
            fix=f'Layout("...", {{..., "{lacking[0]}": "its spec"}})',
        )
    used = {rule_of(chains, edge): letters for edge, letters in declared.items()}
    for rule, letters in used.items():
        if letters and rule is not None and _dims(letters) != _dims(chains[rule][0]):
            raise SpecError(
                f'{layout.name}: {rule} is "{letters}" in {name}, and other dimensions here',
                chains[rule][0], fix=f'"{letters}", in this order, or a function of that one',
            )  # fmt: skip
    idle = [edge for edge in chains if edge not in used]
    moved = sorted(edge for edge in idle if _exchanges(chains[edge]))
    if moved:
        raise SpecError(f"{layout.name} moves {', '.join(moved)}, which {name} does not pass")
    strange = next((edge for edge in idle if _name(edge) not in EDGES), None)
    if strange:
        guess = nearest(strange, set(map(_name, declared)))
        raise SpecError(
            f'{layout.name} has an edge "{strange}", which {name} does not pass',
            fix=f'did you mean "{guess}"?' if guess else "a layout of its edges alone",
        )


def check_letters(given: Iterable[str], layout: Layout, name: str) -> None:
    """Raise `SpecError` for a size of a letter that no edge has."""
    known = letters_of(dict(layout.chains)) | {"H"}
    strange = next((letter for letter in given if letter not in known), None)
    if strange:
        raise SpecError(
            f"shard({name}, ..., {strange}=...): no edge of {layout.name} has a dimension {strange}",
            fix=f"one of {', '.join(sorted(known))}",
        )


def letters_of(chains: Chains) -> set[str]:
    """Every letter of a layout's edges."""
    return {letter for chain in chains.values() for text in chain for letter in parse(text).letters}


def _name(edge: str) -> str:
    return edge.rsplit(".", 1)[-1]


def _dims(text: str) -> list[tuple[str, ...]]:
    """The letters of each dimension, with one name for all tokens and one for query heads."""
    dims = [tuple("S" if atom.name == "T" else atom.name for atom in dim) for dim in parse(text).dims]
    return [("H",) if dim == ("K", "G") else dim for dim in dims]


def _exchanges(chain: tuple[str, ...]) -> bool:
    """Whether tokens or heads move on the way; a sum at the end of a layer is no reason to need that layer."""
    specs = [parse(text) for text in chain]
    kinds = {step.kind for a, b in itertools.pairwise(specs) for step in steps(a, b)}
    return bool(kinds & set(COLLECTIVES) - {"all-reduce"})
