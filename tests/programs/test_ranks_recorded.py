"""Decode over ranks as a device's graph has it: operations and exchanges on tensors, and nothing of what the host did.

A recording does not run; between replays nothing stands in the memory that it made itself.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from meshfn import programs
from meshfn import sharding as sh
from meshfn.functional import grouped
from meshfn.programs import rank_held
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .test_ranks import CASES, HEADS, MOE, OPTIONS, PROMPTS, SIZES, build, dense, made

SOME = [CASES[0], CASES[2], CASES[4], CASES[7], CASES[11], (dense, {"dp": 2}, ((HEADS, MOE),))]
HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select")
MORE: list[dict[str, Any]] = [
    {"do_sample": True, "top_k": 10**6, "top_p": 0.0, "seed": 2**63 - 1},
    {"do_sample": True, "top_k": 1, "temperature": 1e-6, "min_p": 1.0, "seed": 0},
]
here = threading.local()


def tensors(of: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, torch.Tensor)]


def place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """What is called within, in order; `run` calls it again. made: memory that it allocated, by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.Tensor]]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.before: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in HOST, f"{func} in a graph"
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        given = tensors((args, kwargs))
        for x in given if writes else ():
            if place(x) not in self.made:
                self.before.setdefault(place(x), (x, x.untyped_storage().clone()))
        found = func(*args, **kwargs)
        self.kept += [args, kwargs, found]
        new = [x for x in tensors(found) if place(x) not in map(place, given)]
        self.made.update((place(x), x) for x in new)
        if writes or (new and "empty" not in name):  # a view of what was given stays one
            self.calls.append((lambda: tensors(func(*args, **kwargs)), tensors(found) if new else []))
        return found

    def exchange(self, launch: Any, x: torch.Tensor, *how: Any) -> Any:
        with _disable_current_modes():
            found = launch(x, *how).wait()
        self.kept += [x, found]
        self.made[place(found)] = found
        self.calls.append((lambda: [launch(x, *how).wait()], [found]))
        return Done(found)

    def undo(self) -> None:
        for x, bytes_ in self.before.values():
            x.untyped_storage().copy_(bytes_)
        self.forget()

    def forget(self) -> None:
        for x in self.made.values():
            x.untyped_storage().fill_(0x7F)

    def run(self) -> None:
        for call, into in self.calls:
            for old, new in zip(into, call(), strict=False):  # into: nothing, where it writes to what it was given
                old.copy_(new)
        self.forget()


class Done:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def wait(self) -> torch.Tensor:
        return self.value


class RecordedRanks:
    """A transport whose exchanges are recorded too, each as one call."""

    traces, spare = False, None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        launch = getattr(self.inner, name)
        recording = getattr(here, "recording", None)
        return launch if recording is None else lambda *given: recording.exchange(launch, *given)


class GraphReplay:
    def __init__(self) -> None:
        self.graphs: dict[Any, Recording] = {}

    def warm_up(self, run: Any) -> None:
        run()

    def capture(self, name: Any, run: Any) -> None:
        here.recording = self.graphs[name] = Recording()
        try:
            with here.recording:
                run()
        finally:
            here.recording = None
        self.graphs[name].undo()

    def replay(self, name: Any) -> None:
        self.graphs[name].run()

    def release(self) -> None:
        self.graphs.clear()


@pytest.mark.parametrize(("layout", "axes", "parts"), SOME, ids=[f"{case[0].name} {case[1]}" for case in SOME])
def test_tokens_are_those_of_one_rank(monkeypatch, layout, axes, parts):
    monkeypatch.setattr(rank_held, "replay_of", lambda *_: GraphReplay())
    monkeypatch.setattr(grouped, "_is_captured", lambda device: getattr(here, "recording", None) is not None)
    of, asked = made(parts), [*OPTIONS[1:3], *MORE, {}]
    one = programs.build(of, compile=False, **SIZES)

    def called(program):
        return [program.generate(PROMPTS[:rows], max_new_tokens=11, **o).tokens for rows in (2, 1) for o in asked]

    def body(at):
        return called(build(of, layout, at.at(at.rank, RecordedRanks(at.transport))))

    want = called(one)
    for found in sh.Threads(sh.Mesh(**axes)).run(body):
        assert found == want
