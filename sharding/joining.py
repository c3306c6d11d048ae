"""Whether a function and a layout go together: the edges that one passes and the other has rules for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.nn import Parameter

from ..functional.tree import Tree
from . import rules
from .errors import SpecError, nearest
from .implied import recurrent
from .layouts import EDGES, OF_MODELS, Layout
from .mesh import Axes
from .spec import parse
from .steps import COLLECTIVES, steps

__all__ = [
    "Joined",
    "check_arguments",
    "check_edges",
    "check_letters",
    "check_mask",
    "check_parts",
    "check_weights",
    "letters_of",
    "rule_of",
]

Chains = Mapping[str, tuple[str, ...]]


def rule_of(chains: Chains, edge: str) -> str | None:
    """Which edge of a layout a declared one is: by its part and its name, or by its name alone."""
    *_, part, name = ("", *edge.split("."))
    return next((rule for rule in (f"{part}.{name}", name) if rule in chains), None)


class Joined(NamedTuple):
    """edges: those of a function that a layout serves, with their letters. lacking: of each part that it does not
    serve, where another stands for it, the class of its parameters and the edges without a rule."""

    edges: dict[str, str]
    lacking: dict[str, tuple[type, tuple[str, ...]]]


def check_edges(
    declared: Mapping[str, str], layout: Layout, name: str, choices: Iterable[Mapping[str, type]] = ()
) -> Joined:
    """Raise `SpecError` unless every edge of a function has a rule of its dimensions, and every rule that moves
    something or that nobody knows has an edge. declared: edge -> its letters, empty where the function does not say
    them. choices: groups of parts, of each of which a layout may serve one alone."""
    chains = dict(layout.chains)
    found = Joined(dict(declared), {})
    for choice in choices:
        by_part = {part: _lacking(chains, _of_part(declared, part)) for part in choice}
        if all(by_part.values()):  # the one that is meant lacks the fewest
            part = min(by_part, key=lambda part: len(by_part[part]))
            _refuse(layout, name, by_part[part], f" in {_name(part)}")
        lacking = {part: names for part, names in by_part.items() if names}
        _refuse_half(layout, name, lacking, declared)
        found.lacking.update({part: (choice[part], names) for part, names in lacking.items()})
    for part in found.lacking:
        for edge in _of_part(declared, part):
            del found.edges[edge]
    if without := _lacking(chains, found.edges):
        _refuse(layout, name, without)
    for edge, letters in found.edges.items():
        rule = rule_of(chains, edge)
        if letters and rule is not None and _dims(letters) != _dims(chains[rule][0]):
            raise SpecError(
                f'{layout.name}: {rule} is "{letters}" in {name}, and other dimensions here',
                chains[rule][0], fix=f'"{letters}", in this order, or a function of that one',
            )  # fmt: skip
    used = {rule_of(chains, edge) for edge in found.edges}
    idle = [edge for edge in chains if edge not in used]
    moved = sorted(edge for edge in idle if _exchanges(chains[edge]) and _name(edge) not in OF_MODELS)
    if moved:
        two = any(edge.startswith("gdn.") for edge in chains) and "q" in chains
        raise SpecError(
            f"{layout.name} moves {', '.join(moved)}, which {name} does not pass",
            fix="for a layer alone, that of the two layouts which is of its kind"
            if two
            else "a layout of its edges alone",
        )
    strange = next((edge for edge in idle if not _usual(edge)), None)
    if strange:
        guess = nearest(strange, set(map(_name, declared)))
        raise SpecError(
            f'{layout.name} has an edge "{strange}", which {name} does not pass',
            fix=f'did you mean "{guess}"?' if guess else "a layout of its edges alone",
        )
    return found


def _of_part(declared: Mapping[str, str], part: str) -> list[str]:
    """The edges of a part of a function."""
    return [edge for edge in declared if edge.startswith(f"{part}.")]


def _lacking(chains: Chains, edges: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(edge) for edge in edges if rule_of(chains, edge) is None))


def _refuse(layout: Layout, name: str, lacking: tuple[str, ...], where: str = "") -> NoReturn:
    raise SpecError(
        f"{layout.name} has no rule for {', '.join(lacking)}, which {name} passes{where}",
        fix=f'{_made_for(layout, lacking)}Layout("...", {{..., "{lacking[0]}": "its spec"}})',
    )


def _made_for(layout: Layout, lacking: tuple[str, ...]) -> str:
    """The layouts here that have the rules that one lacks, to be named before one's own."""
    chains = dict(layout.chains)
    if recurrent(lacking):
        return "gdn_ulysses or gdn_scan, or "
    if "kv_latent" in lacking and "k" in chains:
        return "mla_latent, mla_packed or mla_gather, or "
    if "k" in lacking and "kv_latent" in chains:
        return "ulysses, all_gather or hybrid, or "
    return ""


def _refuse_half(
    layout: Layout, name: str, lacking: Mapping[str, tuple[str, ...]], declared: Mapping[str, str]
) -> None:
    """Raise where a layout moves edges that none but unserved parts have, or has rules that are for them alone, for the
    part that lacks the fewest. lacking: the edges without a rule of each unserved part."""
    chains = dict(layout.chains)
    unserved = {edge for part in lacking for edge in _of_part(declared, part)}
    served = {rule_of(chains, edge) for edge in declared if edge not in unserved}
    for part in sorted(lacking, key=lambda part: len(lacking[part])):
        found = [rule_of(chains, edge) for edge in _of_part(declared, part)]
        own = [rule for rule in found if rule is not None and rule not in served]
        own = [rule for rule in own if not _usual(rule) or _exchanges(chains[rule])]
        if own:
            _refuse(layout, name, lacking[part], f" in {_name(part)}, beside {', '.join(own)}")


def check_parts(
    given: Mapping[str, Any], lacking: Mapping[str, tuple[type, tuple[str, ...]]], layout: str, name: str
) -> None:
    """Raise `SpecError` for parameters of a part that a layout does not serve. given: arguments, by name. lacking: as
    `check_edges` returns it."""
    for argument, x in given.items() if lacking else ():
        for path, node in _nodes(x):
            for kind, edges in lacking.values():
                if isinstance(node, kind):
                    raise SpecError(
                        f"{name}({argument}=...): {path.lstrip('.') or argument} is of class {kind.__name__}, and "
                        f"{layout} has no rule for its {', '.join(edges)}",
                        fix="a layout with rules for every kind of layer that there is"
                        + "; beside(..., gdn_scan(...)) makes one of two" * recurrent(edges)
                        + "; mla_latent, mla_packed and mla_gather have those of latents" * ("kv_latent" in edges),
                    )


def check_mask(given: Mapping[str, Any], declared: Mapping[str, str], choices: Iterable[Any], name: str) -> None:
    """Raise `ValueError` for a mask beside parameters of a part that passes none, which would not see it. declared,
    choices: as `check_edges` takes them."""
    if given.get("mask") is None:
        return
    blind = [kind for each in choices for part, kind in each.items() if f"{part}.mask" not in declared]
    for path, node in itertools.chain(*(_nodes(x) for x in given.values())) if blind else ():
        if type(node) in blind:
            raise ValueError(
                f"{name}(mask=...): {path.lstrip('.')} is of class {type(node).__name__}, which reads a state and no "
                "tokens, so there is nothing to mask\n"
                "    fix: positions of -1 for padding, cu_seqlens or segment_ids for documents"
            )


def check_weights(given: Mapping[str, Any], declared: Mapping[str, str], layout: Layout, axes: Axes, name: str) -> None:
    """Raise `TypeError` for parameters of which a rank takes rows, and which are not plain tensors: of a quantised
    weight, or one with adapters, rows may mean anything."""
    chains = dict(layout.chains)
    of_weights = [edge for edge, letters in declared.items() if letters and "B" not in parse(letters).letters]
    cut = {_name(edge) for edge in of_weights if not rules.stays(chains[rule_of(chains, edge) or ""], axes)}
    for argument, x in given.items() if cut else ():
        for path, node in _nodes(x):
            for edge in cut:
                leaf = getattr(node, edge, None)
                # Fake tensors are plain ones without values.
                plain = type(leaf) in (Tensor, Parameter) or type(leaf).__module__.startswith("torch._subclasses")
                if isinstance(leaf, Tensor) and not plain:
                    raise TypeError(
                        f"{name}({argument}=...): {f'{path}.{edge}'.lstrip('.')} is a {type(leaf).__name__}, and "
                        f"{layout.name} takes rows of it, which only a plain tensor is known to have\n"
                        "    fix: the plain weight, or a layout in which it stays whole"
                    )


def _nodes(x: Any, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Every tree within a tree, itself first, with its path, `.layers[0].attention`."""
    if isinstance(x, Tree):
        yield path, x
        for field in dataclasses.fields(x):  # type: ignore[arg-type]
            yield from _nodes(getattr(x, field.name), f"{path}.{field.name}")
    elif isinstance(x, (tuple, list)):
        for i, each in enumerate(x):
            yield from _nodes(each, f"{path}[{i}]")


def check_letters(given: Iterable[str], layout: Layout, name: str) -> None:
    """Raise `SpecError` for a size of a letter that no edge has."""
    known = letters_of(dict(layout.chains)) | {"H"}
    strange = next((letter for letter in given if letter not in known), None)
    if strange:
        fix = strange.upper() if strange.upper() in known else f"one of {', '.join(sorted(known))}"
        raise SpecError(
            f"shard({name}, ..., {strange}=...): no edge of {layout.name} has a dimension {strange}", fix=fix
        )


def check_arguments(given: Iterable[str], known: Iterable[str], name: str) -> None:
    """Raise `TypeError` for arguments that neither a layer nor its layout has. known: of both."""
    known = list(dict.fromkeys(known))
    if strange := [each for each in given if each not in known]:
        known.remove("wire")  # which a layout refuses
        raise TypeError(
            f"{name} under a layout: unknown arguments\n    {', '.join(strange)}\n    known: {', '.join(known)}"
        )


def letters_of(chains: Chains) -> set[str]:
    """Every letter of a layout's edges."""
    return {letter for chain in chains.values() for text in chain for letter in parse(text).letters}


def _name(edge: str) -> str:
    return edge.rsplit(".", 1)[-1]


def _usual(edge: str) -> bool:
    """Whether a layout may have it though a function does not pass it."""
    return _name(edge) in EDGES or _name(edge).startswith("cache_")


def _dims(text: str) -> list[tuple[str, ...]]:
    """The letters of each dimension, with one name for all tokens and one for query heads."""
    dims = [tuple("S" if atom.name == "T" else atom.name for atom in dim) for dim in parse(text).dims]
    return [("H",) if dim == ("K", "G") else dim for dim in dims]


def _exchanges(chain: tuple[str, ...]) -> bool:
    """Whether tokens or heads move on the way; a sum at the end of a layer is no reason to need that layer."""
    specs = [parse(text) for text in chain]
    kinds = {step.kind for a, b in itertools.pairwise(specs) for step in steps(a, b)}
    return bool(kinds & set(COLLECTIVES) - {"all-reduce"})
