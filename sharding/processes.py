"""Ranks as processes: torch.distributed over a `DeviceMesh`, gloo or NCCL, as `torchrun` starts them.

The only file that touches torch's functional collectives. They trace: under `torch.compile` an exchange is a node of
the graph and its wait another. gloo gives garbage, or ends the process, where two ranks expect different sizes, and
refuses uneven gathers; so the plan has raised before, and what is uneven goes as an all-to-all, with a local sum where
one is due. On a CPU, where gloo's all-to-all is its fastest collective, gathers and reduce-scatters all go so.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Mesh
from .packing import Spare
from .transport import Call, Part, TransportError, Work, disagreement, summed

__all__ = ["ProcessGroup", "keep_collectives"]

_ops = torch.ops._c10d_functional


class ProcessGroup:
    """The executor: `mesh = ProcessGroup(device_mesh).mesh` is this process's own, and `body(shard, mesh=mesh)` runs.

    device_mesh: with names for its dimensions, which become the axes; it may be a part of the world, or one of several
    siblings. Every process of it makes this call at once: a group is made for each set of axes. The time limit of an
    exchange is that of `init_process_group(timeout=)`; a device mesh of one dimension keeps its own group and limit.
    check: before each collective the members tell each other what they are about to do, and all of them raise where
    they disagree; for finding such a fault, at the price of a second exchange each time. Compiled functions do not
    check. Without it, a tensor that requires a gradient on one rank alone is found in backward, where that rank waits
    until the time limit.

    Raises `ValueError` for a mesh without names, whose ranks do not ascend, or that this process is not in.
    """

    traces = True

    def __init__(self, device_mesh: Any, *, check: bool = False) -> None:
        importlib.import_module("torch.distributed._functional_collectives")  # registers the ops
        names = getattr(device_mesh, "mesh_dim_names", None)
        if not names:
            fix = "init_device_mesh(..., mesh_dim_names=('g', 'u'))"
            raise ValueError(
                f"ProcessGroup(device_mesh=...): a DeviceMesh whose dimensions have names is needed\n    fix: {fix}"
            )
        ranks = device_mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"ProcessGroup(device_mesh=...): ranks must ascend, these are {ranks}")
        if dist.get_rank() not in ranks:
            raise ValueError(f"ProcessGroup(device_mesh=...): rank {dist.get_rank()} is none of its ranks {ranks}")
        plain = Mesh(**dict(zip(names, device_mesh.mesh.shape, strict=True)))
        rank = ranks.index(dist.get_rank())
        self.check, self.spare = check, Spare()
        self.members: dict[tuple[str, ...], int] = {}
        self.place: dict[tuple[str, ...], int] = {}  # of this rank among them
        self.names: dict[tuple[str, ...], str] = {}
        self.groups: dict[tuple[str, ...], Any] = {}
        made: dict[tuple[int, ...], Any] = {}
        for n in range(1, len(names) + 1):
            for axes in itertools.combinations(names, n):
                members = tuple(ranks[r] for r in plain.ranks(axes, rank))
                if members not in made:
                    made[members] = _group(device_mesh, members)
                group = made[members]
                for order in itertools.permutations(axes):
                    self.members[order], self.groups[order] = len(members), group
                    self.place[order] = members.index(ranks[rank])
                    self.names[order] = "" if group is None else group.group_name
        self.mesh = plain.at(rank, self)

    def group(self, *axes: str) -> Any:
        """The `torch.distributed` group of this rank over some axes, as for an optimiser's own sums."""
        if axes not in self.groups:
            raise KeyError(f"ProcessGroup.group{axes}: some of {', '.join(dict(self.mesh.axes))} are needed")
        return self.groups[axes]

    def limit_s(self, device_type: str) -> float | None:
        """Seconds that an exchange may take on such devices, where there is a limit."""
        limits = [time_limit(group, device_type) for group in self.groups.values() if group is not None]
        return next((limit.total_seconds() for limit in limits if limit is not None), None)

    def why_not_captured(self, device_type: str) -> str | None:
        """Why a graph of such a device cannot hold exchanges, or None."""
        if self.check:
            return "the transport checks each of its calls"
        names = {group._get_backend(torch.device(device_type)).name() for group in self.groups.values() if group}
        return None if names <= {"nccl"} else f"{', '.join(sorted(names))} exchanges through the host"

    def all_gather(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        """Equal blocks gather; uneven ones go to everybody, one by one. So do all on a CPU: gloo's own all-gather hands
        blocks round, each step after the one before, and takes as long among two ranks, among four 1.2 to 1.4 times."""
        self._agree("all-gather", x, counts, counts, axes, call)
        n = self.members[axes]
        if _equal(counts) and x.device.type != "cpu":
            return self._run("all-gather", _all_gather, x, (n,), axes, call)
        how = (_scaled(x, counts), _scaled(x, [x.shape[0]] * n))
        if torch.compiler.is_compiling() or x.device.type != "cpu":
            return self._run("all-gather", _all_to_all, x.repeat(n), how, axes, call)
        copies = self.spare.take(x, n * x.shape[0])
        copies.view(n, -1).copy_(x)
        return self._run("all-gather", _all_to_all, copies, how, axes, call, after=partial(self.spare.give, copies))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], axes: tuple[str, ...], call: Call) -> Work:
        """Equal blocks are summed on their way, uneven ones where they arrive. So are all on a CPU: gloo's own
        reduce-scatter takes 1.5 to 2.5 times as long, and rounds each addition."""
        self._agree("reduce-scatter", x, counts, counts, axes, call)
        n = self.members[axes]
        if _equal(counts) and x.dtype in _SUMMED and x.device.type != "cpu":
            return self._run("reduce-scatter", _reduce_scatter, x, (n,), axes, call)
        mine = counts[self.place[axes]]
        how = (_scaled(x, [mine] * n), _scaled(x, counts))
        return self._run("reduce-scatter", _all_to_all, x, how, axes, call, blocks=n)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> Work:
        """A block for each."""
        self._agree("all-to-all", x, counts, receive, axes, call)
        how = (_scaled(x, receive), _scaled(x, counts))
        return self._run("all-to-all", _all_to_all, x, how, axes, call)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], call: Call) -> Work:
        """The sum, on its way; of a dtype that cannot be summed there, of everybody's whole."""
        self._agree("all-reduce", x, [x.numel()], [x.numel()], axes, call)
        n = self.members[axes]
        if x.dtype in _SUMMED:
            return self._run("all-reduce", _all_reduce, x, (), axes, call)
        return self._run("all-reduce", _all_gather, x, (n,), axes, call, blocks=n)

    def _agree(
        self, kind: str, x: Tensor, counts: Sequence[int], receive: Sequence[int], axes: tuple[str, ...], call: Call
    ) -> None:
        """Raise `TransportError` on every member where they are about to do different things."""
        if not self.check or torch.compiler.is_compiling():
            return
        mine = Part(kind, axes, x.dtype, list(counts), list(receive), call)
        parts: list[Any] = [None] * self.members[axes]
        with _Explained(f"the check before {mine}", self, axes, call):
            dist.all_gather_object(parts, mine, group=self.groups[axes])
        group = self.mesh.ranks(axes, self.mesh.rank)
        problem = disagreement(group, dict(zip(group, parts, strict=True)))
        if problem:
            doing = [f"    rank {r:<3} is at {part}: {part.call}" for r, part in zip(group, parts, strict=True)]
            raise TransportError("\n".join([problem, *doing, f"    mesh: {self.mesh}"]))

    def _run(
        self,
        kind: str,
        op: Callable[..., Tensor],
        x: Tensor,
        how: tuple[Any, ...],
        axes: tuple[str, ...],
        call: Call,
        blocks: int = 0,
        after: Callable[[], None] | None = None,
    ) -> Work:
        name, carried = self.names[axes], _bytes(x)
        if torch.compiler.is_compiling():
            return _Work(op(carried, *how, name), x.dtype, blocks)
        with _Explained(f"{kind} over {'/'.join(axes)}", self, axes, call) as explained:
            return _Work(op(carried, *how, name), x.dtype, blocks, explained, after)


# What gloo carries, and adds up; other dtypes go as bytes and are added where they arrive.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SUMMED = (*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
_CARRIED = (*_SUMMED, torch.bool)


def _all_gather(x: Tensor, n: int, name: str) -> Tensor:
    return cast(Tensor, _ops.all_gather_into_tensor(x, n, name))


def _reduce_scatter(x: Tensor, n: int, name: str) -> Tensor:
    return cast(Tensor, _ops.reduce_scatter_tensor(x, "sum", n, name))


def _all_to_all(x: Tensor, receive: list[int], counts: list[int], name: str) -> Tensor:
    return cast(Tensor, _ops.all_to_all_single(x, receive, counts, name))


def _all_reduce(x: Tensor, name: str) -> Tensor:
    return cast(Tensor, _ops.all_reduce(x, "sum", name))


def _bytes(x: Tensor) -> Tensor:
    """What travels of a flat buffer."""
    if x.dtype in _CARRIED:
        return x
    # A buffer of one element or none may have any stride, and only a stride of 1 can be seen as bytes.
    return (x if x.stride(0) == 1 else x.new_empty(x.shape).copy_(x)).view(torch.uint8)


def _scaled(x: Tensor, counts: Sequence[int]) -> list[int]:
    """Counts of elements as counts of what travels."""
    size = 1 if x.dtype in _CARRIED else x.element_size()
    return [n * size for n in counts]


def keep_collectives() -> Any:
    """For `checkpoint(fn, ..., use_reentrant=False, context_fn=sh.keep_collectives)`: backward computes `fn` again, but
    what its exchanges on processes gave is kept, and they do not run again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        moved = op.namespace == "_c10d_functional"
        return CheckpointPolicy.MUST_SAVE if moved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Work:
    """blocks: how many have to be added up once they are here. after: what is to be done then."""

    def __init__(
        self,
        value: Tensor,
        dtype: torch.dtype,
        blocks: int,
        explained: _Explained | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.value, self.dtype, self.blocks, self.explained, self.after = value, dtype, blocks, explained, after

    def wait(self) -> Tensor:
        if self.explained is None:
            value = _ops.wait_tensor(self.value)
        else:
            with self.explained:
                value = _ops.wait_tensor(self.value)
        if self.after is not None:
            self.after()
        if value.dtype != self.dtype:
            value = value.view(self.dtype)
        if self.blocks:
            value = summed(value.view(self.blocks, value.shape[0] // self.blocks))
        return cast(Tensor, value)


class _Explained:
    """Says of what torch raises in an exchange who took part and what it was for."""

    def __init__(self, what: str, transport: ProcessGroup, axes: tuple[str, ...], call: Call) -> None:
        self.what, self.transport, self.axes, self.call = what, transport, axes, call

    def __enter__(self) -> _Explained:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            mesh = self.transport.mesh
            peers = ", ".join(str(r) for r in mesh.ranks(self.axes, mesh.rank) if r != mesh.rank)
            raise TransportError(
                f"rank {mesh.rank}: {self.what} with rank {peers} failed: {self.call}\n"
                f"    a peer is gone, was slower than the time limit, or made another call     mesh: {mesh}\n"
                f"    {str(error).splitlines()[0]}"
            ) from error


def _equal(counts: Sequence[int]) -> bool:
    return all(n == counts[0] for n in counts)


def _group(device_mesh: Any, ranks: tuple[int, ...]) -> Any:
    """The group of these global ranks. Those that a device mesh makes for its dimensions wait for torch's own limit of
    half an hour, whatever the world's is; so where it has several, each set of axes has a group made here."""
    if len(ranks) == 1:
        return None
    if device_mesh.mesh.dim() == 1:
        return device_mesh.get_group(0)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    # Only its members make a group, each in the same order of axes.
    limit = time_limit(dist.group.WORLD, device_mesh.device_type)
    return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)


def time_limit(group: Any, device_type: str) -> datetime.timedelta | None:
    """How long an exchange of a group may take on such devices, which torch has no public way to ask; None where its
    backend has no limit (torch's fake one)."""
    options = group._get_backend(torch.device(device_type)).options
    return None if options is None else cast(datetime.timedelta, options._timeout)
