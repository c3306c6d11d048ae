"""From the layout by which prompts are read to the one that decodes: what each cache and each state moves.

Prompts may be read with their tokens split over ranks, and decoded with rows or heads split over the same ranks. A
cache then lies otherwise in one than in the other, and is moved once, behind the last chunk of the prompts: heads
become rows by an all-to-all, whole keys become rows or heads by a slice, and what already lies so stays.

Letters: J rows that were read, T cache slots, Z vocabulary, as in caches and states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import sharding as sh
from ..functional import tree
from ..functional.cache import Cache
from ..sharding import rules
from ..sharding.ports import Sized
from ..sharding.spec import Atom, Spec, parse
from ..sharding.steps import steps
from ..sharding.wires import LayoutWire
from .generate import turns_of
from .ranks import Ranks
from .sizes import READ_STEP, Sizes
from .steps import State

__all__ = ["Handover", "all_held", "check_handover", "check_whole", "reads_others"]

NAME = "hand-over"


class Handover:
    """source, target: of one rank, by the layout that reads prompts and by the one that decodes. sizes: of all ranks.
    Raises `SpecError` where one does not lead to the other."""

    def __init__(self, source: Ranks, target: Ranks, sizes: Sizes) -> None:
        self._source, self._target, self._sizes = source, target, sizes
        self._rows = _more(_axes(source.layout, "B"), _axes(target.layout, "B"))
        self._layers = [
            self._layer(tree.paths(a), tree.paths(b))
            for a, b in zip(source.cache_specs(sizes), target.cache_specs(sizes), strict=True)
        ]
        before, after = (Atom("Z", _axes(each.layout, "Z")) for each in (source, target))
        here, there = Atom("J"), Atom("J", self._rows)
        one = _chain(Spec(((here,),)), Spec(((there,),)))
        logits = _chain(Spec(((here,), (before,))), Spec(((there,), (after,))))
        edges = {**dict.fromkeys(("token", "logprob", "position"), one), "logits": logits}
        self._of_state = sh.Layout(NAME, edges)

    def _layer(self, a: dict[str, Sized], b: dict[str, Sized]) -> tuple[sh.Layout, dict[str, int]]:
        """How the leaves of a layer's cache move, by name, and the sizes of their letters."""
        edges, sizes = {}, dict[str, int]()
        for path, here in a.items():
            sizes |= {letter: n for letter, n in here.sizes.items() if letter not in "BT"}
            pair = (_of_rows(here.spec, ()), _of_rows(b[path].spec, self._rows))
            edges[f"cache_{path.removeprefix('.')}"] = _chain(*_alike(*pair, sizes, self._source.mesh))
        return sh.Layout(NAME, edges), sizes

    def own(self, rows: int) -> slice:
        """Of the rows that were read here those that are decoded here."""
        spec = Spec(((Atom("J", self._rows),),))
        found: slice = spec.slices({"J": rows}, self._source.mesh, self._source.mesh.rank)[0]
        return found

    def caches(self, read: Sequence[Sequence[Tensor]], into: Sequence[Cache], lengths: Sequence[int]) -> None:
        """Write what was read of rows of these lengths, 0 where nothing was: those rows stay as they are. read: the
        leaves of each cache."""
        rows, mine = len(lengths), self.own(len(lengths))
        slots = -(-max(lengths, default=0) // READ_STEP) * READ_STEP
        for old, leaves, (layout, sizes) in zip(into, read, self._layers, strict=True):
            if not isinstance(old, F.GDNCache):
                leaves = [leaf[:, : min(slots, leaf.shape[1] - 1)] for leaf in leaves]  # one more is never read
            parts = {name: leaf[:rows] for (name, _), leaf in zip(layout.chains, leaves, strict=True)}
            found = self._wire(layout, {**sizes, "J": rows}).receive(**parts)
            for there, x in zip(tree.leaves(old), found, strict=True):
                place = there[: x.shape[0], : x.shape[1]]
                place.copy_(_chosen(lengths[mine], x, place))

    def state(self, read: State, into: State, lengths: Sequence[int]) -> State:
        """The state that is decoded from."""
        rows, mine, new = len(lengths), self.own(len(lengths)), dict[str, Any]()
        names = [name for name, _ in self._of_state.chains]
        wire = self._wire(self._of_state, {"J": rows, "Z": self._source.config.vocab_size})
        found = wire.receive(**{name: getattr(read, name)[:rows] for name in names})
        for name, x in zip(names, found, strict=True):
            old = getattr(into, name)
            new[name] = torch.cat((_chosen(lengths[mine], x, old[: len(x)]), old[len(x) :]))
        return dataclasses.replace(into, **new)

    def _wire(self, layout: sh.Layout, sizes: dict[str, int]) -> LayoutWire:
        return LayoutWire.of(layout, self._source.mesh, sizes, device=self._source.device)


def reads_others(source: Ranks, target: Ranks, params: F.Decoder) -> bool:
    """Whether prompts are read with other parts of the weights than a rank decodes with."""
    return source.parts(params) != target.parts(params)


def all_held(
    here: tuple[Ranks, F.Decoder], read: tuple[Ranks, F.Decoder]
) -> tuple[dict[str, Sized], dict[str, Tensor]]:
    """How all leaves that a rank computes with lie, and the leaves, by path: those that it decodes with, and where
    prompts are read with others, those."""
    (ranks, params), (reading, params_read) = here, read
    lies, leaves = ranks.lies(params), tree.paths(params)
    if params_read is params:
        return lies, leaves
    name = "{} of prompts".format
    lies_read, leaves_read = reading.lies(params_read), tree.paths(params_read)
    return (
        {**lies, **{name(path): each for path, each in lies_read.items()}},
        {**leaves, **{name(path): leaf for path, leaf in leaves_read.items()}},
    )


def check_handover(source: Ranks, target: Ranks, sizes: Sizes, params: F.Decoder) -> None:
    """Raise `ValueError` and `SpecError` where what one layout reads cannot be handed over to the other. params: of the
    model that was given."""
    try:
        source.cache_specs(sizes)
    except ValueError as error:
        raise ValueError(f"build(prefill_layout=...): it must keep caches\n    {error}") from None
    turns = turns_of(source.config)
    rows = _axes(source.layout, "B"), _axes(target.layout, "B")
    mesh = source.mesh
    before, after = ([axis for axis in axes if mesh[axis] > 1] for axes in rows)
    if after[: len(before)] != before:
        raise ValueError(
            f"build(prefill_layout=...): {source.layout.name} deals rows over {'/'.join(before)}, and "
            f"{target.layout.name} over {'/'.join(after) or 'no axis'}, which does not begin with it\n"
            f'    fix: dp="{"/".join(before)}" in both     mesh: {mesh}'
        )
    if turns and after != before:
        raise ValueError(
            f"build(prefill_layout=...): this model reads a row again that passes {turns[0]} tokens (longrope), and "
            f"ranks of {'/'.join(after[len(before) :])} have other rows in decode than they read\n"
            f"    fix: without prefill_layout, or the rows of {source.layout.name} in layout"
        )
    if reads_others(source, target, params):
        check_whole("build(prefill_layout=...)", source, target, params)
    Handover(source, target, sizes)


def check_whole(what: str, source: Ranks, target: Ranks, params: F.Decoder) -> None:
    """Raise `ValueError` for a rank's own parts where it needs others to read prompts with. what: begins the error."""
    whole = F.Decoder.abstract(source.config)
    if [leaf.shape for leaf in tree.leaves(params)] != [leaf.shape for leaf in tree.leaves(whole)]:
        raise ValueError(
            f"{what}: {source.layout.name} reads prompts with other parts of the weights than "
            f"{target.layout.name} decodes with, and the model has those of one rank alone\n"
            "    fix: the whole model, or two layouts with the same tp"
        )


def _chosen(lengths: Sequence[int], new: Tensor, old: Tensor) -> Tensor:
    """Rows of some length from new, others from old."""
    if all(lengths):
        return new
    rows = torch.tensor(lengths, device=old.device) > 0
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def _axes(layout: sh.Layout, letter: str) -> tuple[str, ...]:
    """Those that split a letter of what a layout begins and ends with."""
    edge = "logits" if letter == "Z" else "tokens"
    return next(atom.axes for atom in parse(layout[edge][-1]).atoms if atom.name == letter)


def _more(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in after if axis not in before)


def _of_rows(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """A cache's spec with J for the rows of a rank's group, dealt over these axes."""
    dims = tuple((Atom("J", axes),) if dim[0].name == "B" else dim for dim in spec.dims)
    return Spec(dims, spec.partial)


def _alike(a: Spec, b: Spec, sizes: dict[str, int], mesh: sh.Mesh) -> tuple[Spec, Spec]:
    """The two in the same letters: heads that one deals out one by one, and the other by key/value heads, which is the
    same where these divide; and as one where all ranks have the same of both."""
    by_head = [any(atom.need or atom.name == "H" for atom in spec.atoms) for spec in (a, b)]
    if by_head[0] != by_head[1]:
        plain = b if by_head[0] else a
        other = rules.by_query_head(plain)
        if _same(plain, other, sizes, mesh):
            a, b = (a, other) if by_head[0] else (other, b)
        elif a.letters != b.letters:  # else by way of all heads
            over = "/".join(axis for atom in plain.atoms if atom.name == "K" for axis in atom.axes if mesh[axis] > 1)
            raise sh.SpecError(
                f"build(prefill_layout=...): one layout deals out H={sizes['H']} heads of states one by one, the other "
                f"K={sizes['K']} key heads unevenly over {over}, and they do not meet",
                str(plain), mesh=str(mesh), fix=f"{over} that divides K={sizes['K']}, or gdn_scan for prompts",
            )  # fmt: skip
    return (a, a) if _same(a, b, sizes, mesh) else (a, b)


def _same(a: Spec, b: Spec, sizes: dict[str, int], mesh: sh.Mesh) -> bool:
    known = {**sizes, "J": mesh.size, "T": 1}
    return all(a.slices(known, mesh, rank) == b.slices(known, mesh, rank) for rank in range(mesh.size))


def _chain(a: Spec, b: Spec) -> str:
    """The reshards from one to the other."""
    found = [a, *(step.after for step in steps(parse(str(a)), parse(str(b))))]
    return " -> ".join(map(str, found))
