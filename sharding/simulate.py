"""`simulate`: a body for one rank, as a function of global tensors, run on every rank in this process.

It is one differentiable function: backward enters the rank threads again, along the graphs that forward left there.
Where that backward is itself to be differentiated (`create_graph=True`, `torch.func`), it is a simulation of its own,
of the body's vector-Jacobian product, and so on to any order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import tree
from .errors import SpecError
from .functorch import Guarded, transform_level
from .mesh import Mesh
from .ports import Leaf, Port, differentiable, enter, gather, leave, matched, scatter
from .shard import Sharded
from .threads import Ambient, Fault, Latency, Threads
from .watch import captured, check_signature, refuse_captured, refuse_other_leaves, refuse_tangents, same_results

__all__ = ["simulate"]


def simulate(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    /,
    *,
    timeout: float = 60.0,
    latency: Latency = 0.0,
    fault: Fault | None = None,
    **sizes: int,
) -> Callable[..., Any]:
    """A function of global tensors that runs `fn(*shards, mesh=rank's own)` on each rank of a mesh, as threads.

    fn: the body. mesh: its ranks. in_specs: one spec an argument (a single one needs no tuple), or a tree of specs for
    a tree of tensors; None gives every rank the whole argument. out_specs: likewise, of what the body returns; None
    for what every rank returns alike. sizes: of letters that no argument shows, such as K of `(K/u G)`.
    timeout: seconds that one rank may compute between two collectives. latency, fault: see `Threads`.

    The result is what the ranks hold, joined: where a spec is whole over an axis, its ranks must agree; where it ends
    in `+axis`, they are summed. Gradients from outside (`backward`, `torch.autograd.grad`, `torch.func`) equal those of
    the dense function, for tensors that are arguments; a body that closes over one that needs a gradient is refused.
    The body must be pure: a gradient that is itself to be differentiated (`torch.func`, `create_graph=True`) runs it
    once more, with the same random numbers and modes.

    What `shard` returns brings its own specs: `simulate(shard(...), mesh)` takes what the function itself takes, by
    name too.

    Raises `SpecError` before any rank starts where arguments do not fit; what a rank raised; and `TransportError`
    where ranks disagree, listing what each was doing.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"simulate(mesh=...): a Mesh is needed, not {type(mesh).__name__}")
    Threads(mesh, timeout=timeout)  # raises for a timeout that is none
    if isinstance(fn, Sharded):
        if in_specs is not None or out_specs is not None:
            raise TypeError("simulate: what shard returns has its own specs\n    fix: simulate(shard(...), mesh)")
        return _sharded(fn, mesh, timeout=timeout, latency=latency, fault=fault)

    def simulated(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError("simulate cannot be compiled, since its ranks are threads: compile what the body calls")
        specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) if args or in_specs is not None else ()
        if len(specs) != len(args):
            raise SpecError(
                f"simulate: {len(args)} arguments, but in_specs has {len(specs)}", fix="one spec an argument"
            )
        check_signature(fn, args, mesh)
        called = getattr(fn, "argument_names", None) or [f"args[{i}]" for i in range(len(args))]
        leaves = [leaf for a, s, name in zip(args, specs, called, strict=True) for leaf in matched(a, s, name)]
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor)]
        ports = enter(tensors, mesh, sizes)
        alike = [port.sizes for port, leaf in zip(ports, tensors, strict=True) if leaf.sizes is None]
        bound = dict(alike[0] if alike else sizes)
        structure = tree.structure(args)

        def body(shards: Sequence[Tensor], at: Mesh) -> tuple[list[Leaf], Any]:
            here = iter(shards)
            values = [next(here) if isinstance(leaf.value, Tensor) else leaf.value for leaf in leaves]
            result = fn(*tree.unflatten(structure, values), mesh=at)
            leaving = out_specs(result) if callable(out_specs) else out_specs
            return matched(result, leaving, "the result"), tree.structure(result)

        closed_over = captured(fn)
        refuse_captured(closed_over)
        run = _Run(body, mesh, tuple(ports), bound, (timeout, latency, fault))
        run.grad, run.guard = torch.is_grad_enabled(), transform_level() > 0
        run.captured, run.ambient, run.random = closed_over, Ambient(), _Random()
        results = iter(_Simulated.apply(run, *(leaf.value for leaf in tensors)))
        values = [next(results) if leaf is None else leaf.value for leaf in run.results]
        return tree.unflatten(run.structure, values)

    return simulated


def _sharded(fn: Sharded, mesh: Mesh, **options: Any) -> Callable[..., Any]:
    """A sharded function as one of global tensors, which takes the same arguments."""
    if fn.mesh.axes != mesh.axes:
        raise SpecError(f"simulate: the function is sharded over {fn.mesh}, and this mesh is {mesh}", fix="one mesh")

    def simulated(*args: Any, **kwargs: Any) -> Any:
        names, count, named = list(kwargs), len(args), fn.named(args, kwargs)
        specs = fn.in_specs(named)
        positional = [specs[name] for name in list(named)[:count]]
        order = (*positional, *(specs[name] for name in names))

        def body(*values: Any, mesh: Mesh) -> Any:
            return fn(*values[:count], mesh=mesh, **dict(zip(names, values[count:], strict=True)))

        body.argument_names = [*list(named)[:count], *names]  # type: ignore[attr-defined]
        known: dict[str, Any] = {letter: n for letter, n in fn.sizes.items() if letter in "SHKG"} | fn.widths(named)
        leaving = functools.partial(fn.out_specs, cache=specs.get("cache"))
        return simulate(body, mesh, order, leaving, **options, **known)(*args, *kwargs.values())

    return simulated


# Of a rank's shards, and the rank's mesh: what it returns, leaf by leaf, and how it is put together.
Body = Callable[[Sequence[Tensor], Mesh], tuple[list[Leaf], Any]]


@dataclass
class _Run:
    """One simulation, before and after it ran.

    lead: batch dimensions in front of those that specs name. grad, guard: whether the caller wants gradients, and is
    inside a transform. captured: tensors that the body closes over. ambient, random: its modes and the state of its
    generators; again: whether this is a gradient, which runs the body with them once more. outs: the ports of the
    results; known beforehand for a gradient. results: None in the place of each tensor. saved: what backward needs,
    where there is one.
    """

    body: Body
    mesh: Mesh
    ins: tuple[Port, ...]
    sizes: dict[str, int]
    options: tuple[float, Latency, Fault | None]
    lead: int = 0
    grad: bool = False
    guard: bool = False
    captured: Sequence[Tensor] = ()
    ambient: Ambient | None = None
    random: _Random | None = None
    outs: tuple[Port, ...] | None = None
    results: list[Leaf | None] = field(default_factory=list)
    structure: Any = None
    saved: _Saved | None = None
    again: bool = False


class _Saved(NamedTuple):
    """The ranks' graphs: for each rank its shards, what it returned, and what its collectives gave."""

    threads: Threads
    shards: list[list[Tensor]]
    results: list[list[Tensor]]
    received: list[list[Tensor]]


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(run: _Run, *xs: Tensor) -> tuple[Tensor, ...]:
        return _forward(run, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*(y for y in output if not differentiable(y)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        run, xs = ctx.run, ctx.saved_tensors
        grads = tuple(g for g, port in zip(grads, run.outs, strict=True) if port.differentiable)
        wanted = [i for i, port in enumerate(run.ins) if port.differentiable]
        if torch.is_grad_enabled() or run.saved is None:
            found = iter(_Simulated.apply(_gradient(run), *xs, *grads))
        else:
            found = iter(_backward(run, run.saved, grads))
        return None, *(next(found) if i in wanted else None for i in range(len(xs)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "simulate has no forward-mode derivative: its ranks exchange what backward needs\n"
            "    fix: torch.func.jacrev in place of jacfwd, jacrev(jacrev(f)) in place of hessian(f)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: _Run, *xs: Tensor) -> Any:
        batched = _behind_a_batch(run, in_dims[1:], info.batch_size)
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, in_dims[1:], strict=True)]
        ys = _Simulated.apply(batched, *moved)
        assert batched.outs is not None
        run.results, run.structure = batched.results, batched.structure
        run.outs = tuple(port.alone() for port in batched.outs)
        return ys, (0,) * len(ys)


def _forward(run: _Run, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run every rank, and join what they return."""
    parts = [scatter(x, port) for x, port in zip(xs, run.ins, strict=True)]
    tracked = [run.grad and x.requires_grad for x in xs]
    timeout, latency, fault = run.options
    threads = Threads(run.mesh, timeout=timeout, latency=latency, fault=fault)

    def one(mesh: Mesh) -> Any:
        shards = [part[mesh.rank].requires_grad_(track) for part, track in zip(parts, tracked, strict=True)]
        mesh.received = [] if any(tracked) else None
        with torch.set_grad_enabled(run.grad), Guarded() if run.guard else contextlib.nullcontext():
            leaves, structure = run.body(shards, mesh)
        received, mesh.received = mesh.received or [], None  # a recomputation adds nothing to it
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor)]
        refuse_other_leaves([leaf.value for leaf in tensors], received, shards, run.captured)
        refuse_tangents([leaf.value for leaf in tensors])
        return shards, leaves, structure, tensors, received

    with run.random.again() if run.again and run.random else contextlib.nullcontext():
        ranks = threads.run(one, run.ambient)
    shards, leaves, structures, tensors, received = zip(*ranks, strict=True)
    same_results(leaves, structures)
    results = [[leaf.value for leaf in of_rank] for of_rank in tensors]
    if run.outs is None:
        run.outs = tuple(leave(tensors, run.mesh, run.sizes, run.lead))
    run.structure = structures[0]
    run.results = [None if isinstance(leaf.value, Tensor) else leaf for leaf in leaves[0]]
    if any(tracked):
        run.saved = _Saved(threads, list(shards), results, list(received))
    return tuple(gather([y.detach() for y in ys], port) for ys, port in zip(_by_result(results), run.outs, strict=True))


def _by_result(of_ranks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [list(ys) for ys in zip(*of_ranks, strict=True)]


def _backward(run: _Run, saved: _Saved, grads: Sequence[Tensor]) -> list[Tensor]:
    """Enter the ranks again, each along its own graph."""
    assert run.outs is not None
    outs = [i for i, port in enumerate(run.outs) if port.differentiable]
    parts = [scatter(g, run.outs[i]) for i, g in zip(outs, grads, strict=True)]
    ins = [i for i, port in enumerate(run.ins) if port.differentiable]

    def one(mesh: Mesh) -> list[Tensor]:
        r = mesh.rank
        roots = [(saved.results[r][i], part[r]) for i, part in zip(outs, parts, strict=True)]
        # A rank joins every collective's backward, also where nothing that it returned depends on one.
        roots += [(y, torch.zeros_like(y)) for y in saved.received[r]]
        roots = [(y, g) for y, g in roots if y.requires_grad]
        shards = [saved.shards[r][i] for i in ins]
        wanted = [x for x in shards if x.requires_grad]
        if not roots or not wanted:
            return [torch.zeros_like(x) for x in shards]
        ys, gs = zip(*roots, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, gs, retain_graph=True, allow_unused=True))
        return [
            torch.zeros_like(x) if not x.requires_grad or (g := next(found)) is None else g.detach() for x in shards
        ]

    return [gather(of_ranks, run.ins[i]) for i, of_ranks in zip(ins, _by_result(saved.threads.run(one)), strict=True)]


def _gradient(run: _Run) -> _Run:
    """The vector-Jacobian product of a run as a run: of its inputs and what comes back, to the inputs' gradients."""
    assert run.outs is not None
    ins = [i for i, port in enumerate(run.ins) if port.differentiable]
    outs = [port for port in run.outs if port.differentiable]

    def body(shards: Sequence[Tensor], mesh: Mesh) -> tuple[list[Leaf], Any]:
        xs, grads = list(shards[: len(run.ins)]), tuple(shards[len(run.ins) :])

        def returned(*some: Tensor) -> tuple[Tensor, ...]:
            outer, mesh.received, mesh.level = (mesh.received, mesh.level), [], transform_level()
            here = dict(zip(ins, some, strict=True))
            leaves, _ = run.body([here.get(i, x) for i, x in enumerate(xs)], mesh)
            values = [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor) and differentiable(leaf.value)]
            received, (mesh.received, mesh.level) = mesh.received, outer
            return *values, *received

        ys, pull, *_ = torch.func.vjp(returned, *(xs[i] for i in ins))
        found = pull((*grads, *map(torch.zeros_like, ys[len(grads) :])))
        return [Leaf(g, None, f"the gradient of args[{i}]") for i, g in zip(ins, found, strict=True)], None

    made = _Run(body, run.mesh, (*run.ins, *outs), run.sizes, run.options, run.lead)
    made.grad, made.outs = torch.is_grad_enabled(), tuple(run.ins[i] for i in ins)
    made.ambient, made.random, made.again = run.ambient, run.random, True
    return made


def _behind_a_batch(run: _Run, in_dims: Sequence[int | None], n: int) -> _Run:
    """The run of a batch, each rank under `vmap`."""

    def body(shards: Sequence[Tensor], mesh: Mesh) -> tuple[list[Leaf], Any]:
        seen: list[Any] = []

        def one(*xs: Tensor) -> tuple[Tensor, ...]:
            leaves, structure = run.body(xs, mesh)
            seen.append((leaves, structure))
            return tuple(leaf.value for leaf in leaves if isinstance(leaf.value, Tensor))

        dims = tuple(None if dim is None else 0 for dim in in_dims)
        values = iter(torch.func.vmap(one, in_dims=dims, randomness="different")(*shards))
        leaves, structure = seen[0]
        return [replace(x, value=next(values)) if isinstance(x.value, Tensor) else x for x in leaves], structure

    ins = tuple(p if dim is None else p.behind(n) for p, dim in zip(run.ins, in_dims, strict=True))
    outs = None if run.outs is None else tuple(port.behind(n) for port in run.outs)
    made = _Run(body, run.mesh, ins, run.sizes, run.options, run.lead + 1, run.grad, False, outs=outs)
    made.ambient, made.random, made.again = run.ambient, run.random, run.again
    return made


class _Random:
    """The state of torch's generators at one moment."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw once more what was drawn from then on, and leave the generators as they are now."""
        with torch.random.fork_rng(range(len(self.cuda))):
            torch.set_rng_state(self.cpu)
            for device, state in enumerate(self.cuda):
                torch.cuda.set_rng_state(state, device)
            yield
