"""Ops that write their arguments, within a region of a compiled graph. The only file that touches torch's
functionalization.

Where torch makes a graph functional it turns an op that writes into one that returns what it would have written, and
Inductor turns that back. Within a region (`nested_compile_region`) torch 2.13 does so by `torch.func.functionalize`,
which refuses any op of somebody else's that writes. What it should have done there is done here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["functional_form", "is_functional", "region_rule"]


def region_rule() -> str | None:
    """None where a region may write in place by an op of ours, else the reason why not: older releases of torch end in
    an assertion of their own."""
    version = torch.__version__.split("+")[0]
    known = tuple(map(int, version.split(".")[:2])) >= (2, 13)
    return None if known else f"torch {version} compiles no layer that writes in place, 2.13 does"


def is_functional() -> bool:
    """Whether the innermost transform of `torch.func` that is under way makes a graph functional, as a region's is."""
    from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_all_functorch_interpreters

    under_way = retrieve_all_functorch_interpreters()
    return bool(under_way) and isinstance(under_way[-1], FunctionalizeInterpreter)


def functional_form(op: Callable[..., Any], signature: inspect.Signature, mutates: tuple[str, ...]) -> Any:
    """What stands for a call of an op while it is made functional. op: an overload, with its signature;
    mutates: the arguments that it writes, in their order."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
        from torch._higher_order_ops.auto_functionalize import auto_functionalized
        from torch._subclasses.functional_tensor import CppFunctionalizeAPI, FunctorchFunctionalizeAPI

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        region: Any = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())  # type: ignore[arg-type]
        plain = {name: region.unwrap_tensors(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        with region.redispatch_to_next(), CppFunctionalizeAPI().redispatch_to_next():
            made = auto_functionalized(op, **plain)  # type: ignore[arg-type]
        out, written = made[: -len(mutates)], made[-len(mutates) :]
        for name, new in zip(mutates, written, strict=True):
            region.replace(given[name], new)
            region.commit_update(given[name])
            region.sync(given[name])
        results = tuple(map(region.wrap_tensors, out))
        return results[0] if len(results) == 1 else results

    return call
