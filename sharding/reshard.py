"""The one verb: `reshard(x, "B S/u (K G) E -> B S (K/u G) E", mesh, S=97, K=3)`.

The pair says which move it is: an axis lost is an all-gather, `+axis` lost an all-reduce, `+axis` turned into `/axis` a
reduce-scatter, an axis that moves from one dimension to another an all-to-all, an axis gained a local slice. Blocks are
packed into one flat buffer before the exchange and unpacked after it, with one copy each at most; none where they
already lie so. Backward is the move read backwards, of the same plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import moves, shards
from .errors import SpecError
from .exchange import Started, finish, local, start
from .functorch import transform_level
from .mesh import Mesh
from .moves import Move, Side
from .spec import parse_pair
from .steps import COLLECTIVES
from .trace import site
from .transport import Call

__all__ = ["Pending", "launch", "reshard"]


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
    plan = _plan(x, pair, mesh, sizes)
    if plan.move.kind not in COLLECTIVES:
        return local(x, plan.move)
    _check_transport(mesh)
    return _noted(_exchanged(x, plan.move, plan.adjoint, _call(x, pair), mesh), mesh)


def launch(x: Tensor, pair: str, mesh: Mesh, /, **sizes: int) -> Pending:
    """`reshard` in two halves: what goes out is on its way, and `.wait()` returns what `reshard` would have.

    Backward launches where forward waited and waits where it launched, so that what was computed between the two
    overlaps there too. Do not write to x before `wait`. In a compiled function the exchange is launched by the
    compiler's own schedule.
    """
    plan = _plan(x, pair, mesh, sizes)
    if plan.move.kind not in COLLECTIVES or torch.compiler.is_compiling():
        return Pending(reshard(x, pair, mesh, **sizes))
    flight = _Flight(plan.move, plan.adjoint, _call(x, pair), mesh)
    return Pending(_Launch.apply(x, flight), flight)


class Pending:
    """A launched reshard."""

    def __init__(self, value: Tensor, flight: _Flight | None = None) -> None:
        self._value, self._flight = value, flight

    def wait(self) -> Tensor:
        """The tensor in its new layout; the same one however often it is asked for."""
        if self._flight is not None:
            self._value, self._flight = _noted(_Wait.apply(self._value, self._flight), self._flight.mesh), None
        return self._value


def _plan(x: Tensor, pair: str, mesh: Mesh, sizes: dict[str, int]) -> moves.Planned:
    if not isinstance(x, Tensor):
        raise TypeError(f"reshard(x=...): a tensor is needed, not {type(x).__name__}")
    if not isinstance(pair, str) or not isinstance(mesh, Mesh):
        given_types = f"{type(pair).__name__} and {type(mesh).__name__}"
        raise TypeError(f"reshard(x, pair, mesh): a string and a Mesh are needed, not {given_types}")
    if torch.compiler.is_compiling():  # where a size may be symbolic: index makes it a constant, int would not
        given = tuple((letter, operator.index(size)) for letter, size in sizes.items())
    else:  # before any cache sees it, for which 6.0 is 6
        given = tuple((letter, shards.whole(letter, size, pair)) for letter, size in sizes.items())
    axes = tuple((axis, operator.index(size)) for axis, size in mesh.axes)
    shape, rank = x.shape, operator.index(mesh.rank)
    read = tuple((dim, operator.index(shape[dim])) for dim in moves.reads(pair, axes, given, len(shape)))
    plan = moves.move(pair, axes, rank, given, len(shape), read)
    for dim, expected in enumerate(plan.local):
        if expected >= 0 and shape[dim] != expected:
            if torch.compiler.is_compiling():
                raise ValueError(f'x does not fit "{pair}": its dimension {dim} is not {expected} (see it run eagerly)')
            raise _misfit(pair, mesh, given, shape, plan.local)
    return plan


def _check_transport(mesh: Mesh) -> None:
    if torch.compiler.is_compiling() and not (mesh.transport and mesh.transport.traces):
        raise RuntimeError("threads cannot be compiled: compile what the body calls, or run it on processes")
    if torch.compiler.is_compiling() and transform_level() > 0:
        raise RuntimeError("vmap and torch.func around an exchange cannot be compiled: compile what stands between")


def _misfit(
    pair: str, mesh: Mesh, given: tuple[tuple[str, int], ...], shape: Sequence[int], local: Sequence[int]
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
        f"x does not fit its spec: rank {mesh.rank} holds {wanted}, but x is {' '.join(str(int(n)) for n in shape)}",
        pair, (dim[0].span[0], dim[-1].span[1]), mesh=f"{mesh}, rank {mesh.rank}", known=shards.known(dict(given)),
        fix=fix,
    )  # fmt: skip


def _call(x: Tensor, pair: str) -> Call:
    if torch.compiler.is_compiling():
        return Call(pair)
    return Call(pair, site(), grad=x.requires_grad and torch.is_grad_enabled())


def _noted(y: Tensor, mesh: Mesh) -> Tensor:
    if mesh.received is not None and y.requires_grad and mesh.level == transform_level():
        mesh.received.append(y)
    return y


def _exchanged(x: Tensor, move: Move, back: Move, call: Call, mesh: Mesh) -> Tensor:
    """Launch and wait at once."""
    if torch.compiler.is_compiling() or transform_level():
        return cast(Tensor, _Exchange.apply(x, move, back, call, mesh))
    # A tangent of forward mode goes there too, to be refused: collectives would drop it.
    if (x.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(x).tangent is not None:
        return cast(Tensor, _Eager.apply(x, move, back, call, mesh))
    return finish(start(x, move, call, mesh))


class _Exchange(torch.autograd.Function):
    """What transforms and the compiler see."""

    @staticmethod
    def forward(x: Tensor, move: Move, back: Move, call: Call, mesh: Mesh) -> Tensor:
        return finish(start(x, move, call, mesh))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        move, back, call, mesh = ctx.rest
        return _exchanged(grad, back, move, call._replace(backward=not call.backward), mesh), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, move: Move, back: Move, call: Call, mesh: Mesh) -> Any:
        # The batch is one more dimension in front, moved with the rest.
        return _Exchange.apply(x.movedim(in_dims[0], 0), _behind_a_batch(move), _behind_a_batch(back), call, mesh), 0


class _Eager(torch.autograd.Function):
    """The same where neither looks on. In this older form torch does not bind arguments to a signature at each call,
    which takes as long as a third of an exchange between simulated ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, back: Move, call: Call, mesh: Mesh) -> Tensor:
        ctx.rest = move, back, call, mesh
        return finish(start(x, move, call, mesh))

    backward = _Exchange.backward


class _Flight:
    """An exchange that is launched in one place and waited for in another, and in backward the other way round."""

    def __init__(self, move: Move, back: Move, call: Call, mesh: Mesh) -> None:
        self.move, self.back, self.call, self.mesh = move, back, call, mesh
        self.started: Started | None = None
        self.returning: _Flight | None = None  # of the gradient, once backward has launched it
        self.batched: _Flight | None = None  # of the whole batch, under vmap

    def reversed(self) -> _Flight:
        return _Flight(self.back, self.move, self.call._replace(backward=not self.call.backward), self.mesh)


class _Launch(torch.autograd.Function):
    """Starts a flight and gives a token of no elements, which ties the wait to it in the graph."""

    @staticmethod
    def forward(x: Tensor, flight: _Flight) -> Tensor:
        flight.started = start(x, flight.move, flight.call, flight.mesh)
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[1]

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return _Wait.apply(token, ctx.flight.returning), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, flight: _Flight) -> Any:
        flight.batched = _Flight(_behind_a_batch(flight.move), _behind_a_batch(flight.back), flight.call, flight.mesh)
        token = _Launch.apply(x.movedim(in_dims[0], 0), flight.batched)
        return token.expand(info.batch_size, 0), 0


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(token: Tensor, flight: _Flight) -> Tensor:
        assert flight.started is not None
        return finish(flight.started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.flight.returning = ctx.flight.reversed()
        return _Launch.apply(grad, ctx.flight.returning), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Tensor, flight: _Flight) -> Any:
        return _Wait.apply(token.select(in_dims[0], 0), flight.batched), 0


def _behind_a_batch(move: Move) -> Move:
    def side(s: Side | None) -> Side | None:
        return None if s is None else s._replace(dim=s.dim + 1)

    before, after = (tuple((dim + 1, factors) for dim, factors in dims) for dims in (move.before, move.after))
    return move._replace(source=side(move.source), target=side(move.target), before=before, after=after)
