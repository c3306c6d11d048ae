"""Plain arithmetic on constants, which a compiler need not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["constant"]

F = TypeVar("F", bound=Callable[..., object])


def constant(fn: F) -> F:
    """Dynamo calls the function with the constants that it has and keeps the result, a tuple of constants, as
    `torch.compiler.assume_constant_result` would make it do; that one imports the compiler, which takes two seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
