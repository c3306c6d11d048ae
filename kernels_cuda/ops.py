"""How a kernel becomes an op of torch: what it returns, what it launches, and the plain function it stands for.

`torch.ops.meshfn_cuda.<name>` is opaque to the compiler. On a GPU it launches; its gradient is that of the plain
function, computed again. On a CPU it is not defined: the tests define it there, by running the same launches thread by
thread.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional.primitive import PRIMITIVES
from .launch import Launch

__all__ = ["NAMESPACE", "OPS", "Op", "composite", "define", "opaque", "vector_length"]

NAMESPACE = "meshfn_cuda"
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Op:
    """reference: the plain function, whose annotations are the op's schema. outputs: of the same arguments, what the op
    returns, uninitialised. launches: of those outputs and the same arguments, what is run."""

    name: str
    reference: Callable[..., Any]
    outputs: Callable[..., Any]
    launches: Callable[..., Sequence[Launch]]

    def run(self, execute: Callable[[Launch], None], *args: Any, **kwargs: Any) -> Any:
        """The op by another way to execute a launch. `execute` finds arguments that live as long as the call."""
        given = inspect.signature(self.reference).bind(*args, **kwargs)
        given.apply_defaults()
        out = self.outputs(**given.arguments)
        for launch in self.launches(out, **given.arguments):
            if math.prod(launch.grid):
                execute(launch)
        return out


# name -> op
OPS: dict[str, Op] = {}


def define(op: Op) -> Callable[..., Any]:
    """Register `torch.ops.meshfn_cuda.<op.name>` and return it."""
    OPS[op.name] = op
    name = f"{NAMESPACE}::{op.name}"
    _library.define(op.name + torch.library.infer_schema(op.reference, mutates_args=()))
    _library.impl(op.name, lambda *args, **kwargs: op.run(_on_gpu, *args, **kwargs), "CUDA")
    torch.library.register_fake(name, op.outputs, lib=_library)
    torch.library.register_autograd(name, _backward(op), setup_context=_keep, lib=_library)
    return opaque(op.name)


def opaque(name: str) -> Callable[..., Any]:
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def composite(primitive: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Register `torch.ops.meshfn_cuda.<primitive>`, made of other ops, with the arguments of the primitive."""
    _library.define(primitive + torch.library.infer_schema(PRIMITIVES[primitive], mutates_args=()))
    _library.impl(primitive, fn, "CompositeImplicitAutograd")
    return opaque(primitive)


def _on_gpu(launch: Launch) -> None:
    from .device import execute

    execute(launch)


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.there = [isinstance(x, Tensor) for x in inputs]
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.options = keyword_only_inputs


def _backward(op: Op) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if there else rest for there, rest in zip(ctx.there, ctx.rest, strict=True)]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed and ctx.there[i]]

        def plain(*some: Tensor) -> Any:
            given = list(inputs)
            for i, x in zip(wanted, some, strict=True):
                given[i] = x
            return op.reference(*given, **ctx.options)

        _, vjp = torch.func.vjp(plain, *(inputs[i] for i in wanted))
        found = vjp(grads[0] if len(grads) == 1 else tuple(grads))
        out: list[Tensor | None] = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            out[i] = grad
        return tuple(out)

    return backward


def vector_length(width: int | None, *tensors: Tensor | None) -> int:
    """How many numbers one load may take, of 16 bytes at most: every row of every tensor begins at a multiple of it,
    and the width is one, unless it is None."""
    given = [t for t in tensors if t is not None]
    length = 16 // given[0].element_size()
    while length > 1 and not (
        (width is None or width % length == 0)
        and all(t.data_ptr() % (length * t.element_size()) == 0 for t in given)
        and all(stride % length == 0 for t in given for stride in t.stride()[:-1])
    ):
        length //= 2
    return length
