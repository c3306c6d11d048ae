"""A kernel, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .dynamo import is_operator
from .sizes import Target

__all__ = ["Call", "Kernel"]


@dataclass(frozen=True)
class Call:
    """One call of a primitive, as a kernel's `supports` sees it. arguments: all of them by name, defaults filled in;
    tensors are fakes with shapes, dtypes and strides."""

    primitive: str
    arguments: Mapping[str, Any]
    target: Target


@dataclass(frozen=True)
class Kernel:
    """An entry of the table.

    primitive: the name it serves, such as "gated_mlp". op: takes the primitive's arguments and returns its results,
        an op such as `torch.ops.mylib.gated.default`, which the compiler takes as it is.
    supports: None for a call it can compute, else the reason why not, in a few words.
    in_place: arguments that the op writes instead of returning the results behind the first, in their order. Such a
        kernel takes no call whose results are not copied there, or are used otherwise.
    """

    name: str
    primitive: str
    op: Callable[..., Any]
    supports: Callable[[Call], str | None] = field(default=lambda call: None)
    in_place: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_operator(self.op):
            raise TypeError(
                f"Kernel({self.name}): op must be an operator of torch.ops, not {type(self.op).__name__}\n"
                "    fix: register it with torch.library and pass torch.ops.<namespace>.<name>.default"
            )
