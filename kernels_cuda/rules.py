"""What kernels ask of a call before they take it, and how they say no: a reason of a few words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..functional.shapes import ShapeError

__all__ = [
    "CPP_TYPES",
    "NORMS",
    "arch_rule",
    "as_rows",
    "by_rows",
    "check_absent",
    "check_contiguous",
    "check_dtype",
    "check_most",
    "check_norm",
    "check_rows",
    "check_same",
    "check_written",
    "dtype_rule",
    "tokens_of",
]

CPP_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
# (zero_centered, scale_in_fp32) -> the kernels' name of an RMSNorm
NORMS: Mapping[tuple[bool, bool], str] = MappingProxyType(
    {
        (False, False): "RMS",
        (True, False): "RMS_ZERO_CENTERED",
        (False, True): "RMS_IN_FP32",
        (True, True): "RMS_ZERO_CENTERED_IN_FP32",
    }
)
OLDEST = 80


def arch_rule(arch: str | None) -> str | None:
    """Of a device like "sm_90": None where kernels are compiled for it, else the reason why not."""
    number = re.match(r"sm_(\d+)", arch or "")
    if number is None:
        return "no architecture is named"
    return f"{arch} is older than sm_{OLDEST}" if int(number[1]) < OLDEST else None


def dtype_rule(x: Tensor, *others: Tensor | None) -> str | None:
    """None where all tensors have one dtype, which the kernels know, else the reason why not."""
    if x.dtype not in CPP_TYPES:
        return f"no {_name(x.dtype)}"
    other = next((t.dtype for t in others if t is not None and t.dtype != x.dtype), None)
    return None if other is None else f"{_name(x.dtype)} with {_name(other)}"


def check_dtype(op: str, **tensors: Tensor | None) -> None:
    """Raise `TypeError` unless all have the dtype of the first, and kernels know it."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(given))
    if given[first].dtype not in CPP_TYPES:
        raise TypeError(
            f"{op}({first}=...): it is {given[first].dtype}, and the kernel takes {', '.join(map(_name, CPP_TYPES))}\n"
            f"    fix: {first}.float(), or the plain function"
        )
    for name, t in given.items():
        if t.dtype != given[first].dtype:
            raise TypeError(
                f"{op}({name}=...): it is {t.dtype}, and {first} {given[first].dtype}\n"
                f"    fix: {name}.to({first}.dtype)"
            )


def check_same(op: str, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Raise `TypeError` unless all have this dtype: a kernel reads their bytes as such."""
    for name, t in tensors.items():
        if t is not None and t.dtype != dtype:
            raise TypeError(
                f"{op}({name}=...): it is {t.dtype}, and the kernel reads {dtype}\n    fix: {name}.to({dtype})"
            )


def check_contiguous(op: str, **tensors: Tensor | None) -> None:
    """Raise `ValueError` for a tensor that a kernel reads as one piece of memory and is none."""
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            raise ValueError(
                f"{op}({name}=...): it is not contiguous, its strides are {t.stride()}\n    fix: {name}.contiguous()"
            )


def check_most(op: str, name: str, letter: str, size: int, most: int) -> None:
    """Raise `ShapeError` unless a size of an argument is 1 to `most`."""
    if not 1 <= size <= most:
        raise ShapeError(
            f"{op}({name}=...): {letter} is {size}, and the kernel takes 1 to {most}\n    fix: the plain function"
        )


def check_absent(op: str, **arguments: object) -> None:
    """Raise `ValueError` for an argument of the primitive that the kernel would leave out."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{op}({name}=...): the kernel has none\n    fix: {name}=None, or the plain function")


def check_norm(op: str, norm_type: str, **bias: Tensor | None) -> None:
    """Raise `ValueError` for a norm that the kernels have not."""
    if norm_type != "rms_norm":
        raise ValueError(f"{op}(norm_type={norm_type!r}): the kernel has rms_norm alone\n    fix: the plain function")
    check_absent(op, **bias)


def check_written(op: str, **tensors: Tensor) -> None:
    """Raise `ValueError` where two numbers of what is written lie in one place."""
    for name, t in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(
                f"{op}({name}=...): it is written, and several of its numbers lie in one place\n"
                f"    fix: {name}.contiguous()"
            )


def check_rows(op: str, **tensors: Tensor | None) -> None:
    """Raise `ValueError` unless the numbers of every row lie next to each other."""
    for name, t in tensors.items():
        if t is not None and t.shape[-1:] > (1,) and t.stride(-1) != 1:
            raise ValueError(
                f"{op}({name}=...): numbers of a row lie {t.stride(-1)} apart, not side by side\n"
                f"    fix: {name}.contiguous()"
            )


def tokens_of(x: Tensor) -> int:
    """How many tokens x `... D` has, as a plain number."""
    return math.prod(int(n) for n in x.shape[:-1])


def as_rows(x: Tensor) -> Tensor:
    """x `... D` as `N D`, where D may be 0 and N is not to be found by dividing by it."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def by_rows(**tensors: Sequence[Tensor | None]) -> str | None:
    """None where the numbers of every row lie next to each other, else the reason, by the name given."""
    for name, each in tensors.items():
        for t in each:
            if t is not None and t.shape[-1] > 1 and t.stride(-1) != 1:
                return f"{name} by columns" if t.dim() > 1 else f"{name} with gaps"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
