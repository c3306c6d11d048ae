"""A kernel for `gpu.py`: its cases against fp64, then timed in captured graphs.

A figure is the time of one call in a graph of many, over so many copies of its arguments that none is found in a cache.
Its bound is the bytes that must move, at the bandwidth of a copy of 1 GiB measured in the same process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Kernel", "bandwidth", "copied", "copy_rate", "errors", "tensors"]

# Far more than a cache holds.
SPREAD = 1 << 30
# name of a device -> bytes a second, as its datasheet says
DATASHEETS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "B200": 8.0e12}


def datasheet() -> float | None:
    name = torch.cuda.get_device_name()
    return next((rate for known, rate in DATASHEETS.items() if known in name), None)


class Kernel:
    """name: of `_gpu_cases.KERNELS`. Made, its cases are compared; called, they are timed."""

    def __init__(self, name: str) -> None:
        from _gpu_cases import KERNELS

        self.name, self.cases, self.failed = name, [], []
        for case in KERNELS[name]():
            try:
                self.cases.append((case, *errors(case)))
            except Exception as problem:
                self.failed.append({"section": name, "failed": f"{case.label}: {problem}"})
                if "CUDA" in str(problem):
                    break  # nothing works in this process any more

    def __call__(self) -> Iterator[dict[str, Any]]:
        yield from self.failed
        if any("CUDA" in each["failed"] for each in self.failed):
            return
        copy = copy_rate()
        for case, error, plain_error in self.cases:
            copies = [case.make() for _ in range(max(1, min(64, SPREAD // max(case.moved, 1))))]
            took = seconds([functools.partial(case.op, *a) for a in copies] * -(-50 // len(copies)))
            del copies
            told = {"us": took * 1e6, "gbps": case.moved / took / 1e9, "share": case.moved / took / copy}
            yield {"section": self.name, "label": case.label, **told, "error": error, "plain_error": plain_error}


def bandwidth() -> Iterator[dict[str, Any]]:
    yield {"section": "bandwidth", "copy": copy_rate(), "datasheet": datasheet()}


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


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
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
