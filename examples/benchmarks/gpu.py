"""Every kernel on a GPU: against fp64, and how much of the measured bandwidth it reaches.

    python examples/benchmarks/gpu.py [--out FOLDER] [--kernel NAME]

Needs this repository on the path as `meshfn`, a CUDA build of torch (2.11 on), `cuda-core` with NVRTC, and optree.
Prints each figure as it comes; at the end, or after four minutes, FOLDER holds `gpu.txt` and `gpu.json`. Each kernel
runs in a process of its own, so that one that fails is a line of the table and no more.

A figure is the time of one call in a captured graph of many, over so many copies of its arguments that none is found in
a cache. Its bound is the bytes that must move, at the bandwidth of a copy of 1 GiB measured in the same process.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 240
# Far more than a cache holds.
SPREAD = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"))
    parser.add_argument("--kernel", help="this one alone, in this process")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu.py: no CUDA device is available")
    if given.kernel:
        return measure(given.kernel)
    import _two_gpus
    from _gpu_cases import KERNELS

    begin, found = time.monotonic(), []
    for name in KERNELS:
        left = LIMIT_S - (time.monotonic() - begin)
        found += child(name, left) if left > 10 else [{"kernel": name, "failed": "no time was left"}]
    for figure in _two_gpus.figures(max(10, LIMIT_S - (time.monotonic() - begin))):
        found.append(figure)
        print(text_of(figure), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps({"device": device(), "figures": found}, indent=1))
    (given.out / "gpu.txt").write_text("\n".join([text_of(device()), *map(text_of, found)]) + "\n")
    print(f"{given.out / 'gpu.txt'} and gpu.json, after {time.monotonic() - begin:.0f} s")


def device() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    return {"name": torch.cuda.get_device_name(), "arch": f"sm_{major}{minor}", "torch": torch.__version__}


def command_of(name: str) -> list[str]:
    return [sys.executable, __file__, "--kernel", name]


def child(name: str, limit: float) -> list[dict[str, Any]]:
    """The figures of one kernel, as they come from a process of its own."""
    found: list[dict[str, Any]] = []
    process = subprocess.Popen(command_of(name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stop = threading.Timer(limit, process.kill)
    stop.start()
    rest = []
    for line in process.stdout or ():
        if line.startswith("{"):
            found.append(json.loads(line))
            print(text_of(found[-1]), flush=True)
        else:
            rest.append(line.strip())
    process.wait()
    why = f"ended with {process.returncode}" if stop.is_alive() else f"was stopped after {limit:.0f} s"
    stop.cancel()
    if process.returncode:
        found.append({"kernel": name, "failed": " / ".join([why, *rest[-3:]])})
        print(text_of(found[-1]), flush=True)
    return found


def text_of(figure: dict[str, Any]) -> str:
    if "arch" in figure:
        return f"{figure['name']}, {figure['arch']}, torch {figure['torch']}"
    if figure["kernel"] == "one_shot_all_reduce":
        from _two_gpus import text_of as of_two

        return of_two(figure)
    if "failed" in figure:
        return f"{figure['kernel']:14} FAILED  {figure['failed']}"
    if "copy_gbps" in figure:
        return f"{figure['kernel']:14} a copy of 1 GiB reads and writes {figure['copy_gbps']:.0f} GB/s"
    return (
        f"{figure['kernel']:14} {figure['label']:48} {figure['us']:8.2f} us  {figure['gbps']:6.0f} GB/s"
        f"  {figure['share']:5.1%} of a copy's  error {figure['error']:.1e} (plain {figure['plain_error']:.1e})"
    )


def measure(kernel: str) -> None:
    """Print a line of JSON for each case of a kernel."""
    from _gpu_cases import KERNELS

    copy = copy_rate() / 1e9
    print(json.dumps({"kernel": kernel, "copy_gbps": copy}), flush=True)
    for case in KERNELS[kernel]():
        try:
            error, plain_error = errors(case)
            # At least 50 calls, over copies that together are larger than any cache.
            copies = [case.make() for _ in range(max(1, min(64, SPREAD // max(case.moved, 1))))]
            calls = [functools.partial(case.op, *a) for a in copies] * -(-50 // len(copies))
            took = seconds(calls)
        except Exception as problem:
            print(json.dumps({"kernel": kernel, "failed": f"{case.label}: {problem}"}), flush=True)
            if "CUDA" in str(problem):
                sys.exit(1)  # nothing works in this process any more
            continue
        rate = case.moved / took / 1e9
        figure = {"kernel": kernel, "label": case.label, "us": took * 1e6, "gbps": rate, "share": rate / copy}
        print(json.dumps({**figure, "error": error, "plain_error": plain_error}), flush=True)


def copy_rate() -> float:
    """Bytes that a copy of 1 GiB reads and writes in a second."""
    source = torch.empty(SPREAD, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    return 2 * SPREAD / seconds([functools.partial(into.copy_, source)] * 4)


def errors(case: Any) -> tuple[float, float]:
    """The largest difference to fp64, of the op and of the plain function in the same dtype; raises where that of one
    result is more than 1.5 times the other. Each of the three calls has arguments of its own, which it may write."""
    args = case.make()
    calls = ((case.plain, torch.float64), (case.plain, None), (case.op, None))
    with torch.no_grad():
        right, usual, found = (flat(fn(*copied(args, dtype))) for fn, dtype in calls)
    pairs = []
    for f, u, r in zip(found, usual, right, strict=True):
        error, plain = (float((x - r).abs().max()) for x in (f, u))
        if not error <= 1.5 * plain + 1e-6 * float(r.abs().max()):
            raise ArithmeticError(f"error {error:.2e} against fp64, and of the plain function {plain:.2e}")
        pairs.append((error, plain))
    return max(error for error, _ in pairs), max(plain for _, plain in pairs)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def copied(value: Any, dtype: torch.dtype | None) -> Any:
    """Every tensor anew, numbers that are no integers in this dtype unless it is None."""
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(dtype if value.is_floating_point() else None, copy=True)


def flat(value: Any) -> list[torch.Tensor]:
    return [v.double() for v in value] if isinstance(value, (list, tuple)) else [value.double()]


def seconds(calls: list[Any]) -> float:
    """Of one call, the best of five replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return min(times)


if __name__ == "__main__":
    main()
