"""CUDA kernels carried out on the CPU, a fiber a thread: the text is that which NVRTC compiles.

    host = Host(order="shuffled:7")
    host(Launch("gemv.cu", "gemv<__nv_bfloat16, 2>", (4, 1, 1), (128, 1, 1), 0, (x, w, y, ctypes.c_int(64))))

simt/ holds the machine (machine.hpp says how it works), building.py the compiler. What a kernel does wrong there, such as a
barrier that some threads never reach, is raised as `KernelFault`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .building import SANITIZERS, SIMT, Builder
from meshfn.kernels_cuda import Launch

__all__ = ["Host", "KernelFault", "Launch"]

KERNELS = Path(__file__).parents[2] / "kernels_cuda"


class KernelFault(RuntimeError):  # noqa: N818  # as a fault of the machine
    """What a kernel did wrong: file and line, which thread, who waits where, or a sanitizer's report."""


class _Region(ctypes.Structure):
    """simt::Region."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("argument", ctypes.c_int32),
        ("constant", ctypes.c_int32),
    ]


class _Request(ctypes.Structure):
    """simt::Request."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("cooperative", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("next", ctypes.POINTER(ctypes.c_int64)),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint64),
    ]


class Host:
    """Runs launches on the CPU.

    order: whose turn it is, of the threads of a block and of the blocks: "forward", "reversed", "shuffled:SEED".
    sanitizer: None, "address", "undefined" or "thread": then a launch runs in a process of its own, on copies of its
    tensors with nothing around them. threads: of the operating system, which share the blocks; one where a launch is
    cooperative or there is a sanitizer. flags: more for g++. folder: where the texts lie. builder: with a cache of its own.

    A call raises `ValueError` where the arguments are not those of the kernel's signature, `BuildError` where the text is
    wrong, and `KernelFault` where what it does is, or where a tensor changed that it takes as const.
    """

    def __init__(
        self,
        *,
        order: str = "forward",
        sanitizer: str | None = None,
        threads: int = 1,
        flags: Sequence[str] = (),
        folder: Path = KERNELS,
        builder: Builder | None = None,
    ) -> None:
        if not (found := re.fullmatch(r"forward|reversed|shuffled:(\d+)", order)):
            raise ValueError(f"order={order!r} is not known\n    fix: forward, reversed or shuffled:SEED")
        if sanitizer not in SANITIZERS:
            raise ValueError(f"sanitizer={sanitizer!r} is not known\n    fix: None, address, undefined or thread")
        if threads < 1:
            raise ValueError(f"threads={threads} runs nothing\n    fix: threads=1")
        self._order = ("forward", "reversed", "shuffled").index(order.partition(":")[0])
        self._seed = int(found[1] or 0)
        self._sanitizer, self._threads, self._flags, self._folder = sanitizer, threads, tuple(flags), folder
        self._builder = builder or Builder()
        self._built: dict[tuple[str, str], Path] = {}

    def __call__(self, launch: Launch) -> None:
        """Run a kernel to its end."""
        key = launch.source, launch.name
        if key not in self._built:
            self._built[key] = self._builder.kernel(
                self._folder / launch.source, launch.name, self._sanitizer, self._flags
            )
        built = self._built[key]
        parameters = _signature(built, self._sanitizer)
        _check(launch, parameters)
        request = _Request(
            (*launch.grid,), (*launch.block,), launch.shared_bytes, launch.cooperative, self._order, self._seed
        )
        regions = _regions(launch, parameters)
        kept = {r.argument: _checksum(r) for r in regions if r.constant}
        if self._sanitizer is None:
            self._here(built, request, regions, launch)
        else:
            _elsewhere(built, request, regions, launch, self._sanitizer)
        for region in regions:
            if region.constant and _checksum(region) != kept[region.argument]:
                was = f"`{parameters[region.argument]}`"
                raise KernelFault(f"{launch.name} wrote to argument {region.argument}, which it takes as {was}")

    def _here(self, built: Path, request: _Request, regions: Sequence[_Region], launch: Launch) -> None:
        """In this process. Each thread has a library of its own: a machine is one thread of the operating system."""
        request.regions, request.region_count = (_Region * len(regions))(*regions), len(regions)
        counter = ctypes.c_int64(0)  # of blocks, counted by all
        request.next = ctypes.pointer(counter)
        values = [_value(arg) for arg in launch.args]
        args = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        machines = [_library(built, i) for i in range(1 if launch.cooperative else self._threads)]
        faults: list[str] = []

        def run(machine: Any) -> None:
            if found := machine.simt_launch(ctypes.byref(request), args):
                faults.append(found.decode())

        others = [threading.Thread(target=run, args=(machine,)) for machine in machines[1:]]
        with _RUNNING:
            for thread in others:
                thread.start()
            run(machines[0])
            for thread in others:
                thread.join()
        if faults:
            raise KernelFault(_with_lines(faults[0], built))


# A machine carries out one launch at a time; ranks that are threads of one process may come together.
_RUNNING = threading.Lock()


@dataclass(frozen=True)
class _Parameter:
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


@cache
def _signature(built: Path, sanitizer: str | None) -> tuple[_Parameter, ...]:
    """A kernel's parameters, from what the compiler printed: "... [with P = {const float*, int}]"."""
    if sanitizer is None:
        printed = _library(built, 0).simt_signature().decode()
    else:
        printed = subprocess.run([*_prefix(sanitizer), built], capture_output=True, text=True, check=True).stdout
    inside = printed[printed.index("{") + 1 : printed.rindex("}")]
    found = []
    for text in re.findall(r"(?:[^,<]|<[^>]*>)+", inside):
        text = text.strip()
        base = re.sub(r"\b(const|volatile)\b|\*.*", "", text).strip()
        found.append(_Parameter(text, base, "*" in text, text.startswith("const ") and text.count("*") == 1))
    return tuple(found)


def _check(launch: Launch, parameters: Sequence[_Parameter]) -> None:
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
            want = " or ".join(sorted(map(str, dtypes))) if len(dtypes) < 4 else "a"
            fix = f"{want} tensor on the CPU, or None"
        else:
            if scalar is not None and type(arg) is scalar:
                continue
            fix = f"ctypes.{scalar.__name__}(...)" if scalar else "a kernel that takes numbers and pointers"
        what = f"a {arg.dtype} tensor on {arg.device}" if isinstance(arg, Tensor) else f"a {type(arg).__name__}"
        raise ValueError(f"{launch.name}: argument {i} is {what}, the kernel takes `{wanted}`\n    fix: {fix}")


def _value(arg: Any) -> Any:
    """What cuLaunchKernel gets the address of."""
    return ctypes.c_void_p(arg.data_ptr() if isinstance(arg, Tensor) else None) if _is_pointer(arg) else arg


def _is_pointer(arg: Any) -> bool:
    return arg is None or isinstance(arg, Tensor)


def _regions(launch: Launch, parameters: Sequence[_Parameter]) -> list[_Region]:
    """The tensors' memory, from the first byte to the one behind the last; what may be written comes first.

    What is const for one argument and written through another is not const.
    """
    found = []
    for i, (t, parameter) in enumerate(zip(launch.args, parameters, strict=True)):
        if isinstance(t, Tensor) and t.numel():
            last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
            found.append(_Region(t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), i, parameter.const))
    for region in found:
        region.constant &= not any(r.start < region.end and region.start < r.end for r in found if not r.constant)
    return sorted(found, key=lambda region: region.constant)


def _bytes(start: int, end: int) -> Any:
    return (ctypes.c_char * (end - start)).from_address(start)


def _checksum(region: _Region) -> int:
    return zlib.crc32(_bytes(region.start, region.end))


@cache
def _library(built: Path, number: int) -> Any:
    """A machine. Those after the first are loaded from copies, so that each has its own variables."""
    if number:
        with tempfile.NamedTemporaryFile() as copy:  # it stays mapped
            shutil.copyfile(built, copy.name)
            library = ctypes.CDLL(copy.name)
    else:
        library = ctypes.CDLL(str(built))
    library.simt_launch.restype = library.simt_signature.restype = ctypes.c_char_p
    return library


def _with_lines(text: str, built: Path) -> str:
    """A fault's text with file and line for addresses of code, {+0x1234}, and for the functions they were inlined into."""

    def line(found: re.Match[str]) -> str:
        command = ["addr2line", "-i", "-e", built, found[1]]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        lines = [Path(line.split()[0]) for line in told]
        return " from ".join(line.name for line in lines if line.parent != SIMT) or lines[-1].name

    return re.sub(r"\{\+(0x[0-9a-f]+)\}", line, text)


# A sanitizer's process.

_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
_LIMIT = 100.0  # seconds of one launch


def _prefix(sanitizer: str) -> list[str]:
    """TSan keeps its own memory where a random layout of addresses may put ours."""
    return ["setarch", "-R"] if sanitizer == "thread" else []


def _elsewhere(built: Path, request: _Request, regions: Sequence[_Region], launch: Launch, sanitizer: str) -> None:
    """In a process of its own: what tensors share stays shared, and nothing else lies beside them."""
    buffers: list[tuple[int, int]] = []
    for start, end in sorted((r.start, r.end) for r in regions):
        if buffers and start < buffers[-1][1]:
            buffers[-1] = buffers[-1][0], max(end, buffers[-1][1])
        else:
            buffers.append((start, end))
    parts = [bytes(request), struct.pack("Q", len(buffers))]
    for start, end in buffers:
        parts += [struct.pack("QQ", end - start, start % 256), bytes(_bytes(start, end))]
    parts.append(struct.pack("Q", len(launch.args)))
    for arg in launch.args:
        if isinstance(arg, Tensor) and arg.numel():
            at = next(i for i, (start, end) in enumerate(buffers) if start <= arg.data_ptr() < end)
            parts.append(struct.pack("qQ", at, arg.data_ptr() - buffers[at][0]))
        else:
            parts.append(struct.pack("q", -1) + (b"" if _is_pointer(arg) else bytes(arg)).ljust(8, b"\0"))
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "launch", Path(folder) / "result"
        asked.write_bytes(b"".join(parts))
        command = [*_prefix(sanitizer), built, asked, told]
        try:
            environment = os.environ | _OPTIONS
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment)
        except subprocess.TimeoutExpired:
            raise KernelFault(f"{launch.name} did not end within {_LIMIT:g} s") from None
        if done.returncode:
            raise KernelFault(f"{launch.name}: {sanitizer} sanitizer, exit code {done.returncode}\n{done.stderr}")
        result = told.read_bytes()
    length = 8 + struct.unpack_from("Q", result)[0]
    if length > 8:
        raise KernelFault(_with_lines(result[8:length].decode(), built))
    ends = itertools.accumulate((end - start for start, end in buffers), initial=length)
    for (start, end), at in zip(buffers, ends, strict=False):
        ctypes.memmove(start, result[at : at + end - start], end - start)
