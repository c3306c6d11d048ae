"""What an exchange costs: `reshard` beside DTensor's `redistribute` and a bare collective, on gloo processes; and a
collective of small tensors between simulated ranks.

    python examples/benchmarks/sharding.py [--ranks 2]

Each round times every engine in turn, and a figure is the median of the rounds. "bare" is the collective alone on
buffers that are already packed, nothing before it or after it: what no layout change can undercut.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import sharding as sh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SIZES = {"B": 1, "S": 4096, "H": 16, "E": 64}
CASES = {
    # name -> the pair, and what DTensor calls its two sides
    "all-to-all": ("B S/u H E -> B S H/u E", Shard(1), Shard(2)),
    "all-gather": ("B S/u H E -> B S H E", Shard(1), Replicate()),
}


def rounds(engines: dict[str, Callable[[], Any]], n: int, each: int) -> dict[str, float]:
    """Median seconds of a call, the engines in turn."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(n + 1):
        for name, fn in engines.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(each):
                fn()
            if i:  # the first round warms up
                found[name].append((time.perf_counter() - start) / each)
    return {name: statistics.median(times) for name, times in found.items()}


def rank(r: int, n: int, store: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=r, world_size=n, init_method=f"file://{store}")
    device_mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("u",))
    mesh = sh.ProcessGroup(device_mesh).mesh
    for tokens, each in ((64, 50), (SIZES["S"], 4)):
        sizes = {**SIZES, "S": tokens}
        for name, (pair, left, right) in CASES.items():
            spec = sh.Spec.parse(pair.split("->")[0])
            x = torch.randn(spec.local(sizes, mesh, r)).requires_grad_()
            there = DTensor.from_local(x, device_mesh, [left])
            flat = x.detach().flatten()
            whole = torch.empty(flat.numel() * (1 if name == "all-to-all" else n))
            bare = dist.all_to_all_single if name == "all-to-all" else dist.all_gather_into_tensor
            y, z = sh.reshard(x, pair, mesh, **sizes), there.redistribute(placements=[right])
            assert torch.equal(y, z.to_local())
            g = torch.randn_like(y)

            def ours(x: Any = x, pair: str = pair, sizes: Any = sizes, g: Any = g) -> Any:
                return torch.autograd.grad(sh.reshard(x, pair, mesh, **sizes), x, g)

            # What each rank adds to the gradient of a replicated value, which DTensor drops unless it is told.
            back = Partial() if right == Replicate() else right

            def theirs(x: Any = x, left: Any = left, right: Any = right, back: Any = back, g: Any = g) -> Any:
                y = DTensor.from_local(x, device_mesh, [left]).redistribute(placements=[right])
                return torch.autograd.grad(y.to_local(grad_placements=[back]), x, g)

            plain, placed = x.detach(), there.detach()
            forward = rounds(
                {
                    "reshard": lambda x=plain, p=pair, s=sizes: sh.reshard(x, p, mesh, **s),
                    "DTensor": lambda t=placed, p=right: t.redistribute(placements=[p]).to_local(),
                    "bare": lambda w=whole, f=flat, b=bare: b(w, f),
                },
                9, each,
            )  # fmt: skip
            both = rounds({"reshard": ours, "DTensor": theirs}, 9, each)
            if r == 0:
                print(f"{name} of {tokens} tokens ({flat.numel() * 4 / 1e6:.2f} MB a rank), {n} ranks")
                show("forward", forward)
                show("and backward", both)
    dist.destroy_process_group()


def show(what: str, found: dict[str, float]) -> None:
    """One line: microseconds, and their ratios to reshard."""
    words = [f"{name} {seconds * 1e6:8.0f} us ({seconds / found['reshard']:.2f})" for name, seconds in found.items()]
    print(f"    {what:<13}" + "   ".join(words))


def simulated(n: int, turns: int = 300) -> None:
    """Collectives of small tensors between simulated ranks."""

    def body(x: torch.Tensor, *, mesh: sh.Mesh) -> torch.Tensor:
        for _ in range(turns):
            x = sh.reshard(x, "S/u D -> S D/u", mesh, S=16)
            x = sh.reshard(x, "S D/u -> S/u D", mesh, D=16)
        return x

    run = sh.simulate(body, sh.Mesh(u=n), "S/u D", "S/u D")
    times, back = [], []
    for _ in range(6):
        x = torch.randn(16, 16, requires_grad=True)
        start = time.perf_counter()
        y = run(x)
        middle = time.perf_counter()
        y.sum().backward()
        times.append((middle - start) / turns / 2)
        back.append((time.perf_counter() - middle) / turns / 2)
    forward, backward = (statistics.median(t[1:]) * 1e3 for t in (times, back))
    print(f"simulated, {n:2} ranks: {forward:.2f} ms a collective, {backward:.2f} ms in backward")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    n = parser.parse_args().ranks
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for ranks in (2, 4, 16):
        simulated(ranks)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (n, os.path.join(folder, "store")), nprocs=n)


if __name__ == "__main__":
    main()
