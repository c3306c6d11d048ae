"""What an error of the language looks like: what is wrong, the user's own string with a caret, the mesh, one fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["SpecError", "nearest"]


class SpecError(ValueError):
    """A spec, a pair of specs, sizes or a tensor that cannot be; raised before anything moves."""

    def __init__(
        self,
        what: str,
        text: str = "",
        span: tuple[int, int] | None = None,
        *,
        mesh: str = "",
        known: str = "",
        fix: str = "",
    ) -> None:
        """Lay the message out.

        what: one line, with the numbers. text: the user's string. span: what to mark in it. mesh: as `Mesh` prints its
        axes. known: sizes so far. fix: what to write instead.
        """
        lines = [what]
        text = re.sub(r"\s", " ", text)  # one line, as the caret counts
        if text:
            lines.append(f"    {text}")
            if span is not None:
                lines.append("    " + " " * span[0] + "^" * max(1, span[1] - span[0]))
        facts = [f"{name}: {value}" for name, value in (("mesh", mesh), ("sizes", known)) if value]
        if facts and fix and "\n" not in fix and sum(map(len, facts)) + len(fix) < 100:
            lines.append("    " + "     ".join([*facts, f"fix: {fix}"]))
        else:
            lines += ["    " + "     ".join(facts)] * bool(facts)
            lines += ["    fix: " + fix.replace("\n", "\n         ")] * bool(fix)
        super().__init__("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a wrong one was meant to be: the same letters in another order, or else a similar one."""
    known = list(known)
    for other in known:
        if sorted(other.lower()) == sorted(name.lower()):
            return other
    found = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    if found:
        return found[0]
    starts = [other for other in known if other[:1] == name[:1]]
    return starts[0] if len(starts) == 1 else None
