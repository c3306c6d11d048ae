"""What a simulation refuses, since its gradient would be lost in silence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from ..functional import tree
from .errors import SpecError
from .functorch import is_wrapped
from .ports import Leaf

__all__ = ["captured", "check_signature", "refuse_captured", "refuse_other_leaves", "refuse_tangents", "same_results"]


def check_signature(fn: Callable[..., Any], args: Sequence[Any], mesh: Any) -> None:
    """Raise `TypeError` where a body cannot be called with these arguments and its mesh."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin that tells nobody
        return
    try:
        signature.bind(*args, mesh=mesh)
    except TypeError as error:
        names = ", ".join(f"x{i}" for i in range(len(args)))
        fix = f"def body({names}, *, mesh): one argument a spec, and the rank's mesh"
        raise TypeError(f"simulate: the body takes other arguments ({error})\n    fix: {fix}") from None


def captured(fn: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a function closes over: its variables, defaults, partial arguments and the globals it names."""
    return [value for value in _captured(fn) if isinstance(value, Tensor)]


def refuse_captured(tensors: Sequence[Tensor]) -> None:
    """Raise `ValueError` where a transform around a body follows a tensor that it closes over."""
    for x in tensors:
        if is_wrapped(x):
            raise ValueError(
                f"simulate: the body closes over a tensor of {tuple(x.shape)} that a transform around it "
                "(torch.func) follows, and its gradient would be lost\n"
                "    fix: hand it over as an argument, with a spec of its own"
            )


def _captured(fn: Any) -> Iterator[Any]:
    fn = inspect.unwrap(fn)
    inner = getattr(fn, "func", None)
    if inner is not None:
        yield from tree.leaves((getattr(fn, "args", ()), getattr(fn, "keywords", {})))
        yield from _captured(inner)
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            yield from tree.leaves(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    yield from tree.leaves((getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)))
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    yield from tree.leaves([fn.__globals__[name] for name in names if name in getattr(fn, "__globals__", {})])


def refuse_other_leaves(
    results: Sequence[Tensor], received: Sequence[Tensor], shards: Sequence[Tensor], closed_over: Sequence[Tensor]
) -> None:
    """Raise `ValueError` where a rank's graph reaches a tensor that requires a gradient and was no argument.

    What ranks received may come from a leaf that the body made for itself, but not from one that it closes over.
    """
    mine = {id(x) for x in shards}
    _refuse(results, lambda x: id(x) not in mine)
    theirs = {id(x) for x in closed_over} - mine
    _refuse(received, lambda x: id(x) in theirs)


def _refuse(ys: Sequence[Tensor], wrong: Callable[[Tensor], bool]) -> None:
    stack: list[Any] = [y.grad_fn for y in ys if y.grad_fn is not None]
    stack += [_Leafless(y) for y in ys if y.grad_fn is None and y.requires_grad]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and wrong(variable):
            raise ValueError(
                f"simulate: the body closes over a tensor of {tuple(variable.shape)} that requires a gradient, "
                "which it would never get\n    fix: hand it over as an argument, with a spec of its own, or detach it"
            )
        stack += [parent for parent, _ in node.next_functions if parent is not None]


class _Leafless:
    """A result that is itself such a tensor."""

    def __init__(self, variable: Tensor) -> None:
        self.variable = variable
        self.next_functions: tuple[Any, ...] = ()


def refuse_tangents(results: Sequence[Tensor]) -> None:
    """Raise `ValueError` where a result carries a tangent of forward mode, which no argument brought."""
    if any(forward_ad.unpack_dual(y).tangent is not None for y in results):
        raise ValueError(
            "simulate: the body closes over a tensor with a tangent (forward mode), which would be lost\n"
            "    fix: torch.func.grad, or jacrev, of a function that hands it over as an argument"
        )


def same_results(leaves: Sequence[Sequence[Leaf]], structures: Sequence[Any]) -> None:
    """Raise `SpecError` unless all ranks return the same tree, and the same where it is no tensor."""
    for rank, mine in enumerate(leaves):
        names, first = ([leaf.name for leaf in of_rank] for of_rank in (mine, leaves[0]))
        if structures[rank] != structures[0]:
            lacking = ", ".join(n for n in first if n not in names)
            more = ", ".join(n for n in names if n not in first)
            both = [f"it lacks {lacking}"] * bool(lacking) + [f"it has {more}"] * bool(more)
            what = "; ".join(both) or f"{structures[rank]}, not {structures[0]}"
            raise SpecError(f"rank {rank} returns another structure than rank 0: {what}")
        for a, b in zip(mine, leaves[0], strict=True):
            if isinstance(a.value, Tensor) != isinstance(b.value, Tensor) or not _same(a.value, b.value):
                values = f"{_told(b.value)} and {_told(a.value)}"
                raise SpecError(f"{a.name} must be alike on every rank, and is not on rank 0 and rank {rank}: {values}")


def _same(a: Any, b: Any) -> bool:
    plain = (bool, int, float, complex, str, bytes, type(None))
    if not isinstance(a, plain) or not isinstance(b, plain):
        return True  # a value that nobody says how to compare
    return a == b or (a != a and b != b)


def _told(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
