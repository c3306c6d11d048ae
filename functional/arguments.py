"""Keyword arguments that a function does not have, all of them in one error."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

__all__ = ["lists_unknown"]

P = ParamSpec("P")
R = TypeVar("R")


def lists_unknown(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises `TypeError` that lists every keyword argument that it does not have."""
    known = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            lines = []
            for name in unknown:
                near = difflib.get_close_matches(name, known, 1)
                lines.append(name + (f"    did you mean {near[0]}?" if near else ""))
            raise TypeError(
                f"{fn.__name__}: unknown arguments\n    " + "\n    ".join(lines) + f"\n    known: {', '.join(known)}"
            )
        return fn(*args, **kwargs)

    return cast(Callable[P, R], call)
