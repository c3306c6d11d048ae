"""Where the CUDA toolkit's headers lie, as wheels bring them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

__all__ = ["wheel_headers"]

# What kernels include, directly or not, and the wheel that has it.
_NEEDED = (("cuda_bf16.h", "runtime"), ("crt/host_defines.h", "crt"), ("nv/target", "cccl"))


@functools.cache
def wheel_headers() -> tuple[Path, ...]:
    """The folders. Raises `RuntimeError` where a wheel is missing, with its name."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    folders = [folder for root in roots for folder in sorted(Path(root).glob("*/include"))]
    found = []
    for header, wheel in _NEEDED:
        there = [folder for folder in folders if (folder / header).exists()]
        if not there:
            raise RuntimeError(f"no {header} among the installed wheels\n    fix: pip install nvidia-cuda-{wheel}")
        found.append(there[0])
    return tuple(dict.fromkeys(found))
