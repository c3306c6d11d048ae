"""Which leaves of the pytree one tensor of a checkpoint holds, and how they lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Leaves"]


@dataclass(frozen=True)
class Leaves:
    """One leaf, or several beside each other along `dim`.

    interleaved: they take turns there, instead of following each other. transposed: the tensor has its last two
    dimensions the other way round than the leaves have them.
    ones: dimensions of size 1 that the tensor has, and the leaf has not.
    files: what files call it, where they call it otherwise than modules do. With `{e}` for an expert they have each of
    the experts by itself, under one name a leaf; without, one other name is the whole tensor's, and as many names as
    leaves those of each. also: what some files call it instead.
    """

    paths: tuple[str, ...]
    dim: int = 0
    interleaved: bool = False
    transposed: bool = False
    ones: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether files have its experts one by one."""
        return any("{e}" in name for name in self.files)

    @property
    def split(self) -> bool:
        """Whether files have its leaves one by one, each whole."""
        return len(self.files) == len(self.paths) > 1 and not self.apart

    def at(self, layer: int) -> Leaves:
        """Those of one layer, whose number stands for `{i}`."""
        every = (self.paths, self.files, self.also)
        paths, files, also = (tuple(each.replace("{i}", str(layer)) for each in names) for names in every)
        return replace(self, paths=paths, files=files, also=also)

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The tensor's, from the leaves'."""
        found = list(shapes[0])
        found[self.dim] = sum(each[self.dim] for each in shapes)
        if self.transposed:
            found[-2:] = found[:-3:-1]
        for at in self.ones:
            found.insert(at, 1)
        return tuple(found)

    def cut(self, base: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The leaves in a tensor, as views through which gradients reach it; the tensor itself where it is the leaf."""
        if len(shapes) == 1 and not self.transposed and not self.ones:
            return [base]
        with torch.inference_mode(False), torch.enable_grad():
            if self.ones:
                return [base.view(shapes[0])]
            whole = base.mT if self.transposed else base
            if self.interleaved:
                where = [(slice(None),) * self.dim + (slice(k, None, len(shapes)),) for k in range(len(shapes))]
                return [whole[each] for each in where]
            counts = [each[self.dim] for each in shapes]
            starts = [sum(counts[:k]) for k in range(len(counts))]
            return [whole.narrow(self.dim, start, n) for start, n in zip(starts, counts, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of these leaves."""
        parts = [each.detach() for each in parts]
        if len(parts) == 1:
            whole = parts[0]
            for at in self.ones:
                whole = whole.unsqueeze(at)
        elif self.interleaved:
            whole = torch.stack(tuple(parts), self.dim + 1).flatten(self.dim, self.dim + 1)
        else:
            whole = torch.cat(tuple(parts), self.dim)
        return whole.mT if self.transposed else whole
