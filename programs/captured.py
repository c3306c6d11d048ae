"""Decode as one graph: what is captured, when, and what invalidates it. A `Replay` does the recording.

Everything of a step advances inside: token, log-probability, position (which says too whether a row has ended), counts
of tokens, and, since a row draws by a function of its seed and position, what it draws by. A launch is one step or
several; each step's tokens are left in a column of their own, so that between launches nothing is copied but these.

Letters: B batch, n steps of a launch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from .chooser import Choice
from .replay import Replay
from .steps import State

__all__ = ["KINDS", "CapturedDecode", "launch_steps", "leaf_names"]

_log = logging.getLogger(__name__)

# The steps of a launch, where a call has so many left. A launch costs the host some microseconds, and the device a gap
# and a copy of the state; so few are enough to spread that, and a capture takes as long as it has steps. It divides
# how often the end is looked for.
STEPS = 8
# Of options: a rank among several captures one for each number of candidates that it sends.
KINDS = 4


def launch_steps(max_len: int) -> int:
    """The steps of a longer launch, in a program of that size; 1 where no call has so many."""
    # The first token is the prompt's, and the second comes from prefill.
    return STEPS if max_len - 2 >= STEPS else 1


def leaf_names(params: F.Decoder, caches: Sequence[Cache]) -> list[str]:
    """Of the leaves of both, in their order."""
    names = [f"cache[{i}]{path}" for i, each in enumerate(caches) for path in tree.paths(each)]
    return [f"params{path}" for path in tree.paths(params)] + names


class CapturedDecode:
    """The decode steps of a program over buffers of its own.

    step: (parameters, cache, state, end tokens, read) -> state. idle: (state, end tokens, read) with no active row;
    these tensors become the static buffers. names: of the leaves of parameters and cache, for the log. steps: of a
    longer launch. choose: (state after a step, position that it was fed at, end tokens, choice, options) -> the state
    with its token chosen by them. others_failed: (whether this rank could not capture) -> why others could not, which
    capture the same now.
    captures: how many graphs were captured: one for each length of a launch, and each `Chooser.graph`.
    """

    def __init__(
        self,
        step: Callable[..., State],
        replay: Replay,
        idle: tuple[State, Tensor, Any],
        names: Sequence[str],
        steps: int,
        choose: Callable[[State, Tensor, Tensor, Choice, int], State],
        others_failed: Callable[[bool], str],
    ) -> None:
        self._step, self._replay, self._names, self._choose = step, replay, names, choose
        self._others_failed = others_failed
        self._state, self._eos, self._read = idle
        self._idle = tree.map(torch.clone, self._state)
        self._choice: Choice | None = None
        self.steps, self.captures = steps, 0
        self._inputs: tuple[Any, Any] | None = None
        self._places: list[tuple[Any, ...]] = []
        # By steps and `Chooser.graph`: tokens and log-probabilities `B n` of the last launch.
        self._columns: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._returned: State | None = None
        self._ends: Tensor | None = None

    def __call__(self, inputs: tuple[Any, Any], state: State, eos_token_id: Tensor) -> State:
        """The state after a step, with the most likely token; a copy, which later steps leave alone.

        inputs: parameters and cache. The same object as at the last call is not looked at again.
        Raises `RuntimeError` where the capture fails; the next call tries again.
        """
        self.launch(inputs, state, eos_token_id, 1)
        self._returned = tree.map(torch.clone, self._state)
        return self._returned

    def launch(
        self, inputs: tuple[Any, Any], state: State, eos_token_id: Tensor, n: int, *, options: int = 0
    ) -> tuple[State, Tensor, Tensor]:
        """n steps, 1 or `steps` -> the state after them, tokens and log-probabilities `B n`: buffers, which the next
        launch writes over. options: `Chooser.graph`; but for 0 tokens are chosen as `choice` says. Otherwise as a
        call."""
        if inputs is not self._inputs:
            self._hold(inputs)
        if (n, options) not in self._columns:
            if options and len({each for _, each in self._columns if each} | {options}) > KINDS:
                self.drop(f"options of {KINDS} kinds are held at most")
                self._hold(inputs)
            self._capture(inputs, n, options)
        # A state that comes back as it was returned already stands in the buffers.
        if state is not self._state and state is not self._returned:
            _copy(self._state, state)
        if eos_token_id is not self._ends:
            self._eos.copy_(eos_token_id)
        self._returned = self._ends = None
        self._replay.replay((n, options))
        self._ends = eos_token_id
        return self._state, *self._columns[n, options]

    @property
    def choice(self) -> Choice:
        """The buffers of options, to be filled before the first launch with them."""
        if self._choice is None:
            batch, vocab_size = self._state.logits.shape
            self._choice = Choice.off(batch, vocab_size, self._state.logits.device)
        return self._choice

    def prepare(self, inputs: tuple[Any, Any]) -> None:
        """Warm up and capture what has no options and is not captured yet, so that no step need."""
        self._hold(inputs)
        for n in dict.fromkeys((1, self.steps)):
            if (n, 0) not in self._columns:
                self._capture(inputs, n, options=0)

    def drop(self, why: str) -> None:
        """Capture all again, each graph when it is needed."""
        _log.info("decode is captured again: %s", why)
        self.release()

    def release(self) -> None:
        self._replay.release()
        self._columns.clear()
        self._inputs, self._places = None, []
        self._returned = self._ends = None

    def _hold(self, inputs: tuple[Any, Any]) -> None:
        """Inputs that lie where those of the graphs do are held in place of them; for others graphs are captured again,
        each when it is needed."""
        places = [_place(leaf) for leaf in tree.leaves(inputs)]
        if self._places != places:
            if self._places:
                pairs = zip(self._names, self._places, places, strict=True)
                moved = [name for name, old, new in pairs if old != new]
                more = f" and {len(moved) - 2} more" if len(moved) > 2 else ""
                self.drop(f"{', '.join(moved[:2])}{more} moved")
            self._places = places
        # Held, so that no other tensor can come to lie where the graphs still read.
        self._inputs = inputs

    def _capture(self, inputs: tuple[Any, Any], n: int, options: int) -> None:
        params, cache = inputs
        shape = self._state.token.shape[0], n
        tokens, logprobs = (x.new_zeros(shape) for x in (self._state.token, self._state.logprob))
        choice = self.choice if options else None

        def run(n: int) -> None:
            state, steps = self._state, []
            for _ in range(n):
                fed, state = state.position, self._step(params, cache, state, self._eos, self._read)
                if choice is not None:
                    state = self._choose(state, fed, self._eos, choice, options)
                steps.append(state)
            torch.stack([each.token for each in steps], 1, out=tokens[:, :n])
            torch.stack([each.logprob for each in steps], 1, out=logprobs[:, :n])
            _copy(self._state, state)

        # A generation may be under way. With no active row no run changes a byte of its cache, nor counts a token.
        before, failed = tree.map(torch.clone, self._state), None
        _copy(self._state, self._idle)
        try:
            # Of two steps the second takes what the first returns, and further ones are like it.
            self._replay.warm_up(functools.partial(run, min(n, 2)))
            self._replay.capture((n, options), functools.partial(run, n))
        except Exception as error:
            failed = error
        finally:
            _copy(self._state, before)
        others = self._others_failed(failed is not None)
        if failed is not None or others:
            self.release()
            raise RuntimeError(
                f"decode: its step cannot be captured as one graph: {failed or others}\n"
                "    fix: build(..., compile=False)"
            ) from failed
        self.captures += 1
        self._columns[n, options] = tokens, logprobs


def _copy(into: State, state: State) -> None:
    for old, new in zip(tree.leaves(into), tree.leaves(state), strict=True):
        old.copy_(new)


def _place(leaf: Tensor) -> tuple[Any, ...]:
    """Where a graph finds a tensor, and what it takes it for."""
    return leaf.data_ptr(), leaf.dtype, leaf.device, leaf.shape, leaf.stride()
