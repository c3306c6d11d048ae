# %% [markdown]
# Tensor-parallel decode of SmolLM2-135M in fp32 over two gloo processes of one thread each, compiled and eager in turn,
# beside the program of one rank. A step is split into
#
# - products: matrix products; of a compiled program the loops that its compiler wrote, in which they stand,
# - collectives: from the launch of each to the end of its wait, as the transport sees it, with the wait for the peer,
# - the rest: Python, dispatch and packing; of the eager program also what its products are not.
#
# Loops and exchanges are timed as they are called. What products an eager step has a profiler tells, in steps of its
# own. `--clock cpu` counts the processor's time of the thread, for a machine that others use too.

# %%
from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import programs
from meshfn import sharding as sh
from torch import Tensor

CLOCK: Callable[[], float] = time.perf_counter
RANKS, ROUNDS, STEPS, CONTEXT = 2, 5, 16, 16
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


# %%
class Timed:
    """A transport that counts its exchanges, and the seconds that they take."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.traces, self.spare = inner, inner.traces, inner.spare
        self.seconds, self.exchanges = 0.0, 0

    def _launch(self, launch: Callable[..., Any], *args: Any) -> Any:
        start = CLOCK()
        work = launch(*args)
        self.seconds += CLOCK() - start
        self.exchanges += 1
        return Waiting(work, self)

    def all_gather(self, *args: Any) -> Any:
        return self._launch(self.inner.all_gather, *args)

    def reduce_scatter(self, *args: Any) -> Any:
        return self._launch(self.inner.reduce_scatter, *args)

    def all_to_all(self, *args: Any) -> Any:
        return self._launch(self.inner.all_to_all, *args)

    def all_reduce(self, *args: Any) -> Any:
        return self._launch(self.inner.all_reduce, *args)


class Waiting:
    def __init__(self, work: Any, timed: Timed) -> None:
        self.work, self.timed = work, timed

    def wait(self) -> Tensor:
        start = CLOCK()
        value: Tensor = self.work.wait()
        self.timed.seconds += CLOCK() - start
        return value


# %%
class Loops:
    """The compiler's loops, all that there are in this process, which count the seconds that they take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self) -> None:
        from torch._inductor.codecache import PyCodeCache

        for module in PyCodeCache.modules:
            for name, fn in list(vars(module).items()):
                if name.startswith("cpp_fused") and not hasattr(fn, "__wrapped__"):
                    setattr(module, name, self._timed(fn))

    def _timed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            start = CLOCK()
            fn(*args)
            self.seconds += CLOCK() - start

        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call


class Step(NamedTuple):
    """Seconds."""

    whole: float
    products: float
    collectives: float

    @property
    def rest(self) -> float:
        return self.whole - self.products - self.collectives


class Runner:
    """A program, stepped. timed: its transport."""

    def __init__(self, program: Any, timed: Timed, loops: Loops, batch: int) -> None:
        self.program, self.timed, self.loops = program, timed, loops
        self.prompts = [[100 + 7 * row + i for i in range(CONTEXT)] for row in range(batch)]

    def steps(self) -> list[Step]:
        state, found = self.program.prefill(self.prompts), []
        for _ in range(STEPS):
            self.timed.seconds, self.timed.exchanges, self.loops.seconds = 0.0, 0, 0.0
            start = CLOCK()
            state = self.program.decode(state)
            found.append(Step(CLOCK() - start, self.loops.seconds, self.timed.seconds))
        return found

    def products(self) -> float:
        """Seconds of a step that a profiler finds in torch's own products."""
        state = self.program.prefill(self.prompts)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(STEPS):
                state = self.program.decode(state)
        return 1e-6 * sum(e.self_cpu_time_total for e in profile.events() if e.name in PRODUCTS) / STEPS


def show(name: str, steps: Sequence[Step], products: float) -> None:
    """Medians. products: of torch's own, of each step."""
    steps = [step._replace(products=step.products + products) for step in steps]
    whole, made, sent, rest = (
        statistics.median(getattr(step, part) for step in steps)
        for part in ("whole", "products", "collectives", "rest")
    )
    cells = [f"{1e6 * x:8.0f} us ({x / whole:5.1%})" for x in (made, sent, rest)]
    print(
        f"  {name:9} step {1e6 * whole:8.0f} us   products {cells[0]}   collectives {cells[1]}   rest {cells[2]}",
        flush=True,
    )


# %%
def rank_of(rank: int, store: str, model_name: str, batches: Sequence[int], clock: str) -> None:
    global CLOCK
    CLOCK = time.thread_time if clock == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    limit = datetime.timedelta(minutes=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    device_mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    mesh = sh.ProcessGroup(device_mesh).mesh
    model, loops = programs.load(model_name, dtype=torch.float32), Loops()
    for batch in batches:
        sizes = {"batch": batch, "max_len": 64, "chunk": CONTEXT}
        runners, layout = {}, sh.ulysses(tp="tp")
        for name, compile in (("compiled", True), ("eager", False)):
            timed = Timed(mesh.transport)
            program: Any = programs.build(model, mesh=mesh.at(rank, timed), layout=layout, compile=compile, **sizes)
            runners[name] = Runner(program, timed, loops, batch)
        if rank == 0:
            runners["one rank"] = Runner(programs.build(model, **sizes), Timed(sh.Local()), loops, batch)
        loops.wrap()
        dist.barrier()
        found: dict[str, list[Step]] = {name: [] for name in runners}
        for i in range(ROUNDS + 1):  # the first is not counted
            for name, runner in runners.items():
                steps = runner.steps()
                found[name] += steps if i else []
            dist.barrier()
        products = runners["eager"].products()
        if rank == 0:
            built = ", ".join(f"{name} {runner.program.build_seconds:.0f} s" for name, runner in runners.items())
            count = runners["compiled"].timed.exchanges
            print(f"\n{model.name}, batch {batch}: {count} exchanges a step; built in {built}")
            for name in runners:
                show(name, found[name], products if name == "eager" else 0.0)
        for runner in runners.values():
            runner.program.close()
    dist.destroy_process_group()


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Decode over two processes, split into products, collectives and the rest. Takes ten minutes on "
        "two cores, with compiles in it, and 3 GB of memory."
    )
    parser.add_argument("--model", default="smollm2-135m", help="what programs.load takes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the machine, or of the thread")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (f"{folder}/store", arguments.model, arguments.batch, arguments.clock), nprocs=RANKS)
