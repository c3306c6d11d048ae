# %% [markdown]
# Tensor-parallel decode of SmolLM2-135M in fp32 over two gloo processes of one thread each, compiled and eager in turn,
# beside the program of one rank. A step is split into
#
# - products: matrix products; of a compiled program the loops that its compiler wrote, in which they stand,
# - collectives: from the launch of each to the end of its wait, as the transport sees it, with the wait for the peer,
# - the rest: Python, dispatch and packing; of the eager program also what its products are not.
#
# Steps are timed without a profiler; one tells, in steps of its own, how long products take.

# %%
from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import programs
from meshfn import sharding as sh
from torch import Tensor

RANKS, ROUNDS, STEPS, CONTEXT = 2, 5, 16, 16
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


# %%
class Timed:
    """A transport that counts its exchanges, and the seconds that they take."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.traces, self.spare = inner, inner.traces, inner.spare
        self.seconds, self.exchanges = 0.0, 0

    def _launch(self, launch: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        work = launch(*args)
        self.seconds += time.perf_counter() - start
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
        start = time.perf_counter()
        value: Tensor = self.work.wait()
        self.timed.seconds += time.perf_counter() - start
        return value


# %%
class Runner:
    """A program, stepped. timed: its transport."""

    def __init__(self, program: Any, timed: Timed, batch: int) -> None:
        self.program, self.timed = program, timed
        self.prompts = [[100 + 7 * row + i for i in range(CONTEXT)] for row in range(batch)]

    def steps(self) -> list[tuple[float, float]]:
        """Seconds of each step, and of the collectives in it."""
        state, found = self.program.prefill(self.prompts), []
        for _ in range(STEPS):
            self.timed.seconds, self.timed.exchanges = 0.0, 0
            start = time.perf_counter()
            state = self.program.decode(state)
            found.append((time.perf_counter() - start, self.timed.seconds))
        return found

    def products(self) -> float:
        """Seconds of a step that a profiler finds in products, or in the compiler's loops."""
        state = self.program.prefill(self.prompts)
        found = []
        for _ in range(STEPS):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                state = self.program.decode(state)
            mine = [e for e in profile.events() if "cpp_fused" in e.name or e.name in PRODUCTS]
            found.append(1e-6 * sum(e.self_cpu_time_total for e in mine))
        return statistics.median(found)


def split(name: str, steps: Sequence[tuple[float, float]], products: float) -> str:
    step, sent = (statistics.median(column) for column in zip(*steps, strict=True))
    rest = statistics.median(seconds - collective for seconds, collective in steps) - products
    cells = [f"{1e6 * x:9.0f} us ({x / step:5.1%})" for x in (products, sent, rest)]
    return f"  {name:10} step {1e6 * step:9.0f} us   products {cells[0]}   collectives {cells[1]}   rest {cells[2]}"


# %%
def rank_of(rank: int, store: str, model_name: str, batches: Sequence[int]) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.cpp.enable_kernel_profile = True  # loops are seen by name
    limit = datetime.timedelta(minutes=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    device_mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    mesh = sh.ProcessGroup(device_mesh).mesh
    model = programs.load(model_name, dtype=torch.float32)
    for batch in batches:
        sizes = {"batch": batch, "max_len": 64, "chunk": CONTEXT}
        runners, layout = {}, sh.ulysses(tp="tp")
        for name, compile in (("compiled", True), ("eager", False)):
            timed = Timed(mesh.transport)
            program: Any = programs.build(model, mesh=mesh.at(rank, timed), layout=layout, compile=compile, **sizes)
            runners[name] = Runner(program, timed, batch)
        if rank == 0:
            runners["one rank"] = Runner(programs.build(model, **sizes), Timed(sh.Local()), batch)
        dist.barrier()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
        for i in range(ROUNDS + 1):  # the first is not counted
            for name, runner in runners.items():
                steps = runner.steps()
                found[name] += steps if i else []
            dist.barrier()
        products = {name: runner.products() for name, runner in runners.items()}
        dist.barrier()
        if rank == 0:
            built = ", ".join(f"{name} {runner.program.build_seconds:.0f} s" for name, runner in runners.items())
            count = runners["compiled"].timed.exchanges
            print(f"\n{model.name}, batch {batch}: {count} exchanges a step; built in {built}")
            for name in runners:
                print(split(name, found[name], products[name]), flush=True)
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (f"{folder}/store", arguments.model, arguments.batch), nprocs=RANKS)
