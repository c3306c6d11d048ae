"""The ops of kernels_cuda on a CPU: their own Python, with launches carried out by the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from meshfn import kernels_cuda
from meshfn.kernels_cuda import Launch

from .harness import Host

__all__ = ["host_ops", "run_on"]

_hosts: list[Callable[[Launch], None]] = []
_library = torch.library.Library("meshfn_cuda", "IMPL")


def _on_cpu(op: kernels_cuda.Op) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _hosts:
            raise RuntimeError(f"{op.name} on a CPU, outside of host_ops()")
        return op.run(_hosts[-1], *args, **kwargs)

    return run


for _op in kernels_cuda.OPS.values():
    _library.impl(_op.name, _on_cpu(_op), "CPU")


@contextmanager
def host_ops(host: Callable[[Launch], None] | None = None, **options: Any) -> Iterator[list[Launch]]:
    """Within it, ops of CPU tensors are carried out by `host`, or by `Host(**options)`. Yields the launches so far."""
    execute, seen = host or Host(**options), []

    def watched(launch: Launch) -> None:
        seen.append(launch)
        execute(launch)

    _hosts.append(watched)
    try:
        yield seen
    finally:
        _hosts.pop()


def run_on(host: Callable[[Launch], None], call: Callable[[], Any]) -> Any:
    """A call's result with ops carried out by one host."""
    with host_ops(host):
        return call()
