"""Launching on a GPU, on torch's current stream. As thin as it can be: without one only `counters` runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .compiler import compile_kernel
from .launch import Argument, Launch, Mapped
from .rules import arch_rule

__all__ = ["COUNTERS", "counters", "execute"]


def execute(launch: Launch) -> None:
    """Enqueue a launch. In a captured graph a programmatic one may overlap with the kernel in front of it; outside of
    one it does not, since a kernel there may be an optimizer's, which writes the weights that are read ahead."""
    from cuda.core import LaunchConfig, Stream
    from cuda.core import launch as enqueue

    device = next(x.device for x in launch.args if isinstance(x, Tensor))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        config = LaunchConfig(
            grid=launch.grid,
            block=launch.block,
            shmem_size=launch.shared_bytes,
            is_cooperative=launch.cooperative,
            programmatic_stream_serialization=launch.programmatic and torch.cuda.is_current_stream_capturing(),
        )
        if launch.shared_bytes > _USUAL_SHARED_BYTES:
            _allow(launch.source, launch.name, device.index, launch.shared_bytes)
        args = map(_as_given, launch.args)
        enqueue(
            Stream.from_handle(stream.cuda_stream), config, _kernel(launch.source, launch.name, device.index), *args
        )


def _as_given(x: Argument) -> Any:
    """An argument as the driver takes it: pointers are numbers."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return x.address if isinstance(x, Mapped) else 0 if x is None else x


@functools.cache
def _kernel(source: str, name: str, device: int) -> Any:
    from cuda.core import Device, ObjectCode

    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}"
    if (reason := arch_rule(arch)) is not None:
        raise RuntimeError(f"{name}: {reason}\n    fix: the plain function")
    cubin = compile_kernel(source, name, arch)
    Device(device).set_current()
    return ObjectCode.from_cubin(cubin.code, name=name).get_kernel(cubin.symbol)


# Of a block; more must be asked for.
_USUAL_SHARED_BYTES = 48 << 10


@functools.cache
def _allow(source: str, name: str, device: int, shared_bytes: int) -> None:
    from cuda.bindings import driver

    wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel = _kernel(source, name, device).handle
    (result,) = driver.cuKernelSetAttribute(wanted, shared_bytes, kernel, driver.CUdevice(device))
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: the device gives no block {shared_bytes} bytes of shared memory ({result.name})")


# More than any launch of blocks that share a result has of results.
COUNTERS = 1 << 16
# (device, stream) -> counters, all zero between launches: each kernel leaves them as it found them. Never replaced,
# since captured graphs hold their address.
_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """`COUNTERS` zeros, int32, the same memory for all launches of one stream, which follow one another.

    Raises `RuntimeError` where the first launch of a stream is captured: zeros made there are zero from a replay on,
    and whatever runs before it would count from what lies in memory.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "kernels_cuda: the first launch of a stream is being captured\n"
                "    fix: run what is captured once before, on the stream of the capture"
            )
        _counters[device, stream] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device, stream]
