"""Keyword arguments that a function does not have, all of them in one error: of ours, and of one handed over."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["check_takes", "lists_unknown"]

P = ParamSpec("P")
R = TypeVar("R")

# Names that other libraries, or functions under a layout, have for what is said otherwise here.
INSTEAD = {
    "attention_mask": "positions, -1 for padding",
    "cu_seqlens": "segment_ids (cu_seqlens is for what shard returns)",
    "position_ids": "positions",
    "past_key_values": "cache",
}


def lists_unknown(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises `TypeError` that lists every keyword argument that it does not have."""
    known = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            lines = []
            for name in unknown:
                near = [INSTEAD[name]] if name in INSTEAD else difflib.get_close_matches(name, known, 1)
                lines.append(name + (f"    did you mean {near[0]}?" if near else ""))
            raise TypeError(
                f"{fn.__name__}: unknown arguments\n    " + "\n    ".join(lines) + f"\n    known: {', '.join(known)}"
            )
        return fn(*args, **kwargs)

    return cast(Callable[P, R], call)


def check_takes(function: str, argument: str, fn: Callable[..., Any], told: Iterable[str]) -> None:
    """Raise `TypeError` where what is handed over as a function's argument does not take all that it will be told, by
    name. One that does not say what it takes is believed."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    taken = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    lacking = ", ".join(name for name in told if name not in taken)
    if lacking and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"{function}({argument}=...): it is told {lacking}, and does not take that\n"
            f"    fix: def {argument}(..., *, {lacking}, **_): ..."
        )
