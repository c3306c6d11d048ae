"""Cores under a layout: what a core is told, and which cores a layout can serve."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .errors import SpecError
from .mesh import Axes, size_of, text_of
from .spec import parse

__all__ = ["call", "check", "fitted"]


def _takes(core: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(core).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == name for p in parameters)


def check(core: Callable[..., Any], name: str, layout: str, queries: str, axes: Axes) -> None:
    """Raise `SpecError` for a core that cannot know where its queries stand. queries: their spec in the core."""
    spec = parse(queries)
    split = [axis for atom in spec.atoms if atom.name == "S" for axis in atom.axes if size_of(axes, axis) > 1]
    if split and not _takes(core, "q_positions"):
        raise SpecError(
            f"{layout}: {name} takes no q_positions, and its queries are some of the tokens, its keys others: it could "
            "not tell which key a query stands at",
            queries, mesh=text_of(axes, spec),
            fix="def core(q, k, v, *, q_positions, k_positions, **_): ..., or **_ alone where order plays no part",
        )  # fmt: skip


def call(
    core: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], told: Mapping[str, Any]
) -> Any:
    """The core, told what it takes.

    given: what its caller said. told: what the layout adds. Keys and values are repeated for a core without kv_index;
    head_offset and local_heads are for those that ask; documents and masks must be taken.
    """
    told = dict(told)
    index = told.get("kv_index")
    if index is not None and not _takes(core, "kv_index"):
        k, v = (x.index_select(2, index) for x in (k, v))
        del told["kv_index"]
    for name in ("segment_ids", "mask", "sinks"):
        if told.get(name) is not None and not _takes(core, name):
            raise TypeError(
                f"{name} is given, but the core takes none\n    fix: def core(q, k, v, *, {name}, **_): ..."
            )
    return core(q, k, v, **given, **{name: x for name, x in told.items() if _takes(core, name)})


def fitted(core: Callable[..., Any]) -> Callable[..., Any]:
    """A core as a layer may call it, with everything that it could be told."""

    @functools.wraps(core)
    def fit(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Any:
        optional = ("kv_index", "head_offset", "local_heads", "segment_ids", "mask", "sinks")
        given = {name: x for name, x in told.items() if name not in optional}
        return call(core, q, k, v, given, {name: x for name, x in told.items() if name in optional})

    return fit
