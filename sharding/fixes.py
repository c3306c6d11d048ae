"""What to write instead of a layout and a mesh that a layer's heads do not fit, for the errors that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .implied import recurrent
from .mesh import Axes, size_of
from .spec import Spec

__all__ = ["fewer", "fit", "fitting", "hybrid"]


def fit(heads: tuple[int, int], outer: int, ranks: int) -> bool:
    """Whether `outer` parts of the heads can each be dealt to so many ranks."""
    count, groups = heads
    return outer > 0 and (groups // outer >= ranks or count // outer >= ranks)


def fewer(axes: Axes, before: tuple[str, ...], over: tuple[str, ...], heads: tuple[int, int]) -> str:
    """The most ranks of the first axis that splits heads with which all are served; of those behind it too, if need
    be."""
    rest, ranks = (math.prod(size_of(axes, axis) for axis in some) for some in (before[1:], over))
    sizes = range(size_of(axes, before[0]), 0, -1)
    if n := next((n for n in sizes if fit(heads, n * rest, ranks)), 0):
        return f"{before[0]}={n}"
    found = [(n * m, n, m) for n in sizes for m in range(1, ranks) if fit(heads, n * rest, m)]
    if not found:
        return f"fewer ranks over {'/'.join(before)}" if heads[1] else "a layer with at least one head"
    _, n, m = max(found)
    return f"{before[0]}={n} and {'/'.join(over)}={m}"


def fitting(
    name: str, edges: Mapping[str, list[Spec]], axes: Axes, over: tuple[str, ...], heads: tuple[int, int], outer: int,
    ranks: int,
) -> str:  # fmt: skip
    """The hybrid that uses as many ranks, with no more of them over heads than there are, or a scan."""
    fits = max((n for n in range(1, ranks) if ranks % n == 0 and fit(heads, outer, n)), default=0)
    if not fits:
        return "a layer with at least one query head"
    axis = over[-1]
    if recurrent(edges):
        return _scan(edges, over)
    gather = next((a for a in ("g", "cp") if a != axis and size_of(axes, a) > 1), "g")
    sizes = {name: size for name, size in axes if name not in (*over, gather)}
    sizes |= {gather: size_of(axes, gather) * (ranks // fits), axis: fits}
    mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"Mesh({mesh}) with {hybrid(name, edges, axis, gather)}"


def hybrid(name: str, edges: Mapping[str, list[Spec]], heads: str, gather: str) -> str:
    """The layout of these edges over both axes, as it is written."""
    if recurrent(edges):
        return _scan(edges, (gather, heads))
    first = edges["q"][0] if "q" in edges else Spec(())
    tp, dp = (next((a.axes for a in first.atoms if a.name in some), ()) for some in (("K", "H"), ("B",)))
    more = "".join(f', {option}="{over}"' for option, over in (("tp", "/".join(tp)), ("dp", "/".join(dp))) if over)
    more += ", zigzag=True" if any(atom.zigzag for atom in first.atoms) else ""
    more += ', dims="S B H E"' if first.letters[:2] == ("S", "B") else ""
    if "kv_latent" not in edges or "k" in edges:
        return f'hybrid(ulysses="{heads}", gather="{gather}"{more})'
    made = "mla_packed" if name.startswith("mla_packed") else "mla_latent"
    return f'{made}("{heads}", "{gather}"{more})'


def _scan(edges: Mapping[str, list[Spec]], axes: tuple[str, ...]) -> str:
    """A scan of a gated delta net over these axes, with those that split its rows and heads already."""
    found = {atom.name: "/".join(atom.axes) for atom in edges["k"][0].atoms}
    more = "".join(f', {option}="{found[letter]}"' for option, letter in (("tp", "K"), ("dp", "B")) if found[letter])
    return "gdn_scan(" + ", ".join(f'"{axis}"' for axis in axes) + f"{more})"
