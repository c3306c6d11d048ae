"""How the phases of a program are run: prompts chunk by chunk, decode step by step, over its parameters and caches.

Letters: B batch, C tokens of a chunk, n tokens of a row.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import tree
from ..functional.cache import Cache
from .chooser import Chooser
from .generate import crossing, turned, turns_of
from .held import Held
from .model import Model
from .phase import Phase
from .prompts import AllRows, Rows, cut, lengths
from .sizes import EOS_LIMIT, READ_STEP, Sizes
from .steps import Leaves, State, packed
from .weights import Weights

__all__ = ["Running"]


class Running(Held):
    """The part of `Program` that feeds its phases."""

    # Who has which rows of a call, and who reads their prompts.
    ranks: Rows = AllRows()
    reading: Rows = AllRows()
    prefill: Phase
    decode: Phase
    _score: Phase

    def __init__(self, model: Model, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(Weights(model.params, device, dtype), device)
        self.model, self.sizes, self.dtype = model, sizes, dtype
        self._rows_read = sizes.batch  # of a call that reads prompts
        self._turns = turns_of(model.config)
        self._session = secrets.randbits(62)  # so that no program takes another's states
        self._reads: dict[int, Leaves] = {}
        with self._alone():
            self.cache = self._caches()
            self._slots = torch.arange(sizes.slots, device=device)
        self._buffers = packed(model.params, self.cache)[1]

    def _caches(self) -> tuple[Cache, ...]:
        return self.sizes.caches(self.model.config, self.dtype, self.device)

    # What the phases take.

    def _inputs(self) -> tuple[Any, Any]:
        """Parameters and caches as the steps take them."""
        return self._weights.live(), self._buffers

    def _inputs_read(self) -> tuple[Any, Any]:
        """The same, as prompts are read with."""
        return self._inputs()

    def _idle(self, phase: Phase) -> tuple[Any, ...]:
        """The other arguments of a phase, with no active row."""
        return self.sizes.idle(phase.name, self.model.config, self.dtype, self.device)

    def _read(self, tokens: int) -> Leaves:
        """The slots that a step reads, when the longest row holds so many tokens; each size is made once."""
        n = -(-tokens // READ_STEP)
        if n not in self._reads:
            self._reads[n] = self.sizes.read(self._slots, tokens, self.model.config)
        return self._reads[n]

    def _eos(self, stop: Sequence[int]) -> Tensor:
        """`EOS_LIMIT`, whatever the number of end tokens, which is no part of a graph."""
        return torch.tensor([*stop, *[-1] * (EOS_LIMIT - len(stop))], device=self.device)

    def _read_here(self, rows: list[list[int]]) -> tuple[list[list[int]], int]:
        """Of the rows of a call those whose prompts are read here, and the tokens of the longest on any rank."""
        return rows[self.reading.own(len(rows))], max(map(len, rows))

    def _chunks(self, rows: list[list[int]], most: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Leaves]]:
        """tokens `B C`, positions `B C`, last `B` of each call that reads prompts, and the slots it reads. most: tokens
        of the longest row on any rank: all ranks make as many calls, with rows or without."""
        for tokens, positions, last in cut(rows, self._rows_read, self.sizes.chunk, most):
            # A chunk without a token reads as many slots as one with some: no size of its own is compiled.
            wanted = max(1, max(map(max, positions)) + 1)
            t, p, ends = (torch.tensor(x, device=self.device) for x in (tokens, positions, last))
            yield t, p, ends, self._read(wanted)

    # The phases, run.

    def _start(self) -> State:
        """A new session: what the cache holds for an older state is gone, and no row is active."""
        self._session += 1
        return State.empty(self.sizes.batch, self.model.config.vocab_size, self.dtype, self.device)

    def _run_prefill(
        self, inputs: tuple[Any, Any], state: State, rows: list[list[int]], eos: Tensor, most: int = 0
    ) -> State:
        """The state with the rows that are not empty read into the cache, and their first new token. rows: those whose
        prompts are read here. most: see `_chunks`."""
        length = lengths(rows, self._rows_read, self.device)
        for tokens, positions, last, read in self._chunks(rows, most):
            state = self.prefill.step(*inputs, state, tokens, positions, last, length, eos, read)
        return state

    def _decode_step(self, inputs: tuple[Any, Any], state: State, eos: Tensor, tokens: int) -> State:
        """tokens: those of the longest row, the one fed included."""
        if self._captured is not None:
            return self._captured(inputs, state, eos)
        new: State = self.decode.step(*inputs, state, eos, self._read(tokens))
        return new

    def _run_score(self, rows: list[list[int]], most: int) -> Tensor:
        """`B n`, at each token the log-probability of the one after it; what stands at the last one of a row or behind
        it means nothing. rows, most: as of `_run_prefill`."""
        self._session += 1  # the cache of older states is written over
        inputs, length = self._inputs_read(), lengths(rows, self._rows_read, self.device)
        targets = [[*row[1:], 0] for row in rows]
        pairs = zip(self._chunks(rows, most), self._chunks(targets, most), strict=True)
        found = [
            self._score.step(*inputs, tokens, positions, wanted, length, read)
            for (tokens, positions, _, read), (wanted, *_) in pairs
        ]
        return torch.cat(found, 1)[: len(rows)]

    def _stepping(
        self, inputs: tuple[Any, Any], eos: Tensor, choose: Chooser, every: list[list[int]]
    ) -> Callable[[State, Tensor, int], tuple[State, Tensor, Tensor]]:
        """The steps of a generation, as `run_decode` takes them: replayed, several at once, where decode is captured;
        and where the longrope angles of a row turn, that row is read again. every: the prompts of all rows."""
        rows, longest = every[self.ranks.own(len(every))], max(map(len, every))

        def step(state: State, tokens: Tensor, n: int) -> tuple[State, Tensor, Tensor]:
            taken = tokens.shape[1] - 1
            if self._captured is not None:
                for k in (n, 1):
                    if not crossing(self._turns, rows, taken, k):
                        return self._launch(inputs, state, eos, k, choose.graph)
                state = tree.map(torch.clone, state)  # the graph's own, which it writes over
            new = self._decode_step(inputs, state, eos, longest + taken + 1)
            again, most = turned(self._turns, rows, state, taken, tokens), self._turning(every, taken)
            if most or any(again):
                new = self._run_prefill(inputs, new, again, eos, most)
            new = choose(new, state.position, eos)
            return new, new.token[:, None], new.logprob[:, None]

        return step

    def _turning(self, rows: list[list[int]], taken: int) -> int:
        """Tokens of the longest row that another rank may read again now, where this one has to take part; else 0."""
        return 0
