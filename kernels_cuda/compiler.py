"""CUDA C++ text to cubins, by NVRTC, without a GPU, a driver or a compiler of one's own; kept on disk.

A cubin is found again by its text, the text of what it includes, its name, the options, the architecture and NVRTC's
version. Two processes that build one at once both write it, each under a name of its own first, so that neither reads
half of it; one that dies leaves such a file behind, which nobody reads. A damaged entry is built again. Where nothing
can be kept, a warning says so and each process compiles for itself.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .headers import wheel_headers

__all__ = ["ARCHITECTURES", "CompileError", "Cubin", "compile_kernel", "missing"]

HERE = Path(__file__).parent
# What the kernels are compiled for in the tests; any later one is compiled at its first use.
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# By default a generic lambda is the host's to NVRTC before 13.3.
_OPTIONS: dict[str, Any] = {"std": "c++17", "ptxas_options": "-v", "device_as_default_execution_space": True}


class CompileError(RuntimeError):
    """NVRTC's own message, with the kernel's file and line."""


@dataclass(frozen=True)
class Cubin:
    """code: the binary. symbol: the kernel's name in it. registers: of a thread. shared_bytes: static, of a block.
    spilled_bytes: what does not fit in registers and is stored, of a thread."""

    code: bytes
    symbol: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def missing() -> str | None:
    """Why nothing can be compiled here (a package, the library or its headers are not there), with what to install;
    None where it can."""
    try:
        import cuda.core  # noqa: F401

        if not _brings_headers():
            wheel_headers()
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"NVRTC is not here ({first})\n    fix: pip install 'meshfn[cuda]'"
    return None


def compile_kernel(source: str, name: str, arch: str, *, cache: Path | None = None) -> Cubin:
    """source: a file of this folder. name: the kernel as C++ calls it, such as "gemv<bf16, 8, 1, 2>". arch: "sm_90".
    cache: the folder of cubins, the user's unless given. Raises `CompileError`, and `RuntimeError` without NVRTC."""
    if (problem := missing()) is not None:
        raise RuntimeError(f"compile_kernel({name}): {problem}")
    folder = _cache_folder() if cache is None else cache
    path = folder / f"{_key(source, name, arch)}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    found = _build(source, name, arch)
    try:
        _write(path, found)
    except OSError as error:
        warnings.warn(
            f"compile_kernel({name}): what was compiled is not kept, and the next process compiles it again ({error})\n"
            "    fix: set XDG_CACHE_HOME to the path of a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _build(source: str, name: str, arch: str) -> Cubin:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    bundled = _brings_headers()
    folders = [HERE] if bundled else [HERE, *wheel_headers()]
    include = {"include_path": tuple(map(str, folders)), "use_bundled_headers": bundled}
    options = ProgramOptions(arch=arch, name=source, **_OPTIONS, **include)
    try:
        built = Program((HERE / source).read_text(), "c++", options).compile(
            "cubin", name_expressions=(name,), logs=log
        )
    except Exception as error:  # the class is private
        if "NVRTC" not in type(error).__name__:
            raise
        if "--gpu-architecture" in str(error):
            raise CompileError(
                f'compile_kernel(arch="{arch}"): NVRTC {_version()} does not know it\n'
                f"    fix: a newer nvidia-cuda-nvrtc, or one of {', '.join(ARCHITECTURES)}"
            ) from error
        raise CompileError(f"{source}, {name}, {arch}:\n{error}") from error
    symbol = built.symbol_mapping[name]
    symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
    return Cubin(built.code, symbol, *_resources(log.getvalue()))


def _resources(log: str) -> tuple[int, int, int]:
    """Registers, static shared bytes, spilled bytes, as ptxas tells them of the one kernel."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"ptxas did not say what the kernel needs:\n{log}")
    shared, spilled = re.search(r"(\d+) bytes smem", log), re.search(r"(\d+) bytes spill stores", log)
    return int(registers[1]), int(shared[1]) if shared else 0, int(spilled[1]) if spilled else 0


def _key(source: str, name: str, arch: str) -> str:
    said = [_text(source), name, arch, json.dumps(_OPTIONS), _version()]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:32]


@functools.cache
def _text(source: str) -> str:
    """A file's text with that of all it may include."""
    headers = sorted(HERE.glob("*.cuh"))
    return "\0".join(path.read_text() for path in (HERE / source, *headers))


def _brings_headers() -> bool:
    """From 13.3 on NVRTC has the toolkit's headers in itself; torch brings an older one along."""
    return tuple(map(int, _version().split("."))) >= (13, 3)


@functools.cache
def _version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _cache_folder() -> Path:
    """The user's. A relative path is to be ignored, says the specification of XDG's folders."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshfn" / "cubins"
    except RuntimeError as error:  # cuda.core needs one too
        raise RuntimeError(
            "compile_kernel: this user has no home\n    fix: set HOME to the path of a folder"
        ) from error


def _read(path: Path) -> Cubin | None:
    """None where there is none, or what is there is not what was written."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        told: dict[str, Any] = json.loads(head)
        digest = told.pop("sha256")
        return Cubin(code, **told) if digest == _digest(told, code) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(told: dict[str, Any], code: bytes) -> str:
    return hashlib.sha256(json.dumps(told).encode() + b"\n" + code).hexdigest()


def _write(path: Path, cubin: Cubin) -> None:
    told = asdict(cubin)
    code = told.pop("code")
    told["sha256"] = _digest(told, code)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(told).encode() + b"\n" + code)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
