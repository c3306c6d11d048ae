"""A program: prefill, decode and (at its first use) score, compiled over one cache that they write in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from .. import functional as F
from .agreement import OfRows
from .asked import Asked, read_asked
from .captured import CapturedDecode, launch_steps, leaf_names
from .chooser import Chooser
from .generate import Generation, Streamer, Timings, assemble, check_state, now, run_decode
from .graph import LeafPaths
from .kernel import Kernel
from .lower import with_table
from .model import Model
from .phase import Phase
from .prompts import Prompts, end_tokens, filler, lengths, read_prompts
from .replay import Replay
from .report import PhasePlan, Plan, make_plan
from .running import Running
from .sampling import SamplingOptions
from .sizes import Sizes, target_of
from .steps import State, make_steps
from .weights import Place

__all__ = ["Program"]


class Program(Running):
    """A model ready to generate. print(program) is its plan. Made by `build`.

    params: the parameters it reads at each call; may be set to others of the same shapes.
    cache: one entry a layer, written in place by prefill and decode.
    On a GPU decode is one graph, choice and all, captured when built and again, with a logged line, when a leaf moved.
    `with build(...) as program:` closes it at the end.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        kernels: tuple[Kernel, ...],
        strict: bool,
        compiled: bool,
    ) -> None:
        super().__init__(model, sizes, device, dtype)
        self.strict, self.compiled = strict, compiled
        self.batch = sizes.batch  # rows of all ranks
        self.target = target_of(device, dtype)
        self.kernels = with_table(self.target, kernels) if compiled else ()
        # Tracing a plan takes seconds. A build that is strict or has kernels of its own is held to it, others by tests.
        self._held_to_plan = bool(kernels) or strict
        self.build_seconds = 0.0
        # A step overwrites what the state before it still needs: the oldest token of a ring, or a recurrent state.
        self._spent = any(
            isinstance(each.attention, F.GDNConfig) or sizes.slots_of(each.attention.window) < sizes.slots
            for each in model.config.layers
        )
        self._plan: tuple[list[Place], Plan] | None = None
        steps = self._steps()
        self.prefill = Phase("prefill", steps["prefill"], self, self._prefill)
        self.decode = Phase("decode", steps["decode"], self, self._decode)
        self._score = Phase("score", steps["score"], self, self.score)
        self.leaf_paths = LeafPaths.of(model.params, self.cache)

    def _steps(self) -> dict[str, Callable[..., Any]]:
        return make_steps(self.model.config)

    @property
    def plan(self) -> Plan:
        """Of the parameters as they lie now."""
        if self._plan is None or self._plan[0] != self._weights.places():
            self._plan = self._weights.places(), self._make_plan()
        return self._plan[1]

    def _make_plan(self) -> Any:
        model = dataclasses.replace(self.model, params=self.params)
        return make_plan(model, self.target, self.sizes, self.kernels, self.compiled)

    def planned(self, phase: str) -> PhasePlan:
        return self.plan.phases[phase]

    def planned_left(self, phase: str) -> list[str] | None:
        """The primitives that the plan leaves without a kernel; None where the build is not held to it."""
        return self.planned(phase).left if self._held_to_plan and phase != "score" else None

    def check_left(self, left: Mapping[str, Sequence[str]]) -> None:
        """Raise `ValueError` where the build is strict, for primitives without a kernel: a line each, by phase."""
        lines = [f"{phase} {line}" for phase, each in left.items() for line in each]
        if self.strict and lines:
            raise ValueError("build(strict=True): no kernel for\n    " + "\n    ".join(lines))

    def _check_planned(self, *phases: Phase) -> None:
        self.check_left({phase.name: self.planned_left(phase.name) or () for phase in phases})

    def __repr__(self) -> str:
        return str(self.plan)

    @property
    def params(self) -> F.Decoder:
        return self._weights.params

    @params.setter
    def params(self, new: F.Decoder) -> None:
        """Raises `TreeError` where a shape differs, `ValueError` where dtype or device do. Where a leaf lies otherwise
        in memory (as one computed from a view of a fused tensor does), the next call compiles again, with a warning."""
        if self._replace(new) and self._held_to_plan:
            _ = self.plan  # as in `warm_up`

    def warm_up(self) -> None:
        """Compile both phases, by running them with no active row, which changes no byte of the cache, and capture
        decode where it is replayed. `build` has done so; once more it only runs."""
        # What is lowered is held to the plan, and it is traced now, not in the middle of a compile.
        self._check_planned(self.prefill, self.decode)
        with self._alone():
            start = now(self.device)
            self._weights.allocate()
            inputs = self._inputs()
            for phase in (self.prefill, self.decode):
                phase.step(*inputs, *self._idle(phase))
            self._capture(inputs, self._made_for)
            self.build_seconds = now(self.device) - start

    def _made_for(self, replay: Replay) -> CapturedDecode:
        # One static size: what a graph reads does not follow the context.
        buffers = *self._idle(self.decode)[:2], self._read(self.sizes.max_len)
        given = leaf_names(self.params, self.cache), launch_steps(self.sizes.max_len)
        return CapturedDecode(self.decode.step, replay, buffers, *given, self._choose_inside, self._others_failed)

    def _prompts(
        self,
        prompts: Any,
        attention_mask: Tensor | None,
        max_new_tokens: int = 0,
        pad_token_id: int | None = None,
        ends: Sequence[int] | None = None,
    ) -> Prompts:
        """Rows of tokens. Of padded ids without a mask the padding is dropped, unless its token ends rows too and so
        may be meant, as in transformers."""
        padding = self.model.pad_token_id if pad_token_id is None else pad_token_id
        return read_prompts(
            prompts,
            attention_mask=attention_mask,
            tokenizer=self.model.tokenizer,
            vocab_size=self.model.config.vocab_size,
            batch=self.batch,
            max_len=self.sizes.max_len,
            max_new_tokens=max_new_tokens,
            pad_token_id=filler(pad_token_id, self.model.pad_token_id, ends),
            padding=None if padding in (self.model.eos_token_id if ends is None else ends) else padding,
        )

    def _prefill(self, prompts: Any, *, attention_mask: Tensor | None = None, eos_token_id: Any = ()) -> State:
        """Read prompts into the cache, from its first slot on -> the state after them, with the first new token."""
        every, stop = self._told(
            "prefill",
            lambda: {"prompts": self._prompts(prompts, attention_mask).rows, "eos_token_id": self._ends(eos_token_id)},
        ).values()
        rows, most = self._read_here(every)
        with self._alone():
            state = self._run_prefill(self._inputs(), self._start(), rows, self._eos(stop), most)
            return dataclasses.replace(state, session=self._session)

    def _decode(self, state: State, *, eos_token_id: Any = ()) -> State:
        """Feed each active row its token -> the state after it.

        The state must be one of the last prefill, with rings or gated delta nets the last one; its token may be
        another (`dataclasses.replace(state, token=...)`).
        Raises `TypeError` or `ValueError` for a state of another prefill, whose cache is gone, or of another program,
        for a token that is none, and where a row is full.
        """
        fed, stop = self._told(
            "decode",
            lambda: {
                "state.token, state.position": OfRows(self._check_state(state)),
                "eos_token_id": self._ends(eos_token_id),
            },
        ).values()
        _, positions = fed.value
        with self._alone():
            # A token of the user's own may come from anywhere; a copy made here is like any other.
            plain = dataclasses.replace(state, session=0, token=state.token.to(self.device, copy=True))
            if self._spent:
                self._session += 1
            new = self._decode_step(self._inputs(), plain, self._eos(stop), max(*positions, 0) + 1)
            return dataclasses.replace(new, session=self._session)

    def _ends(self, eos_token_id: Any) -> tuple[int, ...]:
        return end_tokens(eos_token_id, self.model.config.vocab_size)

    def _check_state(self, state: State) -> tuple[list[int], list[int]]:
        """Raise for one that no step can follow. -> its tokens and positions."""
        vocab_size = self.model.config.vocab_size
        return check_state(state, self._session, self.sizes, self._turns, vocab_size, spent=self._spent)

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        num_return_sequences: int = 1,
        return_logprobs: bool = False,
        streamer: Streamer | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A continuation of each prompt: the most likely tokens, or what `options` ask for.

        prompts: see `read_prompts`; or input_ids and attention_mask, `B S`. eos_token_id: what ends a row, the
        model's unless given, `()` for none. pad_token_id: fills rows that end early, in `.sequences`.
        stop_strings: text that ends a row. num_return_sequences: rows of each prompt, next to each other.
        return_logprobs: of the model itself, before any option. streamer: gets the prompt and each token, batch 1.
        options: do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty
        and seed, as `read_controls` says, with transformers' defaults. They are tensors: none compiles anything.
        Raises `ValueError` and `TypeError`, naming the argument, before any work.
        """
        asked = self._asked(
            prompts=prompts,
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            stop_strings=stop_strings,
            num_return_sequences=num_return_sequences,
            return_logprobs=return_logprobs,
            streamer=streamer,
            options=options,
        )
        read, choose, streamer = asked.read, self._chooser(asked), asked.streamer
        rows, (rows_read, most) = read.rows[self.ranks.own(len(read.rows))], self._read_here(read.rows)
        with self._alone():
            begin = now(self.device)
            inputs, eos = self._inputs(), self._eos(asked.ends)
            if streamer is not None:
                streamer.put(read.input_ids)
            if self._captured is not None and choose.needed:
                choose.fill(self._captured.choice)
            state = self._run_prefill(inputs, self._start(), rows_read, eos, most)
            state = choose(state, lengths(rows, self.sizes.batch, self.device) - 1, eos)
            middle = now(self.device)
            tokens, logprobs, steps = run_decode(
                self._stepping(inputs, eos, choose, read.rows),
                state,
                rows,
                launch=1 if self._captured is None else self._captured.steps,
                max_new_tokens=max_new_tokens,
                ends=asked.ends,
                texts=asked.texts,
                streamer=streamer,
                anywhere=self.ranks.anywhere,
            )
            tokens, logprobs = (self.ranks.of_all(x, len(read.rows)) for x in (tokens, logprobs))
            end = now(self.device)
        return assemble(
            read,
            tokens,
            logprobs,
            texts=asked.texts,
            eos_token_id=asked.ends,
            pad_token_id=filler(pad_token_id, self.model.pad_token_id, asked.ends),
            return_logprobs=return_logprobs,
            seeds=choose.seeds,
            tokenizer=self.model.tokenizer,
            timings=lambda kept: Timings(
                build=self.build_seconds,
                prefill=middle - begin,
                decode=end - middle,
                prompt_tokens=sum(map(len, read.rows)),
                steps=steps,
                rows=len(read.rows),
                kept=kept,
            ),
        )

    # What a rank among several does otherwise: it agrees with others first, chooses by parts of logits, may read
    # prompts with other weights into other caches, and compiles beside others.

    def _ready(self, phase: Phase) -> None:
        """Called before a phase runs that may not be compiled yet."""

    def _told(self, function: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a call was told, by argument, as `read` found and checked it."""
        return read()

    def _asked(self, **given: Any) -> Asked:
        """What a call of `generate` was told."""
        return read_asked(self.model, self.batch, self._prompts, **given)

    def _chooser(self, asked: Asked) -> Chooser:
        return Chooser(
            asked.read.rows,
            batch=self.sizes.batch,
            vocab_size=self.model.config.vocab_size,
            max_new_tokens=asked.max_new_tokens,
            device=self.device,
            arch=self.target.compiled_for,
            **asked.options,
        )

    def score(self, prompts: Any, *, attention_mask: Tensor | None = None) -> list[Tensor]:
        """The log-probability of each token after the first, given those before: `n - 1` numbers a row of n tokens.
        Its graph is compiled at the first call.
        """
        (every,) = self._told("score", lambda: {"prompts": self._prompts(prompts, attention_mask).rows}).values()
        rows, most = self._read_here(every)
        with self._alone():
            self._ready(self._score)
            found = self.reading.of_all(self._run_score(rows, most), len(every)).cpu()
        return [found[i, : len(row) - 1] for i, row in enumerate(every)]
