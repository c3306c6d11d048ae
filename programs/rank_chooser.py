"""What chooses the tokens of a rank's rows, of logits of its rows of the vocabulary.

Letters: B batch, Z vocabulary of the rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .. import functional as F
from ..functional.sampling import Controls, uniform
from .asked import Asked
from .chooser import Choice, Chooser, choose_inside, position_after
from .ranks import Ranks
from .sampling import row_seeds
from .steps import State

__all__ = ["RankChooser", "choose_inside_ranks"]


class RankChooser(Chooser):
    """seeds: of all rows. given: batch, device and arch, as `Chooser` takes them, of this rank."""

    def __init__(self, ranks: Ranks, asked: Asked, **given: Any) -> None:
        rows, self._ranks = asked.read.rows, ranks
        own, options = ranks.own(len(rows)), dict(asked.options)
        seeds = row_seeds(options.get("seed"), len(rows)) if options.get("do_sample") is True else None
        if seeds is not None:
            options["seed"] = seeds[own]
        given |= {"max_new_tokens": asked.max_new_tokens, "vocab_size": ranks.config.vocab_size}
        super().__init__(rows[own], **given, **options)
        self.seeds = seeds
        part = ranks.vocabulary
        if self.needed:
            self._counts = self._counts[:, part.start : part.stop]

    @property
    def graph(self) -> int:
        """Of ranks with parts of the vocabulary: those of as many candidates."""
        return self._candidates if self.needed and self._ranks.choice.own("Z") else super().graph

    @property
    def _candidates(self) -> int:
        rows = self._ranks.vocabulary
        most = (self._shortcuts["most"] or rows.size) if self._shortcuts["draws"] else 1
        return min(most, -(-rows.size // self._ranks.mesh["tp"]))  # no rank has more

    def _chosen(
        self, logits: Tensor, after: Tensor, counts: Tensor, eos_token_id: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._ranks.choice.own("Z") is None:
            return super()._chosen(logits, after, counts, eos_token_id, u)
        shortcuts = {name: self._shortcuts[name] for name in ("penalizes", "nucleus")}
        given = logits, after, counts, self._controls, eos_token_id, u
        return _drawn(self._ranks, *given, k=self._candidates, **shortcuts)


def choose_inside_ranks(
    ranks: Ranks, state: State, fed: Tensor, eos_token_id: Tensor, choice: Choice, k: int, arch: str | None
) -> State:
    """`choose_inside` of a rank. k: `RankChooser.graph`."""
    if ranks.choice.own("Z") is None:
        return choose_inside(state, fed, eos_token_id, choice, arch)
    after = position_after(fed)
    u = uniform(choice.controls.seed, after)
    given = state.logits, after, choice.counts, choice.controls, eos_token_id, u
    token, logprob, position, counts = _drawn(ranks, *given, k=k)
    choice.counts.copy_(counts)
    return dataclasses.replace(state, token=token, logprob=logprob, position=position)


def _drawn(
    ranks: Ranks,
    logits: Tensor,
    after: Tensor,
    counts: Tensor,
    controls: Controls,
    eos_token_id: Tensor,
    u: Tensor,
    *,
    k: int,
    **shortcuts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `sample`. after: `B`, the position of the token to come, -1 for a row that has ended."""
    rows = ranks.vocabulary
    token, logprob = F.drawn_token(logits, counts, controls, u, rows=rows, k=k, wire=ranks.choice, **shortcuts)
    place = (token - rows.start)[:, None]
    here = (after >= 0)[:, None] & (place >= 0) & (place < counts.shape[1])
    counts = counts.scatter_add(-1, place.clamp(0, counts.shape[1] - 1), here.to(counts.dtype))
    return token, logprob, F.advance(token, logprob, after, eos_token_id), counts
