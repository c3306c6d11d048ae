"""What a rank holds while its program runs beside others: sums over a pair, a graph that all capture together, and
where it is, for what it says of a peer that is not.

Letters: B batch, n steps of a launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .. import sharding as sh
from ..sharding.opaque import Port
from .agreement import during, named
from .chooser import Choice
from .held import Held
from .pair_sums import PairSums
from .rank_chooser import choose_inside_ranks
from .ranks import Ranks
from .replay import OverdueError, Replay, replay_of
from .steps import State
from .weights import Place

__all__ = ["RankHeld"]


class RankHeld(Held):
    """`Held` of a rank among several. sums: what adds up over its pair, and is closed together."""

    ranks: Ranks
    sums: PairSums
    # Behind which exchanges are nodes of a graph; None where steps run eagerly. And why none is captured.
    _port: Port | None
    _why_calls: str | None
    # Which part of a call runs; and how many steps of decode have since prefill.
    _at = "build"
    _steps_taken = 0
    # Where the leaves lay that the captured graphs read.
    _captured_at: list[Place] | None = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with super()._alone(), during(lambda: self._at):
            try:
                yield
            except OverdueError as error:
                raise self._lost(error) from error
            if not self._closed:
                self.sums.check()  # before a caller sees a result

    # Decode, captured.

    def _capture(self, *given: Any) -> None:
        """All ranks at once, since a warm-up sends. Raises on every rank where one fails."""
        if self._replay is None:
            return
        self._capture_again([rank for rank, moved in self.ranks.beside(self._moved) if moved])
        try:
            super()._capture(*given)
            self._captured_at = self._weights.read_at()
        except Exception:
            self.ranks.agreement.refuse("build")
            raise
        self.ranks.agreement.check("build", {"what to capture": "decode"})

    @property
    def _moved(self) -> bool:
        """Whether graphs read where some leaf lies no more."""
        return self._captured is not None and self._captured_at != self._weights.read_at()

    def _capture_again(self, moved: list[int]) -> None:
        """moved: the ranks on which a leaf did, the same list on all that capture together."""
        if self._captured is not None and moved:
            self._captured.drop(f"leaves moved on {named(moved)}")
            self._captured_at = self._weights.read_at()

    @functools.cached_property
    def _replay(self) -> Replay | None:
        return None if self._why_calls else replay_of(self.device, self.compiled, self.sums.limit_s)

    def _others_failed(self, failed: bool) -> str:
        """Of the ranks that have the same rows: with others no step meets."""
        with during("the agreement of ranks on a graph"):
            others = [rank for rank, found in self.ranks.beside(failed) if found and rank != self.ranks.mesh.rank]
        return f"{named(others)} raised, and says why" if others else ""

    def _choose_inside(self, state: State, fed: Tensor, eos: Tensor, choice: Choice, graph: int) -> State:
        return choose_inside_ranks(self.ranks, state, fed, eos, choice, graph, self.target.compiled_for)

    def _launch(
        self, inputs: tuple[Any, Any], state: State, eos: Tensor, n: int, options: int
    ) -> tuple[State, Tensor, Tensor]:
        self._step(n)
        return super()._launch(inputs, state, eos, n, options)

    def _step(self, n: int) -> None:
        first, self._steps_taken = self._steps_taken + 1, self._steps_taken + n
        which = f"step {first}" if n == 1 else f"steps {first} to {first + n - 1}"
        self._at = f"decode, {which} after prefill"

    # The end.

    def close(self) -> None:
        """As of any program; where ranks have mapped each other's memory (`plan.sums`), all of them close together."""
        super().close()
        if self._port is not None:
            self._port.close()
        self.sums.close(together=True)

    def _lost(self, error: OverdueError) -> sh.TransportError:
        """A launch waits for a peer for ever: nothing more is to be had of the device, nor released."""
        self._closed = True
        self.sums.abandon()
        return sh.TransportError(
            f"rank {self.ranks.mesh.rank}: {error}\n"
            "    a peer is gone, was slower than the time limit, or made another call, and this rank's graph waits for "
            f"it     mesh: {self.ranks.mesh}\n    fix: end all ranks and build the program again"
        )

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # the others may not come
            self.sums.close(together=False)
        super().__exit__(*error)
