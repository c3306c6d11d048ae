"""What a program holds while it runs: weights, a captured graph, and the right to be alone with them."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from .. import functional as F
from .captured import CapturedDecode
from .chooser import Choice, choose_inside
from .replay import Replay, replay_of
from .sizes import Target
from .steps import State
from .weights import Weights

__all__ = ["Held"]


class Held:
    """The part of `Program` that is taken and released."""

    compiled: bool
    target: Target

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.device = device
        self._weights = weights
        self._captured: CapturedDecode | None = None
        self._busy = threading.Lock()
        self._closed = False

    def _replace(self, new: F.Decoder) -> bool:
        """Take other parameters -> whether the next call compiles again, of which who sets them is warned."""
        moved = self._weights.replace(new)
        if moved and self.compiled:
            few = ", ".join(moved[:2]) + (f" and {len(moved) - 2} more" if len(moved) > 2 else "")
            warnings.warn(
                f"program.params: {few} lie otherwise in memory than those before, so the next call compiles again; "
                "copy_ into the old ones compiles nothing",
                stacklevel=3,
            )
        return bool(moved) and self.compiled

    def refresh(self) -> None:
        """Bring what is derived from the parameters, the plan's converted copies, up to date, in place. Each call does
        so itself before it reads them; this moves the copying to an earlier moment."""
        with self._alone():
            self._weights.refresh()

    def _capture(self, inputs: tuple[Any, Any], made_for: Callable[[Replay], CapturedDecode]) -> None:
        """Decode, where it is replayed: what has no options and is not captured yet."""
        if self._captured is None and self._replay is not None:
            self._captured = made_for(self._replay)
        if self._captured is not None:
            self._captured.prepare(inputs)

    @functools.cached_property
    def _replay(self) -> Replay | None:
        return replay_of(self.device, self.compiled)

    def _choose_inside(self, state: State, fed: Tensor, eos: Tensor, choice: Choice, graph: int) -> State:
        """As `Chooser.__call__`, in a graph. graph: `Chooser.graph`."""
        return choose_inside(state, fed, eos, choice, self.target.compiled_for)

    def _others_failed(self, failed: bool) -> str:
        """Why ranks that capture now beside this one could not, of whether it could not itself; "" where all could."""
        return ""

    def _launch(
        self, inputs: tuple[Any, Any], state: State, eos: Tensor, n: int, options: int
    ) -> tuple[State, Tensor, Tensor]:
        assert self._captured is not None
        return self._captured.launch(inputs, state, eos, n, options=options)

    def close(self) -> None:
        """Release the captured graph, and with it what it holds of communication; before process groups are
        destroyed. Then the program runs no more; to close it again does nothing."""
        if not self._closed:
            with self._alone():
                self._closed = True
                if self._captured is not None:
                    self._captured.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this program is closed\n    fix: build another one")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this program is in use by another call, and has one cache\n    fix: build a second one")
        # What is ambient has no part in a step: it runs without gradients, in the program's own dtype, on its device.
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self._busy.release()
