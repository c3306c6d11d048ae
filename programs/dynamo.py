"""The only file that touches torch's private compiler interfaces, behind names of our own.

`tests/programs/test_dynamo.py` holds each of them to what is said here, so that a torch release that moves one fails
there and loudly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import operator
import sysconfig
import types
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "capture",
    "compile_with",
    "compiler_problem",
    "dynamic_size",
    "graphs",
    "inductor",
    "largest",
    "longest_sum",
    "region",
    "region_of",
    "same_memory",
    "source_of",
    "without_warning",
    "writes_to",
]

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_with(fn: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """`torch.compile(fn, fullgraph=True)` with an own backend and an own cache of compiled code.

    Dynamo keeps its cache with the code object, so two programs made of one function would meet each other's guards
    and share a limit; a copy of the code object keeps them apart. `dynamic=False` because Dynamo also remembers, by
    source line, which sizes have changed; only what `dynamic_size` marks is dynamic. Only the arguments' shapes,
    strides, dtypes and devices are guarded: a step has no other input, and what is ambient (the number of threads, a
    default dtype, a mode) may not compile it again.
    """
    compiled: Callable[..., Any] = torch.compile(
        _copy(fn, fn.__name__),
        fullgraph=True,
        backend=backend,
        dynamic=False,
        options={"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe},
    )
    return compiled


def graphs() -> int:
    """How many graphs Dynamo has compiled in this process, ours and others'."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def without_warning(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the warning that Dynamo provokes where it compiles what takes another function's result: it
    asks every tensor for its `.grad`, which such a one has none of."""

    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            return fn(*args)

    return call


def inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental import _config

    caching: Any = torch.compiler.config
    symbolic: Any = _config
    tag = f"{caching.cache_key_tag} meshfn {_digest()}{_nonce(graph)}"
    # Oblivious: a dynamic size counts as unknown. Else a sum over one is compiled, and guarded, for sizes up to 4096 or
    # for those above.
    with caching.patch(cache_key_tag=tag), symbolic.patch(backed_size_oblivious=True):
        compiled: Any = compile_fx(graph, list(inputs), config_patches={"size_asserts": False})
    return compiled  # type: ignore[no-any-return]


def _nonce(graph: fx.GraphModule) -> str:
    """What no other compile has, where a graph holds somebody else's op that is made of torch's: the cache on disk
    knows its name alone, and we do not know its text. Else nothing."""
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes if is_operator(node.target)]
    foreign = {op.name() for op in targets if op.namespace not in ("meshfn", "meshfn_cpu")}
    composite = "CompositeImplicitAutograd"
    known = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, composite) for name in foreign)
    return f" {uuid.uuid4()}" if known else ""


@functools.cache
def _digest(root: Path = Path(__file__).parents[1]) -> str:
    """Of the text of this package. The compiler's cache on disk knows a primitive by its name alone, and would serve
    what an earlier version of its function was compiled to."""
    digest = hashlib.sha256()
    for room in sorted(init.parent for init in root.glob("*/__init__.py") if init.parent.name != "tests"):
        for path in sorted(room.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def capture(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The Dynamo graph of a call, without computing it (arguments may be meta tensors)."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph)
        return stop

    def stop(*_: Any) -> Any:
        raise _CapturedError

    with torch.no_grad(), contextlib.suppress(_CapturedError):
        compile_with(fn, backend)(*args)
    (graph,) = found
    return graph


class _CapturedError(Exception):
    """Ends a call whose graph is all that was wanted."""


def dynamic_size(t: Tensor, dim: int, *, max: int) -> Tensor:
    """Mark a dimension as one whose size changes from call to call, from 2 to `max`."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(t, dim, min=2, max=max)
    return t


def largest(size: Any) -> int:
    """A size of a traced tensor, at its largest where it is dynamic."""
    node = getattr(size, "node", None)
    return int(size) if node is None else int(node.shape_env.bound_sympy(node.expr).upper)


def region(fn: Callable[..., Any], name: str, key: Callable[..., int]) -> Callable[..., Any]:
    """A function that is compiled once and called many times within one graph, under a name of its own.

    key: from the arguments to an integer; calls with equal keys must differ in nothing that a graph depends on. Dynamo
    would find that out by itself, by 300 guards a call, which cost more than all else in tracing a layer.
    Dynamo takes two regions with equal code for one, whatever their closures hold; the name makes the code differ.
    A region may not read `.T` of an argument (torch 2.13 lifts the attribute out of the region and then fails).
    """
    mark: Callable[..., Any] = torch.compiler.nested_compile_region
    known = "reuse_hash_fn" in inspect.signature(mark).parameters  # from torch 2.13 on
    marked: Callable[..., Any] = mark(_copy(fn, name), **({"reuse_hash_fn": key} if known else {}))
    return marked


def _copy(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    code = fn.__code__.replace(co_name=name)
    own = types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
    own.__kwdefaults__ = fn.__kwdefaults__
    return own


def region_of(node: fx.Node) -> tuple[fx.GraphModule, Sequence[Any]] | None:
    """The body and the arguments of a call of a region; None for another node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "invoke_subgraph":
        return None
    body, _, *args = node.args
    assert isinstance(body, fx.Node)
    return getattr(node.graph.owning_module, str(body.target)), args


def source_of(node: fx.Node) -> str | None:
    """Where a graph input comes from, as `params.layers[0][2]`; None where Dynamo does not say."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    text = name() if callable(name) else name
    return text.replace("L['", "", 1).replace("']", "", 1) if isinstance(text, str) else None


def value_of(node: fx.Node) -> Any:
    """What a node computes, as fake tensors with shapes, dtypes and strides."""
    return node.meta.get("example_value")


def same_memory(a: Any, b: Any) -> bool:
    """Whether two traced values are tensors of one storage."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return bool(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()))


_IN_PLACE = {operator.setitem, operator.delitem}
_IN_PLACE |= {getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])}


def writes_to(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments whose memory a node may write to."""
    out = node.kwargs.get("out")
    into = [out] if isinstance(out, fx.Node) else []
    if region_of(node) is not None:
        return node.all_input_nodes
    if is_operator(node.target):
        schema: Any = node.target
        return node.all_input_nodes if schema._schema.is_mutable else into
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    if node.op.startswith("call_") and (named or node.target in _IN_PLACE or node.kwargs.get("inplace")):
        into += [node.all_input_nodes[0]] if node.all_input_nodes else []
    return into


def op_name(node: fx.Node) -> str:
    """`"meshfn::gated_mlp"` for a call of an operator of `torch.ops`, "" for any other node."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return str(target._schema.name if is_operator(target) else getattr(target, "_qualified_op_name", ""))


def is_operator(op: Any) -> bool:
    """Whether a compiled graph can call it as it is."""
    return isinstance(op, torch._ops.OpOverload)


def refused_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator cannot be called with such arguments, by its schema, in a few words, or None."""
    arguments = op._schema.arguments
    by_place = [each.name for each in arguments if not each.kwarg_only]
    given = {*by_place[: len(args)], *kwargs}
    unknown = sorted(given - {each.name for each in arguments})
    missing = [each.name for each in arguments if each.name not in given and not each.has_default_value()]
    if len(args) > len(by_place):
        return f"its op takes {len(by_place)} arguments by place, not {len(args)}"
    if unknown:
        return f"its op has no argument {', '.join(unknown)}"
    return f"its op needs {', '.join(missing)}, which the call has not" if missing else None


def longest_sum(device: torch.device) -> int | None:
    """The largest dynamic size over which Inductor can sum on a device, None for any (see `inductor`)."""
    if device.type != "cpu":
        return None
    from torch._inductor.codegen.cpp import CppKernel

    # torch 2.11 decides by the size it is shown first, and guards it.
    method = getattr(CppKernel, "need_use_acc_helper", None)
    return 4096 if method is not None and "check_leq" in inspect.getsource(method) else None


def compiler_problem(device: torch.device) -> str | None:
    """Why Inductor cannot compile for a device here, or None."""
    if device.type != "cpu":
        return None
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on a CPU, and finds none (install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "torch.compile needs Python.h on a CPU, and finds none (install Python's development headers)"
    return None
