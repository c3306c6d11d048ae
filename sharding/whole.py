"""What every rank has all of: positions, documents and masks. Checked against the tokens before anything moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import documents
from .layouts import Layout

__all__ = ["NAMES", "Whole", "check_heads", "take"]

# Arguments that every rank gets whole.
NAMES = ("positions", "q_positions", "k_positions", "segment_ids", "cu_seqlens", "mask")


class Whole(NamedTuple):
    """edges: the global value of each edge. cu: boundaries of documents, if they were given. ordered: whether
    positions ascend with tokens within a document. positions: `B|1 S`, None where a cache alone knows them; given:
    whether the caller said them."""

    edges: Mapping[str, Tensor | None]
    cu: tuple[int, ...] | None
    ordered: bool
    positions: Tensor | None
    given: bool


def take(arguments: dict[str, Any], layout: Layout, tokens: int, rows: int, device: torch.device) -> Whole:
    """Take what is whole out of the arguments. Raises `ValueError` naming the argument where it does not fit.

    tokens: S. rows: how many of the batch this rank has. device: of the activations.
    """
    found = {name: arguments.pop(name) for name in NAMES if name in arguments}
    cu, ids = found.get("cu_seqlens"), found.get("segment_ids")
    if cu is not None:
        if ids is not None:
            raise ValueError("cu_seqlens and segment_ids both say where documents are\n    fix: cu_seqlens alone")
        cu = documents.boundaries(cu, tokens)
        ids = documents.document_ids(cu, device).expand(rows, tokens)
    usual = documents.positions_within(cu or (0, tokens), device)
    positions = _positions(found, usual, tokens, rows, device)
    given = any(found.get(name) is not None for name in ("positions", "q_positions"))
    ordered = not given
    if given and layout.exchange == "needed":
        if torch.compiler.is_compiling() or not all(bool((p == usual).all()) for p in positions):
            raise ValueError(
                'positions with exchange="needed": the keys that a query needs are worked out from 0 .. S-1 in each '
                'document, and these are others\n    fix: exchange="all", or no positions'
            )
        ordered = True
    if isinstance(ids, (tuple, list)) and len(ids) != 2:
        raise ValueError(f"segment_ids: B S, or a pair of queries' and keys', not {len(ids)} of them")
    q_ids, k_ids = ids if isinstance(ids, (tuple, list)) else (ids, ids)
    for name, x in (("segment_ids", q_ids), ("segment_ids of the keys", k_ids)):
        if x is not None:
            _fits(name, x, (rows, tokens), tokens, device)
    mask = _mask(found.get("mask"), tokens, rows, device)
    # Behind a cache tokens go on, and only it knows from where.
    known = given or arguments.get("cache") is None
    edges = {
        "q_positions": positions[0] if known else None,
        "k_positions": positions[1] if known else None,
        "q_segment_ids": q_ids,
        "k_segment_ids": k_ids,
        "mask": mask,
    }
    return Whole(edges, cu, ordered, edges["q_positions"], given)


def _positions(
    found: Mapping[str, Any], usual: Tensor, tokens: int, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of queries and of keys."""
    both, q, k = (found.get(name) for name in ("positions", "q_positions", "k_positions"))
    if (q is None) != (k is None):
        raise ValueError("q_positions and k_positions: both, or neither (here one token is query and key)")
    if both is not None and q is not None:
        raise ValueError("positions and q_positions both say where tokens stand\n    fix: one of them")
    named = [("positions", both)] if both is not None else [("q_positions", q), ("k_positions", k)]
    for name, p in named:
        if p is not None:
            of_all = isinstance(p, Tensor) and p.dim() > 0 and p.shape[0] == 1
            _fits(name, p, (1 if of_all else rows, tokens), tokens, device)
    q, k = (both, both) if q is None else (q, k)
    return (usual, usual) if q is None or k is None else (q, k)


def _fits(name: str, x: Any, shape: tuple[int, int], tokens: int, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: a tensor is needed, not {type(x).__name__}")
    if tuple(x.shape) != shape:
        fix = "all tokens of these rows, which every rank gets whole, not this rank's part of them"
        if x.dim() == 2 and x.shape[1] == tokens:
            fix = f"the {shape[0]} rows that this rank holds, or one for all"
        raise ValueError(
            f"{name} {_numbers(x)}: {shape[0]} {shape[1]} is needed, rows of all S={tokens} tokens\n    fix: {fix}"
        )
    _on(name, x, device)


def _on(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, the activations on {device}\n    fix: {name}.to({str(device)!r})")


def _numbers(x: Tensor) -> str:
    return " ".join(str(int(n)) for n in x.shape) or "(a scalar)"


def check_heads(mask: Tensor | None, heads: int) -> None:
    """Raise `ValueError` for a mask of other heads than a layer has."""
    if mask is not None and mask.shape[1] not in (1, heads):
        raise ValueError(f"mask {_numbers(mask)}: B|1 H|1 S S is needed, and the layer has H={heads} query heads")


def _mask(mask: Any, tokens: int, rows: int, device: torch.device) -> Tensor | None:
    """As `B|1 H|1 S T`."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: a tensor is needed, not {type(mask).__name__}")
    if mask.dtype != torch.bool:
        dtype = str(mask.dtype).removeprefix("torch.")
        raise TypeError(f"mask: boolean, true where a query may see a key, not {dtype}\n    fix: mask == 0 if additive")
    shape = tuple(mask.shape)
    fits = shape[-2:] == (tokens, tokens) and (
        len(shape) == 2 or (len(shape) == 4 and shape[0] in (1, rows))
    )  # fmt: skip
    if not fits:
        raise ValueError(
            f"mask {_numbers(mask)}: S S, or B|1 H|1 S S, is needed, with all S={tokens} tokens on both sides\n"
            "    fix: the global mask, which every rank gets whole and cuts itself"
        )
    _on("mask", mask, device)
    return mask if mask.dim() == 4 else mask[None, None]
