"""Shapes in letters: one check for every function, one error for every shape that does not fit.

A spec is a line of letters, `"B S H E"`, or with composites, `"B S (K G) E"`. Sizes are global when they come from a
config, and a rank's own when they come from a tensor; this file only compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = [
    "ShapeError",
    "check_positions",
    "check_positive",
    "check_scale",
    "check_shapes",
    "letters",
    "parse",
    "shape_of",
]


class ShapeError(ValueError):
    """A tensor whose shape contradicts its spec or another argument."""


def parse(spec: str) -> tuple[tuple[str, ...], ...]:
    """`"((K/tp G) E) D"` -> `(("K", "G", "E"), ("D",))`: the letters of each dimension, without mesh axes.

    Nested parentheses group letters of one dimension; `/axis`, `/axis:zigzag`, `@letter` and `+axis` say how a
    dimension lies on a mesh (the sharding language) and do not change what it is.
    """
    dims: list[tuple[str, ...]] = []
    group: list[str] = []
    depth = 0
    for token in spec.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
            if depth < 0:
                raise ValueError(f'spec "{spec}": a ")" too many')
            if depth == 0:
                dims.append(tuple(group))
                group = []
        elif not token.startswith("+"):
            letter = token.split("/")[0].split("@")[0].rstrip("?")
            if not letter.isidentifier():
                raise ValueError(f'spec "{spec}": "{token}" does not start with a name')
            if depth:
                group.append(letter)
            else:
                dims.append((letter,))
    if depth:
        raise ValueError(f'spec "{spec}": a "(" is never closed')
    return tuple(dims)


def letters(spec: str) -> str:
    """The spec without mesh axes, `"((K G) E) D"` as `"(K G E) D"`."""
    return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in parse(spec))


def shape_of(spec: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that a spec has for given sizes; a letter without a size raises `ShapeError`."""
    shape = []
    for dim in parse(spec):
        size = 1
        for letter in dim:
            if letter not in sizes:
                known = " ".join(f"{k}={v}" for k, v in sizes.items())
                raise ShapeError(f'no size for {letter} in "{spec}"\n    known: {known}\n    fix: pass {letter}=...')
            size *= sizes[letter]
        shape.append(size)
    return tuple(shape)


def check_positions(function: str, positions: Tensor | None) -> None:
    """Raise `TypeError` for positions that cannot be below 0, which is what padding is: a mask most likely."""
    if positions is not None and not positions.dtype.is_signed:
        raise TypeError(
            f"{function}(positions=...): places in a row are needed, -1 for padding, not {positions.dtype}\n"
            "    fix: torch.where(mask > 0, mask.cumsum(-1) - 1, -1) if it is a mask, true where a token is"
        )


def check_positive(what: str, **values: Any) -> None:
    """Raise `ValueError` for a value that is no integer above 0 (a bool is none)."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{what}({name}=...): a positive integer is needed, not {value!r}")


def check_scale(what: str, value: float | None, name: str = "softmax_scale") -> None:
    """Raise `ValueError` for a factor that is not finite and above 0; None is the usual one."""
    if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
        raise ValueError(f"{what}({name}={value}): a finite number above 0 is needed")


def _numbers(t: Tensor) -> str:
    return " ".join(str(int(n)) for n in t.shape) or "a scalar"


def check_shapes(
    function: str, sizes: Mapping[str, int] | None = None, /, **arguments: tuple[Tensor | None, str]
) -> dict[str, int]:
    """Bind each letter once, in the order of the arguments; return the bindings.

    arguments: `name=(tensor or None, spec)`; None is skipped. A dimension of 1 under a letter written with a trailing
    `?` (as `"B? S"`) may stand for any size; a spec that begins with `...` leaves leading dimensions alone.
    Raises `ShapeError`, naming the argument, the letter, both sizes and the bindings so far.
    """
    bound: dict[str, int] = dict(sizes or {})
    source: dict[str, str] = dict.fromkeys(bound, "the config")
    for name, (tensor, spec) in arguments.items():
        if tensor is None:
            continue
        leading = spec.startswith("... ")
        parsed = parse(spec.removeprefix("... "))
        skipped = tensor.dim() - len(parsed)
        if skipped < 0 or (skipped and not leading):
            least = "at least " if leading else ""
            raise ShapeError(
                f"{function}({name}=...): {least}{len(parsed)} dimensions are needed, but it has {tensor.dim()}\n"
                f"    {name}: {spec.replace('?', '')} = {_numbers(tensor)}{_so_far(bound)}"
                + (
                    f"\n    fix: {name}[:, None], the same for each head"
                    if spec.startswith("B? H?") and skipped == -1
                    else f"\n    fix: {name}[None], the same for each row"
                    if spec.startswith("B? ") and skipped == -1
                    else ""
                )
            )
        # Marks stand on plain letters, so the words of such a spec line up with its dimensions.
        may_be_one = [word.endswith("?") for word in spec.removeprefix("... ").split()]
        for i, dim in enumerate(parsed, skipped):
            size = tensor.shape[i]
            if may_be_one[i - skipped] and size == 1:
                continue
            unknown = [x for x in dim if x not in bound]
            known = 1
            for x in dim:
                known *= bound.get(x, 1)
            if not unknown:
                if size != known:
                    first = source[dim[0]]
                    raise ShapeError(_mismatch(function, name, spec, tensor, i, dim, known, first, arguments, bound))
            elif len(unknown) == 1 and known > 0 and size % known == 0:
                bound[unknown[0]] = size // known
                source[unknown[0]] = name
            else:
                word = "(" + " ".join(dim) + ")"
                raise ShapeError(
                    f"{function}({name}=...): {word} is {int(size)}, which {known} does not divide\n"
                    f"    {name}: {spec} = {_numbers(tensor)}{_so_far(bound)}"
                )
    return bound


def _so_far(bound: Mapping[str, int]) -> str:
    return "\n    so far: " + " ".join(f"{k}={int(v)}" for k, v in bound.items()) if bound else ""


def _mismatch(
    function: str,
    name: str,
    spec: str,
    tensor: Tensor,
    at: int,
    dim: tuple[str, ...],
    known: int,
    first: str,
    arguments: Mapping[str, tuple[Tensor | None, str]],
    bound: Mapping[str, int],
) -> str:
    word = dim[0] if len(dim) == 1 else "(" + " ".join(dim) + ")"
    lines = [f"{function}({name}=...): {word} is {int(known)} in {first} but {int(tensor.shape[at])} in {name}"]
    other = arguments.get(first)
    width = len(name)
    if other is not None and other[0] is not None:
        width = max(len(first), len(name))
        lines.append(f"    {first:<{width}}: {other[1].replace('?', '')} = {_numbers(other[0])}")
    head = f"    {name:<{width}}: {spec.replace('?', '')} = "
    lines.append(head + _numbers(tensor))
    before = " ".join(str(int(n)) for n in tensor.shape[:at])
    lines.append(" " * (len(head) + len(before) + bool(before)) + "^" * len(str(int(tensor.shape[at]))))
    return "\n".join(lines) + _so_far(bound)
