"""Faults planted into the text of `gemv.cu`, one at a time: each is caught by a check that the text as it is passes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from meshfn.kernels_cuda import device

from .harness import KERNELS, KernelFault
from .test_gemv import CASES, case, check, run

SPLIT = case("plain_mlp", torch.float32, (2,), 2048, (6,), norm="rms", bias=True)
ODD = case("gated_mlp", torch.bfloat16, (3,), 37, (7, 7), norm="rms")
STRIDED = case("linear_add", torch.float32, (3,), 43, (6,), bias=True, lie="sliced")


def numbers(folder: Path) -> None:
    """Against fp64, twice: what the first launch leaves behind is what the second finds."""
    for each in (SPLIT, SPLIT, ODD, STRIDED):
        check(*each, folder=folder)


def rounds(folder: Path) -> None:
    """Against fp64, more columns than are in flight at once."""
    check(*CASES["several rounds"], folder=folder)


def orders(folder: Path) -> None:
    """To the bit in other orders of threads and blocks, of columns that blocks share."""
    first = run(*SPLIT, folder=folder)
    for order in ("reversed", "shuffled:1", "shuffled:2"):
        assert all(map(torch.equal, first, run(*SPLIT, folder=folder, order=order)))


def races(folder: Path) -> None:
    run(*SPLIT, folder=folder, sanitizer="thread")


def overruns(folder: Path) -> None:
    run(*ODD, folder=folder, sanitizer="address")


def waits(folder: Path) -> None:
    """What the kernel in front writes is not read before it has ended: until then, x and residual point nowhere."""
    path = folder / "gemv.cu"
    text = path.read_text()
    names = ("x", "residual")
    hidden = "".join(f" const T* const late_{name} = {name}; {name} = nullptr;" for name in names)
    shown = "".join(f" {name} = late_{name};" for name in names)
    text = text.replace("griddep_launch();", "griddep_launch();" + hidden)
    path.write_text(text.replace("griddep_wait();", "griddep_wait();" + shown))
    run(*STRIDED, folder=folder)


# name -> what stands in the text, what is planted in its place, what catches it
PLANTED: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "no barrier in front of the warps' sums": (
        "  __syncthreads();\n  float mine = 0.f;",
        "  float mine = 0.f;",
        numbers,
    ),
    "no barrier in front of the count": (
        "    __threadfence();\n    __syncthreads();\n    if (t == 0) {",
        "    __threadfence();\n    if (t == 0) {",
        races,
    ),
    "no barrier behind the count": (
        "    __syncthreads();\n    if (!last) return;",
        "    if (!last) return;",
        numbers,
    ),
    "no barrier in front of the output": (
        "  __syncthreads();\n  const int n = t / taken",
        "  const int n = t / taken",
        numbers,
    ),
    "a whole load at the rest of a row": (
        "vectors = width / VEC, rest",
        "vectors = (width + VEC - 1) / VEC, rest",
        numbers,
    ),
    "a rest without its last number": ("rest = width - vectors * VEC;", "rest = width - vectors * VEC - 1;", numbers),
    "shares too small": ("(vectors + gridDim.y - 1) / gridDim.y;", "vectors / gridDim.y - 1;", numbers),
    "shares that overlap": ("min(vectors, begin + share)", "min(vectors, begin + share + 1)", numbers),
    "a counter that is not reset": ("      if (last) arrived[blockIdx.x] = 0;  // for the next launch\n", "", numbers),
    "a block too many to wait for": ("== gridDim.y - 1;", "== gridDim.y;", numbers),
    "one's own sums alone": ("mine += __ldcg(&here[y *", "mine += __ldcg(&here[blockIdx.y *", numbers),
    "sums in the order of arrival": ("__ldcg(&here[y *", "__ldcg(&here[(y + blockIdx.y) % gridDim.y *", orders),
    "rows of weights as if contiguous": (
        "{s0, s1, s2, s3, s4, s5}}",
        "{width, width, width, width, width, width}}",
        numbers,
    ),
    "rows of the residual as if contiguous": ("n * residual_stride + f", "n * outputs + f", numbers),
    "rows of x as if contiguous": ("min(n, tokens - 1) * x_stride", "min(n, tokens - 1) * width", numbers),
    "sums of a warp left out": ("  if (lane == 0) {\n", "  if (lane == 0 && t < 96) {\n", numbers),
    "weights fetched once": ("      fetch(a, v + AHEAD * THREADS);\n", "", rounds),
    "outputs beyond the last": ("if (n >= tokens || f >= outputs) return;", "if (n >= tokens) return;", overruns),
    "x before the kernel in front": (
        "  griddep_wait();\n",
        "  const float early = wide(x[threadIdx.x % width]);\n  griddep_wait();\n  if (early != early) return;\n",
        waits,
    ),
    "no wait for the kernel in front": ("  griddep_wait();\n", "", waits),
}


@contextlib.contextmanager
def planted(tmp_path: Path, old: str, new: str) -> Iterator[Path]:
    """A folder with the kernels' texts, one of them changed. What a wrong kernel leaves in the counters goes too."""
    for path in (*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "gemv.cu").read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in gemv.cu"
    (tmp_path / "gemv.cu").write_text(text.replace(old, new))
    device._counters.clear()
    try:
        yield tmp_path
    finally:
        device._counters.clear()


def test_the_text_as_it_is_passes_every_check(tmp_path):
    """So that what a check finds is what was planted."""
    for catches in dict.fromkeys(catches for _, _, catches in PLANTED.values()):
        folder = tmp_path / catches.__name__
        folder.mkdir()
        with planted(folder, "  griddep_wait();\n", "  griddep_wait();  // as it is\n"):
            catches(folder)


USUAL = ("a rest without its last number", "no wait for the kernel in front")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.verify) for n in PLANTED])
def test_a_planted_fault_is_caught(tmp_path, name):
    old, new, catches = PLANTED[name]
    with planted(tmp_path, old, new), pytest.raises((AssertionError, KernelFault)):
        catches(tmp_path)
