"""A layer of a random case over processes, and what its ranks must give: values of one rank, events of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

from . import gloo
from .gloo import mesh_of

__all__ = ["check", "own", "ran"]


def own(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-11, atol=1e-12))


def ran(case: Any, fn: Callable[..., Any], dense: Callable[[Any], Any]) -> tuple[bool, list[Any]]:
    """Whether this rank has its part of the output and of every gradient, and its events. dense: output and gradients
    of x and each parameter, on one rank."""
    mesh = mesh_of(**case.axes)
    record = sh.trace(mesh)
    layer = sh.shard(fn, case.layout, record.mesh, S=case.x.shape[1])
    specs, ends = layer.specs(case.params, case.cfg), case.layout["out"][-1]
    params = F.tree.map(own, sh.cut(case.params, specs, mesh))
    x = own(sh.cut(case.x, ends, mesh))
    given = {"params": case.params, "x": case.x, "cfg": case.cfg, **case.options}
    rows = {name: spec for name, spec in layer.in_specs(given).items() if name in case.options and spec is not None}
    options = {n: sh.cut(o, rows[n], mesh) if n in rows else o for n, o in case.options.items()}
    y, _ = layer(params, x, case.cfg, **options)
    leaves = [x, *F.tree.leaves(params)]
    loss = sh.counted_once((y * sh.cut(case.grad, ends, mesh)).sum(), ends, mesh)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]
    summed = sh.sum_gradients(F.tree.unflatten(F.tree.structure(params), grads[1:]), specs, mesh)

    want, wanted = dense(case)
    right = F.tree.unflatten(F.tree.structure(case.params), wanted[1:])
    of_x = sh.sum_gradients(grads[0], ends, mesh)  # ranks that share tokens have a part each
    there = sh.cut((case.grad != 0).to(want.dtype), ends, mesh)  # what stands in padding means nothing
    pairs = [(y * there, sh.cut(want * (case.grad != 0), ends, mesh)), (of_x, sh.cut(wanted[0], ends, mesh))]
    pairs += zip(F.tree.leaves(summed), F.tree.leaves(sh.cut(right, specs, mesh)), strict=True)
    return all(_close(a, b) for a, b in pairs), record.events


def check(results: Sequence[Any], chosen: Sequence[Any], sharded: Callable[..., Any], least: int) -> None:
    """results: what every rank has of every case, by `ran`. sharded: the same on threads. least: how many must move."""
    for i, case in enumerate(chosen):
        record = sh.trace(sh.Mesh(**case.axes))
        sharded(case, record.mesh)
        for rank, of_rank in enumerate(results):
            right, events = of_rank[i]
            assert right, f"rank {rank}: {case}"
            assert gloo.facts(events) == gloo.facts(record.of(rank)), f"{case}"
    assert sum(len(events) > 0 for _, events in results[0]) >= least
