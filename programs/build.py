"""Build a program: prefill and decode, compiled once each, over one cache that they write in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from .. import functional as F
from ..functional import tree
from . import dynamo
from .generate import Generation, Streamer, Timings, assemble, now, run_decode
from .graph import Graph
from .lower import KERNELS, Kernel, lower
from .model import Model
from .prompts import Prompts, read_prompts
from .report import Plan, make_plan
from .sizes import EOS_LIMIT, READ_STEP, Sizes, Target
from .steps import State, make_steps, packed

__all__ = ["Phase", "Program", "build", "plan"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def build(
    model: Model,
    *,
    batch: int = 1,
    max_len: int = 1024,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    compile: bool = True,
    kernels: Sequence[Kernel] = (),
) -> Program:
    """Trace, lower and compile prefill and decode of a model; afterwards nothing compiles again.

    batch: rows at most. max_len: tokens a row at most, prompt and new ones. chunk: tokens of a prompt that one prefill
    call takes. dtype, device: the model's unless given; weights that must be converted are copied once and refreshed
    in place before each use. strict: a primitive without a kernel is an error that lists them all.
    compile: False runs the same functions eagerly. kernels: tried before those of `lower.KERNELS`.
    Raises `ValueError` before any work.
    """
    sizes = Sizes(batch=batch, max_len=max_len, chunk=chunk)
    if model.device.type == "meta":
        raise ValueError("build: the model has no weights, it was loaded with abstract=True\n    fix: load it without")
    place = torch.device(device or model.device)
    dtype = dtype or model.dtype
    _check_place(place, dtype)
    problem = dynamo.compiler_problem(place) if compile else None
    if problem is not None:
        raise ValueError(f"build(compile=True): {problem}\n    fix: install g++, or pass compile=False")
    program = Program(model, sizes, place, dtype, tuple(kernels), compile)
    if strict and (left := [f"{p.name} {line}" for p in program.plan.phases.values() for line in p.without_kernel]):
        raise ValueError("build(strict=True): no kernel for\n    " + "\n    ".join(left))
    program.warm_up()
    return program


def plan(
    model: Model,
    *,
    batch: int = 1,
    max_len: int = 1024,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    arch: str | None = None,
    kernels: Sequence[Kernel] = (),
) -> Plan:
    """What `print(build(...))` would print, without weights (`load(..., abstract=True)`) and without the device."""
    target = Target(device, dtype or model.dtype, arch)
    sizes = Sizes(batch=batch, max_len=max_len, chunk=chunk)
    return make_plan(model, target, sizes, _all_kernels(target, kernels))


def _all_kernels(target: Target, extra: Sequence[Kernel]) -> tuple[Kernel, ...]:
    return (*extra, *KERNELS.get(target.device, ()))


def _check_place(device: torch.device, dtype: torch.dtype) -> None:
    known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
    if dtype not in _DTYPES or (device.type == "mps" and dtype == torch.float64):
        raise ValueError(f"build(dtype={dtype}): {device.type} cannot run it\n    known: {known}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                'build(device="cuda"): no CUDA device is available\n'
                '    fix: programs.plan(model, device="cuda") prints the plan without one'
            )
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise ValueError(f"build(dtype={dtype}): {torch.cuda.get_device_name(device)} cannot run it")


class Phase:
    """One function of a program. Calling it runs the phase; see `Program.prefill`, `Program.decode`.

    compiles: how often its graph was compiled.
    """

    def __init__(self, name: str, step: Callable[..., Any], program: Program, call: Callable[..., State]) -> None:
        self.name = name
        self.compiles = 0
        self._program, self._call = program, call
        self._module: fx.GraphModule | None = None
        self.step = dynamo.compile_with(step, self._compile) if program.compiled else step

    def __call__(self, *args: Any, **kwargs: Any) -> State:
        return self._call(*args, **kwargs)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiles += 1
        lower(module, self._program.target, self._program.kernels)
        self._module = module
        return dynamo.inductor(module, inputs)

    @property
    def graph(self) -> Graph:
        """The Dynamo-level graph as it was compiled; before or without compiling, as it would be."""
        planned = self._program.plan.phases[self.name].graph
        return planned if self._module is None else planned.of(self._module)


class Program:
    """A model ready to generate. print(program) is its plan. Made by `build`.

    params: the parameters it reads at each call; may be set to others of the same shapes.
    cache: one entry a layer, written in place by prefill and decode.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        kernels: tuple[Kernel, ...],
        compiled: bool,
    ) -> None:
        self.model, self.sizes, self.compiled = model, sizes, compiled
        self.device, self.dtype = device, dtype
        self.target = Target(device.type, dtype, _arch(device))
        self.kernels = _all_kernels(self.target, kernels)
        self.cache = sizes.caches(model.config, dtype, device)
        self.build_seconds = 0.0
        self._params = model.params
        self._converted: dict[str, Tensor] = {}
        self._slots = torch.arange(sizes.slots, device=device)
        self._reads: dict[int, Tensor] = {}
        self._busy = threading.Lock()
        self._plan: Plan | None = None
        steps = make_steps(model.config)
        self.prefill = Phase("prefill", steps["prefill"], self, self._prefill)
        self.decode = Phase("decode", steps["decode"], self, self._decode)
        self._score = Phase("score", steps["score"], self, self._decode)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = make_plan(self.model, self.target, self.sizes, self.kernels)
        return self._plan

    def __repr__(self) -> str:
        return str(self.plan)

    @property
    def params(self) -> F.Decoder:
        return self._params

    @params.setter
    def params(self, new: F.Decoder) -> None:
        """Raises `TreeError` where a shape differs, `ValueError` where dtype, device or strides do."""
        tree.check(new, F.Decoder.abstract(self.model.config), what="program.params")
        old = tree.paths(self._params)
        faults = [
            f"{path}: {was}, but the tensor has {now}"
            for path, leaf in tree.paths(new).items()
            for was, now in [(_layout(old[path]), _layout(leaf))]
            if was != now
        ]
        if faults:
            raise ValueError("program.params: other parameters than it was built for\n    " + "\n    ".join(faults))
        self._params = new

    def warm_up(self) -> None:
        """Compile both phases, by running them with no active row, which changes no byte of the cache."""
        start = now(self.device)
        params = self._live_params()
        with torch.no_grad():
            for phase in (self.prefill, self.decode):
                phase.step(params, self.cache, *self._idle(phase.name))
        self.build_seconds = now(self.device) - start

    def _idle(self, phase: str) -> tuple[Any, ...]:
        return self.sizes.idle(phase, self.model.config, self.dtype, self.device)

    def _live_params(self) -> F.Decoder:
        """The parameters as the steps take them: detached, so that a Parameter and a plain tensor compile alike;
        converted copies (another dtype or device) brought up to date in place."""

        def live(path: str, leaf: Tensor) -> Tensor:
            if leaf.dtype == self.dtype and leaf.device == self.device:
                return leaf.detach()
            if path not in self._converted:
                self._converted[path] = torch.empty_like(leaf, dtype=self.dtype, device=self.device)
            return self._converted[path].detach().copy_(leaf.detach())

        new = {path: live(path, leaf) for path, leaf in tree.paths(self._params).items()}
        return packed(tree.unflatten(tree.structure(self._params), new.values()))

    def _read(self, tokens: int) -> Tensor:
        """The slots that a step reads, when the longest row holds so many tokens; each size is made once."""
        n = -(-tokens // READ_STEP)
        if n not in self._reads:
            self._reads[n] = self.sizes.read(self._slots, tokens)
        return self._reads[n]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this program is in use by another call, and has one cache\n    fix: build a second one")
        try:
            with torch.no_grad():
                yield
        finally:
            self._busy.release()

    def _prompts(self, prompts: Any, attention_mask: Tensor | None, max_new_tokens: int, pad: int = 0) -> Prompts:
        return read_prompts(
            prompts,
            attention_mask=attention_mask,
            tokenizer=self.model.tokenizer,
            vocab_size=self.model.config.vocab_size,
            batch=self.sizes.batch,
            max_len=self.sizes.max_len,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
        )

    def _chunks(self, rows: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """tokens, positions, last, read of each prefill call; rows are left-aligned, shorter ones padded with -1."""
        batch, chunk = self.sizes.batch, self.sizes.chunk
        longest = max(map(len, rows))
        for start in range(0, longest, chunk):
            tokens = torch.zeros(batch, chunk, dtype=torch.int64)
            positions = torch.full((batch, chunk), -1)
            last = torch.full((batch,), -1)
            for i, row in enumerate(rows):
                here = row[start : start + chunk]
                tokens[i, : len(here)] = torch.tensor(here, dtype=torch.int64)
                positions[i, : len(here)] = torch.arange(start, start + len(here))
                if here and start + len(here) == len(row):
                    last[i] = len(here) - 1
            yield (
                tokens.to(self.device),
                positions.to(self.device),
                last.to(self.device),
                self._read(min(start + chunk, longest)),
            )

    def _eos(self, eos_token_id: Sequence[int]) -> Tensor:
        """Always of one size, so that the number of end tokens is no part of the graph."""
        if len(eos_token_id) > EOS_LIMIT:
            raise ValueError(f"eos_token_id: {len(eos_token_id)} tokens, at most {EOS_LIMIT}")
        padded = [*eos_token_id, *[-1] * (EOS_LIMIT - len(eos_token_id))]
        return torch.tensor(padded, device=self.device)

    def _run_prefill(self, params: F.Decoder, rows: list[list[int]], eos: Tensor) -> State:
        state = State.empty(self.sizes.batch, self.model.config.vocab_size, self.dtype, self.device)
        for tokens, positions, last, read in self._chunks(rows):
            state = self.prefill.step(params, self.cache, state, tokens, positions, last, eos, read)
        return state

    def _prefill(self, prompts: Any, *, attention_mask: Tensor | None = None, eos_token_id: Any = ()) -> State:
        """Read prompts into the cache, from its first slot on -> the state after them, with the first new token."""
        read = self._prompts(prompts, attention_mask, 0)
        with self._alone():
            return self._run_prefill(self._live_params(), read.rows, self._eos(_ids(eos_token_id)))

    def _decode(self, state: State, *, eos_token_id: Any = ()) -> State:
        """Feed each active row its token -> the state after it. Raises `ValueError` where a row is full."""
        longest = int(state.position.max()) + 1
        if longest > self.sizes.max_len:
            raise ValueError(f"decode: a row holds max_len={self.sizes.max_len} tokens; there is no slot for another")
        with self._alone():
            eos = self._eos(_ids(eos_token_id))
            result: State = self.decode.step(self._live_params(), self.cache, state, eos, self._read(max(longest, 1)))
            return result

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        return_logprobs: bool = False,
        streamer: Streamer | None = None,
    ) -> Generation:
        """The most likely continuation of each prompt.

        prompts: see `read_prompts`; or input_ids and attention_mask, `B S`. eos_token_id: what ends a row, the
        model's unless given, `()` for none. pad_token_id: fills rows that end early, in `.sequences`.
        streamer: gets the prompt and each token, batch 1. Raises `ValueError` before any work.
        """
        if (prompts is None) == (input_ids is None):
            raise ValueError("generate: pass prompts, or input_ids")
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ValueError(f"generate(max_new_tokens={max_new_tokens!r}): a positive integer is needed")
        stop = self.model.eos_token_id if eos_token_id is None else _ids(eos_token_id)
        pad = next((p for p in (pad_token_id, self.model.pad_token_id, *stop) if p is not None), 0)
        read = self._prompts(input_ids if prompts is None else prompts, attention_mask, max_new_tokens, pad)
        if streamer is not None and len(read.rows) > 1:
            raise ValueError(f"generate(streamer=...): one prompt at a time, not {len(read.rows)}")
        eos = self._eos(stop)
        with self._alone():
            begin = now(self.device)
            params = self._live_params()
            if streamer is not None:
                streamer.put(read.input_ids)
            state = self._run_prefill(params, read.rows, eos)
            middle = now(self.device)
            tokens, logprobs, steps = run_decode(
                lambda s, length: self.decode.step(params, self.cache, s, eos, self._read(length)),
                state,
                start=max(map(len, read.rows)),
                max_new_tokens=max_new_tokens,
                rows=len(read.rows),
                stop=stop,
                streamer=streamer,
            )
            end = now(self.device)
        return assemble(
            read,
            tokens,
            logprobs if return_logprobs else None,
            eos_token_id=stop,
            pad_token_id=pad,
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

    def score(self, prompts: Any, *, attention_mask: Tensor | None = None) -> list[Tensor]:
        """The log-probability of each token after the first, given those before: `n - 1` numbers a row of n tokens.

        Its graph is compiled at the first call.
        """
        read = self._prompts(prompts, attention_mask, 0)
        with self._alone():
            params = self._live_params()
            parts = []
            targets = [[*row[1:], 0] for row in read.rows]
            for (tokens, positions, _, slots), (wanted, *_) in zip(
                self._chunks(read.rows), self._chunks(targets), strict=True
            ):
                parts.append(self._score.step(params, self.cache, tokens, positions, wanted, slots))
        found = torch.cat(parts, 1).cpu()
        return [found[i, : len(row) - 1] for i, row in enumerate(read.rows)]


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)


def _layout(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} on {t.device} with strides {tuple(t.stride())}"


def _arch(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
