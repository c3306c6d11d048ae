"""Models that do not fit a mesh: axes that nothing uses, and parts of a vocabulary or of experts that would be empty.

All of it is plain Python from whole numbers, the same on every rank, and raises before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..functional import tree
from .errors import SpecError
from .layouts import Layout
from .mesh import Axes, size_of, text_of
from .spec import parse

__all__ = ["check_parts_of", "check_used"]

# What makes use of an axis, by the meaning that every mesh gives it.
USES = {
    "dp": 'dp="dp" in the layout, for rows of the batch',
    "tp": 'tp="tp" in the layout, for heads, features and vocabulary',
    "ep": 'spread(layout, experts="ep")',
}
HELD = {"Z": "rows of the vocabulary", "X": "experts"}


def check_used(declared: Iterable[str], layout: Layout, axes: Axes, name: str) -> None:
    """Raise `SpecError` for an axis over which a whole model would do the same on every rank. declared: its edges."""
    if not any(edge.startswith("layers.") for edge in declared):
        return  # a layer may be a part of something larger that does use it
    for axis, size in axes:
        if size > 1 and axis not in layout.axes:
            what = "no experts are dealt out over it" if axis == "ep" else "no rule of it uses that axis"
            raise SpecError(
                f"shard({name}, ...): {layout.name} on {axis}={size}: {what}, and its ranks would all do the same",
                mesh=text_of(axes), fix=f"Mesh without {axis}, or {USES.get(axis, f'a layout that names {axis}')}",
            )  # fmt: skip


def check_parts_of(given: Mapping[str, Any], cfg: Any, layout: Layout, axes: Axes, name: str) -> None:
    """Raise `SpecError` where some rank would have no row of the vocabulary or no expert, and where no field says that
    its parameters lie as the layout has them. given: arguments, by name."""
    over = {letter: [axis for axis in layout.split(letter) if size_of(axes, axis) > 1] for letter in ("D", *HELD)}
    if cfg is None or not any(over.values()):
        return
    for argument, x in given.items():
        if not isinstance(x, tree.Tree) or argument == "cache":
            continue
        sizes, specs = tree.sizes_of(x, cfg), tree.paths(x.specs())
        said: dict[str, set[str]] = {letter: set() for letter in over}
        for path, text in specs.items():
            for atom in parse(text).atoms:
                said.setdefault(atom.name, set()).update(atom.axes)
                for axis in over[atom.name] if atom.name in HELD else ():
                    have, ranks = sizes[path][atom.name], size_of(axes, axis)
                    if axis in atom.axes and have < ranks:
                        raise SpecError(
                            f"{name}({argument}=...): {path.lstrip('.')} has {atom.name}={have} {HELD[atom.name]}, "
                            f"fewer than {axis}={ranks} ranks",
                            text, atom.span, mesh=text_of(axes), fix=f"{axis}={have} at most",
                        )  # fmt: skip
        for letter, some in over.items():
            for axis in some:
                if said[letter] and axis not in said[letter]:
                    known = ", ".join(f"{letter}/{each}" for each in sorted(said[letter]))
                    raise SpecError(
                        f"{name}({argument}=...): {layout.name} has {letter}/{axis}, and fields say {known}",
                        mesh=text_of(axes), fix=f"an axis of that name: {', '.join(sorted(said[letter]))}",
                    )  # fmt: skip
