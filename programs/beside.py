"""Weights that read the same input, side by side in memory: one product can then take them all, without a copy."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..kernels_cuda import one_product

__all__ = ["beside_text", "groups", "lay", "side_by_side"]

# What a class projects one input by, in the order in which its function does. Fused projections are one leaf already.
_TOGETHER: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {
        F.Attention: ("q", "q_gate", "k", "v"),
        F.MLA: ("kv_a", "q_a", "gate"),
        F.GDN: ("q", "k", "v", "b", "a", "a_down", "z", "z_down", "qkvz", "ba"),
        F.MLP: ("gate", "up"),
    }
)


def side_by_side(params: F.Decoder) -> F.Decoder:
    """The same parameters, with copies of those weights that read one input (q, k and v; gate and up) side by side in
    memory, as `load(device="cuda")` reads them. Leaves of more than one dtype or device stay where they are.

    A copy of what requires a gradient does so too, but an optimizer or module that holds the old one writes it no more:
    a warning says which. Raises `TypeError` for what are no parameters of a decoder."""
    if not isinstance(params, F.Decoder):
        fix = "\n    fix: model.params" if hasattr(params, "params") else ""
        raise TypeError(f"side_by_side(params=...): a Decoder is needed, not {type(params).__name__}{fix}")
    given = tree.paths(params)
    leaves = dict(given)
    lay(leaves, groups(params))
    if held := [path for path, old in given.items() if leaves[path] is not old and old.requires_grad]:
        few = ", ".join(f"params{path}" for path in held[:2]) + (f" and {len(held) - 2} more" if len(held) > 2 else "")
        warnings.warn(
            f"side_by_side: {few} require gradients, and these are copies: an optimizer or a module that holds the old "
            "ones writes these no more\n    fix: make the optimizer of the new ones, F.tree.trainable(params)",
            stacklevel=2,
        )
    found: F.Decoder = tree.replace(params, leaves)
    return found


def groups(params: F.Decoder) -> list[tuple[str, ...]]:
    """The paths of leaves that belong side by side."""
    return list(_groups(params, ""))


def _groups(node: Any, path: str) -> Iterator[tuple[str, ...]]:
    if isinstance(node, tuple):
        for i, each in enumerate(node):
            yield from _groups(each, f"{path}[{i}]")
    elif dataclasses.is_dataclass(node):
        there = [name for name in _TOGETHER.get(type(node), ()) if isinstance(getattr(node, name), Tensor)]
        if len(there) > 1:
            yield tuple(f"{path}.{name}" for name in there)
        for each in dataclasses.fields(node):
            yield from _groups(getattr(node, each.name), f"{path}.{each.name}")


def lay(leaves: dict[str, Tensor], of: Sequence[tuple[str, ...]]) -> None:
    """Put copies of the leaves of each group side by side, group by group, so that no more than one is there twice."""
    for group in of:
        old = [leaves[path].detach() for path in group]
        if len({(leaf.dtype, leaf.device) for leaf in old}) > 1 or one_product.as_one(old) is not None:
            continue
        storage = torch.empty(sum(leaf.numel() for leaf in old), dtype=old[0].dtype, device=old[0].device)
        at = 0
        for path, leaf in zip(group, old, strict=True):
            # Tensors of their own over one storage: a view would be no leaf, and its base what an optimizer sees.
            new = leaf.new_empty(0).set_(storage.untyped_storage(), at, leaf.shape, (leaf.shape[1], 1))
            leaves[path] = new.copy_(leaf).requires_grad_(leaves[path].requires_grad)
            at += leaf.numel()


def beside_text(params: F.Decoder, copied: set[str]) -> str:
    """How many products with several weights are one. copied: leaves of which a program for a GPU keeps copies, side by
    side."""
    leaves, of = tree.paths(params), groups(params)
    if any(leaf.device.type == "meta" for leaf in leaves.values()):
        return 'one_product: of weights that lie side by side, as load(device="cuda") lays them; others one by one'
    lie = {group for group in of if one_product.as_one([leaves[path].detach() for path in group]) is not None}
    one = [group for group in of if copied.issuperset(group) or (group in lie and copied.isdisjoint(group))]
    apart = "" if len(one) == len(of) else "; weights of the others lie apart, see programs.side_by_side"
    return f"one_product: {len(one)} of {len(of)}{apart}"
