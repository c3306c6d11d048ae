"""How a kernel becomes an op of torch: what it returns, what it launches, and the plain function it stands for.

`torch.ops.meshfn_cuda.<name>` is opaque to the compiler. On a GPU it launches; its gradient is that of the plain
function, computed again. Elsewhere it is refused: the tests define it on a CPU, by running the same launches thread by
thread. What an op cannot take is refused before a launch, since a GPU that faults serves its process no more.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..functional.primitive import NAMESPACE as PLAIN
from ..functional.shapes import ShapeError
from .in_place import functional_form, is_functional
from .launch import Launch

__all__ = ["NAMESPACE", "OPS", "Op", "composite", "define", "in_place", "vector_length"]

NAMESPACE = "meshfn_cuda"
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Op:
    """reference: the plain function, whose annotations are the op's schema. outputs: of the same arguments, what the op
    returns, uninitialised. launches: of those outputs and the same arguments, what is run. mutates: arguments written
    in place, by the reference too; such an op has no gradient."""

    name: str
    reference: Callable[..., Any]
    outputs: Callable[..., Any]
    launches: Callable[..., Sequence[Launch]]
    mutates: tuple[str, ...] = ()

    def run(self, execute: Callable[[Launch], None], *args: Any, **kwargs: Any) -> Any:
        """The op by another way to execute a launch. `execute` finds arguments that live as long as the call."""
        given = inspect.signature(self.reference).bind(*args, **kwargs)
        given.apply_defaults()
        _check_device(self.name, given.arguments)
        if self.mutates and torch.is_grad_enabled():
            self._refuse_gradients(given.arguments)
        out = self.outputs(*given.args, **given.kwargs)
        for launch in self.launches(out, *given.args, **given.kwargs):
            _check_grid(self.name, next(iter(given.arguments)), launch)
            if math.prod(launch.grid):
                execute(launch)
        return out

    def _refuse_gradients(self, given: Mapping[str, Any]) -> None:
        name = next((name for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad), None)
        if name is not None:
            raise RuntimeError(
                f"{self.name}({name}=...): it needs a gradient, and {self.mutates[0]} is written in place\n"
                "    fix: torch.no_grad(), or the plain function to train"
            )


def _check_device(name: str, arguments: Mapping[str, Any]) -> None:
    tensors = {argument: t for argument, t in arguments.items() if isinstance(t, Tensor)}
    first = next(iter(tensors))
    for argument, t in tensors.items():
        if t.device != tensors[first].device:
            raise TypeError(
                f"{name}({argument}=...): it is on {t.device}, and {first} on {tensors[first].device}\n"
                f'    fix: {argument}.to("{tensors[first].device}")'
            )


# Blocks of a grid, in each of its dimensions, that every GPU takes.
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)


def _check_grid(name: str, argument: str, launch: Launch) -> None:
    if any(n > most for n, most in zip(launch.grid, _MOST_BLOCKS, strict=True)):
        raise ShapeError(
            f"{name}({argument}=...): a launch of {' x '.join(map(str, launch.grid))} blocks, and a GPU takes "
            f"{' x '.join(map(str, _MOST_BLOCKS))}\n    fix: fewer rows a call"
        )


# name -> op
OPS: dict[str, Op] = {}


def define(op: Op) -> Callable[..., Any]:
    """Register `torch.ops.meshfn_cuda.<op.name>` and return a function of the same arguments that calls it, and that
    `torch.func` can transform; of an op that writes in place the overload itself."""
    OPS[op.name] = op
    opaque = _opaque(op.name, op.reference, op.outputs, op.mutates)
    _library.impl(op.name, lambda *args, **kwargs: op.run(_on_gpu, *args, **kwargs), "CUDA")
    _library.impl(op.name, functools.partial(_refuse_device, op), "CompositeExplicitAutograd")
    return opaque if op.mutates else _transformable(op.name, op.reference, opaque)


def define_composed(
    name: str, reference: Callable[..., Any], outputs: Callable[..., Any], compute: Callable[..., Any]
) -> Callable[..., Any]:
    """`define` of what launches nothing of its own: compute calls torch, on every device."""
    opaque = _opaque(name, reference, outputs, ())
    _library.impl(name, compute, "CompositeExplicitAutograd")
    return _transformable(name, reference, opaque)


def _opaque(
    name: str, reference: Callable[..., Any], outputs: Callable[..., Any], mutates: tuple[str, ...]
) -> Callable[..., Any]:
    _library.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    torch.library.register_fake(f"{NAMESPACE}::{name}", outputs, lib=_library)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def _transformable(name: str, reference: Callable[..., Any], opaque: Callable[..., Any]) -> Callable[..., Any]:
    backward = _backward(reference)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=_keep, lib=_library)
    function = _differentiable(reference, opaque)
    signature = inspect.signature(reference)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_functional():  # no gradient is taken there, and torch has no rule for an `autograd.Function`
            return opaque(*args, **kwargs)
        return function.apply(*signature.bind(*args, **kwargs).args, kwargs)

    return call


def composite(primitive: str, fn: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Register `torch.ops.meshfn_cuda.<name>`, the primitive's unless given, made of other ops, with the arguments of
    the primitive."""
    name = name or primitive
    schema = str(getattr(getattr(torch.ops, PLAIN), primitive).default._schema).partition("(")[2]
    _library.define(f"{name}({schema}")
    _library.impl(name, fn, "CompositeImplicitAutograd")
    # Where a transform of torch.func takes a call over: below this key its own functions are not found any more.
    _library.impl(name, fn, "FuncTorchDynamicLayerFrontMode")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def in_place(primitive: str, op: Op) -> Callable[..., Any]:
    """Register an op that writes in place, and `torch.ops.meshfn_cuda.<primitive>`, which is that op in a graph too."""
    opaque = define(op)
    _library.define(primitive + torch.library.infer_schema(op.reference, mutates_args=op.mutates))
    _library.impl(primitive, opaque, "CompositeImplicitAutograd")
    functional = functional_form(opaque, inspect.signature(op.reference), op.mutates)
    _library.impl(primitive, functional, "Functionalize")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), primitive).default
    return overload


def _refuse_device(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Of tensors none of which is on a GPU."""
    given = inspect.signature(op.reference).bind(*args, **kwargs).arguments
    argument, t = next((name, x) for name, x in given.items() if isinstance(x, Tensor))
    raise TypeError(
        f"{op.name}({argument}=...): it is on {t.device}, and the kernel runs on a GPU\n"
        f"    fix: {argument}.cuda(), or the plain function"
    )


def _on_gpu(launch: Launch) -> None:
    from .device import execute

    execute(launch)


# torch names no arguments by keyword where an op has none.
_NONE: Mapping[str, Any] = MappingProxyType({})


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Mapping[str, Any] = _NONE) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.there = [isinstance(x, Tensor) for x in inputs]
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.options = keyword_only_inputs


def _backward(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function's, of the inputs that need one; nothing of the forward is kept but its inputs."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if there else rest for there, rest in zip(ctx.there, ctx.rest, strict=True)]
        wanted = [i for i, there in enumerate(ctx.there) if there and ctx.needs_input_grad[i]]

        numbers: list[bool] = []  # of the results, which have a gradient: integers have none

        def plain(*some: Tensor) -> Any:
            given = list(inputs)
            for i, x in zip(wanted, some, strict=True):
                given[i] = x
            out = reference(*given, **ctx.options)
            out = out if isinstance(out, tuple) else (out,)
            numbers[:] = [x.is_floating_point() for x in out]
            return tuple(itertools.compress(out, numbers))

        vjp: Callable[..., Any] = torch.func.vjp(plain, *(inputs[i] for i in wanted))[1]
        found = vjp(tuple(itertools.compress(grads, numbers)))
        out: list[Tensor | None] = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            out[i] = grad
        return tuple(out)

    return backward


def _differentiable(reference: Callable[..., Any], opaque: Callable[..., Any]) -> Any:
    """The op as an `autograd.Function`: what torch registers for an op is no such function as `torch.func` needs."""
    plain_backward = _backward(reference)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return opaque(*args[:-1], **args[-1])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _keep(ctx, inputs[:-1], output, inputs[-1])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return (*plain_backward(ctx, *grads), None)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            """The plain function: the op would be called once for each sample."""
            given = args[:-1]
            out = torch.vmap(lambda *some: reference(*some, **args[-1]), in_dims[:-1])(*given)
            return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return Function


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
