"""Plain arithmetic on constants, which a compiler need not follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["constant"]

P = ParamSpec("P")
R = TypeVar("R")


def constant(fn: Callable[P, R]) -> Callable[P, R]:
    """A pure function of hashable constants, worked out once for each; the last few thousand are kept.

    Dynamo calls it with the constants that it has and keeps the result, a tuple of constants, as
    `torch.compiler.assume_constant_result` would make it do; that one imports the compiler, which takes two seconds.
    """
    cached = functools.lru_cache(4096)(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]  # which must be hashable

    call.cache_info = cached.cache_info  # type: ignore[attr-defined]
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
