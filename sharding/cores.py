"""Cores under a layout: what a core is told, and which cores a layout can serve."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import SpecError
from .mesh import Axes, size_of, text_of
from .spec import parse

__all__ = ["call", "check", "fitted", "ready", "takes"]


def takes(core: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments that a core takes; None where it takes any."""
    try:
        parameters = inspect.signature(core).parameters.values()
    except (TypeError, ValueError):  # a builtin that tells nobody
        raise TypeError(
            f"{core!r} does not say which arguments it takes\n"
            "    fix: lambda q, k, v: core(q, k, v), which takes and gives B S H E"
        ) from None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)


def check(taken: frozenset[str] | None, name: str, layout: str, queries: str, axes: Axes) -> None:
    """Raise `SpecError` for a core that cannot know where its queries stand. taken: by `takes`. queries: their spec."""
    spec = parse(queries)
    split = [axis for atom in spec.atoms if atom.name == "S" for axis in atom.axes if size_of(axes, axis) > 1]
    if split and taken is not None and "q_positions" not in taken:
        raise SpecError(
            f"{layout}: {name} takes no q_positions, and its queries are some of the tokens, its keys others: it could "
            "not tell which key a query stands at",
            queries, mesh=text_of(axes, spec),
            fix="def core(q, k, v, *, q_positions, k_positions, **_): ..., or **_ alone where order plays no part",
        )  # fmt: skip


def ready(taken: frozenset[str] | None, name: str, given: Mapping[str, Any], told: Sequence[str]) -> None:
    """Raise `TypeError` before anything moves for a core that does not take what its caller gives. taken: by `takes`.
    told: what it must be told besides."""
    for argument in (*given, *told):
        if taken is not None and argument not in taken:
            fix = f"def core(q, k, v, *, {argument}, **_): ..."
            raise TypeError(f"{argument} is given, but {name} takes none\n    fix: {fix}")


def call(
    core: Callable[..., Any],
    taken: frozenset[str] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Mapping[str, Any],
    told: Mapping[str, Any],
) -> Tensor:
    """The core, told what it takes.

    taken: by `takes`. given: what its caller said. told: what the layout adds. Keys and values are repeated for a core
    without kv_index; head_offset and local_heads are for those that ask;
    """
    wanted = {name: x for name, x in told.items() if taken is None or name in taken}
    if taken is not None and "kv_index" in taken:
        wanted.setdefault("kv_index", None)  # for a core that has no default for it
    if "kv_index" in told and "kv_index" not in wanted:
        k, v = (x.index_select(2, told["kv_index"]) for x in (k, v))
    y = core(q, k, v, **given, **wanted)
    if not isinstance(y, Tensor):
        raise TypeError(f"the core returned {type(y).__name__}: one tensor is needed, like q with the width of v")
    return y


def fitted(core: Callable[..., Any]) -> Callable[..., Any]:
    """A core as a layer may call it, with everything that it could be told."""

    taken = takes(core)

    @functools.wraps(core)
    def fit(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
        optional = ("kv_index", "head_offset", "local_heads")
        given = {name: x for name, x in told.items() if name not in optional}
        return call(core, taken, q, k, v, given, {name: x for name, x in told.items() if name in optional})

    return fit
