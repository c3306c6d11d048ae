"""What a training step reads: a mapping under transformers' names, checked, its targets shifted, and cut by rows.

Letters: B rows, S tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..functional.loss import IGNORE

__all__ = ["read_batch", "split"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_OURS = ("input_ids", "labels", "loss_mask", "positions", "attention_mask", "segment_ids")
# What others call it.
_ELSEWHERE = {
    "position_ids": "positions",
    "targets": "labels, of the tokens themselves: the step shifts them",
    "cu_seqlens": "segment_ids, the number of each token's document",
}


def read_batch(batch: Mapping[str, Any], device: torch.device, *, more: bool = True) -> dict[str, Any]:
    """The batch with `targets` `B S`, the token after each or -100; positions are None where every row is whole, and
    segment_ids without documents. more: whether a loss may read what else is in it. See `TrainStep.__call__`. Raises
    `ValueError` and `TypeError`, naming the entry."""
    if not isinstance(batch, Mapping):
        fix = "\n    fix: dataclasses.asdict(batch)" if hasattr(batch, "__dataclass_fields__") else ""
        raise TypeError(f"batch: a mapping with input_ids is needed, not {type(batch).__name__}{fix}")
    for name, fix in _ELSEWHERE.items():
        if name in batch:
            raise ValueError(f'batch["{name}"]: not known by this name\n    fix: {fix}')
    if "input_ids" not in batch:
        raise ValueError(f"batch: input_ids is missing\n    it has: {', '.join(map(str, batch)) or 'nothing'}")
    unread = [] if more else [name for name in batch if name not in _OURS]
    if unread:
        near = difflib.get_close_matches(str(unread[0]), _OURS, n=1)
        fix = f'did you mean "{near[0]}"?' if near else "leave it out, or train_step(..., loss) with one that reads it"
        raise ValueError(
            f'batch["{unread[0]}"]: the loss of the next token does not read it\n'
            f"    known: {', '.join(_OURS)}\n    fix: {fix}"
        )
    for first, second in (("labels", "loss_mask"), ("positions", "attention_mask")):
        if batch.get(first) is not None and batch.get(second) is not None:
            raise ValueError(f"batch: {first} and {second} say the same; one of them at most")
    ids = batch["input_ids"]
    for name in _OURS:
        if batch.get(name) is not None:
            _check(name, batch[name], ids, device)
    segments = batch.get("segment_ids")
    positions, mask = batch.get("positions"), batch.get("attention_mask")
    if positions is None and (mask is not None or segments is not None):
        positions = _positions(torch.ones_like(ids) if mask is None else (mask != 0).long(), segments)
    return {**batch, "positions": positions, "targets": _targets(batch, positions, segments), "segment_ids": segments}


def _check(name: str, value: Any, ids: Any, device: torch.device) -> None:
    told = f'batch["{name}"]'
    if not isinstance(value, Tensor):
        raise TypeError(f"{told}: a tensor is needed, not {type(value).__name__}")
    shape, wanted = tuple(value.shape), tuple(ids.shape)
    if value.dim() != 2 or (shape != wanted and not (name == "positions" and shape == (1, wanted[1]))):
        needed = "B S" if name == "input_ids" else f"B S = {wanted}"
        raise ValueError(f"{told}: {needed} is needed, not {shape}")
    if value.dtype not in _INTEGERS and not (value.dtype == torch.bool and name.endswith("mask")):
        raise TypeError(f"{told}: integers are needed, not {value.dtype}")
    if value.device != device:
        raise ValueError(f'{told}: on {value.device}, the parameters are on {device}\n    fix: .to("{device}")')


def _positions(there: Tensor, segments: Tensor | None) -> Tensor:
    """there `B S`, 1 for a token and 0 for padding -> its position in its document, -1 for padding. A document is a run
    of equal numbers in segment_ids."""
    count = there.cumsum(-1)
    before = torch.zeros_like(count)
    if segments is not None:
        begins = segments[:, 1:] != segments[:, :-1]
        before[:, 1:] = torch.where(begins, count[:, :-1], 0)
    return torch.where(there != 0, count - before.cummax(-1).values - 1, -1)


def _targets(batch: Mapping[str, Any], positions: Tensor | None, segments: Tensor | None) -> Tensor:
    """The label of the next token, -100 where that is of another document, or one of the two is padding."""
    ids, mask = batch["input_ids"], batch.get("loss_mask")
    labels = ids if batch.get("labels") is None else batch["labels"]
    kept = torch.ones_like(ids[:, 1:], dtype=torch.bool) if mask is None else mask[:, 1:] != 0
    if segments is not None:
        kept = kept & (segments[:, 1:] == segments[:, :-1])
    if positions is not None:
        kept = kept & (positions[:, 1:] >= 0) & (positions[:, :-1] >= 0)
    targets = torch.full_like(ids, IGNORE, dtype=torch.int64)
    targets[:, :-1] = torch.where(kept, labels[:, 1:], IGNORE)
    return targets


def split(batch: Mapping[str, Any], parts: int) -> Iterator[dict[str, Any]]:
    """The batch in equal parts, by rows: every tensor that has the rows of input_ids is cut, all else goes with each
    part. Raises `ValueError` where the rows do not divide."""
    rows = batch["input_ids"].shape[0]
    if rows % parts:
        fix = max(n for n in range(1, parts + 1) if rows % n == 0)
        raise ValueError(f"train_step(microbatches={parts}): does not divide {rows} rows\n    fix: microbatches={fix}")
    each = rows // parts
    for part in range(parts):
        here = slice(part * each, (part + 1) * each)
        yield {
            name: value[here] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in batch.items()
        }
