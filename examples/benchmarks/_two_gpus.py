"""`one_shot_all_reduce` between two GPUs, beside NCCL's all-reduce: what `gpu.py` runs where two are present.

A figure is the time of one sum in a captured graph of many, on the rank that is slower; the payloads are those of a
decode step (batch x width, bf16) and the largest that the kernel takes.
"""

from __future__ import annotations

import datetime
import functools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshfn.kernels_cuda.one_shot_all_reduce import CAP_BYTES
from meshfn.kernels_cuda.peers import CudaMemory, Link, connect
from torch import Tensor

__all__ = ["SECTION", "figures"]

SECTION = "kernel one_shot_all_reduce"
NUMBERS = (2048, 2560, 8 * 2560, 64 * 2560, CAP_BYTES // 2)
CALLS = 200


def figures(limit: float) -> Iterator[dict[str, Any]]:
    """As they come from two processes, which are stopped after so many seconds."""
    count = torch.cuda.device_count()
    if count < 2:
        yield {"section": SECTION, "skipped": f"{count} GPU{'' if count == 1 else 's'} here, and it takes 2"}
        return
    with tempfile.TemporaryDirectory() as folder:
        commands = [[sys.executable, __file__, str(rank), f"{folder}/store"] for rank in range(2)]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        stop = threading.Timer(limit, lambda: [process.kill() for process in processes])
        stop.start()
        last = ""
        for line in processes[0].stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
            last = line.strip() or last
        for rank, process in enumerate(processes):
            rest = process.communicate()[0]
            if process.returncode:
                said = [f"rank {rank} ended with {process.returncode}", *(rest or last).strip().splitlines()[-1:]]
                yield {"section": SECTION, "failed": " / ".join(said)}
        stop.cancel()


def measure(rank: int, store: str) -> None:
    """One of the two: rank 0 prints a line of JSON for each payload."""
    from _gpu_kernels import seconds

    torch.cuda.set_device(rank)
    device, limit = torch.device("cuda", rank), datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)

    def both(x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(found, x)
        return found

    def tell(word: bytes) -> list[bytes]:
        return [bytes(x.tolist()) for x in both(torch.tensor(list(word), dtype=torch.uint8, device=device))]

    link = connect(lambda: CudaMemory(device), rank, tell, torch.bfloat16, limit_s=20.0)
    found = [{"skipped": link}] if isinstance(link, str) else compared(link, both, dist.all_reduce, seconds, device)
    for figure in found:
        if rank == 0:
            print(json.dumps({"section": SECTION, **figure}), flush=True)
    if isinstance(link, Link):
        link.close()
    dist.destroy_process_group()


def compared(
    link: Link, both: Callable[[Tensor], list[Tensor]], library: Callable[[Tensor], Any], seconds: Any, device: Any
) -> Iterator[dict[str, Any]]:
    """A figure for each payload, on both ranks. both: what each brings. library: adds up in place. seconds: of one of
    some calls."""

    def slower(calls: list[Any]) -> float:
        return max(map(float, both(torch.tensor([seconds(calls)], dtype=torch.float64, device=device))))

    for n in NUMBERS:
        x, zeros = torch.randn(2, n, device=device).bfloat16()
        zeros.zero_()
        one, two = (each.double() for each in both(x))
        error = float((link.sum(x).double() - (one + two)).abs().max())
        ours = slower([functools.partial(link.sum, x)] * CALLS)
        nccl = slower([functools.partial(library, zeros)] * CALLS)
        if (why := link.failure()) is not None:
            raise RuntimeError(why)
        rate = 2 * n / ours / 1e9
        yield {"bytes": 2 * n, "us": ours * 1e6, "gbps": rate, "nccl_us": nccl * 1e6, "error": error}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    measure(int(sys.argv[1]), sys.argv[2])
