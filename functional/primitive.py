"""Primitives: plain functions that a graph shows as one node, so that a kernel may take their place.

In eager code a primitive *is* its function. Under `torch.compile` it is one call of `torch.ops.meshfn.<name>`,
registered CompositeImplicitAutograd: a backend may swap the node (`programs/lower.py`); where it does not, the node
decomposes into the function's own operations and the compiler fuses them. `torch.func` transforms see through it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

__all__ = ["NAMESPACE", "PRIMITIVES", "primitive"]

NAMESPACE = "meshfn"
# name -> the plain function
PRIMITIVES: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library(NAMESPACE, "DEF")

P = ParamSpec("P")
R = TypeVar("R")


def primitive(fn: Callable[P, R], *, differentiable: bool = True, mutates: tuple[str, ...] = ()) -> Callable[P, R]:
    """Register the function as `torch.ops.meshfn.<its name>`; its annotations and defaults are the schema.

    differentiable: False for a function that has an `autograd.Function` in it, which the transforms of `torch.func` do
    not find within an operator under `torch.compile`; it is one node then where no gradient is taken, and else inlined.
    mutates: the arguments that it writes, where a kernel does (`kernels_cuda`); no function of `functional` has any.
    """
    name = fn.__name__
    if "wire" in inspect.signature(fn).parameters:
        raise TypeError(
            f"primitive({name}): a primitive is one node of a graph, and a layout cannot reach the edges in it\n"
            "    fix: make primitives of what lies between two edges"
        )
    PRIMITIVES[name] = fn
    _library.define(name + torch.library.infer_schema(fn, mutates_args=mutates))
    _library.impl(name, fn, "CompositeImplicitAutograd")
    # Without this key vmap would fall back to a slow loop over samples, with a warning.
    _library.impl(name, fn, "FuncTorchBatchedDecomposition")
    op = getattr(getattr(torch.ops, NAMESPACE), name)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() and (differentiable or not torch.is_grad_enabled()):
            return cast(R, op(*args, **kwargs))
        return fn(*args, **kwargs)

    return call
