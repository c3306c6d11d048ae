"""What records work and runs it again: a device's graphs, or the host's stand-in for them.

It knows nothing of what it records; `captured` decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

__all__ = ["CudaReplay", "HostReplay", "Replay", "replay_of"]


class Replay(Protocol):
    """Records functions that take nothing, return nothing, and read and write buffers that stay where they are. They
    run one after another, whichever are called, and leave nothing that the next one would miss."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it as often as it takes until a run makes nothing that lasts."""

    def capture(self, name: Hashable, run: Callable[[], None]) -> None:
        """Record it; whether it runs meanwhile is open, so its buffers must stand where a run changes nothing."""

    def replay(self, name: Hashable) -> None:
        """Run what was recorded under that name."""

    def release(self) -> None:
        """Forget all that was recorded, and free what it holds; also where nothing is."""


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
    """CUDA graphs, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool, stream=self._stream):
            run()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        self._graphs[name].replay()

    def release(self) -> None:
        if self._graphs:
            torch.cuda.synchronize(self._device)  # a replay may still be under way
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()


def replay_of(device: torch.device, compiled: bool) -> Replay | None:
    """How decode is replayed; None where each step is a call: on a CPU, and eagerly, where a step may wait for the
    device, which no graph can hold."""
    return CudaReplay(device) if compiled and device.type == "cuda" else None
