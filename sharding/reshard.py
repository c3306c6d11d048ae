"""The one verb: `reshard(x, "B S/u (K G) E -> B S (K/u G) E", mesh, S=97, K=3)`.

The pair says which move it is: an axis lost is an all-gather, `+axis` lost an all-reduce, `+axis` turned into `/axis` a
reduce-scatter, an axis that moves from one dimension to another an all-to-all, an axis gained a local slice. Blocks are
packed into one flat buffer before the exchange and unpacked after it, with one copy each at most; none where they
already lie so. Backward is the move read backwards, of the same plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import moves, opaque, shards
from .errors import SpecError
from .exchange import Started, finish, local, start
from .functorch import transform_level
from .mesh import Mesh, constant_axes
from .moves import Move, Side
from .shards import Ranges
from .spec import parse_pair
from .steps import COLLECTIVES
from .trace import site
from .transport import Call

__all__ = ["Flight", "Pending", "call_of", "check_transport", "exchanged", "launch", "noted", "planned", "reshard"]

Moves = tuple[Move, ...]


def reshard(x: Tensor, pair: str, mesh: Mesh, /, **sizes: int) -> Tensor:
    """Move a rank's shard from one layout to another.

    x: this rank's shard, laid out as the left side says. pair: `"from -> to"`, one move. mesh: this rank's own.
    sizes: the global size of every letter that is sharded on the left, `S=97`; others are read from x. Of H, K and G
    (H = K G) two are enough.

    Differentiable, any number of times. The gradient of a value that was replicated over an axis is a pending sum over
    it (`+axis`), which nothing here adds up, scales or averages. A slice of one range is a view of x, and where nothing
    moves the result is x itself.

    Raises `SpecError` before anything moves: on every rank alike for what the pair, the mesh and the sizes say.
    """
    plan = planned(x, pair, mesh, sizes)
    if plan.move.kind not in COLLECTIVES:
        return local(x, plan.move)
    check_transport(mesh)
    return noted(exchanged((x,), (plan.move,), (plan.adjoint,), call_of((x,), pair), mesh), mesh)[0]


def launch(x: Tensor, pair: str, mesh: Mesh, /, **sizes: int) -> Pending:
    """`reshard` in two halves: what goes out is on its way, and `.wait()` returns what `reshard` would have.

    Backward launches where forward waited and waits where it launched, so that what was computed between the two
    overlaps there too. Do not write to x before `wait`. In a compiled function the exchange is launched by the
    compiler's own schedule.
    """
    plan = planned(x, pair, mesh, sizes)
    if plan.move.kind not in COLLECTIVES or torch.compiler.is_compiling():
        return Pending(reshard(x, pair, mesh, **sizes))
    flight = Flight((plan.move,), (plan.adjoint,), call_of((x,), pair), mesh)
    return Pending(flight.launch((x,)), flight)


class Pending:
    """A launched reshard."""

    def __init__(self, value: Tensor, flight: Flight | None = None) -> None:
        self._value, self._flight = value, flight

    def wait(self) -> Tensor:
        """The tensor in its new layout; the same one however often it is asked for."""
        if self._flight is not None:
            (self._value,) = noted(self._flight.wait(self._value), self._flight.mesh)
            self._flight = None
        return self._value


def planned(
    x: Tensor,
    pair: str,
    mesh: Mesh,
    sizes: Mapping[str, int],
    needed: tuple[Ranges, ...] | None = None,
    name: str = "x",
) -> moves.Planned:
    """What a pair does to this rank's shard. needed: see `moves.move`. name: of x, for errors. Raises `SpecError` where
    it does not fit."""
    if not isinstance(x, Tensor):
        raise TypeError(f"reshard(x=...): a tensor is needed, not {type(x).__name__}")
    if not isinstance(pair, str) or not isinstance(mesh, Mesh):
        given_types = f"{type(pair).__name__} and {type(mesh).__name__}"
        raise TypeError(f"reshard(x, pair, mesh): a string and a Mesh are needed, not {given_types}")
    if torch.compiler.is_compiling():  # where a size may be symbolic: index makes it a constant, int would not
        given = tuple((letter, operator.index(size)) for letter, size in sizes.items())
    else:  # before any cache sees it, for which 6.0 is 6
        given = tuple((letter, shards.whole(letter, size, pair)) for letter, size in sizes.items())
    axes = constant_axes(mesh)
    shape, rank = x.shape, operator.index(mesh.rank)
    read = tuple((dim, operator.index(shape[dim])) for dim in moves.reads(pair, axes, given, len(shape)))
    plan = moves.move(pair, axes, rank, given, len(shape), read, needed)
    for dim, expected in enumerate(plan.local):
        if expected >= 0 and shape[dim] != expected:
            if torch.compiler.is_compiling():
                raise ValueError(f'x does not fit "{pair}": its dimension {dim} is not {expected} (see it run eagerly)')
            raise _misfit(name, pair, mesh, given, shape, plan.local)
    return plan


def check_transport(mesh: Mesh) -> None:
    """Raise `RuntimeError` for what cannot be compiled."""
    if torch.compiler.is_compiling() and not (mesh.transport and mesh.transport.traces):
        raise RuntimeError("threads cannot be compiled: compile what the body calls, or run it on processes")
    if torch.compiler.is_compiling() and transform_level() > 0:
        raise RuntimeError("vmap and torch.func around an exchange cannot be compiled: compile what stands between")


def _misfit(
    name: str, pair: str, mesh: Mesh, given: tuple[tuple[str, int], ...], shape: Sequence[int], local: Sequence[int]
) -> SpecError:
    left, _ = parse_pair(pair)
    at = next(dim for dim, n in enumerate(local) if n >= 0 and n != shape[dim])
    named = left.named
    letters = dict(
        zip(shards.dims_of(left, range(len(shape))), (" ".join(a.name for a in d) for d in named), strict=True)
    )
    wanted = " ".join(letters.get(dim, "?") if n < 0 else str(n) for dim, n in enumerate(local))
    dim = next(d for d, i in zip(named, letters, strict=True) if i == at)
    ranks = math.prod(mesh[axis] for axis in dim[0].axes)
    fix = "global sizes, and a shard as the left side says: sh.show draws who holds what"
    if len(dim) == 1 and dict(given).get(dim[0].name) == shape[at] and ranks > 1:
        letter, n = dim[0].name, int(shape[at])
        fix = f"x is all of {letter}: pass this rank's shard of it, x[Spec.parse(...).slices(...)]\n"
        fix += f"or, if {n} is what the shard holds: {letter}={n * ranks}, since sizes are global"
    return SpecError(
        f"{name} does not fit its spec: rank {mesh.rank} holds {wanted}, but {'x' if name == 'x' else 'it'} is "
        f"{' '.join(str(int(n)) for n in shape)}",
        pair, (dim[0].span[0], dim[-1].span[1]), mesh=f"{mesh}, rank {mesh.rank}", known=shards.known(dict(given)),
        fix=fix,
    )  # fmt: skip


def call_of(xs: Sequence[Tensor], pair: str, edges: tuple[str, ...] = ()) -> Call:
    """What an exchange is for."""
    if torch.compiler.is_compiling():
        return Call(pair, edges=edges)
    return Call(pair, site(), grad=torch.is_grad_enabled() and any(x.requires_grad for x in xs), edges=edges)


def noted(ys: tuple[Tensor, ...], mesh: Mesh) -> tuple[Tensor, ...]:
    """What an exchange gave, where the executor wants to know."""
    if mesh.received is not None and mesh.level == transform_level():
        mesh.received += [y for y in ys if y.requires_grad]
    return ys


def exchanged(xs: Sequence[Tensor], moves: Moves, backs: Moves, call: Call, mesh: Mesh) -> tuple[Tensor, ...]:
    """Launch and wait at once: several tensors in one collective, where their moves are of one kind and group."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if (
        torch.compiler.is_compiling() and not needed
    ):  # Dynamo would count the arguments of forward, which are any number
        if mesh.key is not None:
            return opaque.exchange(xs, moves, call, mesh.key)
        return finish(start(xs, moves, call, mesh))
    if torch.compiler.is_compiling() or transform_level():
        return cast(tuple[Tensor, ...], _Exchange.apply(moves, backs, call, mesh, *xs))
    # A tangent of forward mode goes there too, to be refused: collectives would drop it.
    if needed or any(map(_has_tangent, xs)):
        return cast(tuple[Tensor, ...], _Eager.apply(moves, backs, call, mesh, *xs))
    return finish(start(xs, moves, call, mesh))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


class _Exchange(torch.autograd.Function):
    """What transforms and the compiler see."""

    @staticmethod
    def forward(moves: Moves, backs: Moves, call: Call, mesh: Mesh, *xs: Tensor) -> tuple[Tensor, ...]:
        return finish(start(xs, moves, call, mesh))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        moves, backs, call, mesh = ctx.rest
        return None, None, None, None, *exchanged(grads, backs, moves, call._replace(backward=not call.backward), mesh)

    @staticmethod
    def vmap(info: Any, in_dims: Any, moves: Moves, backs: Moves, call: Call, mesh: Mesh, *xs: Tensor) -> Any:
        # The batch is one more dimension in front, moved with the rest.
        batched = [_in_front(x, dim, info.batch_size) for x, dim in zip(xs, in_dims[4:], strict=True)]
        ys = _Exchange.apply(_behind_a_batch(moves), _behind_a_batch(backs), call, mesh, *batched)
        return ys, (0,) * len(ys)


class _Eager(torch.autograd.Function):
    """The same where neither looks on. In this older form torch does not bind arguments to a signature at each call,
    which takes as long as a third of an exchange between simulated ranks."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, backs: Moves, call: Call, mesh: Mesh, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rest = moves, backs, call, mesh
        return finish(start(xs, moves, call, mesh))

    backward = _Exchange.backward


class Flight:
    """An exchange that is launched in one place and waited for in another, and in backward the other way round."""

    def __init__(self, moves: Moves, backs: Moves, call: Call, mesh: Mesh) -> None:
        self.moves, self.backs, self.call, self.mesh = moves, backs, call, mesh
        self.started: Started | None = None
        self.returning: Flight | None = None  # of the gradient, once backward has launched it
        self.batched: Flight | None = None  # of the whole batch, under vmap

    def launch(self, xs: Sequence[Tensor]) -> Tensor:
        """Send, and a token that ties `wait` to it."""
        return cast(Tensor, _Launch.apply(self, *xs))

    def wait(self, token: Tensor) -> tuple[Tensor, ...]:
        """What came."""
        return cast(tuple[Tensor, ...], _Wait.apply(token, self))

    def reversed(self) -> Flight:
        return Flight(self.backs, self.moves, self.call._replace(backward=not self.call.backward), self.mesh)


class _Launch(torch.autograd.Function):
    """Starts a flight and gives a token of no elements, which ties the wait to it in the graph."""

    @staticmethod
    def forward(flight: Flight, *xs: Tensor) -> Tensor:
        flight.started = start(xs, flight.moves, flight.call, flight.mesh)
        return xs[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[0]

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return None, *ctx.flight.returning.wait(token)

    @staticmethod
    def vmap(info: Any, in_dims: Any, flight: Flight, *xs: Tensor) -> Any:
        flight.batched = Flight(
            _behind_a_batch(flight.moves), _behind_a_batch(flight.backs), flight.call, flight.mesh
        )  # fmt: skip
        batched = [_in_front(x, dim, info.batch_size) for x, dim in zip(xs, in_dims[1:], strict=True)]
        return flight.batched.launch(batched).expand(info.batch_size, 0), 0


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(token: Tensor, flight: Flight) -> tuple[Tensor, ...]:
        assert flight.started is not None
        started, flight.started = flight.started, None  # buffers live no longer than they fly
        return finish(started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.flight.returning = ctx.flight.reversed()
        return ctx.flight.returning.launch(grads), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Tensor, flight: Flight) -> Any:
        assert flight.batched is not None
        ys = flight.batched.wait(token.select(in_dims[0], 0))
        return ys, (0,) * len(ys)


def _in_front(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _behind_a_batch(moves: Moves) -> Moves:
    def side(s: Side | None) -> Side | None:
        return None if s is None else s._replace(dim=s.dim + 1)

    def dims(some: Any) -> Any:
        return tuple((dim + 1, factors) for dim, factors in some)

    return tuple(
        m._replace(source=side(m.source), target=side(m.target), before=dims(m.before), after=dims(m.after))
        for m in moves
    )
