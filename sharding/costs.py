"""What a mesh costs, measured, and which layout is best on it, by a stated model."""

from __future__ import annotations

import functools
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .errors import SpecError
from .layouts import Layout
from .mesh import Mesh
from .plan import Plan
from .reshard import reshard
from .show import columns

__all__ = ["Choice", "Costs", "Ranking", "best", "measure"]

ROUNDS = 7


@dataclass(frozen=True)
class Costs:
    """latency: seconds of an exchange of next to nothing, by axis. bandwidth: bytes a second that a rank sends, by
    axis. flops: arithmetic of one rank, a second. Raises `ValueError` for an axis that has but one of the two, and for
    numbers that cannot be."""

    latency: Mapping[str, float]
    bandwidth: Mapping[str, float]
    flops: float

    def __post_init__(self) -> None:
        for name, has, lacks in (
            ("bandwidth", self.latency, self.bandwidth),
            ("latency", self.bandwidth, self.latency),
        ):
            if more := [axis for axis in has if axis not in lacks]:
                raise ValueError(f'Costs: no {name} of {more[0]}\n    fix: {name}={{..., "{more[0]}": ...}}')
        for name, found in (("bandwidth", self.bandwidth), ("flops", {"a rank": self.flops})):
            if wrong := [(axis, n) for axis, n in found.items() if not n > 0]:
                raise ValueError(
                    f"Costs: {name} of {wrong[0][0]} is {wrong[0][1]}\n    fix: more than 0, what is done in a second"
                )
        if late := [(axis, n) for axis, n in self.latency.items() if not n >= 0]:
            raise ValueError(f"Costs: latency of {late[0][0]} is {late[0][1]}\n    fix: seconds, 0 or more")

    def seconds(self, axes: Sequence[str], sent: int) -> float:
        """Of one exchange over axes; of several, the slowest counts."""
        unknown = [axis for axis in axes if axis not in self.latency]
        if unknown:
            raise ValueError(
                f"costs of {unknown[0]} are not known     known: {', '.join(self.latency) or 'none'}\n"
                f'    fix: a latency and a bandwidth of "{unknown[0]}", which measure(mesh) finds on a mesh that has it'
            )
        return max(self.latency[axis] + sent / self.bandwidth[axis] for axis in axes)


def measure(mesh: Mesh, *, device: Any = "cpu", nbytes: int = 2**22, dtype: torch.dtype = torch.float32) -> Costs:
    """Latency and bandwidth of each axis of a mesh, and arithmetic: of an all-to-all, and of a product of matrices.

    mesh: this rank's own; every rank makes this call. nbytes: what a rank holds of the large exchange. Every rank
    returns the same: the slowest of all.
    """
    size = dtype.itemsize
    found: list[float] = []
    axes = [axis for axis, n in mesh.axes if n > 1]
    for axis in axes:
        n = mesh[axis]
        times = []
        for each in (1, max(1, nbytes // (size * n))):
            x = torch.zeros(1, n * each, dtype=dtype, device=device)
            run = functools.partial(reshard, x, f"S/{axis} D -> S D/{axis}", mesh, S=n)
            times.append(_median(run, device))
        sent = (n - 1) * size * max(1, nbytes // (size * n))
        found += [times[0], max(times[1] - times[0], 1e-9) / sent]
    a = torch.randn(512, 512, dtype=dtype, device=device)
    found.append(_median(lambda: a @ a, device) / (2 * 512**3))
    mine = torch.tensor(found, dtype=torch.float64, device=device)
    for axis in axes:  # every rank takes the slowest figures of all
        mine = reshard(mine[None], f"P/{axis} N -> P N", mesh, P=mesh[axis]).max(0).values
    slowest = mine.tolist()
    return Costs(
        dict(zip(axes, slowest[0:-1:2], strict=True)),
        {axis: 1 / each for axis, each in zip(axes, slowest[1:-1:2], strict=True)},
        1 / slowest[-1],
    )


def _median(run: Callable[[], Any], device: Any) -> float:
    times = []
    for i in range(ROUNDS + 2):
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _finish(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Choice(NamedTuple):
    """A layout with what it would take. exchanges, core: seconds of a forward and a backward. why: what decides, or why
    it cannot be; then there are no seconds."""

    layout: Layout
    exchanges: float
    core: float
    peak: int
    why: str
    plan: Plan | None

    @property
    def seconds(self) -> float:
        return self.exchanges + self.core if self.plan is not None else float("inf")


class Ranking(tuple[Choice, ...]):
    """Layouts, the fastest first. `ranking[0].layout` is the best; prints as a table with the reasons."""

    def __str__(self) -> str:
        rows = [("layout", "exchanges", "core", "peak bytes", "")]
        for c in self:
            numbers = (f"{c.exchanges * 1e3:.3g} ms", f"{c.core * 1e3:.3g} ms", f"{c.peak:,}") if c.plan else ("-",) * 3
            on = "" if len({str(x.plan.mesh) for x in self if x.plan}) < 2 or c.plan is None else f" on {c.plan.mesh}"
            rows.append((c.layout.name + on, *numbers, c.why))
        model = (
            "exchanges: latency + bytes of the busiest rank / bandwidth, one after the other, forward and backward\n"
            "core: 3 x flops of the busiest rank\n"
            "elements a token: received forward by the busiest rank, for each token of a rank's share"
        )
        return "\n".join([*columns(rows, [False, True, True, True, False]), model])

    def __repr__(self) -> str:
        return str(self)


def best(
    layouts: Sequence[Layout | tuple[Layout, Mesh]], mesh: Mesh, sizes: Mapping[str, int], costs: Costs, **options: Any
) -> Ranking:
    """Layouts ranked by a model of their plans: each exchange takes its latency and the bytes of the busiest rank over
    the bandwidth, one after the other (overlap hides some of it, which is not counted), forward and backward; the core
    takes three times its flops, of the rank with the most.

    sizes: global, as `Layout.plan` takes them; those of latents (B, S, H, L, N, R, V) rank layouts of latent attention
    among plain ones, in which keys and values are materialised first; those of gated delta nets (B, S, H, K, E, V, W)
    rank theirs. options: the rest of its arguments (dtype, causal, window, cu_seqlens). A layout may bring a mesh of
    its own, as a pair: more of the same ranks over another axis. A layout that cannot be on its mesh stands last, with
    the reason. Raises `SpecError` where that is all of them, and for what is wrong with the sizes themselves;
    `TypeError` and `ValueError` for other arguments.
    """
    pairs = _pairs(layouts, mesh)
    if not isinstance(costs, Costs):
        raise TypeError(
            f"best(costs=...): Costs are needed, not {type(costs).__name__}\n    fix: measure(mesh), or Costs(...)"
        )
    found, errors = [], []
    for layout, on in pairs:
        try:
            made = layout.plan(on, **sizes, **options)
        except SpecError as error:
            errors.append(error)
            what = str(error).splitlines()[0].removeprefix(f"{layout.name}: ")
            found.append(Choice(layout, 0.0, 0.0, 0, textwrap.shorten(what, 90, placeholder=" ..."), None))
            continue
        exchanges = sum(costs.seconds(e.axes, max(e.sends[1], e.receives[1])) for e in made.exchanges)
        found.append(Choice(layout, exchanges, 3 * made.flops[1] / costs.flops, made.peak, _why(made), made))
    if not any(choice.plan for choice in found):
        if len(set(map(str, errors))) == 1 and not str(errors[0]).startswith(found[0].layout.name):
            raise errors[0]  # of no layout
        reasons = "\n".join(f"    {choice.layout.name}: {choice.why}" for choice in found)
        raise SpecError(f"best: none of {len(found)} layouts can be on this mesh\n{reasons}", mesh=str(mesh))
    return Ranking(sorted(found, key=lambda choice: choice.seconds))


def _pairs(layouts: Any, mesh: Mesh) -> list[tuple[Layout, Mesh]]:
    """Each layout with its mesh."""
    if isinstance(layouts, Layout):
        raise TypeError("best(layouts=...): several are needed, not one Layout\n    fix: [layout, ...]")
    found = [each if isinstance(each, tuple) else (each, mesh) for each in layouts]
    if not found:
        raise ValueError("best(layouts=...): at least one layout is needed\n    fix: [ulysses(), all_gather(), ...]")
    for i, pair in enumerate(found):
        kinds = tuple(type(each).__name__ for each in pair)
        if len(pair) != 2 or not (isinstance(pair[0], Layout) and isinstance(pair[1], Mesh)):
            raise TypeError(
                f"best(layouts=...): each is a Layout, or a pair of a Layout and a Mesh, and that at {i} has "
                f"{', '.join(kinds)}\n    fix: (layout, Mesh(...))"
            )
        layout, on = pair
        if on.size != mesh.size:
            raise ValueError(
                f"best(layouts=...): {layout.name} is on {on}, {on.size} ranks, and mesh has {mesh.size}\n"
                "    fix: the same ranks over other axes"
            )
    return found


def _why(made: Plan) -> str:
    busiest = max(max(found.bytes) for found in made.classes)
    low, high = made.flops
    uneven = f", work {high / low:.2f} to 1" if low and high > low else ", even work" if low else ""
    # What a shard does to a state has one size, and so have the tokens in front of it.
    flat = {"summary"} <= {edge for e in made.exchanges for edge in e.edges} <= {"summary", "q", "k", "v"}
    volume = "whatever S is" if flat else f"{made.volume:,.0f} elements a token"
    return f"{len(made.exchanges)} exchanges, {busiest:,} bytes, {volume}{uneven}"
