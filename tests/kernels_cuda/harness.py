"""CUDA kernels carried out on the CPU, a fiber a thread: the text is that which NVRTC compiles.

    host = Host(order="shuffled:7")
    host(Launch("gemv.cu", "gemv<__nv_bfloat16, 2>", (4, 1, 1), (128, 1, 1), 0, (x, w, y, ctypes.c_int(64))))
    host.together([Device(launches_of_one), Device(launches_of_its_peer, sleeps=(0, 50))])

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

from meshfn.kernels_cuda import Launch

from .building import SANITIZERS, SIMT, Builder
from .signature import Parameter, Region, check, extent, is_pointer, parameters_of, regions_of, value_of

__all__ = ["FOREVER", "Device", "Host", "KernelFault", "Launch"]

KERNELS = Path(__file__).parents[2] / "kernels_cuda"


class KernelFault(RuntimeError):  # noqa: N818  # as a fault of the machine
    """What a kernel did wrong: file and line, which thread, who waits where, or a sanitizer's report."""


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
        ("regions", ctypes.POINTER(Region)),
        ("region_count", ctypes.c_uint64),
    ]


class _Device(ctypes.Structure):
    """simt::Device."""

    _fields_ = [
        ("calls", ctypes.c_int64),
        ("sleeps_from", ctypes.c_int64),
        ("sleeps_to", ctypes.c_int64),
        ("args", ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))),
        ("regions", ctypes.POINTER(Region)),
        ("region_count", ctypes.c_uint64),
    ]


FOREVER = 2**63 - 1


@dataclass(frozen=True)
class Device:
    """A GPU among several. launches: one after the other, all of one kernel, as many blocks and threads on all GPUs.
    sleeps: from which round of turns to which it stands still; `(0, FOREVER)` is a peer that never comes."""

    launches: Sequence[Launch]
    sleeps: tuple[int, int] = (0, 0)


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
        built, parameters, request = self._prepared(launch)
        regions = regions_of(launch, parameters)
        kept = {r.argument: _checksum(r) for r in regions if r.constant}
        if self._sanitizer is None:
            self._here(built, request, regions, launch)
        else:
            _elsewhere(built, request, regions, launch, [], self._sanitizer)
        for region in regions:
            if region.constant and _checksum(region) != kept[region.argument]:
                was = f"`{parameters[region.argument]}`"
                raise KernelFault(f"{launch.name} wrote to argument {region.argument}, which it takes as {was}")

    def together(self, devices: Sequence[Device]) -> None:
        """Run what several GPUs launch, at once, until each has done so or sleeps for good."""
        launches = [launch for device in devices for launch in device.launches]
        first = launches[0]
        built, parameters, request = self._prepared(first)
        for launch in launches:
            check(launch, parameters)
            if (launch.name, launch.grid, launch.block) != (first.name, first.grid, first.block):
                raise ValueError(f"{launch.name} on {launch.grid}: all run one kernel, {first.name} on {first.grid}")
        regions = [[r for launch in device.launches for r in regions_of(launch, parameters)] for device in devices]
        if self._sanitizer is not None:
            return _elsewhere(built, request, list(itertools.chain(*regions)), first, devices, self._sanitizer)
        made, kept = (_Device * len(devices))(), []
        for device, mine, into in zip(devices, regions, made, strict=True):
            values = [[value_of(arg) for arg in launch.args] for launch in device.launches]
            args = [(ctypes.c_void_p * len(v))(*map(ctypes.addressof, v)) for v in values]
            pointers = [ctypes.cast(each, ctypes.POINTER(ctypes.c_void_p)) for each in args]
            into.args = (ctypes.POINTER(ctypes.c_void_p) * max(1, len(args)))(*pointers)
            into.regions, into.region_count = (Region * len(mine))(*mine), len(mine)
            into.calls, (into.sleeps_from, into.sleeps_to) = len(device.launches), device.sleeps
            kept += [values, args]
        with _RUNNING:
            found = _library(built, 0).simt_devices(ctypes.byref(request), made, ctypes.c_uint64(len(devices)))
        if found:
            raise KernelFault(_with_lines(found.decode(), built))

    def _prepared(self, launch: Launch) -> tuple[Path, Sequence[Parameter], _Request]:
        key = launch.source, launch.name
        if key not in self._built:
            self._built[key] = self._builder.kernel(
                self._folder / launch.source, launch.name, self._sanitizer, self._flags
            )
        parameters = _signature(self._built[key], self._sanitizer)
        check(launch, parameters)
        request = _Request(
            (*launch.grid,), (*launch.block,), launch.shared_bytes, launch.cooperative, self._order, self._seed
        )
        return self._built[key], parameters, request

    def _here(self, built: Path, request: _Request, regions: Sequence[Region], launch: Launch) -> None:
        """In this process. Each thread has a library of its own: a machine is one thread of the operating system."""
        request.regions, request.region_count = (Region * len(regions))(*regions), len(regions)
        counter = ctypes.c_int64(0)  # of blocks, counted by all
        request.next = ctypes.pointer(counter)
        values = [value_of(arg) for arg in launch.args]
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


@cache
def _signature(built: Path, sanitizer: str | None) -> tuple[Parameter, ...]:
    if sanitizer is None:
        printed = _library(built, 0).simt_signature().decode()
    else:
        printed = subprocess.run([*_prefix(sanitizer), built], capture_output=True, text=True, check=True).stdout
    return parameters_of(printed)


def _bytes(start: int, end: int) -> Any:
    return (ctypes.c_char * (end - start)).from_address(start)


def _checksum(region: Region) -> int:
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
    for function in (library.simt_launch, library.simt_devices, library.simt_signature):
        function.restype = ctypes.c_char_p
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


def _elsewhere(
    built: Path,
    request: _Request,
    regions: Sequence[Region],
    launch: Launch,
    devices: Sequence[Device],
    sanitizer: str,
) -> None:
    """In a process of its own, one launch or those of devices: what arguments share stays shared, and nothing else lies
    beside them."""
    buffers: list[tuple[int, int]] = []
    for start, end in sorted((r.start, r.end) for r in regions):
        if buffers and start < buffers[-1][1]:
            buffers[-1] = buffers[-1][0], max(end, buffers[-1][1])
        else:
            buffers.append((start, end))
    parts = [bytes(request), struct.pack("Q", len(buffers))]
    for start, end in buffers:
        parts += [struct.pack("QQ", end - start, start % 256), bytes(_bytes(start, end))]

    def arguments(launch: Launch) -> None:
        parts.append(struct.pack("Q", len(launch.args)))
        for arg in launch.args:
            start, end = extent(arg) if is_pointer(arg) else (0, 0)
            if start < end:
                at = next(i for i, (first, last) in enumerate(buffers) if first <= start < last)
                parts.append(struct.pack("qQ", at, start - buffers[at][0]))
            else:
                parts.append(struct.pack("q", -1) + (b"" if is_pointer(arg) else bytes(arg)).ljust(8, b"\0"))

    parts.append(struct.pack("Q", len(devices)))
    for device in devices:
        parts.append(struct.pack("qqq", len(device.launches), *device.sleeps))
        for each in device.launches:
            arguments(each)
    if not devices:
        arguments(launch)
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
