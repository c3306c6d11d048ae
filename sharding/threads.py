"""Ranks as threads of this process, which take turns.

One rank runs at a time, until it waits for its peers; then the next one does. So a simulation is deterministic, random
numbers and prints included, a rank that can never go on is known at once, and a collective costs a few thread switches.
The last rank to arrive computes what each of them receives.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .mesh import Mesh
from .trace import site
from .transport import Call, Part, TransportError, Work, disagreement, summed

__all__ = ["Fault", "Latency", "Threads"]

Latency = float | Callable[[int, Call], float]
Fault = Callable[[int, Call], BaseException | None]


@dataclass
class _Exchange:
    """One collective of one group: what its members have brought so far, and what they get."""

    group: tuple[int, ...]
    parts: dict[int, Part] = field(default_factory=dict)
    brought: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None
    ready_at: float = 0.0


@dataclass
class _Rank:
    """gate: locked while it is not this rank's turn. state: "ready", "running", "waits", "returned" or "raised"."""

    gate: threading.Lock
    state: str = "ready"
    waits_for: _Exchange | None = None
    error: BaseException | None = None
    value: Any = None
    ident: int = 0


class Threads:
    """The executor: `Threads(mesh).run(body)` calls `body(mesh.at(rank, ...))` once for each rank.

    timeout: seconds that one rank may compute before the others give up on it. latency: seconds that each exchange
    takes, or a function (rank, call) -> seconds. fault: a function (rank, call) -> the error that strikes this rank at
    this call, or None.
    """

    def __init__(
        self, mesh: Mesh, *, timeout: float = 60.0, latency: Latency = 0.0, fault: Fault | None = None
    ) -> None:
        if not isinstance(timeout, (int, float)) or not 0 < timeout < threading.TIMEOUT_MAX:
            raise ValueError(f"timeout={timeout!r}: a number of seconds above 0 is needed, such as 60.0")
        self.mesh, self.timeout, self.latency, self.fault = mesh, timeout, latency, fault
        self._lock = threading.Lock()
        self._ranks: list[_Rank] = []
        self._started: dict[tuple[tuple[int, ...], int], int] = {}
        self._exchanges: dict[tuple[tuple[int, ...], int], _Exchange] = {}
        self._failure: str | None = None
        self._stamp = 0.0
        self._finished = threading.Event()
        self._one_run = threading.Lock()

    def run(self, body: Callable[[Mesh], Any], ambient: Ambient | None = None) -> list[Any]:
        """Each rank's result, in order. ambient: what the ranks' threads take over, if not of the caller's now.

        Raises what a rank raised, with a note on what the others were doing; `TransportError` where ranks disagree or
        one is slower than the time limit.
        """
        with self._one_run:  # backward may come from several threads
            return self._run(body, ambient or Ambient())

    def _run(self, body: Callable[[Mesh], Any], ambient: Ambient) -> list[Any]:
        if any(rank.state == "running" for rank in self._ranks):
            raise TransportError("a rank of an earlier run, slower than the time limit, still runs")
        self._ranks = [_Rank(threading.Lock()) for _ in range(self.mesh.size)]
        self._started, self._exchanges, self._failure = {}, {}, None
        self._finished.clear()
        for rank in self._ranks:
            rank.gate.acquire()
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._rank, r, body, ambient), daemon=True)
            for r in range(self.mesh.size)
        ]
        self._stamp = time.monotonic()
        for thread in threads:
            thread.start()
        self._ranks[0].gate.release()
        try:
            while not self._finished.wait(max(0.0, self._stamp + self.timeout - time.monotonic())):
                if time.monotonic() - self._stamp >= self.timeout:
                    self._fail(f"a rank computed for longer than the time limit of {self.timeout:g} s")
                    self._finished.wait(0.05)
                    break
        except BaseException:
            self._fail("interrupted")
            raise
        return self._results()

    def _results(self) -> list[Any]:
        own = [r.error for r in self._ranks if r.error is not None and not isinstance(r.error, _PeersError)]
        if own:
            if self._failure:
                own[0].add_note(self._failure)
            raise own[0]
        if self._failure is not None:
            raise TransportError(self._failure)
        values = [r.value for r in self._ranks]
        for rank in self._ranks:
            rank.value = None  # the graphs in it know this executor
        return values

    def _rank(self, r: int, body: Callable[[Mesh], Any], ambient: Ambient) -> None:
        me = self._ranks[r]
        me.ident = threading.get_ident()
        me.gate.acquire()
        try:
            if self._failure is None:
                me.state = "running"
                # Backward must run in this thread: on a device's own thread one rank would wait for another behind it.
                with torch.autograd.set_multithreading_enabled(False), ambient:
                    me.value = body(self.mesh.at(r, _Reach(self, r)))
            me.state = "returned"
        except BaseException as error:  # handed to the caller of run
            me.error = error
            me.state = "raised"
        if me.error is not None:
            if not isinstance(me.error, _PeersError):
                self._fail(f"rank {r} raised {type(me.error).__name__}")
        else:
            waiting = [w for w in self._waited() if r in w.group and r not in w.parts]
            if waiting:
                self._fail(f"rank {r} returned, and a peer waits for it" + _hint(waiting[0]))
        self._pass_on(r)

    def _waited(self) -> list[_Exchange]:
        return [rank.waits_for for rank in self._ranks if rank.state == "waits" and rank.waits_for is not None]

    def _pass_on(self, r: int) -> None:
        """Let the next rank run that can."""
        self._stamp = time.monotonic()
        if self._failure is not None:
            if all(rank.state in ("returned", "raised") for rank in self._ranks):
                self._finished.set()
            return
        n = len(self._ranks)
        following = [(r + i) % n for i in range(1, n + 1)]
        ready = next((i for i in following if self._ranks[i].state == "ready"), None)
        if ready is not None:
            self._ranks[ready].state = "running"
            self._ranks[ready].gate.release()
        elif any(rank.state == "waits" for rank in self._ranks):
            self._fail("the ranks wait for each other: they do not make the same calls in the same order")
            self._pass_on(r)
        else:
            self._finished.set()

    def _fail(self, why: str) -> None:
        """Wake every rank, which raises; the first failure is the one that counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = "\n".join([why, *self._doing(), f"    mesh: {self.mesh}"])
            for rank in self._ranks:
                if rank.state in ("ready", "waits"):
                    with contextlib.suppress(RuntimeError):
                        rank.gate.release()

    def _doing(self) -> list[str]:
        """A line a rank: where it is."""
        frames = sys._current_frames()
        found = []
        for r, rank in enumerate(self._ranks):
            if rank.state == "waits" and rank.waits_for is not None:
                exchange = rank.waits_for
                missing = [str(m) for m in exchange.group if m not in exchange.parts]
                mine = exchange.parts[r]
                text = f"waits in {mine} for rank {', '.join(missing)}" if missing else f"is at {mine}"
                text += f": {mine.call}"
            elif rank.state == "raised":
                text = (
                    f"raised {type(rank.error).__name__}: {str(rank.error).splitlines()[0] if str(rank.error) else ''}"
                )
                text = text.rstrip(": ") + _raised_at(rank.error)
            elif rank.state == "running" and rank.ident in frames:
                text = f"runs  {site(frames[rank.ident])}"
            elif rank.state == "ready":
                text = "has its turn to come" + (f", after {rank.waits_for.parts[r].call}" if rank.waits_for else "")
            else:
                text = rank.state
            found.append(f"    rank {r:<3} {text}")
        return found

    def launch(self, r: int, x: Tensor, part: Part) -> _Work:
        """One rank brings its part."""
        me = self._ranks[r] if self._ranks else None
        call = part.call
        if me is None or me.ident != threading.get_ident() or me.state != "running":
            raise TransportError(
                f"{part}: this is not rank {r}'s own thread, or its run is over: {call}\n"
                "    fix: differentiate inside the body, or what simulate returned"
            )
        self._check()
        fault = self.fault(r, call) if self.fault else None
        if fault is not None:
            raise fault
        group = self.mesh.ranks(part.axes, r)
        number = self._started[group, r] = self._started.get((group, r), -1) + 1
        exchange = self._exchanges.setdefault((group, number), _Exchange(group))
        first = min(exchange.parts, default=r)
        exchange.parts[r], exchange.brought[r] = part, x
        problem = disagreement(group, {first: exchange.parts[first], r: part})
        if problem:
            me.state, me.waits_for = "waits", exchange
            self._fail(problem)
            me.state = "running"
            self._check()
        latency = self.latency(r, call) if callable(self.latency) else self.latency
        if latency:
            exchange.ready_at = max(exchange.ready_at, time.monotonic() + latency)
        if len(exchange.parts) == len(group):
            del self._exchanges[group, number]
            with torch.no_grad():
                exchange.results = _received(exchange)
            exchange.brought.clear()
            for rank in self._ranks:
                if rank.state == "waits" and rank.waits_for is exchange:
                    rank.state = "ready"
        return _Work(self, r, exchange)

    def wait(self, r: int, exchange: _Exchange) -> Tensor:
        """Its part of the result, once every member of the group has brought its own."""
        me = self._ranks[r]
        self._check()
        while exchange.results is None:
            gone = [m for m in exchange.group if m not in exchange.parts and self._ranks[m].state == "returned"]
            me.state, me.waits_for = "waits", exchange
            if gone:
                self._fail(f"rank {gone[0]} returned, and a peer waits for it" + _hint(exchange))
                me.state = "running"
                self._check()
            self._pass_on(r)
            me.gate.acquire()
            me.state = "running"
            self._check()
        me.waits_for = None
        while (left := exchange.ready_at - time.monotonic()) > 0:
            if any(rank.state == "ready" for rank in self._ranks):
                me.state = "ready"
                self._pass_on(r)
                me.gate.acquire()
                self._check()
            else:
                time.sleep(left)
                self._stamp = time.monotonic()
        return exchange.results.pop(r)

    def _check(self) -> None:
        if self._failure is not None:
            raise _PeersError(self._failure)


class _PeersError(TransportError):
    """Raised on the ranks that did nothing wrong."""


@dataclass(frozen=True)
class _Work:
    threads: Threads
    rank: int
    exchange: _Exchange

    def wait(self) -> Tensor:
        return self.threads.wait(self.rank, self.exchange)


@dataclass(frozen=True)
class _Reach:
    """The transport of one rank."""

    threads: Threads
    rank: int

    traces, spare = False, None

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return self._launch("all-gather", x, counts, counts, axes, call)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        return self._launch("reduce-scatter", x, counts, counts, axes, call)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        return self._launch("all-to-all", x, counts, receive, axes, call)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: Call) -> Work:
        return self._launch("all-reduce", x, [x.numel()], [x.numel()], axes, call)

    def _launch(
        self, kind: str, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        part = Part(kind, axes, x.dtype, list(counts), list(receive), call)
        return self.threads.launch(self.rank, x, part)


class Ambient:
    """What of the caller's thread a rank's thread takes over: gradient mode, inference mode, autocast."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in dict.fromkeys(["cpu", "cuda"])
            if torch.is_autocast_enabled(device)
        ]
        self.stack = threading.local()

    def __enter__(self) -> None:
        stack = self.stack.value = contextlib.ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for device, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype))

    def __exit__(self, *error: Any) -> None:
        self.stack.value.close()


def _hint(exchange: _Exchange) -> str:
    if not any(part.call.backward for part in exchange.parts.values()):
        return ""
    return "\n    fix: let what each rank returns depend on what it received, if only by adding 0 * y.sum()"


def _raised_at(error: BaseException | None) -> str:
    """The line of the body on which an error came up."""
    traceback, found = error.__traceback__ if error else None, ""
    while traceback is not None:
        name = site(traceback.tb_frame)
        if name:
            found = (
                f"  {name.split(':')[0]}:{traceback.tb_lineno} in {traceback.tb_frame.f_code.co_name}"
                if (name.endswith(f" in {traceback.tb_frame.f_code.co_name}"))
                else found
            )
        traceback = traceback.tb_next
    return found


def _received(exchange: _Exchange) -> dict[int, Tensor]:
    """What each rank receives, in memory of its own."""
    xs = [exchange.brought[m] for m in exchange.group]
    parts = [exchange.parts[m] for m in exchange.group]
    kind = parts[0].kind
    if kind == "all-gather":
        return {m: torch.cat(xs) for m in exchange.group}
    if kind == "all-reduce":
        total = summed(torch.stack(xs))
        return {m: total.clone() for m in exchange.group}
    blocks = [x.split(part.counts) for x, part in zip(xs, parts, strict=True)]
    if kind == "reduce-scatter":
        return {m: summed(torch.stack([b[i] for b in blocks])) for i, m in enumerate(exchange.group)}
    return {m: torch.cat([b[i] for b in blocks]) for i, m in enumerate(exchange.group)}
