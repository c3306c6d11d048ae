"""A kernel's parameters as its compiler prints them, and a launch's arguments as they must be for it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from meshfn.kernels_cuda import Launch
from meshfn.kernels_cuda.launch import Mapped
from torch import Tensor

__all__ = ["Parameter", "Region", "check", "extent", "is_pointer", "parameters_of", "regions_of", "value_of"]


class Region(ctypes.Structure):
    """simt::Region."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("argument", ctypes.c_int32),
        ("constant", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Parameter:
    """One of a kernel, as the compiler prints its type. base: without pointer and qualifiers."""

    text: str
    base: str
    pointer: bool
    const: bool

    def __str__(self) -> str:
        return self.text


_ANY = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16}
_ANY |= {torch.float32, torch.float64}
# C++ type -> the ctypes scalar, the dtypes of a tensor that a pointer to it may be
_TYPES: dict[str, tuple[Any, set[torch.dtype]]] = {
    "bool": (ctypes.c_bool, {torch.bool}),
    "char": (ctypes.c_char, _ANY),
    "signed char": (ctypes.c_int8, {torch.int8}),
    "unsigned char": (ctypes.c_uint8, _ANY),
    "short int": (ctypes.c_int16, {torch.int16}),
    "int": (ctypes.c_int, {torch.int32}),
    "unsigned int": (ctypes.c_uint, {torch.int32, torch.uint32}),
    "long int": (ctypes.c_long, {torch.int64}),
    "long unsigned int": (ctypes.c_ulong, {torch.int64, torch.uint64}),
    "long long int": (ctypes.c_longlong, {torch.int64}),
    "long long unsigned int": (ctypes.c_ulonglong, {torch.int64, torch.uint64}),
    "float": (ctypes.c_float, {torch.float32}),
    "double": (ctypes.c_double, {torch.float64}),
    "__half": (None, {torch.float16}),
    "__nv_bfloat16": (None, {torch.bfloat16}),
    "__half2": (None, {torch.float16}),
    "__nv_bfloat162": (None, {torch.bfloat16}),
    "float2": (None, {torch.float32}),
    "float4": (None, {torch.float32}),
    "int2": (None, {torch.int32}),
    "int4": (None, {torch.int32}),
    "uint2": (None, _ANY),
    "uint4": (None, _ANY),
    "void": (None, _ANY),
}


def parameters_of(printed: str) -> tuple[Parameter, ...]:
    """From "... [with P = {const float*, int}]"."""
    inside = printed[printed.index("{") + 1 : printed.rindex("}")]
    found = []
    for text in re.findall(r"(?:[^,<]|<[^>]*>)+", inside):
        text = text.strip()
        base = re.sub(r"\b(const|volatile)\b|\*.*", "", text).strip()
        found.append(Parameter(text, base, "*" in text, text.startswith("const ") and text.count("*") == 1))
    return tuple(found)


def check(launch: Launch, parameters: Sequence[Parameter]) -> None:
    """The arguments are those of the signature, in number and type."""
    if len(launch.args) != len(parameters):
        raise ValueError(
            f"{launch.name} takes {len(parameters)} arguments, not {len(launch.args)}\n"
            f"    it takes: {', '.join(map(str, parameters))}"
        )
    for i, (arg, wanted) in enumerate(zip(launch.args, parameters, strict=True)):
        scalar, dtypes = _TYPES.get(wanted.base, (None, set()))
        if wanted.pointer:
            if arg is None:
                continue
            if isinstance(arg, Tensor) and arg.dtype in dtypes and arg.device.type == "cpu":
                continue
            if isinstance(arg, Mapped):
                continue
            want = " or ".join(sorted(map(str, dtypes))) if len(dtypes) < 4 else "a"
            fix = f"{want} tensor on the CPU, or None"
        else:
            if scalar is not None and type(arg) is scalar:
                continue
            fix = f"ctypes.{scalar.__name__}(...)" if scalar else "a kernel that takes numbers and pointers"
        what = f"a {arg.dtype} tensor on {arg.device}" if isinstance(arg, Tensor) else f"a {type(arg).__name__}"
        raise ValueError(f"{launch.name}: argument {i} is {what}, the kernel takes `{wanted}`\n    fix: {fix}")


def value_of(arg: Any) -> Any:
    """What cuLaunchKernel gets the address of."""
    return ctypes.c_void_p(extent(arg)[0]) if is_pointer(arg) else arg


def is_pointer(arg: Any) -> bool:
    return arg is None or isinstance(arg, (Tensor, Mapped))


def extent(arg: Tensor | Mapped | None) -> tuple[int, int]:
    """From the first byte to the one behind the last."""
    if arg is None:
        return 0, 0
    if isinstance(arg, Mapped):
        return arg.address, arg.address + arg.bytes
    start = arg.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
    return start, start + (last + 1) * arg.element_size() if arg.numel() else start


def regions_of(launch: Launch, parameters: Sequence[Parameter]) -> list[Region]:
    """The arguments' memory; what may be written comes first.

    What is const for one argument and written through another is not const.
    """
    found = []
    for i, (arg, parameter) in enumerate(zip(launch.args, parameters, strict=True)):
        if is_pointer(arg) and extent(arg)[0] < extent(arg)[1]:
            found.append(Region(*extent(arg), i, parameter.const))
    for region in found:
        region.constant &= not any(r.start < region.end and region.start < r.end for r in found if not r.constant)
    return sorted(found, key=lambda region: region.constant)
