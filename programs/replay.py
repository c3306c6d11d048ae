"""What records work and runs it again: a device's graphs, or the host's stand-in for them.

It knows nothing of what it records; `captured` decides that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

__all__ = ["CudaReplay", "HostReplay", "OverdueError", "Replay", "replay_of"]


class Replay(Protocol):
    """Records functions that take nothing, return nothing, and read and write buffers that stay where they are. They
    run one after another, whichever are called, and leave nothing that the next one would miss."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it as often as it takes until a run makes nothing that lasts."""

    def capture(self, name: Hashable, run: Callable[[], None]) -> None:
        """Record it; whether it runs meanwhile is open, so its buffers must stand where a run changes nothing."""

    def replay(self, name: Hashable) -> None:
        """Run what was recorded under that name. Raises `OverdueError`."""

    def release(self) -> None:
        """Forget all that was recorded, and free what it holds; also where nothing is."""


class OverdueError(RuntimeError):
    """A replay did not end within its time, and may be under way for ever: the device is lost to this process."""


class HostReplay:
    """Records the functions themselves, with the tensors that they had at the capture."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, Callable[[], None]] = {}

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, name: Hashable, run: Callable[[], None]) -> None:
        self._runs[name] = run

    def replay(self, name: Hashable) -> None:
        self._runs[name]()

    def release(self) -> None:
        self._runs.clear()


class CudaReplay:
    """CUDA graphs, in one pool of memory. limit_s: of a replay that waits for peers, whom nobody else watches over; the
    host then waits for its end."""

    def __init__(self, device: torch.device, limit_s: float | None = None) -> None:
        self._device, self._limit_s, self._lost = device, limit_s, False
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def warm_up(self, run: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            # On the stream of the capture, for each of which libraries make a workspace.
            self._stream = self._stream or torch.cuda.Stream()
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run()
            here.wait_stream(self._stream)

    def capture(self, name: Hashable, run: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        # What other threads do meanwhile, a loader of data or the watchdog of a process group, is none of it.
        how: Any = {"pool": pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._device), torch.cuda.graph(graph, **how):
            run()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        self._graphs[name].replay()
        if self._limit_s is not None:
            with torch.cuda.device(self._device):
                done = torch.cuda.Event()
                done.record()
            end = time.monotonic() + self._limit_s
            while not done.query():
                if time.monotonic() > end:
                    self._lost = True
                    raise OverdueError(f"a launch did not end within {self._limit_s:g} s")
                time.sleep(0)  # others may run; a sleep of any length takes as long as a step

    def release(self) -> None:
        if self._lost:
            return  # to wait would be for ever, and what still runs reads what the graphs hold
        if self._graphs:
            torch.cuda.synchronize(self._device)  # a replay may still be under way
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()


def replay_of(device: torch.device, compiled: bool, limit_s: float | None = None) -> Replay | None:
    """How decode is replayed; None where each step is a call: on a CPU, and eagerly, where a step may wait for the
    device, which no graph can hold. limit_s: see `CudaReplay`."""
    return CudaReplay(device, limit_s) if compiled and device.type == "cuda" else None
