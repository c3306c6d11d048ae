"""The sum over two peers in one launch on each: `one_shot_all_reduce.cu`.

Letters: N numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import Launch, Mapped
from .ops import Op, define
from .rules import CPP_TYPES

__all__ = ["CAP_BYTES", "EXCHANGE_BYTES", "control_for", "failure", "one_shot_all_reduce", "rule"]

_THREADS, _CHANNELS, _PART_BYTES = 512, 32, 32 << 10
_WHOLE_BYTES = 16  # of one load
# Of a payload at most; of the memory that a peer writes: two slots of parts, and a mark of 16 bytes behind each part.
CAP_BYTES = _CHANNELS * _PART_BYTES
EXCHANGE_BYTES = 2 * (CAP_BYTES + _CHANNELS * 16)


def control_for(device: torch.device) -> Tensor:
    """What a rank keeps between launches: `Control` of the text, before the first message."""
    return torch.zeros(_CHANNELS + 5, dtype=torch.int64, device=device)


def rule(dtype: torch.dtype, numbers: int) -> str | None:
    """None for a payload that the kernel takes, else the reason why not."""
    if dtype not in CPP_TYPES:
        return f"no {str(dtype).removeprefix('torch.')}"
    size = numbers * dtype.itemsize
    return None if size <= CAP_BYTES else f"{size:,} bytes, {CAP_BYTES:,} at most"


def failure(control: Tensor, limit_s: float) -> str | None:
    """What went wrong in some launch so far, and so in all that followed; None where nothing did. Waits for the device.
    limit_s: of a wait, in seconds."""
    kind, channel, sequence, brought, own = control[_CHANNELS:].tolist()
    if not kind:
        return None
    message = f"message {sequence} of channel {channel}"
    if kind == 1:
        return f"the peer's {message} did not come within {limit_s:g} s"
    return f"the peer's {message} has {brought} bytes, and this rank's {own}"


def _schema(x: Tensor, control: Tensor, inbox: int, outbox: int, rank: int, limit: int) -> Tensor:
    """x `N` -> rank 0's and rank 1's x added up, `N`, the same bits on both.

    inbox, outbox: addresses of the `EXCHANGE_BYTES` that the peer writes and of those that this rank writes, zero in
    front of the first call. control: see `control_for`. rank: 0 or 1. limit: of a wait, in nanoseconds; see `failure`.
    Both ranks make the same calls.
    """
    raise RuntimeError("one_shot_all_reduce: a sum over two ranks, which is no function of one rank's tensors")


def _outputs(x: Tensor, control: Tensor, inbox: int, outbox: int, rank: int, limit: int) -> Tensor:
    if (reason := rule(x.dtype, math.prod(x.shape))) is not None:
        raise ValueError(f"one_shot_all_reduce(x=...): {reason}\n    fix: the all-reduce of torch.distributed")
    if x.dim() != 1 or (x.shape[0] > 1 and x.stride(0) != 1):
        raise ValueError(
            f"one_shot_all_reduce(x=...): {tuple(x.shape)} with strides {x.stride()}, and one row without gaps is "
            "needed\n    fix: x.contiguous().view(-1)"
        )
    if control.dtype != torch.int64 or control.shape != (_CHANNELS + 5,) or control.stride() != (1,):
        raise ValueError(
            f"one_shot_all_reduce(control=...): {tuple(control.shape)} of {control.dtype}\n    fix: control_for(device)"
        )
    if rank not in (0, 1):
        raise ValueError(f"one_shot_all_reduce(rank={rank}): 0 or 1")
    return x.new_empty(x.shape)


def _launches(
    out: Tensor, x: Tensor, control: Tensor, inbox: int, outbox: int, rank: int, limit: int
) -> Sequence[Launch]:
    (length,) = x.shape
    # Whole passes of a block's threads; by length and dtype alone, so that both ranks cut alike.
    one_pass = _THREADS * _WHOLE_BYTES // x.element_size()
    share = max(1, -(-length // (_CHANNELS * one_pass))) * one_pass
    aligned = x.data_ptr() % _WHOLE_BYTES == out.data_ptr() % _WHOLE_BYTES == 0
    integer = ctypes.c_int
    launch = Launch(
        source="one_shot_all_reduce.cu",
        name=f"one_shot_all_reduce<{CPP_TYPES[x.dtype]}, {_THREADS}, {_CHANNELS}, {_PART_BYTES}>",
        grid=(-(-length // share), 1, 1),
        block=(_THREADS, 1, 1),
        args=(
            *(x, out, Mapped(inbox, EXCHANGE_BYTES), Mapped(outbox, EXCHANGE_BYTES), control),
            *(integer(length), integer(share), integer(aligned), integer(rank), ctypes.c_longlong(limit)),
        ),
        programmatic=True,
    )
    return [launch]


one_shot_all_reduce = define(Op("one_shot_all_reduce", _schema, _outputs, _launches, mutates=("control",)))
