"""Attention whose tokens become heads and come back: `sh.ulysses` beside DeepSpeed's DistributedAttention, on gloo.

    make .venv-peers/made
    .venv-peers/bin/python examples/benchmarks/attention_layouts.py [--tokens 2048] [--ranks 2 4]

Both run in the same processes, on the same tensors, around the same local function, which reads q, k and v and costs
next to nothing beside their exchange. Each round times both, in an order that alternates; a figure is the median of the
rounds, each as long as the slowest rank took, and a ratio the median of each round's own (its quartiles behind it).
Above 1 meshfn is faster. Before that they must agree: outputs and gradients.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

# Read when deepspeed is imported, and by each process that is started. One thread each, as there are few cores.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import sharding as sh
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
E = 64
ROUNDS, CALLS = 15, 4


class Case(NamedTuple):
    what: str
    B: int
    H: int
    K: int


CASES = {
    2: [
        Case("even", 1, 16, 16),
        Case("even", 2, 16, 16),
        Case("even, grouped", 1, 16, 4),
        Case("even, grouped", 2, 16, 4),
        Case("uneven", 1, 9, 9),
        Case("uneven", 2, 9, 9),
        Case("uneven, grouped", 1, 9, 3),
        Case("uneven, grouped", 2, 15, 5),
        Case("K < ranks", 1, 16, 1),
    ],
    4: [
        Case("even", 1, 16, 16),
        Case("even", 2, 16, 16),
        Case("even, grouped", 1, 16, 4),
        Case("even, grouped", 2, 16, 4),
        Case("uneven", 1, 18, 18),
        Case("uneven", 2, 9, 9),
        Case("uneven, grouped", 1, 18, 6),
        Case("uneven, grouped", 2, 15, 5),
        Case("K < ranks", 1, 16, 2),
        Case("K < ranks", 2, 15, 3),
    ],
}


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of every input, head by head, in one pass over each."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    return (grouped * k.mean(1, keepdim=True).unsqueeze(3) + v.unsqueeze(3)).flatten(2, 3)


def theirs() -> Attention:
    """DeepSpeed's attention over all ranks."""
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    # Or it compiles an all-reduce in shared memory, for half a minute, which this attention never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    # Uneven heads ask the mpu which rank this is, and it alone.
    groups.mpu = types.SimpleNamespace(get_sequence_parallel_rank=dist.get_rank)
    # 2, 1: heads are scattered and tokens gathered, of `B S H E`; the last 0 says that the batch comes first.
    layer = DistributedAttention(local, dist.group.WORLD, 2, 1)
    return lambda q, k, v: layer(q, k, v, 0)


def rounds(engines: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of a call in each round, of the slowest rank."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(ROUNDS + 1):
        for name, fn in list(engines.items())[:: 1 if i % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                fn()
            if i:  # the first round warms up
                found[name].append((time.perf_counter() - start) / CALLS)
    slowest = torch.tensor(list(found.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


def agree(engines: dict[str, Attention], inputs: tuple[Tensor, ...], do: Tensor) -> None:
    """Raise where the engines differ, in the output or a gradient."""
    found = {name: (out := core(*inputs), *torch.autograd.grad(out, inputs, do)) for name, core in engines.items()}
    first, *others = found.values()
    for other in others:
        for x, y in zip(first, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def time_case(case: Case, tokens: int, mesh: sh.Mesh, deepspeed: Attention) -> dict[str, dict[str, list[float]]]:
    """Rounds of the forward pass alone, and of both."""
    ours = sh.shard(local, sh.ulysses("u"), mesh, S=tokens, H=case.H, K=case.K)
    engines: dict[str, Attention] = {"meshfn": ours}
    if mesh.size <= case.K:  # it refuses fewer
        engines["DeepSpeed"] = deepspeed
    heads = {"q": case.H, "k": case.K, "v": case.K, "do": case.H}
    plain = [torch.randn(case.B, tokens // mesh.size, n, E) for n in heads.values()]
    q, k, v, do = plain[0].clone(), plain[1].clone(), plain[2].clone(), plain[3]
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    agree(engines, inputs, do)
    return {
        "forward": rounds({name: lambda c=core: c(*plain[:3]) for name, core in engines.items()}),
        "and backward": rounds(
            {name: lambda c=core: torch.autograd.grad(c(*inputs), inputs, do) for name, core in engines.items()}
        ),
    }


def show(case: Case, tokens: int, timed: dict[str, dict[str, list[float]]]) -> None:
    """A line: milliseconds of each, and their ratio."""
    cells = []
    for found in timed.values():
        cells += [f"{statistics.median(times) * 1e3:8.2f}" for times in found.values()]
        if "DeepSpeed" not in found:
            cells.append(f"{'refuses':>9}" + " " * 20)
            continue
        ratios = [b / a for a, b in zip(found["meshfn"], found["DeepSpeed"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"  {middle:5.2f} ({low:.2f} .. {high:.2f})")
    sizes = f"B={case.B} S={tokens} H={case.H} K={case.K}"
    print(f"  {case.what:17}{sizes:24}" + "".join(cells), flush=True)


def rank(r: int, n: int, store: str, tokens: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    torch.manual_seed(r)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=n, timeout=limit)
    mesh = sh.ProcessGroup(init_device_mesh("cpu", (n,), mesh_dim_names=("u",))).mesh
    deepspeed = theirs()
    if r == 0:
        print(f"{n} ranks, E={E}, fp32, milliseconds a call", flush=True)
        columns = f"{'meshfn':>8}{'DeepSpeed':>10}  ratio"
        print(f"{'':43}{'forward: ' + columns:38}and backward: {columns}", flush=True)
    for case in CASES[n]:
        timed = time_case(case, tokens, mesh, deepspeed)
        if r == 0:
            show(case, tokens, timed)
    dist.barrier()
    os._exit(0)  # a process with deepspeed in it now and then aborts where it ends as usual


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="S, of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=list(CASES), help="processes")
    given = parser.parse_args()
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        sys.exit("no deepspeed here: `make .venv-peers/made`, and then this with .venv-peers/bin/python")
    for n in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (n, os.path.join(folder, "store"), given.tokens), nprocs=n)


if __name__ == "__main__":
    main()
