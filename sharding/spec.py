"""The spec language: one line that says how a tensor lies on a mesh.

    spec    = dim* partial?                    "B S/g/u (K/u G) E"    "B S D +tp"
    dim     = NAME need? ("/" axis order?)*  |  "(" dim+ ")"  |  "..."
    need    = "@" NAME                         "K@H/u": the K that my H need
    order   = ":zigzag"                        head-tail order: rank r holds chunks r and 2P-1-r
    partial = "+" axis ("+" axis)*             a pending sum over that axis

Sizes are global. Axes run major to minor: `S/g/u` is split by `g`, each piece then by `u`. An axis splits a tensor
once; one that is not named is replicated. `(K G)` is one dimension made of two, and `(K/u G)` shards it by key/value
head, so that a query head lies where its key/value head does. Shards are balanced: where a size does not divide, the
first ranks hold one more.

Prior art: seqax's shardlib, torch-einshard, spmd_types, jaxtyping and einops.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import SpecError

if TYPE_CHECKING:
    from .mesh import Mesh

__all__ = ["Atom", "Spec", "parse", "parse_pair"]

_TOKEN = re.compile(r"\s+|->|\.\.\.|[()]|[^\s()]+?(?=->|[\s()]|$)")
_ATOM = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<need>@[^/@]*)?(?P<axes>(/[^/]*)*)\Z", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
ELLIPSIS = "..."


@dataclass(frozen=True)
class Atom:
    """One letter of a spec: a tensor dimension, or a factor of one. span: where it stands in the text."""

    name: str
    axes: tuple[str, ...] = ()
    zigzag: bool = False
    need: str | None = None
    span: tuple[int, int] = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        need = f"@{self.need}" if self.need else ""
        axes = [f"{axis}:zigzag" if self.zigzag and i == 0 else axis for i, axis in enumerate(self.axes)]
        return "/".join([self.name + need, *axes])


@dataclass(frozen=True)
class Spec:
    """How a tensor lies on a mesh, as one line says it. Two are equal when they say the same.

        S          a dimension, whole on every rank       S/g/u        split by axis g, each piece by u
        (K/u G)    one dimension of two letters           S/cp:zigzag  head-tail order
        K@H/u      the key/value heads that my H need     ... +tp      any dimensions; a pending sum over tp

    dims: one tuple of atoms a dimension (several where it is composite; one named `...` for any number of dimensions).
    partial: axes over which the values are a pending sum. text: as it was written, with `start` where this spec stands
    in it (a pair has two).
    """

    dims: tuple[tuple[Atom, ...], ...]
    partial: tuple[str, ...] = ()
    text: str = field(default="", compare=False)
    start: int = field(default=0, compare=False)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return tuple(atom for dim in self.dims for atom in dim)

    @property
    def named(self) -> tuple[tuple[Atom, ...], ...]:
        """The dimensions but for `...`."""
        return tuple(dim for dim in self.dims if dim[0].name != ELLIPSIS)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis named, as they stand."""
        return (*(axis for atom in self.atoms for axis in atom.axes), *self.partial)

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(atom.name for atom in self.atoms if atom.name != ELLIPSIS)

    def where(self, axis: str) -> int:
        """Where an axis stands in the text."""
        for atom in self.atoms:
            at = atom.span[0] + len(atom.name) + (len(atom.need) + 1 if atom.need else 0)
            for i, name in enumerate(atom.axes):
                at += 1
                if name == axis:
                    return at
                at += len(name) + (len(":zigzag") if atom.zigzag and i == 0 else 0)
        match = re.search(rf"\+{axis}(?!\w)", self.text[self.start :])
        return self.start + match.start() + 1 if match else self.start

    def __str__(self) -> str:
        dims = [str(dim[0]) if len(dim) == 1 else f"({' '.join(map(str, dim))})" for dim in self.dims]
        return " ".join([*dims, "".join(f"+{axis}" for axis in self.partial)] if self.partial else dims)

    def __repr__(self) -> str:
        return f'Spec("{self}")'

    @staticmethod
    def parse(text: str | Spec) -> Spec:
        """The spec of a line of text. Raises `SpecError` where it is none."""
        return parse(text)

    def local(self, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of one rank's shard. sizes: of every letter, globally (of H, K and G two are enough)."""
        from . import shards

        return shards.local_shape(self, sizes, mesh, rank)

    def slices(self, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[Any, ...]:
        """Which part of the global tensor a rank holds: an index, `x[spec.slices(...)]` is its shard.

        Slices where the part of every dimension is one range; else (zigzag order, an inner factor of a composite
        dimension) a tuple of index tensors that broadcast to the shard's shape.
        """
        from . import shards

        return shards.slices(self, sizes, mesh, rank)

    def placements(self, device_mesh: Any, **sizes: int) -> tuple[Any, ...]:
        """What DTensor calls this layout: one placement for each dimension of a `torch.distributed.DeviceMesh`.

        sizes: of every sharded letter. Raises `SpecError` where DTensor cannot say it: uneven shards other than its
        own, head-tail order, inner factors of a composite dimension, axes in another order than the mesh's.
        """
        from .dtensor import placements

        return placements(self, device_mesh, sizes)


def parse(text: str | Spec) -> Spec:
    """`Spec.parse`."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise TypeError(f"a spec is a string such as 'B S/u D', not {type(text).__name__}")
    return _parse(text)


def parse_pair(text: str) -> tuple[Spec, Spec]:
    """`"B S/u D -> B S D"` as two specs whose dimensions have the same letters in the same order."""
    if not isinstance(text, str):
        raise TypeError(f"a pair is a string such as 'B S/u D -> B S D', not {type(text).__name__}")
    return _parse_pair(text)


@functools.lru_cache(4096)
def _parse(text: str) -> Spec:
    tokens = list(_tokens(text))
    for token, at in tokens:
        if token == "->":
            raise SpecError('one spec is needed here, not a pair ("->")', text, (at, at + 2))
    return _spec(text, 0, len(text), tokens)


@functools.lru_cache(4096)
def _parse_pair(text: str) -> tuple[Spec, Spec]:
    tokens = list(_tokens(text))
    arrows = [at for token, at in tokens if token == "->"]
    if len(arrows) != 1:
        fix = '"from -> to", as "B S/u D -> B S D"'
        span = (arrows[1], arrows[1] + 2) if arrows else None
        raise SpecError(f'a pair has one "->", this has {len(arrows) or "none"}', text, span, fix=fix)
    (arrow,) = arrows
    left = _spec(text, 0, arrow, [t for t in tokens if t[1] < arrow])
    right = _spec(text, arrow + 2, len(text), [t for t in tokens if t[1] > arrow])
    _same_dims(text, left, right)
    return left, right


def _tokens(text: str) -> Iterable[tuple[str, int]]:
    for match in _TOKEN.finditer(text):
        if not match.group().isspace():
            yield match.group(), match.start()


def _spec(text: str, start: int, stop: int, tokens: Sequence[tuple[str, int]]) -> Spec:
    dims: list[tuple[Atom, ...]] = []
    group: list[Atom] = []
    opened: list[tuple[int, int]] = []  # where, and how many atoms stood before
    partial: list[str] = []
    seen: dict[str, tuple[int, int]] = {}  # letters
    split: dict[str, str] = {}  # axes, with what each splits
    for token, at in tokens:
        span = (at, at + len(token))
        if partial:
            end = "".join(f"+{axis}" for axis in partial)
            fix = f"{end}{token}" if token.startswith("+") else f"... {token} {end}"
            raise SpecError(f'"{token}" stands after the pending sum, which is last', text, span, fix=fix)
        if token == "(":
            opened.append((at, len(group)))
        elif token == ")":
            if not opened:
                raise SpecError('a ")" too many', text, span)
            start_of, before = opened.pop()
            if before == len(group):
                raise SpecError('"()" names no dimension', text, (start_of, at + 1), fix="a name, such as (K G)")
            if not opened:
                dims.append(tuple(group))
                group = []
        elif token.startswith("+"):
            partial = _partial(text, token, at, split)
            if opened:
                raise SpecError("a pending sum is of the whole tensor, not of a dimension", text, span)
        else:
            atom = _atom(text, token, at, split)
            if atom.name in seen:
                what = f'dimension "{atom.name}" stands twice'
                fix = "the second one its own letter, such as S for queries and T for keys"
                if atom.name == ELLIPSIS:
                    fix = 'one "...", and a letter for each other dimension'
                raise SpecError(what, text, (at, at + len(atom.name)), fix=fix)
            if atom.name == ELLIPSIS and opened:
                raise SpecError('"..." stands for whole dimensions, not inside of one', text, span)
            seen[atom.name] = span
            if opened:
                group.append(atom)
            else:
                dims.append((atom,))
    if opened:
        at, _ = opened[-1]
        raise SpecError('a "(" is never closed', text, (at, at + 1))
    return Spec(tuple(dims), tuple(sorted(partial)), text, start)


def _atom(text: str, token: str, at: int, split: dict[str, str]) -> Atom:
    span = (at, at + len(token))
    if token == ELLIPSIS:
        return Atom(ELLIPSIS, span=span)
    match = _ATOM.match(token)
    if match is None:
        what = f'"{token}" is no dimension'
        if "+" in token[1:]:
            head, _, tail = token.partition("+")
            raise SpecError(what, text, span, fix=f'a space before the pending sum: "{head} +{tail}"')
        raise SpecError(what, text, span, fix="a name, sharded or not: S, S/u, S/g/u, S/cp:zigzag, K@H/u")
    name, need, rest = match["name"], match["need"], match["axes"]
    at += match.end("need") if need else len(name)
    axes: list[str] = []
    zigzag = False
    for word in rest.split("/")[1:]:
        axis, colon, order = word.partition(":")
        here = (at + 1, at + 1 + len(word))
        at += 1 + len(word)
        if not _NAME.match(axis):
            what = f'"{axis}" is no name of an axis' if axis else f'"{name}/" names no axis'
            fix = 'a pair is written with "->"' if "\N{RIGHTWARDS ARROW}" in token else f"{name}, or {name}/u"
            raise SpecError(what, text, here, fix=fix)
        if colon and order != "zigzag":
            raise SpecError(f'":{order}" is no order', text, here, fix=f"{axis}:zigzag, or {axis}")
        if colon and axes:
            fix = f"{name}/{axes[0]}:zigzag/{axis}"
            raise SpecError("head-tail order stands on the outermost axis of a dimension", text, here, fix=fix)
        _once(text, axis, here[0], split, name)
        zigzag |= bool(colon)
        axes.append(axis)
    if need is not None:
        here = (span[0] + len(name), span[0] + len(name) + len(need))
        if not _NAME.match(need[1:]) or need[1:] == name:
            raise SpecError(
                f'"{need}" names no other dimension', text, here, fix=f"{name}@H/u: the {name} that my H need"
            )
        if not axes or zigzag:
            what = f'"{name}{need}" needs plain axes, over which {need[1:]} is dealt out'
            raise SpecError(what, text, span, fix=f"{name}{need}/u, or {name}")
        if (name, need[1:]) != ("K", "H"):
            what = f'"{name}{need}" is not known: only K@H is, the key/value heads K that query heads H need'
            raise SpecError(what, text, here, fix="K@H/u")
    return Atom(name, tuple(axes), zigzag, need[1:] if need else None, span)


def _partial(text: str, token: str, at: int, split: dict[str, str]) -> list[str]:
    axes = token[1:].split("+")
    for axis in axes:
        at += 1
        if not _NAME.match(axis):
            what = f'"{axis}" is no name of an axis' if axis else f'"{token}" names no axis after "+"'
            raise SpecError(what, text, (at - 1, at + len(axis)), fix="+u, or +g+u")
        _once(text, axis, at, split, "the pending sum")
        at += len(axis)
    return axes


def _once(text: str, axis: str, at: int, split: dict[str, str], name: str) -> None:
    if axis in split:
        both = f"{split[axis]} twice" if split[axis] == name else f"{split[axis]} and {name}"
        what = f'axis "{axis}" splits {both}'
        if split[axis] == name:
            raise SpecError(what, text, (at, at + len(axis)), fix=f"{axis} once")
        raise SpecError(
            what, text, (at, at + len(axis)), fix="one mesh axis splits a tensor once: drop it from one of them"
        )
    split[axis] = name


def _same_dims(text: str, left: Spec, right: Spec) -> None:
    lost = [a for a in left.atoms if a.name not in {b.name for b in right.atoms}]
    invented = [a for a in right.atoms if a.name not in {b.name for b in left.atoms}]
    if lost:
        fix = f"write it on the right too, as {lost[0]}"
        raise SpecError(f'dimension "{lost[0].name}" is lost: it stands on the left alone', text, lost[0].span, fix=fix)
    if invented:
        what = f'dimension "{invented[0].name}" is invented: it stands on the right alone'
        raise SpecError(what, text, invented[0].span, fix="write it on the left too, or drop it: a reshard makes none")
    shape = [tuple(a.name for a in dim) for dim in left.dims]
    other = [tuple(a.name for a in dim) for dim in right.dims]
    if shape != other:
        at = next(i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b)
        span = (right.dims[at][0].span[0], right.dims[at][-1].span[1])
        letters = " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in shape)
        what = "a reshard keeps the dimensions as they are: their order and what is composite differ"
        fix = f'"{letters}" on both sides; einops.rearrange moves dimensions'
        raise SpecError(what, text, span, fix=fix)
