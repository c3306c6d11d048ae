"""The parameters of a program: which it reads, as a compiled graph takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from .. import functional as F
from ..functional import tree
from .beside import groups, lay
from .steps import packed

__all__ = ["Place", "Weights", "computed_dtype"]

# Of a leaf: its address, strides, dtype and device.
Place = tuple[int, tuple[int, ...], torch.dtype, torch.device]


class Weights:
    """The parameters that a program reads at each call, and the converted copies of those that lie elsewhere.

    A leaf of the program's dtype and device is read where it lies. Of another, a copy is kept that `live` brings up to
    date in place.
    """

    def __init__(self, params: F.Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._like = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        self._read(params)
        fp32 = tree.fp32_paths(params)
        self._dtypes = {path: computed_dtype(leaf.dtype, dtype, path in fp32) for path, leaf in self._leaves.items()}
        self._strides = {path: leaf.stride() for path, leaf in self._leaves.items()}
        self._converted: dict[str, Tensor] = {}

    def _read(self, params: F.Decoder) -> None:
        # A tree is frozen: to take it apart for each step would take longer than all else in front of one.
        self.params, self._leaves = params, tree.paths(params)
        self._packed = tree.structure(packed(params, ())[0])

    def replace(self, new: F.Decoder) -> list[str]:
        """-> the paths of leaves that lie otherwise than those before, for which graphs are compiled again. Raises
        `TreeError` where a shape differs, `ValueError` where dtype or device do."""
        tree.check(new, self._like, what="program.params")
        leaves = tree.paths(new)
        strides = {path: leaf.stride() for path, leaf in leaves.items()}
        self._check(leaves, strides)
        moved = [path for path, each in strides.items() if each != self._strides[path] and path not in self._converted]
        self._strides.update({path: strides[path] for path in moved})
        self._read(new)
        return moved

    def places(self) -> list[Place]:
        """Where the leaves lie, and how: what a plan of them depends on."""
        return [(leaf.data_ptr(), leaf.stride(), leaf.dtype, leaf.device) for leaf in self._leaves.values()]

    def read_at(self) -> list[Place]:
        """Where steps read: of converted leaves the copies."""
        leaves = [leaf if self._here(path, leaf) else self._converted[path] for path, leaf in self._leaves.items()]
        return [(leaf.data_ptr(), leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves]

    def allocate(self) -> None:
        """Room for the converted copies, where there is none yet."""
        for path, leaf in self._leaves.items():
            if not self._here(path, leaf) and path not in self._converted:
                # In the order in which it lies, without the gaps of a view.
                self._converted[path] = torch.empty_like(leaf, dtype=self._dtypes[path], device=self._device)
        if self._device.type == "cuda":
            lay(self._converted, [each for each in groups(self.params) if self._converted.keys() >= set(each)])

    def refresh(self) -> None:
        """Bring the converted copies up to date, where they lie. All of them: a version counter would tell which leaf
        was written, but not of writes through `.data`, by a fused optimiser of torch, or of an inference tensor."""
        self._check(self._leaves, self._strides)
        for path, leaf in self._leaves.items():
            if not self._here(path, leaf):
                self._converted[path].copy_(leaf.detach())

    def live(self) -> F.Decoder:
        """The parameters to compute with, `packed`: detached, so that a Parameter and a plain tensor compile alike,
        each with a storage of its own, converted copies brought up to date."""
        self.refresh()
        new, seen = [], set[int]()
        for path, leaf in self._leaves.items():
            leaf = leaf.detach()
            if not self._here(path, leaf):
                leaf = self._converted[path]
            storage = leaf.untyped_storage().data_ptr()
            # A region refuses arguments that share a storage, as fused projections do. They are only read, so a second
            # handle on the same memory serves as well.
            apart = storage in seen or leaf.is_inference()  # an inference tensor would compile again
            # torch.from_dlpack would ask first which device the tensor is on, which takes five times as long.
            new.append(from_dlpack(to_dlpack(leaf)) if apart else leaf)
            seen.add(storage)
        params: F.Decoder = tree.unflatten(self._packed, new)
        return params

    def _here(self, path: str, leaf: Tensor) -> bool:
        return leaf.dtype == self._dtypes[path] and leaf.device == self._device

    def _check(self, leaves: Mapping[str, Tensor], strides: Mapping[str, tuple[int, ...]]) -> None:
        """Leaves must be what the program computes with, or what it has a converted copy for."""
        faults = []
        for path, leaf in leaves.items():
            here = self._here(path, leaf)
            base = leaf._base
            if base is not None and base.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
                faults.append(f"{path}: cut from a tensor that has been given other memory since; load it again")
            if (here and leaf.stride() != strides[path]) or (not here and path not in self._converted):
                wanted = _layout(self._dtypes[path], self._device, strides[path])
                faults.append(f"{path}: {wanted}, but the tensor is {_layout(leaf.dtype, leaf.device, leaf.stride())}")
        if faults:
            raise ValueError("program.params: other parameters than it was built for\n    " + "\n    ".join(faults))


def computed_dtype(stored: torch.dtype, dtype: torch.dtype, keep_fp32: bool) -> torch.dtype:
    """What a program of a dtype computes a leaf in. keep_fp32: see `functional.tree.dim`."""
    return torch.promote_types(stored, dtype) if keep_fp32 else dtype


def _layout(dtype: torch.dtype, device: torch.device, strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device} with strides {strides}"
