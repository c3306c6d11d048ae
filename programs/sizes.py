"""What a program is built for: the device and the static sizes, and arguments of those sizes for each phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import kernels_cuda
from ..functional.cache import Cache
from ..functional.shapes import check_positive
from . import dynamo
from .steps import State, windows

__all__ = ["Sizes", "Target", "by_channel", "target_of"]

# The cache is read in steps of this many slots, so that few different sizes occur.
READ_STEP = 32
# Room for the end-of-sequence tokens of a call, so that their number is no part of a graph; Llama 3 has three.
EOS_LIMIT = 8


@dataclass(frozen=True)
class Target:
    """device: its type, such as "cpu". arch: such as "sm_90"; None on a device without one. lacks: why no kernel can be
    compiled for it here; None where one can, and in a plan for a device that is elsewhere."""

    device: str
    dtype: torch.dtype
    arch: str | None = None
    lacks: str | None = None

    @property
    def compiled_for(self) -> str | None:
        """The architecture that kernels are compiled for, None where none can be."""
        return None if self.lacks else self.arch

    def __str__(self) -> str:
        return " ".join([self.device, str(self.dtype).removeprefix("torch."), *([self.arch] if self.arch else [])])


def target_of(device: torch.device, dtype: torch.dtype) -> Target:
    """Of a device that is here."""
    if device.type != "cuda":
        return Target(device.type, dtype)
    major, minor = torch.cuda.get_device_capability(device)
    problem = kernels_cuda.missing()
    return Target(device.type, dtype, f"sm_{major}{minor}", problem and problem.splitlines()[0])


@dataclass(frozen=True)
class Sizes:
    """batch: rows. max_len: tokens a row. chunk: tokens of a row that a prefill call takes, max_len at most.
    Made by `of`."""

    batch: int
    max_len: int
    chunk: int

    @classmethod
    def of(cls, function: str, *, batch: int, max_len: int, chunk: int) -> Sizes:
        """As `function` was told them. Raises `ValueError` for what is no positive integer."""
        check_positive(function, batch=batch, max_len=max_len, chunk=chunk)
        return cls(batch, max_len, min(chunk, max_len))

    @property
    def slots(self) -> int:
        """One more than is ever read: Dynamo takes a view as long as its base for a special case and would compile
        a second time."""
        return -(-self.max_len // READ_STEP) * READ_STEP + 1

    def slots_of(self, window: int | None) -> int:
        """The slots of a layer's cache; those of a ring are its window and one that is never read, see `slots`."""
        return self.slots if window is None else min(self.slots, window + 1)

    def read(self, every: Tensor, tokens: int, cfg: F.DecoderConfig) -> tuple[Tensor, ...]:
        """For each window of the layers the slots that hold the first `tokens`, rounded up: the dynamic sizes of a
        step. every: all slots, `0 .. slots-1`."""
        found = []
        for window in windows(cfg):
            most = self.slots_of(window) - 1
            slots = every[: min(-(-tokens // READ_STEP) * READ_STEP, most)]
            # A cache that short is always read whole.
            found.append(slots if most <= READ_STEP else dynamo.dynamic_size(slots, 0, max=most))
        return tuple(found)

    def caches(self, cfg: F.DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[Cache, ...]:
        """A cache a layer, uninitialised, the channels of a convolution innermost: a step reads them tap by tap."""
        kinds = [each.attention for each in cfg.layers]
        slots = [self.slots_of(each.window) for each in kinds]
        caches = F.empty_caches(kinds, self.batch, slots, dtype=dtype, device=device)
        return tuple(by_channel(each) if isinstance(each, F.GDNCache) else each for each in caches)

    def idle(self, phase: str, cfg: F.DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
        """The arguments of a phase after parameters and cache, with no active row: computing them changes nothing."""
        none = torch.full((self.batch, self.chunk), -1, device=device)
        state = State.empty(self.batch, cfg.vocab_size, dtype, device)
        eos = torch.full((EOS_LIMIT,), -1, device=device)
        read = self.read(torch.arange(self.slots, device=device), READ_STEP, cfg)
        tokens, length = torch.zeros_like(none), torch.zeros_like(none[:, 0])
        return {
            "prefill": (state, tokens, none, torch.full((self.batch,), -1, device=device), length, eos, read),
            "decode": (state, eos, read),
            # Tensors of their own: two arguments that are one would be one input of the graph.
            "score": (tokens, none, torch.zeros_like(none), length, read),
        }[phase]


def by_channel(cache: F.GDNCache) -> F.GDNCache:
    return replace(cache, **{name: getattr(cache, name).mT.contiguous().mT for name in ("q", "k", "v")})
