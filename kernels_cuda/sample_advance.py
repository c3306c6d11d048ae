"""The end of a step without options: `sample_advance.cu`, and the primitive it serves.

Letters: B batch, Z vocabulary, N end-of-sequence tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..functional import sampling
from ..functional.shapes import check_shapes
from .device import counters
from .launch import Launch
from .ops import Op, composite, define, vector_length
from .rules import CPP_TYPES, arch_rule, by_rows, check_dtype, check_most, check_rows, check_same, dtype_rule

__all__ = ["MOST_VOCABULARY", "sample_advance", "supports"]

# As far as a kernel's int counts, with room to spare.
MOST_VOCABULARY = 1 << 30
_THREADS = 256
# Loads of a thread, each of 16 bytes at most, and blocks of a row.
_LOADS, _MOST_SHARES = 2, 64


def _reference(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits `B Z`, positions `B`, eos_token_id `N` -> token `B`, its log-probability `B` in fp32, positions `B`."""
    return sampling.sample_advance(logits, positions, eos_token_id)


def _outputs(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given = {"logits": (logits, "B Z"), "positions": (positions, "B"), "eos_token_id": (eos_token_id, "N")}
    check_dtype("sample_advance", logits=logits)
    check_same("sample_advance", torch.int64, positions=positions, eos_token_id=eos_token_id)
    check_rows("sample_advance", logits=logits, eos_token_id=eos_token_id)
    sizes = check_shapes("sample_advance", **given)
    check_most("sample_advance", "logits", "Z", sizes["Z"], MOST_VOCABULARY)
    batch = sizes["B"]
    logprob = logits.new_empty(batch, dtype=torch.float32)
    token = logits.new_empty(batch, dtype=torch.int64)
    return token, logprob, torch.empty_like(token)


def _launches(
    out: tuple[Tensor, Tensor, Tensor], logits: Tensor, positions: Tensor, eos_token_id: Tensor
) -> list[Launch]:
    batch, vocabulary = logits.shape
    vector = vector_length(None, logits)
    # By the vocabulary alone, so that a row is the same in every batch.
    share = max(_LOADS * _THREADS * 16 // logits.element_size(), -(-vocabulary // _MOST_SHARES) // 8 * 8 + 8)
    shares = max(1, -(-vocabulary // share))
    partial = arrived = None
    if shares > 1:
        partial, arrived = logits.new_empty(batch, shares, 4, dtype=torch.float32), counters(logits.device)
    integer, long = ctypes.c_int, ctypes.c_longlong
    launch = Launch(
        source="sample_advance.cu",
        name=f"sample_advance<{CPP_TYPES[logits.dtype]}, {vector}>",
        grid=(shares, batch, 1),
        block=(_THREADS, 1, 1),
        args=(
            *(logits, long(logits.stride(0)), positions, long(positions.stride(0)), eos_token_id, partial, arrived),
            *(*out, integer(vocabulary), integer(share), integer(len(eos_token_id))),
        ),
        programmatic=True,
    )
    return [launch]


_sample_advance = define(Op("sample", _reference, _outputs, _launches))


def _advance(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = _sample_advance(logits, positions.contiguous(), eos_token_id)
    return out


sample_advance = composite("sample_advance", _advance)


def supports(arguments: Mapping[str, Any], arch: str | None) -> str | None:
    """Of a call of `sample_advance`: None where the kernel computes it, else the reason why not."""
    logits, positions, ends = (arguments[name] for name in ("logits", "positions", "eos_token_id"))
    if (reason := arch_rule(arch) or dtype_rule(logits)) is not None:
        return reason
    if logits.dim() != 2:
        return f"logits of {logits.dim()} dimensions, only 2"
    integers = {"positions": positions, "eos_token_id": ends}
    for name, t in integers.items():
        if t.dtype != torch.int64:
            return f"{name} of {str(t.dtype).removeprefix('torch.')}, only int64"
    return by_rows(logits=[logits], eos_token_id=[ends])
