"""A program over ranks: what one rank of a mesh runs of prefill, decode and score, beside the others.

    program = programs.build(model, mesh=at, layout=sh.ulysses(tp="tp"), batch=4)   # on every rank, with its own mesh
    program.generate(prompts)                                                       # on every rank, the same call

Every rank is called with all prompts. `generate` and `score` return what there is of all of them; a state of
`prefill` has the rank's own rows. The longest call sends, in this order:

    _agree           what ranks were asked for, and whether weights may have changed; then what they hold of these
    _run_prefill     collectives of layers and of the choice of a token, chunk by chunk, as many on every rank; where
                     prompts are read by a layout of their own, its caches are handed over behind the last (`Handover`)
    _decode_step     collectives of layers and of the choice, step by step; between steps `Ranks.anywhere`, now and then
    Ranks.of_all     the tokens, or scores, of all rows

Each call begins with one exchange by which ranks tell each other what they were asked for, and whether their parameters
may have changed: set anew, written (a counter of autograd's says so), or `refresh` called. Where any may have, they
compare what several of them hold, see `Copies`; so does `build`. What differs is an error on every rank, and the next
call runs as if there had been none. A peer that is gone or slower than the time limit of the mesh is a `TransportError`
on each rank that waits for it, which says for whom, in which exchange and in which step.

What is not seen: a write through `.data`, until `refresh` or `params=`; and what a part that one rank alone holds
should have been.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from ..sharding import Layout, Mesh
from ..sharding.opaque import Port
from .agreement import Said
from .asked import Asked
from .chooser import Chooser
from .copies import COMPARE, MOVED, REPLACED, STREAMS, Copies
from .generate import InStep, Unheard, now
from .handover import Handover, all_held, check_whole, reads_others
from .kernel import Kernel
from .model import Model
from .pair_sums import PairSums
from .phase import Phase
from .program import Program
from .rank_chooser import RankChooser
from .rank_held import RankHeld
from .rank_plan import RankPlan, make_rank_plan
from .rank_steps import compiled_seam, eager_seam, why_calls
from .ranks import Ranks
from .report import PhasePlan
from .sampling import read_controls
from .sizes import Sizes
from .steps import State, make_steps, packed
from .weights import Weights

__all__ = ["RankProgram"]

T = TypeVar("T")


class RankProgram(RankHeld, Program):
    """A rank's own. params: its shards; may be set to others, or to a whole model's, as they must where prompts are
    read with other parts. why_eager: None where it is compiled. prefill_layout: by which prompts are read, `layout`
    unless given; caches are then handed over to it. ranks, reading: by which a rank decodes and reads prompts.
    On a GPU decode is one graph, exchanges and choice in it, which all ranks capture at once: when a leaf moved on one.
    """

    ranks: Ranks
    reading: Ranks

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        kernels: tuple[Kernel, ...],
        strict: bool,
        why_eager: str | None,
        *,
        mesh: Mesh,
        layout: Layout,
        prefill_layout: Layout | None = None,
    ) -> None:
        self.why_eager, self._sizes_of_all = why_eager, sizes
        self.sums, self._why_calls = PairSums(mesh, layout, device, dtype), why_calls(mesh, device)
        self.ranks = self.reading = Ranks(model.config, self.sums.mesh, layout, device)
        if prefill_layout is not None:
            self.reading = Ranks(model.config, self.sums.mesh, prefill_layout, device)
        self._port = Port(self.sums.mesh) if why_eager is None else None
        own = dataclasses.replace(model, params=self.ranks.params(model.params))
        others = reads_others(self.reading, self.ranks, model.params)
        read = self.reading.params(model.params) if others else own.params
        self._copies = Copies(*all_held((self.ranks, own.params), (self.reading, read)), self.ranks.agreement)
        super().__init__(own, self.ranks.sizes(sizes), device, dtype, kernels, strict, why_eager is None)
        self.batch, self._rows_read = sizes.batch, self.reading.sizes(sizes).batch
        self._weights_read = self._weights if read is own.params else Weights(read, device, dtype)
        self._over = None if self.reading is self.ranks else Handover(self.reading, self.ranks, sizes)

    @property
    def params(self) -> F.Decoder:
        return self._weights.params

    @params.setter
    def params(self, new: F.Decoder) -> None:
        """To be set on every rank; the next call sees where it was not, and compares what several ranks hold."""
        mine = read = self.ranks.params(new)
        if self._weights_read is not self._weights:
            check_whole("program.params", self.reading, self.ranks, new)
            read = self.reading.params(new)  # raises before any is set
        Program.params.fset(self, mine)  # type: ignore[attr-defined]
        if read is not mine:
            self._weights_read.replace(read)
        _, leaves = all_held((self.ranks, mine), (self.reading, read))
        self._copies.read(leaves, flags=COMPARE | REPLACED)

    def refresh(self) -> None:
        """As of one rank. What was written on this rank is meant, also where it was on no other; and the next call
        compares what several ranks hold, as after writes through `.data`, which are not seen otherwise."""
        super().refresh()
        if self._weights_read is not self._weights:
            with self._alone():
                self._weights_read.refresh()
        self._copies.accept()

    @property
    def plan(self) -> RankPlan:  # type: ignore[override]
        return super().plan  # type: ignore[return-value]

    def _make_plan(self) -> RankPlan:
        by = (self.ranks, self.params), (self.reading, self._weights_read.params)
        how = self.why_eager, self._why_calls
        return make_rank_plan(self.model, by, self._sizes_of_all, self.target, self.kernels, how, self.sums)

    def planned(self, phase: str) -> PhasePlan:
        if self.why_eager is not None:
            raise ValueError(f"{phase}.graph: it runs eagerly, and there is none: {self.why_eager}")
        return self.plan.steps[phase]

    def __repr__(self) -> str:
        return str(self.plan)

    def warm_up(self) -> None:
        """Compare what several ranks hold, allocate what steps need, compile both phases, and capture decode where it
        is replayed. Raises on every rank where one fails."""
        self._copies.compare("build")
        with self._alone():
            start = now(self.device)
            for weights in dict.fromkeys((self._weights, self._weights_read)):
                weights.allocate()
            self._compile("build", self.prefill, self.decode)
            self._capture(self._inputs(), self._made_for)
            self.build_seconds = now(self.device) - start

    def _compile(self, function: str, *phases: Phase) -> None:
        """Each rank in its own time, with nothing sent. Raises on every rank where one fails. function: in which."""
        if self._port is None:
            return
        try:
            self._check_planned(*phases)
            with self._port.silent():
                for phase in phases:
                    phase.step(*self._inputs(), *self._idle(phase))
        except Exception:
            self.ranks.agreement.refuse(function)
            raise
        self.ranks.agreement.check(function, {"what to compile": [phase.name for phase in phases]})

    def _ready(self, phase: Phase) -> None:
        if phase.compiles == 0:
            self._compile(phase.name, phase)

    def _idle(self, phase: Phase) -> tuple[Any, ...]:
        return self.ranks.idle(super()._idle(phase), self.dtype)

    def _caches(self) -> tuple[Cache, ...]:
        return self.ranks.caches(self._sizes_of_all, self.dtype)

    def _steps(self) -> dict[str, Callable[..., Any]]:
        if self._port is not None:
            return make_steps(self.model.config, compiled_seam(self.ranks, self._port.mesh, self.sizes.chunk))
        trees = [tree.structure(x) for x in (self.model.params, self.cache)]
        read, run = (make_steps(self.model.config, eager_seam(each, *trees)) for each in (self.reading, self.ranks))
        return {**read, "decode": run["decode"]}

    def _inputs_read(self) -> tuple[Any, Any]:
        """Caches of a layout of prompts hold memory no longer than these are read."""
        if self._over is None:
            return self._inputs()
        return self._weights_read.live(), packed(self.params, self.reading.caches(self._sizes_of_all, self.dtype))[1]

    def _start(self) -> State:
        self._session += 1
        self._steps_taken = 0
        return self.ranks.state(self.sizes.batch, self.dtype)

    # What ranks tell each other before a call.

    def _agree(
        self, function: str, read: Callable[[], T], tell: Callable[[T], Mapping[str, Any]], *, streams: bool = False
    ) -> tuple[T, list[Said]]:
        """Raise on every rank where one refuses what it was told, or was told otherwise than others, or has other
        weights. read: finds and checks it. tell: what of it must be alike, by argument. -> what was read, and what each
        rank said."""
        self._at = function
        try:
            self._check_open()
            self.sums.check()
            found = read()
        except Exception:
            self.ranks.agreement.refuse(function)
            raise
        flags = (STREAMS if streams else 0) | (MOVED if self._moved else 0)
        every = self.ranks.agreement.check(function, tell(found), self._copies.said(secrets.randbits(63), flags))
        self._copies.check(function, every)
        self._capture_again([rank for rank, said in enumerate(every) if said.flags & MOVED])
        return found, every

    def _told(self, function: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return self._agree(function, read, lambda told: told)[0]

    def _asked(self, **given: Any) -> Asked:
        def read() -> Asked:
            asked = Program._asked(self, **given)
            self._check(asked)
            return asked

        def tell(asked: Asked) -> dict[str, Any]:
            return {
                "prompts": asked.read.rows,
                "max_new_tokens": asked.max_new_tokens,
                "eos_token_id": asked.ends,
                "pad_token_id": asked.pad_token_id,
                "stop_strings": asked.texts.strings,
                "options of sampling": dict(sorted(asked.options.items())),
            }

        asked, every = self._agree("generate", read, tell, streams=given["streamer"] is not None)
        options, streamer = dict(asked.options), asked.streamer
        if options.get("do_sample") and options.get("seed") is None:
            options["seed"] = every[0].number
        if streamer is not None:
            streamer = InStep(streamer)
        elif any(said.flags & STREAMS for said in every):
            streamer = Unheard()  # so that this rank too sees the end of a row at once
        return dataclasses.replace(asked, options=options, streamer=streamer)

    def _run_prefill(
        self, inputs: tuple[Any, Any], state: State, rows: list[list[int]], eos: Tensor, most: int = 0
    ) -> State:
        self._at = "prefill"
        if self._over is None:
            return super()._run_prefill(inputs, state, rows, eos, most)
        inputs, lengths = self._inputs_read(), [len(row) for row in rows]
        begun = self.reading.state(self._rows_read, self.dtype)
        begun = super()._run_prefill(inputs, begun, rows, eos, most)
        self._at = "the hand-over of caches"
        self._over.caches(inputs[1], self.cache, lengths)
        return self._over.state(begun, state, lengths)

    def _decode_step(self, inputs: tuple[Any, Any], state: State, eos: Tensor, tokens: int) -> State:
        self._step(1)
        return super()._decode_step(inputs, state, eos, tokens)

    def _check(self, asked: Asked) -> None:
        """Raise for what cannot be done over ranks."""
        vocab, options, rows = self.model.config.vocab_size, asked.options, len(asked.read.rows)
        read_controls(rows=rows, batch=rows, vocab_size=vocab, device="cpu", **options)  # of all: as one rank raises
        k = options.get("top_k", 50)
        if options.get("do_sample") and not k and self.ranks.choice.own("Z"):
            raise ValueError(
                f"generate(top_k={k!r}): without it any of {vocab} tokens may be drawn, and their logits lie on "
                f"{self.ranks.mesh['tp']} ranks, which would have to send them all\n    fix: top_k=50"
            )
        if asked.streamer is not None and self.ranks.rows:
            raise ValueError("generate(streamer=...): rows lie on several ranks\n    fix: without it, or without dp")

    def _chooser(self, asked: Asked) -> Chooser:
        arch = self.target.compiled_for if self.ranks.choice.own("Z") is None else None
        return RankChooser(self.ranks, asked, batch=self.sizes.batch, device=self.device, arch=arch)

    def _turning(self, rows: list[list[int]], taken: int) -> int:
        """Experts of a row may be on any rank; whether that row has ended, its own ranks alone know."""
        new = [len(row) + taken for row in rows if self.reading.deals and len(row) + taken in self._turns]
        return max(new, default=-1) + 1
