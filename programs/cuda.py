"""The kernels of a GPU, as entries of the table: each is an op of `kernels_cuda`."""

from __future__ import annotations

from ..kernels_cuda import KERNELS, Serves
from .kernel import Call, Kernel

__all__ = ["CUDA_KERNELS"]


def _entry(serves: Serves) -> Kernel:
    def supports(call: Call) -> str | None:
        return call.target.lacks or serves.supports(call.arguments, call.target.arch)

    return Kernel(serves.kernel, serves.primitive, serves.op, supports, serves.in_place)


CUDA_KERNELS = tuple(map(_entry, KERNELS))
