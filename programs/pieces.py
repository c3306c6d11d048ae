"""What a source holds of a family's tensors, under the source's own names: a file may have experts one by one.

A piece is one tensor there: a whole one of `Family.tensors`, one of its leaves, or one expert of one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from ..functional import Decoder, tree
from .families import Family, Leaves

__all__ = ["Piece", "pieces"]


class Piece(NamedTuple):
    """held: the whole tensor. leaf, expert: which leaf of it and which of its experts this is, None of a whole one.
    described: those leaves by path. spec: their shapes in letters."""

    name: str
    held: Leaves
    leaf: int | None
    expert: int | None
    shape: tuple[int, ...]
    described: str
    spec: str

    def part(self, leaves: Sequence[Tensor]) -> Tensor:
        """What it is, of the leaves of the whole."""
        if self.leaf is None:
            return self.held.join(leaves)
        leaf = leaves[self.leaf].detach()
        return leaf if self.expert is None else leaf[self.expert]


def pieces(
    family: Family, params: Decoder, *, there: Collection[str] = (), files: bool = True
) -> dict[str, list[Piece]]:
    """name -> its pieces, of the family's tensors that these parameters (or their shapes) have.

    there: the names in the source; what stands there whole, as in a module, is one piece. files: whether anything else
    has the form that files have.
    """
    leaves, specs = tree.paths(params), tree.paths(params.specs())
    found = {}
    for name, held in family.tensors(params).items():
        shapes = [tuple(leaves[path].shape) for path in held.paths]
        letters = [str(specs[path]) for path in held.paths]
        if files and name not in there and held.split:
            each = zip(held.files, held.paths, shapes, letters, strict=True)
            found[name] = [
                Piece(file, held, k, None, shape, path, f'"{spec}"') for k, (file, path, shape, spec) in enumerate(each)
            ]
        elif not files or name in there or not held.apart:
            usual = name if not files or name in there or not held.files else held.files[0]
            own = usual if usual in there else next((other for other in held.also if other in there), usual)
            spec = " and ".join(f'"{each}"' for each in letters)
            found[name] = [Piece(own, held, None, None, held.shape(shapes), " ".join(held.paths), spec)]
        else:
            found[name] = [
                Piece(
                    file.replace("{e}", str(e)),
                    held,
                    k,
                    e,
                    shapes[k][1:],
                    f"{held.paths[k]}[{e}]",
                    f'"{letters[k].partition(" ")[2]}"',
                )
                for e in range(shapes[0][0])
                for k, file in enumerate(held.files)
            ]
    return found
