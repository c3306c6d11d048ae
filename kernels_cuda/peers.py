"""Two GPUs of one host that reach into each other's memory: set up by both ranks together, or by neither.

    link = connect(lambda: CudaMemory(device), rank, tell, torch.bfloat16, limit_s=60.0)
    link.sum(x) if isinstance(link, Link) else link  # a reason, the same on both ranks

A link belongs to whoever made it: nothing here is kept for a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .compiler import missing
from .one_shot_all_reduce import CAP_BYTES, EXCHANGE_BYTES, control_for, failure, one_shot_all_reduce
from .rules import arch_rule

__all__ = ["WORD_BYTES", "CudaMemory", "Link", "Memory", "Place", "Tell", "connect"]

# What a rank says to both, itself included, in `WORD_BYTES`, and what each said; a collective, with its own time limit.
Tell = Callable[[bytes], list[bytes]]
WORD_BYTES = 1024
# Of a wait of the trial: a peer may have to compile the kernel first.
_TRIAL_S = 30.0


class Place(NamedTuple):
    """host: one for all processes between which memory can be mapped. device: the same name in every process."""

    host: str
    process: int
    device: str


class Memory(Protocol):
    """A device's memory that another process can map. What fails raises, with the reason."""

    @property
    def device(self) -> torch.device: ...

    @property
    def place(self) -> Place: ...

    def check_access(self, peer: str) -> None:
        """Raise where it is known that this device cannot reach the peer's."""

    def allocate(self, size: int) -> tuple[int, bytes]:
        """The address of so many zeros, and the handle by which a peer maps them."""

    def map(self, handle: bytes) -> int:
        """Where a peer's memory lies here."""

    def unmap(self, address: int) -> None:
        """Once what is under way on the device has ended."""

    def free(self, address: int) -> None:
        """What a peer maps no more."""


class Link:
    """One rank's end; `connect` makes both. rank: 0 or 1 of the two. limit_s: of a wait for the peer."""

    def __init__(self, rank: int, tell: Tell, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self._tell = tell
        self._memory: Memory | None = None
        self._control: Tensor | None = None
        self._inbox: int | None = None
        self._outbox: int | None = None

    def sum(self, x: Tensor) -> Tensor:
        """x `N` of both ranks added up, `CAP_BYTES` at most. Both ranks make the same calls in one order, each on one
        stream, or on streams that wait for each other. Until `failure` says that nothing went wrong, it may be NaN."""
        if self._inbox is None or self._outbox is None:
            raise RuntimeError("this link is closed\n    fix: connect again, on both ranks")
        limit = int(self.limit_s * 1e9)
        out: Tensor = one_shot_all_reduce(x, self._control, self._inbox, self._outbox, self.rank, limit)
        return out

    def failure(self) -> str | None:
        """Why some sum so far, and all after it, is none; waits for the device. A link that failed once stays so."""
        return None if self._control is None else failure(self._control, self.limit_s)

    def close(self, *, together: bool = True) -> None:
        """Give the memory back. together: both ranks call this; otherwise, and where the peer does not come, the
        `EXCHANGE_BYTES` that it may still have mapped are left to the end of the process."""
        self._unmap()
        if self._inbox is not None and together:
            with contextlib.suppress(RuntimeError):  # of the transport: the peer is gone
                self._tell(_word())
                self._free()
        self._inbox = None

    def _unmap(self) -> None:
        if self._memory is not None and self._outbox is not None:
            self._memory.unmap(self._outbox)
            self._outbox = None

    def _free(self) -> None:
        if self._memory is not None and self._inbox is not None:
            self._memory.free(self._inbox)
            self._inbox = None

    # The steps in which both ends come about.

    def _allocate(self, memory: Memory) -> str:
        self._memory, self._control = memory, control_for(memory.device)
        self._inbox, handle = memory.allocate(EXCHANGE_BYTES)
        return json.dumps([*memory.place, handle.hex()])

    def _map(self, said: str) -> None:
        assert self._memory is not None
        *place, handle = json.loads(said)
        peer, own = Place(*place), self._memory.place
        if peer.host != own.host:
            raise RuntimeError("the two ranks are on two hosts")
        if peer.process == own.process:
            raise RuntimeError("the two ranks are one process, which maps no memory of its own")
        if peer.device == own.device:
            raise RuntimeError("the two ranks are on one GPU")
        self._memory.check_access(peer.device)
        self._outbox = self._memory.map(bytes.fromhex(handle))

    def _try(self, dtype: torch.dtype) -> None:
        """Sums whose results are known, through both slots of several channels."""
        assert self._memory is not None
        limit, self.limit_s = self.limit_s, min(self.limit_s, _TRIAL_S)
        n = CAP_BYTES // dtype.itemsize // 16 + 3
        numbers = torch.arange(n, device=self._memory.device) % 31
        weights = [(self.rank + 1) * i for i in range(1, 4)]
        found = [self.sum((numbers * w).to(dtype)) for w in weights]  # all of them, whatever comes of the first
        if not all(torch.equal(x, (numbers * 3 * i).to(dtype)) for i, x in enumerate(found, 1)):
            raise RuntimeError(f"a trial went wrong: {self.failure() or 'another sum came out'}")
        self.limit_s = limit


def connect(memory: Callable[[], Memory], rank: int, tell: Tell, dtype: torch.dtype, *, limit_s: float) -> Link | str:
    """A link between the two ranks that call this together, or the reason why there is none; both get a link, or both
    the same reason.

    memory: of this rank's device; may raise. rank: 0 or 1. dtype: that the trial adds up, so that its kernel is there.
    limit_s: of a wait for the peer, in seconds. Raises what `tell` does.
    """
    link = Link(rank, tell, limit_s)
    said, refused = _step(tell, lambda: link._allocate(memory()))
    if not refused:
        _, refused = _step(tell, lambda: link._map(said[1 - rank]))
    if not refused:
        _, refused = _step(tell, lambda: link._try(dtype))
    if not refused:
        return link
    link._unmap()
    tell(_word())  # from here on neither has the other's memory mapped
    link._free()
    return refused


def _step(tell: Tell, attempt: Callable[[], str | None]) -> tuple[list[str], str]:
    """What both ranks say of a step, and why it is the last: whatever one of them raises, the other hears of it."""
    try:
        mine = _word(said=attempt() or "")
    except Exception as error:
        mine = _word(why=(str(error).strip() or type(error).__name__).splitlines()[0][:200])
    words = [json.loads(word.rstrip(b"\0")) for word in tell(mine)]
    one, two = (word["why"] for word in words)
    refused = (
        one if one == two else "; ".join(f"rank {i} of the pair: {why}" for i, why in enumerate((one, two)) if why)
    )
    return [word["said"] for word in words], refused


def _word(said: str = "", why: str = "") -> bytes:
    return json.dumps({"said": said, "why": why}).encode().ljust(WORD_BYTES, b"\0")


class CudaMemory:
    """A GPU's, by the driver. Raises `RuntimeError` where no kernel can be compiled for it."""

    def __init__(self, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        if (reason := missing() or arch_rule(f"sm_{major}{minor}")) is not None:
            raise RuntimeError(reason)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.zeros(1, device=self.device)  # makes the context that the driver is asked in

    @property
    def place(self) -> Place:
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = boot.read_text().strip() if boot.exists() else socket.gethostname()
        return Place(host, os.getpid(), self._name(self.device.index))

    def check_access(self, peer: str) -> None:
        """Of a device that this process does not see, only mapping its memory tells."""
        seen = [i for i in range(torch.cuda.device_count()) if self._name(i) == peer]
        if seen and not torch.cuda.can_device_access_peer(self.device.index, seen[0]):
            raise RuntimeError(f"cuda:{self.device.index} has no peer access to cuda:{seen[0]}")

    def allocate(self, size: int) -> tuple[int, bytes]:
        with torch.cuda.device(self.device):
            address = self._call("cuMemAlloc", size)
            try:
                self._call("cuMemsetD8", address, 0, size)
                handle = self._call("cuIpcGetMemHandle", address)
                torch.cuda.synchronize()
            except RuntimeError:
                self._call("cuMemFree", address)
                raise
        return int(address), ctypes.string_at(handle.getPtr(), 64)

    def map(self, handle: bytes) -> int:
        from cuda.bindings import driver

        given = driver.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, 64)
        how = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        with torch.cuda.device(self.device):
            return int(self._call("cuIpcOpenMemHandle", given, how))

    def unmap(self, address: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._call("cuIpcCloseMemHandle", address)

    def free(self, address: int) -> None:
        with torch.cuda.device(self.device):
            self._call("cuMemFree", address)

    @staticmethod
    def _name(index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    @staticmethod
    def _call(function: str, *args: Any) -> Any:
        from cuda.bindings import driver

        error, *found = getattr(driver, function)(*args)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function}: {error.name}")
        return found[0] if found else None
