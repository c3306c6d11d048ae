"""Exchanges of a compiled function: each is one op that the compiler does not look into, `meshfn_wire::exchange`.

A graph holds numbers and text, no mesh; so a `Port` lends a mesh to the functions that are compiled for it, under a key
of its own, and the op finds it there. What runs is what runs eagerly: packed, carried by the mesh's transport, noted in
its trace. Forward alone: an exchange that a gradient comes back through is the transport's own op (`processes`).
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .classes import Dry
from .constant import constant
from .exchange import finish, start
from .mesh import Mesh
from .moves import Move
from .transport import Call

__all__ = ["Port", "exchange"]

_keys = itertools.count(1)
_ports: weakref.WeakValueDictionary[int, Port] = weakref.WeakValueDictionary()


class Port:
    """A rank's mesh, lent to what is compiled for one owner: `port.mesh` is the one to compile with.

    Owners never meet: each has keys and moves of its own, which go with it, or when it is closed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.key = next(_keys)
        self.mesh = mesh.keyed(self.key)
        self.moves: dict[str, tuple[tuple[Move, ...], Call]] = {}
        self._real = mesh
        # Which gives blocks of the right sizes, and sends nothing.
        self._dry = Mesh(**dict(mesh.axes)).at(mesh.rank, Dry(mesh.axes, mesh.rank))
        self._silent = False
        _ports[self.key] = self

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within, exchanges send nothing, and what they give means nothing: so that ranks compile without each other,
        each in its own time, and one that fails leaves none waiting."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def close(self) -> None:
        """Give the mesh back. What was compiled for it runs no more; to close it again does nothing."""
        _ports.pop(self.key, None)
        self.moves.clear()

    def run(self, xs: Sequence[Tensor], name: str, *, dry: bool = False) -> list[Tensor]:
        """Make an exchange, or with dry give tensors like its results."""
        moves, call = self.moves[name]
        return list(finish(start(xs, moves, call, self._dry if dry or self._silent else self._real)))


def exchange(xs: Sequence[Tensor], moves: tuple[Move, ...], call: Call, key: int) -> tuple[Tensor, ...]:
    """In a function that is being compiled: the node of an exchange over the mesh of a key."""
    name = _bound(key, moves, call.text, call.edges)
    return tuple(torch.ops.meshfn_wire.exchange(list(xs), key, name))


@constant
def _bound(key: int, moves: tuple[Move, ...], text: str, edges: tuple[str, ...]) -> str:
    """The name of moves at a port. It says all that they are, since the compiler's cache on disk tells graphs apart by
    what is written in them."""
    name = f"{text} #{hashlib.sha256(repr(moves).encode()).hexdigest()[:12]}"
    _port(key).moves[name] = moves, Call(text, edges=edges)
    return name


def _port(key: int) -> Port:
    found = _ports.get(key)
    if found is None:
        raise RuntimeError("an exchange of a compiled function whose owner is closed\n    fix: build another program")
    return found


_library = torch.library.Library("meshfn_wire", "DEF")
# after: of the exchange that all ranks make before this one; only that it is read counts.
_library.define("exchange(Tensor[] xs, int key, str name, Tensor? after=None) -> Tensor[]")


def _run(xs: Sequence[Tensor], key: int, name: str, after: Tensor | None = None) -> list[Tensor]:
    return _port(key).run(xs, name)


def _like(xs: Sequence[Tensor], key: int, name: str, after: Tensor | None = None) -> list[Tensor]:
    return _port(key).run(xs, name, dry=True)


_library.impl("exchange", _run, "CompositeExplicitAutograd")
torch.library.register_fake("meshfn_wire::exchange", _like, lib=_library)
