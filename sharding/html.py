"""Pictures for a notebook: plain HTML tables without scripts, in colours that read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["block", "figure", "lines", "table"]

_CELL = "padding:.15em .7em;border:1px solid rgba(128,128,128,.45);"


def figure(parts: Sequence[str]) -> str:
    """The whole picture. Its ground and its letters are the page's own."""
    return f'<div style="font-family:ui-monospace,monospace;font-size:.9em;line-height:1.5">{"".join(parts)}</div>'


def lines(texts: Sequence[str]) -> str:
    """Lines of text; spaces in front stay."""
    return "".join(f'<div style="white-space:pre-wrap">{escape(text) or "&nbsp;"}</div>' for text in texts)


def block(text: str, rank: int | None) -> str:
    """A cell in the colour of a rank; None for no rank's."""
    # The golden angle keeps ranks that are near each other apart, and half-transparent colours tint any ground.
    ground = "" if rank is None else f"background:hsla({rank * 137.508 % 360:.0f},70%,50%,.3);"
    return f'<td style="{_CELL}{ground}text-align:center">{escape(text)}</td>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A table of text. right: which columns are set to the right. A cell that starts with `<td` is one already."""
    sides = ["right" if r else "left" for r in right]
    head = "".join(
        f'<th style="{_CELL}text-align:{side}">{escape(name)}</th>' for name, side in zip(header, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            cell if cell.startswith("<td") else f'<td style="{_CELL}text-align:{side}">{escape(cell)}</td>'
            for cell, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse;margin:.4em 0"><tr>{head}</tr>{body}</table>'
