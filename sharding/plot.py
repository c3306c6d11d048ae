"""A plan as a figure. matplotlib is needed here alone, and asked for when it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["plot"]


def plot(plan: Plan) -> Any:
    """Above the bytes that each exchange sends, least and most of any rank; below what the fullest rank holds."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plan.plot() draws with matplotlib\n    fix: pip install matplotlib") from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1)
    names = [f"{', '.join(e.edges)}\n{e.kind}" + "\n(backward)" * e.backward for e in plan.exchanges]
    places = range(len(names))
    above.bar(places, [e.sends[1] for e in plan.exchanges], color="C0", label="most of any rank")
    above.bar(places, [e.sends[0] for e in plan.exchanges], color="C1", width=0.5, label="least")
    above.set_xticks(list(places), names, fontsize=8)
    above.set_ylabel("bytes sent")
    facts = "     ".join(plan.facts)
    above.set_title(f"{plan.title}\n{facts}", fontsize=9)
    above.legend(fontsize=8)
    memory = max(plan.classes, key=lambda found: found.peak).memory
    below.step(range(len(memory)), [n for _, n in memory], where="mid", color="C2")
    below.set_xticks(range(len(memory)), [name for name, _ in memory], rotation=45, ha="right", fontsize=8)
    below.set_ylabel("bytes held")
    below.set_ylim(0)
    return figure
