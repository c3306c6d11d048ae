"""Two GPUs that map each other's memory, on a CPU: what `kernels_cuda.peers` asks of a device, and their launches.

    gpus = TwoGpus()
    with host_ops(gpus):
        sh.Threads(sh.Mesh(tp=2)).run(body)  # in it gpus.of(at) comes first, and is the memory of a rank

A launch waits until its peer has launched too; then both run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from meshfn import sharding as sh
from meshfn.kernels_cuda import OPS, Launch
from meshfn.kernels_cuda.launch import Mapped
from meshfn.kernels_cuda.one_shot_all_reduce import EXCHANGE_BYTES, control_for
from meshfn.kernels_cuda.peers import WORD_BYTES, Place
from torch import Tensor

from .harness import FOREVER, Device, Host

__all__ = ["Ends", "FakeMemory", "TwoGpus", "tell_of"]

OP = OPS["one_shot_all_reduce"]
RANK = 8  # which argument of a launch says the rank


class Ends:
    """The memory of both ranks, for launches that a test runs itself."""

    def __init__(self) -> None:
        self.boxes = [torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.control = [control_for(torch.device("cpu")) for _ in range(2)]

    def call(self, rank: int, x: Tensor, limit: int = 10**6) -> tuple[Tensor, Launch]:
        """A launch of a rank, and what it writes."""
        args = (x, self.control[rank], self.boxes[rank].data_ptr(), self.boxes[1 - rank].data_ptr(), rank, limit)
        out = OP.outputs(*args)
        (launch,) = OP.launches(out, *args)
        return out.fill_(7), launch


def tell_of(at: sh.Mesh) -> Callable[[bytes], list[bytes]]:
    """How a rank of a mesh says something to its peer over tp."""

    def tell(word: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)[None]
        both = sh.reshard(mine, "P/tp N -> P N", at.recording(None), P=2)
        return [bytes(each.tolist()) for each in both.view(2, WORD_BYTES)]

    return tell


class TwoGpus:
    """Those of each pair over tp. sleeps: of each rank's launch, by how many there were; forever is until the peer's has
    ended. live: allocations, and how often each is mapped."""

    def __init__(self, host: Host | None = None) -> None:
        self.host = host or Host()
        self.launches: list[Launch] = []
        self.live: dict[int, int] = {}
        self.sleeps: Callable[[int, int], tuple[int, int]] = lambda rank, number: (0, 0)
        self._tensors: dict[int, Tensor] = {}
        self._waiting: dict[frozenset[int], dict[int, Launch]] = {}
        self._meet: dict[int, Callable[[bytes], Any]] = {}  # by thread
        self._memory: dict[int, FakeMemory] = {}

    def of(self, at: sh.Mesh) -> FakeMemory:
        """The memory of a rank, whose thread asks for it; `mine` is it from there on."""
        self._meet[threading.get_ident()] = tell_of(at)
        made = self._memory[threading.get_ident()] = FakeMemory(self, at.rank)
        return made

    def mine(self, device: torch.device) -> FakeMemory:
        return self._memory[threading.get_ident()]

    def __call__(self, launch: Launch) -> None:
        pair = frozenset(arg.address for arg in launch.args if isinstance(arg, Mapped))
        waiting = self._waiting.setdefault(pair, {})
        waiting[launch.args[RANK].value] = launch
        if len(waiting) == 2:
            self._together([waiting[0], waiting[1]])
            waiting.clear()
        self._meet[threading.get_ident()](bytes(WORD_BYTES))

    def _together(self, both: list[Launch]) -> None:
        number = len(self.launches) // 2
        self.launches += both
        sleeps = [self.sleeps(rank, number) for rank in range(2)]
        devices = [Device([launch], each) for launch, each in zip(both, sleeps, strict=True)]
        self.host.together(devices)
        for device in devices:
            if device.sleeps == (0, FOREVER):  # it comes when the other has gone
                self.host.together([Device(device.launches)])


class FakeMemory:
    device = torch.device("cpu")

    def __init__(self, gpus: TwoGpus, rank: int) -> None:
        self.gpus, self.place = gpus, Place("host", rank, f"gpu {rank}")

    def check_access(self, peer: str) -> None:
        assert peer != self.place.device

    def allocate(self, size: int) -> tuple[int, bytes]:
        made = torch.zeros(size, dtype=torch.uint8)
        self.gpus._tensors[made.data_ptr()] = made
        self.gpus.live[made.data_ptr()] = 0
        return made.data_ptr(), made.data_ptr().to_bytes(64, "little")

    def map(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        self.gpus.live[address] += 1
        return address

    def unmap(self, address: int) -> None:
        self.gpus.live[address] -= 1

    def free(self, address: int) -> None:
        assert self.gpus.live.pop(address) == 0, "freed while a peer has it mapped"
        del self.gpus._tensors[address]
