"""How the parameters of a model lie under a layout: each by the spec of its field, heads as those of its layer are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..functional import tree
from . import rules
from .caches import Kept
from .errors import SpecError
from .joining import letters_of
from .layouts import Layout
from .mesh import Axes, size_of, text_of
from .ports import Sized
from .spec import Spec, parse

__all__ = ["specs"]


def specs(params: tree.Tree, cfg: Any, layers: Iterable[Kept], layout: Layout, axes: Axes) -> Any:
    """A tree of what `Sized` says of each parameter: split by those axes alone by which the layout splits its letters.

    layers: the parts with heads, as `caches.kept_by` gives them. Where query heads of one are dealt out one by one,
    there being fewer key/value heads than ranks, so do the rows of its weights lie.
    """
    sizes, texts = tree.sizes_of(params, cfg), tree.paths(params.specs())
    one_by_one = [f".{each.path}.".replace("..", ".") for each in layers if _dealt(each, layout, axes)]
    found = {}
    for path, text in texts.items():
        spec = _by_layout(parse(text), layout)
        if any(path.startswith(start) for start in one_by_one):
            _check_rows(path, spec, sizes[path], layout, axes)
            spec = rules.by_query_head(spec)
        found[path] = Sized(parse(str(spec)), sizes[path])
    return tree.replace(params, found)


def _dealt(layer: Kept, layout: Layout, axes: Axes) -> bool:
    """Whether rows of a layer's weights are dealt out by query head. Where key/value heads divide over the ranks that
    have parts of the weights, it is the same by these."""
    sizes = getattr(layer.cfg, "sizes", {})
    if "H" not in sizes:
        return False
    keys, ranks = sizes.get("K", sizes["H"]), math.prod(size_of(axes, axis) for axis in layout.split("K"))
    return keys % ranks != 0 and rules.dealt(layout.name, layer.chains, axes, (sizes["H"], keys))


def _check_rows(path: str, spec: Spec, sizes: Mapping[str, int], layout: Layout, axes: Axes) -> None:
    """Raise `SpecError` for rows that lie together by key head, and of which nothing says what value head they are."""
    known = letters_of(dict(layout.chains))
    for dim in spec.dims:
        for atom in dim[1:]:
            if dim[0].name == "K" and dim[0].axes and dim[1].name != "G" and atom.name not in known:
                over = "/".join(dim[0].axes)
                ranks, keys = math.prod(size_of(axes, axis) for axis in dim[0].axes), sizes["K"]
                raise SpecError(
                    f"{layout.name}: {path.lstrip('.')} has its rows by key heads, K={keys} of {atom.name}="
                    f"{sizes[atom.name]} rows each, and {over}={ranks} ranks would need parts of one",
                    str(spec), mesh=text_of(axes, spec), fix=f"{over}={keys} at most",
                )  # fmt: skip


def _by_layout(spec: Spec, layout: Layout) -> Spec:
    """A parameter's spec with those axes alone that the layout knows of its letters."""
    dims = tuple(
        tuple(replace(a, axes=tuple(x for x in a.axes if x in layout.split(a.name))) for a in dim) for dim in spec.dims
    )
    return Spec(dims, spec.partial)
