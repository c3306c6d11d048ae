"""The only file that touches torch's private functorch bindings, behind names of our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Guarded", "is_wrapped", "transform_level"]


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform follows this tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def transform_level() -> int:
    """How many transforms (`torch.func.grad`, `vmap`) this thread runs inside of."""
    return torch._C._functorch.maybe_current_level() or 0


class Guarded(TorchFunctionMode):
    """Raises where a tensor of the caller's transform is used in a rank's thread. There it would count as a constant,
    and its gradient would be lost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        level = transform_level()
        for value in (*args, *(kwargs or {}).values()):
            for x in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(x, Tensor) and is_wrapped(x) and torch._C._functorch.maybe_get_level(x) > level:
                    raise ValueError(
                        f"simulate: the body uses a tensor of {tuple(x.shape)} that a transform around it (torch.func) "
                        "follows, and its gradient would be lost\n"
                        "    fix: hand it over as an argument, with a spec of its own"
                    )
        return func(*args, **(kwargs or {}))
