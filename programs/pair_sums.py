"""Pending sums over two ranks of a program, by the kernel `one_shot_all_reduce` where both can, else by the library.

What a program's mesh is given is a transport that hands such a sum to the kernel and everything else on; so layouts,
steps and traces know nothing of it, and its bytes are those of any all-reduce.

Letters: P ranks, N bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import sharding as sh
from ..kernels_cuda.one_shot_all_reduce import CAP_BYTES, EXCHANGE_BYTES, rule
from ..kernels_cuda.peers import WORD_BYTES, CudaMemory, Link, Memory, connect
from ..sharding.transport import Done, Transport, Work
from .rows import size_text

__all__ = ["AXIS", "KERNEL", "PairSums", "Planned"]

KERNEL, AXIS = "one_shot_all_reduce", "tp"
# Of a wait, where a transport has no limit of its own.
_LIMIT_S = 60.0


class PairSums:
    """A rank's sums over `tp`. mesh: the one that a program runs on. Made by both ranks of a pair together.

    link: what carries them, or the reason why the library does, the same on both ranks. peer: the other rank.
    """

    def __init__(self, mesh: sh.Mesh, layout: sh.Layout, device: torch.device, dtype: torch.dtype) -> None:
        self._given, self._device = mesh, device
        self.members = mesh.ranks((AXIS,), mesh.rank)
        self.summed = AXIS in layout.axes and len(self.members) > 1
        self._failed = self._abandoned = False
        self.link: Link | str = self._refused(device, dtype) or self._connected(dtype)
        self.mesh = mesh
        if isinstance(self.link, Link):
            assert mesh.transport is not None
            self.mesh = mesh.at(mesh.rank, _Summing(mesh.transport, self))

    def _refused(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """What all ranks know without a word."""
        if len(self.members) != 2 or not self.summed:
            return f"{AXIS}={len(self.members)}, only 2"
        if getattr(self._given.transport, "check", False):
            return "the transport checks each of its own calls"
        return rule(dtype, 0) or place_rule(device)

    def _connected(self, dtype: torch.dtype) -> Link | str:
        rank = self.members.index(self._given.rank)
        return connect(lambda: memory_of(self._device), rank, self._tell, dtype, limit_s=self.limit_s)

    @property
    def peer(self) -> int:
        return self.members[1 - self.members.index(self._given.rank)]

    @property
    def limit_s(self) -> float:
        """Of a wait for a peer."""
        transport = self._given.transport
        limit = transport.limit_s(self._device.type) if isinstance(transport, sh.ProcessGroup) else None
        return _LIMIT_S if limit is None else limit

    def _tell(self, word: bytes) -> list[bytes]:
        """What both ranks of the pair say."""
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)[None].to(self._device)
        both = sh.reshard(mine, f"P/{AXIS} N -> P N", self._given.recording(None), P=2)
        return [bytes(each.tolist()) for each in both.cpu().view(2, WORD_BYTES)]

    def reason(self, x: Tensor, axes: tuple[str, ...], call: sh.Call) -> str | None:
        """None for a sum that the kernel takes, else why the library does."""
        if isinstance(self.link, str):
            return self.link
        if self._given.ranks(axes, self._given.rank) != self.members:
            return f"over {'/'.join(axes)}"
        if call.grad or call.backward:
            return "it has a gradient"
        return rule(x.dtype, x.numel())

    def dry(self, inner: Transport) -> Planned:
        """What a plan takes in place of this rank's transport: `inner`, with a note of who would make each sum."""
        return Planned(inner, self)

    def check(self) -> None:
        """Raise `TransportError` where a sum since the program was built is none. Waits for the device."""
        why = self.link.failure() if isinstance(self.link, Link) else None
        if why is not None:
            self._failed = True
            raise sh.TransportError(
                f"rank {self._given.rank}: {KERNEL} over {AXIS} with rank {self.peer} failed: {why}\n"
                f"    a peer is gone, was slower than the time limit, or made another call     mesh: {self._given}\n"
                "    fix: end all ranks and build the program again"
            )

    def abandon(self) -> None:
        """Leave the exchange memory to the end of the process: something on the device may use it for ever."""
        self._abandoned = True

    def close(self, *, together: bool) -> None:
        """Give the exchange memory back; see `Link.close`. After a failure nobody waits for the peer."""
        if isinstance(self.link, Link) and not self._abandoned:
            self.link.close(together=together and not self._failed)

    def __str__(self) -> str:
        """A line of a plan."""
        if isinstance(self.link, str):
            return f"over {AXIS} by the library's all-reduce ({KERNEL}: {self.link})"
        sizes = f"up to {size_text(CAP_BYTES)}, {size_text(EXCHANGE_BYTES)} of exchange memory on this rank"
        return f"over {AXIS} with rank {self.peer} by {KERNEL}, {sizes}; a wait ends after {self.link.limit_s:g} s"


def place_rule(device: torch.device) -> str | None:
    """None for a device of which memory can be mapped, else the reason why not."""
    return None if device.type == "cuda" else f"{device.type}, only cuda"


def memory_of(device: torch.device) -> Memory:
    """The memory that a peer maps."""
    return CudaMemory(device)


class _Summing:
    """A transport whose sums over a pair the kernel takes."""

    def __init__(self, inner: Transport, sums: PairSums) -> None:
        self._inner, self._sums = inner, sums
        self.traces, self.spare = inner.traces, inner.spare

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: sh.Call) -> Work:
        return self._inner.all_gather(x, counts, axes, call)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: sh.Call) -> Work:
        return self._inner.reduce_scatter(x, counts, axes, call)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: sh.Call
    ) -> Work:
        return self._inner.all_to_all(x, counts, receive, axes, call)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: sh.Call) -> Work:
        link = self._sums.link
        if isinstance(link, Link) and self._sums.reason(x, axes, call) is None:
            return Done(link.sum(x))
        return self._inner.all_reduce(x, axes, call)


class Planned(_Summing):
    """A transport that hands everything on."""

    def __init__(self, inner: Transport, sums: PairSums) -> None:
        super().__init__(inner, sums)
        self._taken: list[str] = []

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: sh.Call) -> Work:
        self._taken.append(KERNEL if self._sums.reason(x, axes, call) is None else "all-reduce")
        return self._inner.all_reduce(x, axes, call)

    def taken(self) -> tuple[str, ...]:
        """Who would have made each sum since this was last asked, the kernel or the library's all-reduce."""
        found, self._taken = tuple(self._taken), []
        return found
