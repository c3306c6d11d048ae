"""Layouts of whole models: experts dealt out over ranks, and parameters kept in parts.

Which rows go where is known when a router has chosen, and no sooner: so the ranks tell each other how many each expert
gets from whom, and then send as many. Nothing is padded, and nothing left out.

Letters: M rows, D model width, X experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from . import shards
from .errors import SpecError
from .layouts import Layout
from .mesh import Mesh
from .moves import Move, Side, adjoint
from .reshard import call_of, exchanged, noted
from .spec import Spec, parse

__all__ = ["deal", "spread"]


def spread(layout: Layout, *, experts: str | None = None, parameters: str | None = None) -> Layout:
    """A layout for a whole model, which needs no rank to hold all of it: `spread(hybrid(tp="tp", dp="dp"),
    experts="ep", parameters="dp")`.

    experts: an axis over which experts are dealt out, as their fields say `X/ep`; it splits the rows of the batch as
    well, within what splits them already, and a row's tokens go to the ranks of their experts and back. parameters: an
    axis that splits rows, over which the parameters whose fields say `D/dp` are kept in parts: each block gathers its
    own when it begins, and their gradients come back scattered. What it gathered lives until its gradients are there;
    recomputed (`torch.utils.checkpoint` around the `layer` that `decoder` is given), until it ends.

    Raises `SpecError` for axes that do not do that, `ValueError` for neither.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"spread(layout): a Layout is needed, not {type(layout).__name__}")
    if experts is None and parameters is None:
        raise ValueError('spread(layout): nothing is spread\n    fix: experts="ep", parameters="dp", or both')
    chains, said = dict(layout.chains), []
    if experts is not None:
        if experts in layout.axes:
            raise SpecError(
                f'spread(experts="{experts}"): {layout.name} has that axis for something else',
                fix='an axis of its own, such as "ep"',
            )
        chains = {edge: tuple(_rows(text, experts, edge) for text in chain) for edge, chain in chains.items()}
        chains["experts"] = (f"X/{experts}",)
        said.append(f'experts="{experts}"')
    if parameters is not None:
        over = next((a.axes for a in parse(chains["x" if "x" in chains else "q"][0]).atoms if a.name == "B"), ())
        if parameters not in over:
            rows = "/".join(("B", *over))
            raise SpecError(
                f'spread(parameters="{parameters}"): {layout.name} has rows as {rows}, so that ranks of {parameters} '
                "would all do the same",
                fix=f'dp="{parameters}" in the layout',
            )
        chains["parameters"] = (f"D/{parameters}", "D")
        said.append(f'parameters="{parameters}"')
    name = f"{layout.name} spread({', '.join(said)})"
    return replace(layout, name=name, edges=tuple(chains.items()))


def _rows(text: str, axis: str, edge: str) -> str:
    """A spec with an axis more that splits the rows of the batch; of a loss, over which it is a pending sum."""
    spec = parse(text)
    dims = tuple(tuple(replace(a, axes=(*a.axes, axis)) if a.name == "B" else a for a in dim) for dim in spec.dims)
    partial = (*spec.partial, axis) if edge.rpartition(".")[2] == "loss" else spec.partial
    return str(Spec(dims, tuple(sorted(partial))))


def deal(
    rows: Tensor, by_expert: Sequence[Sequence[int]], group: Sequence[int], axes: tuple[str, ...], mesh: Mesh, site: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows `M D`, sorted by expert -> those of all ranks for this one's experts, by the rank that sent them, and what
    takes results back. by_expert: how many each rank of the group has for each. axes: of the group. site: see `Call`.
    """
    me, parts = group.index(mesh.rank), len(group)
    bounds = [shards.balanced(len(by_expert[0]), parts, i) for i in range(parts)]
    traffic = [[sum(of_rank[a:b]) for a, b in bounds] for of_rank in by_expert]
    sends, receives = _side(traffic[me]), _side([of_rank[me] for of_rank in traffic])
    move, over = Move("all-to-all", axes, parts, me, source=receives, target=sends), "/".join(axes)

    def sent(x: Tensor, move: Move, name: str, pair: str) -> Tensor:
        call = call_of((x,), f"{name}: {pair}", (name,))
        call = call._replace(site=site) if site else call
        return noted(exchanged((x,), (move,), (adjoint(move),), call, mesh), mesh)[0]

    def back(y: Tensor) -> Tensor:
        return sent(y, adjoint(move), "results", f"X/{over} D -> M/{over} D")

    return sent(rows, move, "rows", f"M/{over} D -> X/{over} D"), back


def _side(lengths: Sequence[int]) -> Side:
    """Rows that lie by member, so many for each."""
    parts, at = [], 0
    for n in lengths:
        parts.append(((at, at + n),) if n else ())
        at += n
    layout = "even" if len(set(lengths)) == 1 else "tiles"
    return Side(0, at, tuple(parts), tuple(parts), False, tuple(lengths), layout, True)
