"""Keyword arguments that a function does not have, all of them in one error."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["refuse_unknown"]


def refuse_unknown(function: str, fn: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise `TypeError` that lists every keyword argument that a function does not have."""
    if not unknown:
        return
    known = [name for name in inspect.signature(fn).parameters if name != "unknown"]
    lines = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1)
        lines.append(name + (f"    did you mean {near[0]}?" if near else ""))
    raise TypeError(f"{function}: unknown arguments\n    " + "\n    ".join(lines) + f"\n    known: {', '.join(known)}")
