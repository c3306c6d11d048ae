"""Scenarios on real processes: started once, each runs a list of functions, and each result comes back by itself.

Importing torch is what a process costs, so a file of tests starts its processes once, and they are forked off one that
has imported it; but for those that are `fresh`. A scenario is a function of no arguments at the top of a module; every
process runs the same ones in the same order. One that fails ends its process: its peers would wait in a group that no
longer agrees. A wait that never ends is a failure that says who stood where.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import sharding as sh
from meshfn.sharding.trace import Event
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Graphs", "Ran", "Results", "breakable", "facts", "gradients", "layer", "mesh_of", "run", "same", "shards"]

Scenario = Callable[[], Any]


@dataclass
class _Process:
    """One rank as its parent sees it. at: the scenario in which it is. ended: why there is nothing more to come."""

    process: Any
    pipe: Any
    at: str = "the start: imports and init_process_group"
    ended: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Results:
    """What the scenarios gave: `results["name"]` is a list by rank."""

    def __init__(self, ranks: Sequence[_Process]) -> None:
        self._ranks = ranks

    def __getitem__(self, name: str) -> list[Any]:
        """Raises `AssertionError` with the tracebacks where a rank failed, or says why it never came to it."""
        wrong = [f"rank {r}: {told}" for r in range(len(self._ranks)) if (told := self.failure(name, r))]
        assert not wrong, f"{name}\n" + "\n".join(wrong)
        return [rank.values[name] for rank in self._ranks]

    def alone(self, name: str, rank: int) -> Any:
        """One rank's result, where another is meant to have none."""
        told = self.failure(name, rank)
        assert not told, f"{name}, rank {rank}: {told}"
        return self._ranks[rank].values[name]

    def failure(self, name: str, rank: int) -> str:
        """Why a rank has no result; empty where it has one."""
        mine = self._ranks[rank]
        if name in mine.values:
            return ""
        others = {at: r for r, other in enumerate(self._ranks) for at in other.failures}
        blame = f", after {others}" if others and name not in others else ""
        return mine.failures.get(name) or f"{mine.ended or 'never came to it'}, in {mine.at}{blame}"


def run(
    ranks: int, scenarios: Sequence[Scenario], *, limit: float = 120.0, timeout: float = 20.0, fresh: bool = False
) -> Results:
    """Run scenarios on so many processes.

    limit: seconds for all of it, after which every process is killed. timeout: seconds of one collective. fresh: each
    imports for itself, as under torchrun, so that sets of strings have another order on each rank.
    """
    context = mp.get_context("spawn" if fresh else "forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    names = [(s.__module__, s.__name__) for s in scenarios]
    started: list[_Process] = []
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child, args=(rank, ranks, f"file://{folder}/store", timeout, names, theirs), daemon=True
                )
                process.start()
                theirs.close()  # the child holds the other end alone, so that its death ends the pipe
                started.append(_Process(process, ours))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        try:
            _listen(started, time.monotonic() + limit, limit)
        finally:
            for rank in started:
                rank.process.join(5.0)
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()
                rank.pipe.close()
    return Results(started)


# By the process off which others are forked: what each would import before its first exchange.
_IMPORTED = (
    "torch",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "meshfn.programs",
    "meshfn.sharding",
)
# One thread a process: threads of several processes on few cores would wait for each other.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _listen(ranks: Sequence[_Process], deadline: float, limit: float) -> None:
    """Take what comes, until every pipe has ended."""
    while open_ := [rank for rank in ranks if not rank.ended]:
        ready = multiprocessing.connection.wait([r.pipe for r in open_], max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in open_:
                rank.ended = f"killed after the time limit of {limit:g} s"
                rank.process.kill()
            return
        for rank in open_:
            if rank.pipe not in ready:
                continue
            try:
                what, name, value = rank.pipe.recv()
            except EOFError:
                rank.process.join(5.0)
                rank.ended = f"ended with exit code {rank.process.exitcode}"
                continue
            if what == "begin":
                rank.at = name
            else:
                (rank.values if what == "value" else rank.failures)[name] = value


def _child(rank: int, ranks: int, where: str, timeout: float, names: Sequence[tuple[str, str]], pipe: Any) -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)
    for module, name in names:
        pipe.send(("begin", name, None))
        try:
            torch.manual_seed(0)
            pipe.send(("value", name, getattr(importlib.import_module(module), name)()))
        except BaseException:  # told to the parent, which raises it in the test of this scenario
            pipe.send(("failure", name, traceback.format_exc()))
            break
    pipe.close()  # no destroy_process_group: it may wait for a peer that is gone


@functools.cache
def mesh_of(**axes: int) -> Any:
    """All processes, as one mesh; made once."""
    ranks = torch.arange(dist.get_world_size()).reshape(tuple(axes.values()))
    return sh.ProcessGroup(DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes))).mesh


def breakable(seconds: float, axis: str = "u") -> sh.Mesh:
    """All processes with a group of their own and a short limit: it may break, the others go on."""
    group: Any = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=seconds))
    return sh.ProcessGroup(DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,))).mesh


def gradients(y: Tensor, xs: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    """Of a sum that weighs every element of y differently, so that none is zero."""
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad((y * weights).sum(), xs)


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Equal but for rounding in fp64, and not all zero."""
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert all(x.abs().max() > 0 for x in found if x.numel())


def layer(q: Tensor, k: Tensor, mesh: sh.Mesh, S: int, K: int, G: int) -> Tensor:
    """Every kind of collective, over one axis and over both. q: B S/g/u (K G) E. k: B S/g/u K E."""
    heads = sh.reshard(q, "B S/g/u (K G) E -> B S/g (K/u G) E", mesh, S=S, K=K, G=G)
    needed = sh.reshard(k, "B S/g/u K E -> B S/g K@H/u E", mesh, S=S, K=K, G=G)
    every = sh.reshard(k.tanh(), "B S/g/u K E -> B S K E", mesh, S=S)
    total = sh.reshard(heads.sin().sum((1, 2)), "B E +g+u -> B E", mesh)
    back = sh.reshard(heads.cos(), "B S/g (K/u G) E -> B S/g/u (K G) E", mesh, S=S, K=K, G=G)
    part = sh.reshard(every * total[:, None, None], "B S K E +g+u -> B S/g/u K E", mesh)
    return back.sum(2) + part.sum(2) + needed.square().sum((1, 2))[:, None]


def shards(mesh: sh.Mesh, B: int, S: int, K: int, G: int) -> list[Tensor]:
    """This rank's q and k of `layer`."""
    made = torch.Generator().manual_seed(mesh.rank)
    rows = S // mesh.size + (mesh.rank < S % mesh.size)
    shapes = (B, rows, K * G, 4), (B, rows, K, 4)
    return [torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes]


def facts(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """What a rank sent and waited for, in which order and for what: the same on processes and on simulated ranks."""
    return [(e.what, e.kind, e.sent, e.received, e.call.title) for e in events]


class Graphs:
    """A backend of torch.compile: `aot_eager`, with Inductor's choice of what backward computes again. It counts.

    frames: how often it was called. collectives: of each graph, those of forward and of backward.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.collectives: dict[str, list[int]] = {"forward": [], "backward": []}

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def keep(which: str, graph: Any, _inputs: Any) -> Any:
            names = [n.target.name() for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
            self.collectives[which].append(sum(map(_is_collective, names)))
            return make_boxed_func(graph.forward)

        self.frames += 1
        forward, backward = (functools.partial(keep, which) for which in self.collectives)
        both = {"fw_compiler": forward, "inference_compiler": forward, "bw_compiler": backward}
        return aot_autograd(**both, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


class Ran(TorchDispatchMode):
    """Counts collectives where they run: below autograd, and below what selective checkpointing keeps, which is a mode
    of the same sort that is entered later and so asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += _is_collective(func.name())
        return func(*args, **(kwargs or {}))


def _is_collective(name: str) -> bool:
    return name.startswith("_c10d_functional::") and "wait" not in name
