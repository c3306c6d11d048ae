"""A program over ranks: what one rank of a mesh runs of prefill, decode and score, beside the others.

    program = programs.build(model, mesh=at, layout=sh.ulysses(tp="tp"), batch=4)   # on every rank, with its own mesh
    program.generate(prompts)                                                       # on every rank, the same call

Every rank is called with all prompts, and returns all of what is generated. Collectives of a step are its layers' own
and one for the choice of a token; those of a call are told by `agree`, `anywhere` and `of_all` of `Ranks`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from ..sharding import Layout, Mesh
from .asked import Asked, read_asked
from .generate import now
from .handover import Handover, reads_others
from .model import Model
from .program import Program
from .prompts import Prompts
from .rank_plan import RankPlan, make_rank_plan
from .ranks import Ranks
from .sampling import Chooser, row_seeds
from .sizes import Sizes
from .steps import State, make_steps, packed
from .weights import Weights

__all__ = ["RankProgram"]


class RankProgram(Program):
    """A rank's own, which runs eagerly: ranks may be threads, and Dynamo is not safe among these. params: its shards;
    may be set to others, or to a whole model's.

    prefill_layout: by which prompts are read, `layout` unless given; caches are then handed over to it.
    """

    def __init__(
        self, model: Model, sizes: Sizes, device: torch.device, dtype: torch.dtype, *, mesh: Mesh, layout: Layout,
        prefill_layout: Layout | None = None,
    ) -> None:  # fmt: skip
        self.ranks = Ranks(model.config, mesh, layout, device)
        self._all, self.reading = sizes, self.ranks
        own = dataclasses.replace(model, params=self.ranks.params(model.params))
        if prefill_layout is not None:
            self.reading = Ranks(model.config, mesh, prefill_layout, device)
        super().__init__(own, self.ranks.sizes(sizes), device, dtype, (), False, False)
        self.batch, self._rows_read = sizes.batch, self.reading.sizes(sizes).batch
        self._weights_read, self._over = self._weights, None
        if self.reading is not self.ranks:
            self._over = Handover(self.reading, self.ranks, sizes)
            if reads_others(self.reading, self.ranks, model.params):
                self._weights_read = Weights(self.reading.params(model.params), device, dtype)

    @property
    def params(self) -> F.Decoder:
        return self._weights.params

    @params.setter
    def params(self, new: F.Decoder) -> None:
        read = self.reading.params(new) if self._weights_read is not self._weights else None  # raises before any is set
        self._weights.replace(self.ranks.params(new))
        if read is not None:
            self._weights_read.replace(read)

    @property
    def plan(self) -> RankPlan:  # type: ignore[override]
        return make_rank_plan(self.model, self.ranks, self.reading, self._weights_read.params, self._all, self.dtype)

    def __repr__(self) -> str:
        return str(self.plan)

    def warm_up(self) -> None:
        """Allocate what steps need. Nothing is compiled."""
        with self._alone():
            start = now(self.device)
            for weights in dict.fromkeys((self._weights, self._weights_read)):
                weights.allocate()
            self.build_seconds = now(self.device) - start

    def _caches(self) -> tuple[Cache, ...]:
        return self.ranks.caches(self._all, self.dtype)

    def _steps(self) -> dict[str, Callable[..., Any]]:
        structures = [tree.structure(x) for x in (self.model.params, self.cache)]
        found = {ranks: make_steps(self.model.config, ranks.seam(*structures)) for ranks in (self.reading, self.ranks)}
        return {**found[self.reading], "decode": found[self.ranks]["decode"]}

    def _inputs_read(self) -> tuple[Any, Any]:
        """Caches of a layout of prompts hold memory no longer than these are read."""
        if self._over is None:
            return self._inputs()
        return self._weights_read.live(), packed(self.params, self.reading.caches(self._all, self.dtype))[1]

    def _run_prefill(self, inputs: Any, state: State, rows: list[list[int]], eos: Tensor, most: int = 0) -> State:
        if self._over is None:
            return super()._run_prefill(inputs, state, rows, eos, most)
        inputs, lengths, part = self._inputs_read(), [len(row) for row in rows], self.reading.vocabulary
        begun = State.empty(self._rows_read, part.stop - part.start, self.dtype, self.device)
        begun = super()._run_prefill(inputs, begun, rows, eos, most)
        self._over.caches(inputs[1], self.cache, lengths)
        return self._over.state(begun, state, lengths)

    def _start(self) -> State:
        self._session += 1
        rows = self.ranks.vocabulary
        return State.empty(self.sizes.batch, rows.stop - rows.start, self.dtype, self.device)

    def _prompts(self, *given: Any, **more: Any) -> Prompts:
        """This rank's. Raises on every rank where one was given others, or some that are refused."""
        try:
            found = super()._prompts(*given, **more)
        except Exception:
            self.ranks.agree("prompts", None)
            raise
        self.ranks.agree("prompts", {"prompts": found.rows})
        own = self.reading.own(len(found.rows))
        return Prompts(found.rows[own], found.input_ids[own], found.attention_mask[own])

    def _asked(self, **given: Any) -> Asked:
        try:
            asked = read_asked(self.model, self.batch, super()._prompts, **given)
            self._check(asked)
        except Exception:
            self.ranks.agree("generate", None)
            raise
        options = dict(asked.options)
        told = {
            "prompts": asked.read.rows,
            "max_new_tokens": asked.max_new_tokens,
            "eos_token_id": asked.ends,
            "pad_token_id": asked.pad_token_id,
            "stop_strings": asked.texts.strings,
            "options of sampling": sorted(options.items()),
        }
        seed = self.ranks.agree("generate", told, secrets.randbits(63))
        if options.get("do_sample") and options.get("seed") is None:
            options["seed"] = seed
        return dataclasses.replace(asked, options=options)

    def _check(self, asked: Asked) -> None:
        """Raise for what cannot be done over ranks."""
        vocab, options = self.model.config.vocab_size, asked.options
        RankChooser(self, asked)  # raises for options that are none
        k = options.get("top_k", 50)
        if options.get("do_sample") and not k and self.ranks.choice.own("Z"):
            raise ValueError(
                f"generate(top_k={k!r}): without it any of {vocab} tokens may be drawn, and their logits lie on "
                f"{self.ranks.mesh['tp']} ranks, which would have to send them all\n    fix: top_k=50"
            )
        if asked.streamer is not None and self.ranks.rows:
            raise ValueError("generate(streamer=...): rows lie on several ranks\n    fix: without it, or without dp")

    def _chooser(self, asked: Asked) -> Chooser:
        return RankChooser(self, asked)

    def _own(self, rows: list[list[int]]) -> list[list[int]]:
        return rows[self.ranks.own(len(rows))]

    def _own_read(self, rows: list[list[int]]) -> list[list[int]]:
        return rows[self.reading.own(len(rows))]

    def _anywhere(self, live: bool) -> bool:
        return self.ranks.anywhere(live)

    def _of_all(self, x: Tensor, rows: int) -> Tensor:
        return self.ranks.of_all(x, rows)


class RankChooser(Chooser):
    """Chooses for the rows of a rank, of logits of its rows of the vocabulary. seeds: of all rows."""

    def __init__(self, program: RankProgram, asked: Asked) -> None:
        rows, self._ranks = asked.read.rows, program.ranks
        own, vocab = self._ranks.own(len(rows)), program.model.config.vocab_size
        given: Any = {"max_new_tokens": asked.max_new_tokens, "vocab_size": vocab, "device": program.device}
        options = dict(asked.options)
        seeds = row_seeds(options.get("seed"), len(rows)) if options.get("do_sample") is True else None
        if seeds is not None:
            options["seed"] = seeds[own]
        super().__init__(rows[own], batch=program.sizes.batch, **given, **options)
        self.seeds = seeds
        part = self._ranks.vocabulary
        if self._needed:
            self._counts = self._counts[:, part.start : part.stop]

    def _chosen(
        self, logits: Tensor, after: Tensor, counts: Tensor, eos_token_id: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wire = self._ranks.choice
        rows = wire.own("Z")
        if rows is None:
            return super()._chosen(logits, after, counts, eos_token_id, u)
        shortcuts = dict(self._shortcuts)
        draws, most = shortcuts.pop("draws"), shortcuts.pop("most")
        most = (most or rows.size) if draws else 1
        k = min(most, -(-rows.size // self._ranks.mesh["tp"]))  # no rank has more
        token, logprob = F.drawn_token(logits, counts, self._controls, u, rows=rows, k=k, wire=wire, **shortcuts)
        place = (token - rows.start)[:, None]
        here = (after >= 0)[:, None] & (place >= 0) & (place < counts.shape[1])
        counts = counts.scatter_add(-1, place.clamp(0, counts.shape[1] - 1), here.to(counts.dtype))
        return token, logprob, F.advance(token, logprob, after, eos_token_id), counts
