"""The peak bytes of a plan beside those of simulated ranks: memory of this process, watched while each rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from meshfn import sharding as sh
from meshfn.sharding.schedules import schedule_of
from meshfn.sharding.spec import parse
from meshfn.sharding.wires import LayoutWire
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """The most bytes alive behind any operation of this thread. After each it looks which memory is still there, each
    once. owed: of buffers that will be received, which a rank has from the launch on."""

    def __init__(self, apart: Sequence[Tensor]) -> None:
        super().__init__()
        self.apart = [x.untyped_storage()._cdata for x in apart]
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.peak, self.owed, self.off = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.off:
            self.look(made if isinstance(made, (tuple, list)) else (made,))
        return made

    def look(self, made: Sequence[Any]) -> None:
        self.alive = [(memory, n) for memory, n in self.alive if not memory.expired()]
        for x in made:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in (*self.known(), *self.apart):
                self.alive.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.owed + sum(n for _, n in self.alive))

    def known(self) -> list[int]:
        return [memory.cdata for memory, _ in self.alive]


class Watched:
    """A rank's transport. What its peers do in its thread is not its own, and a buffer that it sends is held until it
    has waited, as processes do."""

    traces, spare = False, None

    def __init__(self, transport: sh.Transport, watch: Watch) -> None:
        self.transport, self.watch = transport, watch

    def all_gather(self, x, counts, axes, call):
        return self.launch(x, sum(counts), self.transport.all_gather, x, counts, axes, call)

    def reduce_scatter(self, x, counts, axes, call):
        mesh = self.transport.threads.mesh
        mine = counts[mesh.ranks(axes, self.transport.rank).index(self.transport.rank)]
        return self.launch(x, mine, self.transport.reduce_scatter, x, counts, axes, call)

    def all_to_all(self, x, counts, receive, axes, call):
        return self.launch(x, sum(receive), self.transport.all_to_all, x, counts, receive, axes, call)

    def all_reduce(self, x, axes, call):
        return self.launch(x, x.numel(), self.transport.all_reduce, x, axes, call)

    def launch(self, x, n, collective, *args):
        self.watch.owed += n * x.element_size()
        self.watch.look(())
        self.watch.off = True
        work = collective(*args)
        self.watch.off = False
        return Work(work, x, n * x.element_size(), self.watch)


class Work:
    def __init__(self, work: Any, sent: Tensor, nbytes: int, watch: Watch) -> None:
        self.work, self.sent, self.nbytes, self.watch = work, sent, nbytes, watch

    def wait(self) -> Tensor:
        found, self.sent = self.work.wait(), None
        self.watch.owed -= self.nbytes
        self.watch.look((found,))
        return found


class Opaque(torch.autograd.Function):
    """A core, or whatever else reads: it keeps that until it has made its gradients."""

    @staticmethod
    def forward(ctx, shape, *xs):
        ctx.save_for_backward(*xs)
        return xs[0].new_empty(shape)

    @staticmethod
    def backward(ctx, grad):
        return None, *map(torch.empty_like, ctx.saved_tensors)


def layer(wire: LayoutWire, steps: Any, here: dict[str, Tensor], sizes: dict[str, int]) -> Tensor:
    """The stages of a layer between its exchanges, in the order of the plan."""
    sent: dict[Any, Any] = {}
    for step in steps:
        given = {name: here[name] for name in step.edges if name in here}
        match step.what:
            case "send":
                sent[step.edges] = wire.send(**given)
            case "receive":
                groups = [sent.pop(group) for group in [*sent] if {*group} <= {*step.of}]
                here |= dict(zip((*step.edges, *step.of), wire.receive(*groups, **given), strict=True))
            case "project":
                project = wire.projection(here[step.edges[0]])
            case "make":
                here["kv"] = project(here[step.of[0]]).unflatten(-1, (-1, sizes["NV"]))
            case "core":
                (name,) = step.edges
                here[name] = Opaque.apply(made(name, here, sizes), *(here[each] for each in step.of))
            case "pass":
                here[step.edges[0]] = wire.pass_(**given)
        given = {}
    out = here["o"]
    if "D" in sizes:
        out = wire.pass_(out=Opaque.apply((*out.shape[:2], sizes["D"]), out))
    return Opaque.apply((0,), out)


def made(name: str, here: dict[str, Tensor], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of what a core makes: values of the heads that it has, or what a shard does to their states."""
    if "a" not in here:
        return (*here["q"].shape[:-1], sizes["V"])
    B, S, H, _ = here["a"].shape
    return (1, B, H, sizes["N"], sizes["E"]) if name == "summary" else (B, S, H, sizes["V"])


def measured(layout: sh.Layout, mesh: sh.Mesh, sizes: dict[str, int], cu_seqlens: Any, sight: Any) -> list[int]:
    """The peak of each rank."""
    layout = layout if "q" in dict(layout.chains) else layout.part("gdn")
    schedule, edges = schedule_of(layout, mesh.axes), dict(layout.chains)
    known = schedule.sizes({"V": sizes.get("E"), "K": sizes["H"], "I": 1, **sizes})

    def body(at: sh.Mesh) -> int:
        def tensors(names: Sequence[str]) -> dict[str, Tensor]:
            shapes = {name: parse(edges[name][0]).local(known, mesh, at.rank) for name in names}
            return {name: torch.empty(shape, requires_grad=True) for name, shape in shapes.items()}

        weights = tensors(schedule.parameters)
        watch = Watch([*weights.values()])
        bound = mesh.at(at.rank, Watched(at.transport, watch))
        made = LayoutWire.of(layout, bound, {"S": sizes["S"]}, cu=cu_seqlens)
        wire = made.layer(**{letter: n for letter, n in known.items() if letter in "HKW"}, **sight)
        with watch:
            inputs = tensors(schedule.inputs)
            end = layer(wire, schedule.steps, {**inputs, **weights}, known)
            torch.autograd.grad(end, [*inputs.values(), *weights.values()], end.new_empty(0))
        return watch.peak

    return sh.Threads(mesh).run(body)


TWO, BOTH = {"u": 2}, {"g": 2, "u": 2}
PLAIN = {"B": 2, "S": 195, "H": 10, "K": 5, "E": 48}
DELTA = {"B": 2, "S": 195, "H": 8, "K": 4, "E": 24, "V": 48, "W": 4, "Y": 1}
LATENT = {"B": 2, "S": 195, "H": 5, "L": 64, "N": 32, "R": 16, "V": 32}
DOCUMENTS = {"cu_seqlens": (0, 30, 90, 101, 195), "causal": True}
CASES = [
    (sh.ulysses(), {"u": 3}, PLAIN, {}),
    (sh.ulysses(overlap=True), TWO, PLAIN, {}),
    (sh.ulysses(), {"u": 4}, {**PLAIN, "H": 8, "K": 2}, {}),
    (sh.all_gather(), {"g": 2}, PLAIN, {"causal": True}),
    (sh.all_gather(overlap=True, exchange="needed"), {"g": 3}, PLAIN, DOCUMENTS),
    (sh.all_gather(exchange="needed"), {"g": 9}, {**PLAIN, "S": 900}, {"causal": True, "cu_seqlens": (0, 460, 900)}),
    (sh.all_gather(zigzag=True), {"g": 2}, {**PLAIN, "S": 200}, {"causal": True, "window": 20}),
    (sh.hybrid(), BOTH, PLAIN, {}),
    (sh.hybrid(exchange="needed"), BOTH, PLAIN, DOCUMENTS),
    (sh.hybrid(tp="tp", overlap=True), {"tp": 2, **BOTH}, {**PLAIN, "H": 8, "K": 4, "D": 200}, {}),
    (sh.mla_latent(), TWO, LATENT, {}),
    (sh.mla_latent("u", "g", overlap=True, exchange="needed"), BOTH, LATENT, DOCUMENTS),
    (sh.mla_latent("u", "g"), BOTH, LATENT, {"causal": True}),
    (sh.mla_latent("u", "g", tp="tp", overlap=True), {"tp": 2, **BOTH}, {**LATENT, "H": 4, "D": 200}, {"causal": True}),
    (sh.mla_packed(), TWO, LATENT, {}),
    (sh.mla_packed(overlap=True), TWO, LATENT, DOCUMENTS),
    (sh.mla_packed("u", "g", overlap=True), BOTH, LATENT, {}),
    (sh.mla_packed("u", "g", exchange="needed"), BOTH, LATENT, DOCUMENTS),
    (sh.mla_gather(), {"g": 2}, LATENT, {"causal": True}),
    (sh.mla_gather(overlap=True, exchange="needed"), {"g": 3}, LATENT, DOCUMENTS),
    (sh.mla_gather(exchange="needed"), {"g": 9}, {**LATENT, "S": 900}, {"causal": True, "window": 350}),
    (sh.mla_gather(tp="tp"), {"tp": 2, "g": 2}, LATENT, {"causal": True}),  # of five heads, which stay, three and two
    (sh.mla_gather(zigzag=True, tp="tp"), {"tp": 2, "g": 2}, {**LATENT, "S": 200, "H": 4, "D": 64}, {"causal": True}),
    (sh.gdn_ulysses(), {"u": 3}, DELTA, {}),
    (sh.gdn_ulysses(overlap=True, tp="tp"), {"tp": 2, "u": 2}, {**DELTA, "D": 200, "Y": 24}, {}),
    (sh.gdn_ulysses(), {"u": 4}, {**DELTA, "K": 2}, {}),
    (sh.gdn_scan(), {"cp": 4}, DELTA, {}),
    (sh.gdn_scan("g", "u", tp="tp", overlap=True), {"u": 2, "tp": 2, "g": 2}, {**DELTA, "D": 200}, {}),
    (sh.gdn_scan(), {"cp": 5}, {**DELTA, "S": 404, "W": 5, "Y": 24}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "axes", "sizes", "told"), CASES, ids=[case[0].name for case in CASES])
def test_the_peak_is_what_ranks_hold(layout, axes, sizes, told):
    mesh = sh.Mesh(**axes)
    plan = layout.plan(mesh, **sizes, **told)
    sight = {name: value for name, value in told.items() if name != "cu_seqlens"}
    found = measured(layout, mesh, sizes, told.get("cu_seqlens"), sight)
    assert min(found) > 400_000
    assert [plan.of(rank).peak for rank in range(mesh.size)] == pytest.approx(found, rel=0.01)
