"""What chooses the tokens of one call: after a step, or inside the graph of one.

Letters: B batch, Z vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..functional import tree
from ..functional.sampling import Controls, sample, uniform
from ..kernels_cuda import sample_options
from .sampling import SamplingOptions, prompt_counts, read_controls
from .steps import State

__all__ = ["Choice", "Chooser", "choose_inside", "position_after"]


class Choice(NamedTuple):
    """All that the options of a call are to a graph: buffers, which each call fills. counts: `B Z`, int32, how often
    each token stands in prompt and generated tokens."""

    controls: Controls
    counts: Tensor

    @classmethod
    def off(cls, batch: int, vocab_size: int, device: torch.device) -> Choice:
        """Buffers that ask for the most likely tokens."""
        counts = torch.zeros(batch, vocab_size, dtype=torch.int32, device=device)
        return cls(Controls.off(batch, vocab_size, device), counts)


def choose_inside(state: State, fed: Tensor, eos_token_id: Tensor, choice: Choice, arch: str | None) -> State:
    """As `Chooser.__call__`, of whatever the buffers say: nothing here depends on a value that a host would read, so
    one graph serves all options."""
    after = position_after(fed)
    if sample_options.supports(state.logits, arch) is None:
        given = state.logits, after, choice.counts, choice.controls, eos_token_id
        token, logprob, position = sample_options.sample(*given)
    else:
        token, logprob, position, counts = sample(state.logits, after, choice.counts, choice.controls, eos_token_id)
        choice.counts.copy_(counts)
    return dataclasses.replace(state, token=token, logprob=logprob, position=position)


def position_after(fed: Tensor) -> Tensor:
    """fed: `B`, see `Chooser.__call__` -> `B`, the position of the token to come, -1 for a row that has ended."""
    return torch.where(fed >= 0, fed + 1, -1)


class Chooser:
    """How one call of `generate` chooses its tokens. Where the options ask for nothing else, the most likely ones that
    a step ends with stay, and nothing is computed.

    rows: the prompts. options: those of `read_controls`. seeds: of the rows, None where none is drawn. arch: of a GPU
    that logits are on, where one kernel does it all. needed: whether anything is computed.
    Not compiled: that takes 20 s, and saves a fifth at most, see examples/benchmarks/sampling.py.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        *,
        batch: int,
        vocab_size: int,
        max_new_tokens: int,
        device: torch.device,
        arch: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        controls, seeds = read_controls(rows=len(rows), batch=batch, vocab_size=vocab_size, device="cpu", **options)
        found = {path[1:]: leaf.tolist() for path, leaf in tree.paths(controls).items()}
        drawn = [k for k, draws in zip(found["top_k"], found["do_sample"], strict=True) if draws]
        self.seeds = seeds if drawn else None
        off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        penalizes = any(value != silent for name, silent in off.items() for value in found[name])
        self.needed = bool(drawn) or penalizes
        if not self.needed:
            return
        if device.type == "mps":
            raise ValueError('generate: sampling computes in float64, which mps lacks\n    fix: device="cpu"')
        # What the options leave out, known here and so spared on the device.
        limited = any(k < vocab_size for k in drawn)
        nucleus = any(p < 1 for p in found["top_p"])
        self._shortcuts: Any = {
            "draws": bool(drawn),
            "penalizes": penalizes,
            "nucleus": nucleus,
            "most": max(drawn) if limited else 0,
        }
        self._controls, self._counts = controls, prompt_counts(rows, batch, vocab_size, "cpu")
        self._arch = arch
        self._lengths = torch.tensor([*map(len, rows), *[0] * (batch - len(rows))], device="cpu")
        self._most, self._seed = max_new_tokens, controls.seed
        self._table: Tensor | None = None

    def __call__(self, state: State, fed: Tensor, eos_token_id: Tensor) -> State:
        """The state of a prefill or a decode step with its token chosen anew. fed: `B`, the position of the token that
        gave these logits, -1 for a row that has ended."""
        if not self.needed:
            return state
        after = position_after(fed)
        self._controls = tree.map(lambda t: t.to(fed.device), self._controls)  # once; later it is there
        self._counts = self._counts.to(fed.device)
        if sample_options.supports(state.logits, self._arch) is None:
            counts = self._counts if self._shortcuts["penalizes"] else None
            token, logprob, position = sample_options.sample(state.logits, after, counts, self._controls, eos_token_id)
            return dataclasses.replace(state, token=token, logprob=logprob, position=position)
        u = self._uniform(after)
        token, logprob, position, counts = self._chosen(state.logits, after, self._counts, eos_token_id, u)
        if counts is not self._counts:
            self._counts.copy_(counts)
        return dataclasses.replace(state, token=token, logprob=logprob, position=position)

    @property
    def graph(self) -> int:
        """Which graphs choose as this call does: 0, those that compute nothing; 1, those of all options."""
        return int(self.needed)

    def fill(self, choice: Choice) -> None:
        """Put the options of this call into the buffers of a graph, and choose by these from now on. The counts of its
        prompts too, which the graph counts on in, where some row is penalized by them."""
        for buffer, value in zip(tree.leaves(choice.controls), tree.leaves(self._controls), strict=True):
            buffer.copy_(value)
        if self._shortcuts["penalizes"]:
            choice.counts.copy_(self._counts)
        self._controls, self._counts = choice

    def _uniform(self, after: Tensor) -> Tensor:
        """What each row draws by, `uniform` of its seed and position: made for every position to come at once, since it
        is a hundred small operations."""
        if self._table is None:
            positions = self._lengths[:, None] + torch.arange(self._most, device="cpu")
            self._table = uniform(self._seed[:, None], positions).to(after.device)
            self._lengths = self._lengths.to(after.device)
        place = (after - self._lengths).clamp(0, self._most - 1)
        return self._table.gather(1, place[:, None])[:, 0]

    def _chosen(
        self, logits: Tensor, after: Tensor, counts: Tensor, eos_token_id: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return sample(logits, after, counts, self._controls, eos_token_id, u=u, **self._shortcuts)
