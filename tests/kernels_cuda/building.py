"""Kernel text made a host library or program by g++, once: kept on disk under a hash of all that it is made of.

One file holds what was built and, behind it, its SHA-256: an entry that was cut short or damaged is built again. It is
written under another name and renamed, with a lock held, so that two processes that want the same one build it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshfn.kernels_cuda.headers import wheel_headers

__all__ = ["SANITIZERS", "SIMT", "BuildError", "Builder"]

SIMT = Path(__file__).parent / "simt"
RUNTIME = (
    "scheduler.cpp",
    "devices.cpp",
    "collectives.cpp",
    "faults.cpp",
    "hooks.cpp",
)  # and process.cpp, under a sanitizer

_LANGUAGE = ("-std=c++20", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off")
_KERNEL = (*_LANGUAGE, "-O1", "-fno-strict-aliasing", "-ffunction-sections", "-fdata-sections")
_RUNTIME = (*_LANGUAGE, "-O1", "-ftree-vectorize", "-fno-tree-loop-distribute-patterns")
# Calls before every access, the volatile ones apart.
_ACCESSES = ("--param", "tsan-distinguish-volatile=1")
_CALLS = (*_ACCESSES, "--param", "tsan-instrument-func-entry-exit=0")
# sanitizer -> what the kernel's text is compiled with, what it is linked with, what the runtime is told. Where a library
# of a sanitizer does not listen to its accesses, simt/hooks.cpp does.
SANITIZERS: dict[str | None, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    None: (
        ("-g1", "-gdwarf-4", "-fsanitize=thread,alignment,null", "-fno-sanitize-recover=all", *_CALLS),
        ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs"),
        "-DSIMT_PLAIN",
    ),
    "address": (
        ("-g", "-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0"),
        ("-fsanitize=address", *(f"-Wl,--wrap=__asan_load{n}" for n in (1, 2, 4, 8, 16))),
        "-DSIMT_ADDRESS",
    ),
    "undefined": (
        ("-g", "-fsanitize=thread,undefined", "-fno-sanitize-recover=all", *_CALLS),
        ("-fsanitize=undefined",),
        "-DSIMT_UNDEFINED",
    ),
    "thread": (("-g", "-fsanitize=thread", *_ACCESSES), ("-fsanitize=thread",), "-DSIMT_THREAD"),
}


class BuildError(RuntimeError):
    """What the compiler or the linker said."""


class Builder:
    """Builds and keeps. folder: the cache; where none is named, the user's, or a temporary one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or _user_cache()).resolve()  # g++ runs in another
        self.folder.mkdir(parents=True, exist_ok=True)

    def kernel(self, text: Path, name: str, sanitizer: str | None, flags: Sequence[str] = ()) -> Path:
        """A library with `simt_launch`, or the program that calls it where there is a sanitizer.

        text: the .cu file; it may include what lies beside it. name: the kernel's C++ name expression. flags: more for
        g++. Raises `BuildError` with what g++ said, at the text's own lines.
        """
        compiled, linked, told = SANITIZERS[sanitizer]
        compiled = (*_KERNEL, *compiled, told, f"-I{SIMT}", f"-I{text.parent}", *_includes(), *flags)
        code = f'#include "{text}"\n#define SIMT_KERNEL {name}\n#include "entry.hpp"\n'
        parts = [*_sources(), *(p.read_bytes() for p in (text, *sorted(text.parent.glob("*.cuh"))))]

        def make(folder: Path) -> Path:
            (folder / "kernel.cpp").write_text(code)
            _run("g++", *compiled, "-c", "kernel.cpp", "-o", "kernel.o", folder=folder)
            runtime = self.runtime(sanitizer)
            script = ("-Wl,--gc-sections", f"-Wl,-T,{SIMT / 'shared.ld'}")
            _run("g++", "kernel.o", str(runtime), *linked, *script, "-o", "made", folder=folder)
            return folder / "made"

        return self._kept(f"{text.stem}.{sanitizer or 'host'}", [code, *map(str, (*compiled, *linked)), *parts], make)

    def runtime(self, sanitizer: str | None) -> Path:
        """What every kernel is linked with, never instrumented itself."""
        flags = (*_RUNTIME, SANITIZERS[sanitizer][2], *_includes())

        def make(folder: Path) -> Path:
            files = [*RUNTIME, *(["process.cpp"] if sanitizer else [])]
            (folder / "runtime.cpp").write_text("".join(f'#include "{SIMT / name}"\n' for name in files))
            _run("g++", *flags, "-c", "runtime.cpp", "-o", "made", folder=folder)
            return folder / "made"

        return self._kept(f"runtime.{sanitizer or 'host'}", [*flags, *_sources()], make)

    def _kept(self, title: str, parts: Sequence[str | bytes], make: Callable[[Path], Path]) -> Path:
        """The entry of these parts, made where there is none or it is damaged."""
        digest = hashlib.sha256(_compiler().encode())
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)
        path = self.folder / f"{title}.{digest.hexdigest()[:32]}"
        if _whole(path):
            return path
        with _locked(path.with_name(path.name + ".lock")):
            if not _whole(path):
                with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                    made = make(Path(scratch))
                    with made.open("ab") as file:
                        file.write(hashlib.sha256(made.read_bytes()).digest())
                    made.rename(path)
        return path


def _whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # the lock goes with the process that holds it, however that ends
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: of a user without a home
        home = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshfn" / "simt"
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    return Path(tempfile.gettempdir()) / f"meshfn-simt-{os.getuid()}"


@functools.cache
def _sources() -> tuple[bytes, ...]:
    return tuple(path.name.encode() + path.read_bytes() for path in sorted(SIMT.iterdir()))


@functools.cache
def _compiler() -> str:
    """Which g++ and which headers."""
    path = shutil.which("g++")
    if path is None:
        raise BuildError("no g++ on this machine\n    fix: install g++ 12 or newer")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [(folder / name) for folder in wheel_headers() for name in ("cuda_bf16.hpp", "cuda_fp16.hpp")]
    return version + "".join(hashlib.sha256(h.read_bytes()).hexdigest() for h in headers if h.exists())


def _includes() -> tuple[str, ...]:
    return tuple(part for folder in wheel_headers() for part in ("-isystem", str(folder)))


def _run(*command: str, folder: Path) -> None:
    environment = os.environ | {"LC_ALL": "C"}  # messages in English, in ASCII
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise BuildError(f"g++ refused\n{done.stderr}")
