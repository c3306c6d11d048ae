"""Which kernel computes which primitive: an open table, and a reason for every node that has none.

Primitives are calls of `torch.ops.meshfn.*` in a Dynamo graph. Where a kernel of the table says that it supports the
call, the node becomes the kernel's op; elsewhere it stays, decomposes into its function and the compiler fuses it.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

from torch import fx

from ..functional.primitive import NAMESPACE, PRIMITIVES
from .cpu import CPU_KERNELS
from .cuda import CUDA_KERNELS
from .dynamo import op_name, refused_by, region_of, value_of
from .join import arguments_of, join
from .join_cache import join_cache
from .join_gdn import join_gdn
from .kernel import Call, Kernel
from .part import part
from .sizes import Target

__all__ = ["KERNELS", "choose", "join_all", "lower", "primitive_name", "share_read", "walk", "with_table", "writer_of"]


# device type -> the kernels tried in turn. Open: `build(kernels=...)` takes more, which are tried first.
KERNELS: Mapping[str, tuple[Kernel, ...]] = MappingProxyType({"cpu": CPU_KERNELS, "cuda": CUDA_KERNELS})


def with_table(target: Target, extra: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """`extra`, then the table's kernels of the target's device. Raises `TypeError` and `ValueError` for what no node
    would ever be given to."""
    if isinstance(extra, (Kernel, str)):
        raise TypeError(
            f"kernels: a list is needed, not {type(extra).__name__}\n    fix: kernels=[programs.Kernel(...)]"
        )
    for kernel in extra:
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"kernels: a programs.Kernel is needed, not {type(kernel).__name__}\n"
                "    fix: programs.Kernel(name=..., primitive=..., op=torch.ops.<namespace>.<name>.default)"
            )
        if kernel.primitive not in PRIMITIVES:
            near = difflib.get_close_matches(kernel.primitive, PRIMITIVES, n=1)
            fix = f'did you mean "{near[0]}"?' if near else "print(plan) has their names in its second column"
            raise ValueError(
                f'kernels: {kernel.name} serves "{kernel.primitive}", and no primitive is named so\n    fix: {fix}'
            )
    return (*extra, *KERNELS.get(target.device, ()))


def primitive_name(node: fx.Node) -> str | None:
    """`"gated_mlp"` for a call of `torch.ops.meshfn.gated_mlp`, None for any other node."""
    space, _, name = op_name(node).partition("::")
    return name if space == NAMESPACE else None


def share_read(node: fx.Node) -> Fraction:
    """How much of its parameters a primitive reads at most: of the experts those that tokens choose, else all."""
    bound = arguments_of(node)
    if primitive_name(node) != "expert_mlp":
        return Fraction(1)
    return min(Fraction(1), Fraction(value_of(bound["indices"]).numel(), value_of(bound["gate"]).shape[0]))


def choose(node: fx.Node, target: Target, kernels: tuple[Kernel, ...]) -> tuple[Kernel | None, str]:
    """The kernel for a primitive's node and what a plan says of it: its name, and why kernels of a user's own, which
    are asked first, declined; or None and the reasons of all that did."""
    name = primitive_name(node)
    assert name is not None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    bound = inspect.signature(PRIMITIVES[name]).bind(*args, **kwargs)
    bound.apply_defaults()
    call = Call(name, bound.arguments, target)
    table, reasons, of_own = KERNELS.get(target.device, ()), list[str](), list[str]()
    for kernel in kernels:
        if kernel.primitive != name:
            continue
        try:
            reason = kernel.supports(call)
        except Exception as error:
            raise TypeError(
                f"Kernel({kernel.name}): supports raised {type(error).__name__}: {error}, for a call of {name}\n"
                f"    its arguments: {', '.join(call.arguments)}"
            ) from error
        if reason is not None and not isinstance(reason, str):
            raise TypeError(
                f"Kernel({kernel.name}): supports returned {reason!r} for a call of {name}\n"
                "    fix: return None for what it computes, else the reason why not, in a few words"
            )
        if reason is None and not all(_goes_back(node, i, name) for i, name in enumerate(kernel.in_place, 1)):
            reason = "a result is not copied back, and it writes in place"
        if reason is None:
            reason = refused_by(kernel.op, node.args, node.kwargs)
        if reason is None:
            return kernel, f"{kernel.name} ({'; '.join(of_own)})" if of_own else kernel.name
        reasons.append(f"{kernel.name}: {reason}")
        if kernel not in table:
            of_own.append(reasons[-1])
    return None, f"compiler ({'; '.join(reasons) or f'no {target.device} kernel'})"


def _goes_back(node: fx.Node, i: int, name: str) -> bool:
    """Whether the i-th result of a primitive is copied into the argument of a name, and not used otherwise."""
    results = [user for user in node.users if user.target is operator.getitem and user.args[1] == i]
    users = [(user.target, user.args) for result in results for user in result.users]
    return len(results) == 1 and users == [("copy_", (arguments_of(node)[name], results[0]))]


def writer_of(new: fx.Node, target: Target, kernels: tuple[Kernel, ...]) -> str:
    """Who writes a new value to where it is copied: the kernel that makes it, in place, or the compiler."""
    call = new.args[0] if new.target is operator.getitem else None
    if isinstance(call, fx.Node) and primitive_name(call) is not None:
        kernel, _ = choose(call, target, kernels)
        if kernel is not None and kernel.in_place:
            return kernel.name
    return "compiler"


def walk(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node of a graph and, once each, of the regions it calls."""
    seen = set()
    for node in graph.graph.nodes:
        yield node
        called = region_of(node)
        if called is not None and id(called[0]) not in seen:
            seen.add(id(called[0]))
            yield from walk(called[0])


def join_all(graph: fx.GraphModule, target: Target, kernels: tuple[Kernel, ...]) -> None:
    """Make the larger primitives of which a kernel computes more at once, and parts of what none computes whole, within
    `graph` and its regions."""
    served = {kernel.primitive for kernel in kernels}

    names = [kernel.name for kernel in kernels]

    def taken(node: fx.Node) -> int | None:
        kernel = choose(node, target, kernels)[0]
        return None if kernel is None else names.index(kernel.name)

    for each in {node.graph for node in walk(graph)}:
        if "gdn_step" in served:
            join_gdn(each, taken)
        part(each, taken)
        if served.isdisjoint(("linear_add", "add_norm", "qkv_rope_cache")):
            continue
        while join(each, taken) or join_cache(each, taken):
            pass


def lower(graph: fx.GraphModule, target: Target, kernels: tuple[Kernel, ...]) -> list[str]:
    """Put kernels in place, within `graph`; return a line for each primitive that has none."""
    join_all(graph, target, kernels)
    left = []
    changed = set()
    for node in list(walk(graph)):
        if primitive_name(node) is None:
            continue
        kernel, reason = choose(node, target, kernels)
        if kernel is None:
            left.append(f"{node.name} ({primitive_name(node)}): {reason}")
        else:
            node.target = kernel.op
            if kernel.in_place:
                _leave_out_copies(node)
            changed.add(node.graph)
    for each in changed:
        each.lint()
        assert each.owning_module is not None
        each.owning_module.recompile()
    return left


def _leave_out_copies(node: fx.Node) -> None:
    """Of a node that now returns its first result alone: the others' copies go, into what its op writes itself."""
    for result in list(node.users):
        if result.args[1] == 0:
            result.replace_all_uses_with(node)
            node.meta["example_value"], name = value_of(result), result.name
        for copy in list(result.users):
            node.graph.erase_node(copy)
        node.graph.erase_node(result)
    node.name = name
