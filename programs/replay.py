"""Decode as one graph: captured once over static buffers, and replayed as long as nothing it reads has moved.

A `Replay` records a function without arguments and runs it again; `CapturedDecode` decides what is recorded, when, and
what invalidates it, and knows nothing of devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..functional import tree
from .steps import State

__all__ = ["CapturedDecode", "CudaReplay", "HostReplay", "Replay", "replay_of"]

_log = logging.getLogger(__name__)


class Replay(Protocol):
    """Records a function that takes nothing, returns nothing, and reads and writes buffers that stay where they are."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it as often as it takes until a run makes nothing that lasts."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record it; whether it runs meanwhile is open, so its buffers must stand where a run changes nothing."""

    def replay(self) -> None:
        """Run what was recorded."""

    def release(self) -> None:
        """Forget what was recorded, and free what it holds; also where nothing is."""


class HostReplay:
    """Records the function itself, with the tensors that it had at the capture."""

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        assert self._run is not None
        self._run()

    def release(self) -> None:
        self._run = None


class CudaReplay:
    """A CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

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

    def capture(self, run: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, stream=self._stream):
            run()
        self._graph = graph

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def release(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize(self._device)  # a replay may still be under way
            self._graph.reset()
            self._graph = None


def replay_of(device: torch.device, compiled: bool) -> Replay | None:
    """How decode is replayed; None where each step is a call: on a CPU, and eagerly, where a step may wait for the
    device, which no graph can hold."""
    return CudaReplay(device) if compiled and device.type == "cuda" else None


class CapturedDecode:
    """The decode step of a program over buffers of its own.

    step: (parameters, cache, state, end tokens, read) -> state. idle: (state, end tokens, read) with no active row;
    these tensors become the static buffers. Token, position (which says too whether a row has ended) and
    log-probability advance inside the graph. names: of the leaves of parameters and cache, for the log.
    captures: how often it was captured.
    """

    def __init__(
        self, step: Callable[..., State], replay: Replay, idle: tuple[State, Tensor, Any], names: Sequence[str]
    ) -> None:
        self._step, self._replay, self._names = step, replay, names
        self._state, self._eos, self._read = idle
        self._idle = tree.map(torch.clone, self._state)
        self.captures = 0
        self._inputs: tuple[Any, Any] | None = None
        self._places: list[tuple[Any, ...]] = []
        self._returned: State | None = None
        self._ends: Tensor | None = None

    def __call__(self, inputs: tuple[Any, Any], state: State, eos_token_id: Tensor) -> State:
        """The state after a step; a copy, which later steps leave alone.

        inputs: parameters and cache. The same object as at the last call is not looked at again.
        Raises `RuntimeError` where the capture fails; the next call tries again.
        """
        if inputs is not self._inputs:
            self._hold(inputs)
        # A state that comes back as it was returned already stands in the buffers.
        if state is not self._returned:
            _copy(self._state, state)
        if eos_token_id is not self._ends:
            self._eos.copy_(eos_token_id)
        self._returned = self._ends = None
        self._replay.replay()
        returned = tree.map(torch.clone, self._state)
        self._returned, self._ends = returned, eos_token_id
        return returned

    def prepare(self, inputs: tuple[Any, Any]) -> None:
        """Warm up and capture, so that the first step need not."""
        self._hold(inputs)

    def release(self) -> None:
        self._replay.release()
        self._forget()

    def _forget(self) -> None:
        self._inputs, self._places = None, []
        self._returned = self._ends = None

    def _hold(self, inputs: tuple[Any, Any]) -> None:
        """Inputs that lie where those of the graph do are held in place of them; for others it is captured again."""
        places = [_place(leaf) for leaf in tree.leaves(inputs)]
        if self._places != places:
            if self._places:
                pairs = zip(self._names, self._places, places, strict=True)
                moved = [name for name, old, new in pairs if old != new]
                more = f" and {len(moved) - 2} more" if len(moved) > 2 else ""
                _log.info("decode is captured again: %s%s moved", ", ".join(moved[:2]), more)
            self.release()
            self._capture(inputs)
            self._places = places
        # Held, so that no other tensor can come to lie where the graph still reads.
        self._inputs = inputs

    def _capture(self, inputs: tuple[Any, Any]) -> None:
        params, cache = inputs

        def run() -> None:
            _copy(self._state, self._step(params, cache, self._state, self._eos, self._read))

        # With no active row no run changes a byte of the cache, which may hold a generation that goes on.
        _copy(self._state, self._idle)
        try:
            self._replay.warm_up(run)
            self._replay.capture(run)
        except Exception as error:
            self.release()
            raise RuntimeError(
                f"decode: its step cannot be captured as one graph: {error}\n    fix: build(..., compile=False)"
            ) from error
        self.captures += 1
        _copy(self._state, self._idle)


def _copy(into: State, state: State) -> None:
    for old, new in zip(tree.leaves(into), tree.leaves(state), strict=True):
        old.copy_(new)


def _place(leaf: Tensor) -> tuple[Any, ...]:
    """Where a graph finds a tensor, and what it takes it for."""
    return leaf.data_ptr(), leaf.dtype, leaf.device, leaf.shape, leaf.stride()
