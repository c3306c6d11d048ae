"""Which tokens of a batch there are, for layers that carry a state along a row: padding and packed documents.

A token is no token where its position is below 0 (as in `core` and `cache`) or where it lies beyond its row's length.
It has no effect on any other, whatever it holds (NaN too), and leaves the state of its row as it was. With
`cu_seqlens` the one row of a batch is N documents one after another, each with a state of its own; a document may have
no tokens.

Letters: B batch, S tokens of a row, N documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shapes import ShapeError, check_positions, check_shapes

__all__ = [
    "check_rows",
    "check_state",
    "check_together",
    "document_of",
    "documents_before",
    "readable",
    "tokens_of",
    "zero_absent",
]


def check_rows(
    function: str,
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    positions: Tensor | None,
    segment_ids: Tensor | None = None,
) -> int:
    """How many states there are: N with `cu_seqlens`, else B. Raises where the arguments contradict the row or each
    other; values are read on the CPU alone, where that does not wait for a device, and outside of a trace."""
    sizes = {"B": batch, "S": tokens}
    given = {"lengths": (lengths, "B"), "positions": (positions, "B? S"), "segment_ids": (segment_ids, "B S")}
    check_shapes(function, sizes, **given)
    check_positions(function, positions)
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(
            f"{function}(segment_ids=...): cu_seqlens says already which documents there are\n"
            "    fix: pass cu_seqlens alone, or segment_ids for a batch of packed rows"
        )
    if lengths is not None and (cu_seqlens is not None or positions is not None):
        other = "positions" if cu_seqlens is None else "cu_seqlens"
        raise ValueError(
            f"{function}(lengths=...): {other} says already which tokens there are\n    fix: pass {other} alone"
        )
    if lengths is not None and (known := readable(lengths)) and not all(0 <= n <= tokens for n in known):
        raise ValueError(
            f"{function}(lengths={known}): a row has S={tokens} tokens\n    fix: lengths.clamp(0, {tokens})"
        )
    if cu_seqlens is None:
        return batch
    check_shapes(function, cu_seqlens=(cu_seqlens, "N1"))
    if batch != 1:
        raise ShapeError(
            f"{function}(cu_seqlens=...): packed documents lie in one row, but there are B={batch}\n"
            "    fix: x.flatten(0, 1)[None], and cu_seqlens of all rows"
        )
    if cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ShapeError(
            f"{function}(cu_seqlens=...): N+1 >= 2 integers are needed, not {cu_seqlens.shape[0]} of {cu_seqlens.dtype}"
        )
    known = readable(cu_seqlens)
    if known and (known[0] != 0 or known[-1] != tokens or sorted(known) != known):
        shown = str(known) if len(known) <= 8 else f"[{', '.join(map(str, known[:3]))}, ..., {known[-1]}]"
        raise ValueError(
            f"{function}(cu_seqlens={shown}): it must begin with 0, never fall, and end with the S={tokens} tokens\n"
            "    fix: torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), and a last document for padding"
        )
    return cu_seqlens.shape[0] - 1


def check_state(
    function: str, state: Tensor, spec: str, states: int, dtype: torch.dtype, given: dict[str, tuple[Tensor, str]]
) -> None:
    """Raise where a state has not a row for each row or document, the other sizes of `given` (arguments of
    `check_shapes`), or the dtype."""
    if state.dim() and state.shape[0] != states:
        raise ShapeError(
            f"{function}(initial_state=...): {states} rows or documents need a state each, and it has "
            f"{state.shape[0]}\n    {spec} = {' '.join(map(str, state.shape))}"
        )
    check_shapes(function, **given, initial_state=(state, spec))
    if state.dtype != dtype:
        raise TypeError(
            f"{function}(initial_state=...): its dtype is {state.dtype}, where {dtype} is carried\n"
            f"    fix: initial_state.to({dtype})"
        )


def check_together(function: str, positions: Tensor | None) -> None:
    """Raise `ValueError` where padding lies between the tokens of a row of positions `B|1 S`, which a convolution
    would read."""
    if positions is None or positions.shape[1] < 3:
        return
    there = positions >= 0
    begins = there[:, :1].sum(1) + (there[:, 1:] & ~there[:, :-1]).sum(1)
    if any(known := [n > 1 for n in readable(begins) or []]):
        row = known.index(True)
        tokens = readable(there[row])
        first = tokens.index(True)
        hole = tokens.index(False, first)
        raise ValueError(
            f"{function}(positions=...): padding lies between the tokens of row {row}, at token {hole}, and the "
            "convolution reads it\n"
            "    fix: bring the tokens of each row together, padding in front or behind"
        )


def readable(x: Tensor) -> Any:
    """The values of x where they may be read: not in a trace, not of a fake tensor, not on another device."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return None
    try:
        return x.tolist()
    except RuntimeError:  # under vmap, which has no public way to ask
        return None


def tokens_of(tokens: int, lengths: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Where a token is, boolean `B|1 S`; None where all are."""
    if positions is not None:
        return positions >= 0
    return None if lengths is None else torch.arange(tokens, device=lengths.device) < lengths[:, None]


def zero_absent(x: Tensor, there: Tensor | None) -> Tensor:
    """x `B S ...` with what is no token zeroed: a weight or a gradient of 0 times a NaN is NaN."""
    return x if there is None else x.masked_fill(~there[(..., *[None] * (x.dim() - 2))], 0)


def documents_before(segment_ids: Tensor, there: Tensor | None) -> Tensor:
    """segment_ids `B S` -> `B S+1`: which document of its row the token before each is of, counted from 0, and the last
    token. Neighbours with other ids are of other documents; padding is of that in front of it."""
    if there is not None:
        there = there.expand_as(segment_ids)
        at = torch.arange(segment_ids.shape[1], device=segment_ids.device)
        segment_ids = segment_ids.gather(1, torch.where(there, at, 0).cummax(1).values)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    return torch.nn.functional.pad(new, (min(2, segment_ids.shape[1] + 1), 0)).long().cumsum(1)


def document_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`S`: the document of each token."""
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)
