"""Texts are built once, whoever asks; and run under the compiler's sanitizers, which find what is planted."""

from __future__ import annotations

import multiprocessing
import re
import shutil

import pytest
import torch

from .building import Builder, BuildError
from .cases import HERE, c, ints, launch
from .harness import Host, KernelFault


def test_errors_of_the_text_stand_at_its_line(tmp_path):
    (tmp_path / "broken.cu").write_text(
        '#include "simt.hpp"\n__global__ void broken(float* y) {\n  y[0] = nowhere;\n}\n'
    )
    with pytest.raises(BuildError, match=r"broken\.cu:3:10: error: 'nowhere' was not declared"):
        Host(folder=tmp_path, builder=Builder(tmp_path / "cache"))(launch("broken", (), source="broken.cu"))


def test_options():
    with pytest.raises(ValueError, match="fix: forward, reversed or shuffled:SEED"):
        Host(order="random")
    with pytest.raises(ValueError, match="fix: None, address, undefined or thread"):
        Host(sanitizer="memory")
    with pytest.raises(ValueError, match="fix: threads=1"):
        Host(threads=0)


def _cache(folder):
    """An empty cache, but for what every kernel is linked with."""
    runtime = Builder().runtime(None)
    shutil.copy(runtime, folder / runtime.name)
    return Builder(folder)


def _build(folder):
    """In a process of its own: which file was built, and when."""
    built = Builder(folder).kernel(HERE / "right.cu", "overflow", None)
    return built.name, built.stat().st_mtime_ns


def test_two_processes_build_one_library(tmp_path):
    _cache(tmp_path)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        one, two = pool.map(_build, [tmp_path] * 2, chunksize=1)
    assert one == two
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == 2  # the runtime and the kernel


def test_a_damaged_entry_is_built_again(tmp_path):
    builder = _cache(tmp_path)
    built = builder.kernel(HERE / "right.cu", "overflow", None)
    whole = built.read_bytes()
    for damaged in (whole[:-100], whole[:5000] + b"damaged" + whole[5007:]):
        built.unlink()  # a library that is loaded stays what it was
        built.write_bytes(damaged)
        y = torch.zeros(1, dtype=torch.int32)
        Host(folder=HERE, builder=builder)(launch("overflow", (y,), block=1))
        assert y.item() == 1
        assert built.read_bytes() != damaged


def _report(sanitizer, name, args, flags=(), **how):
    """What a sanitizer has to say; empty where nothing."""
    try:
        Host(folder=HERE, sanitizer=sanitizer, flags=flags)(launch(name, args, **how))
    except KernelFault as found:
        return str(found)
    return ""


def _line(text: str) -> int:
    """Of right.cu, the first that holds the text."""
    return next(i for i, line in enumerate((HERE / "right.cu").read_text().splitlines(), 1) if text in line)


ROWS = {"grid": 3, "block": 128, "shared_bytes": 4}


def _rows():
    return torch.randn(3, 72), torch.zeros(3), c(72)


def test_address_sanitizer():
    assert _report("address", "shared_overrun", (torch.zeros(31),), block=31) == ""
    found = _report("address", "shared_overrun", (torch.zeros(32),), block=32)
    assert "global-buffer-overflow" in found
    assert re.search(rf"#0 .* in shared_overrun.*right\.cu:{_line('part[threadIdx.x + 1]')}\n", found)


def test_thread_sanitizer():
    x, y, n = _rows()
    assert _report("thread", "row_sum<float>", (x, y, n), **ROWS) == ""
    torch.testing.assert_close(y, x.sum(1))
    found = _report("thread", "row_sum<float>", (x, y, n), ("-DNO_BARRIER",), **ROWS)
    assert "data race" in found
    assert f"right.cu:{_line('total[0] = part[0]')}" in found
    assert f"right.cu:{_line('part[threadIdx.x / 32] = sum')}" in found


@pytest.mark.verify
def test_address_sanitizer_at_the_end_of_an_argument():
    x, y, n = _rows()
    assert _report("address", "row_sum<float>", (x, y, n), **ROWS) == ""
    found = _report("address", "row_sum<float>", (x[:, :71], y, n), **ROWS)
    assert "heap-buffer-overflow" in found
    assert f"right.cu:{_line('uint4 loaded')}" in found


@pytest.mark.verify
def test_undefined_behaviour_sanitizer():
    assert _report("undefined", "overflow", (torch.zeros(1, dtype=torch.int32),), block=1) == ""
    found = _report("undefined", "overflow", (torch.tensor([2**31 - 1], dtype=torch.int32),), block=1)
    assert f"right.cu:{_line('void overflow')}" in found
    assert "signed integer overflow" in found


@pytest.mark.verify
@pytest.mark.parametrize("cooperative", [False, True])
def test_thread_sanitizer_between_blocks(cooperative):
    how = {"grid": 4, "block": 32, "cooperative": cooperative}

    def args():
        return torch.randn(4, 32), torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)

    assert _report("thread", "last_block", args(), **how) == ""
    assert "data race" in _report("thread", "last_block", args(), ("-DEARLY",), **how)
    assert "data race" in _report("thread", "blocks_race", (torch.zeros(1, dtype=torch.int32),), **how)


@pytest.mark.verify
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitizers_are_silent_on_right_kernels(sanitizer):
    x = ints(5, 32)
    ring = (torch.zeros(1, dtype=torch.int32), x, ints(5, 32), ints(5, 32))
    assert _report(sanitizer, "ring", ring, grid=5, block=32, cooperative=True) == ""
    assert torch.equal(ring[2].long(), x.view(5, 16, 2).flip(2).reshape(5, 32).cumsum(0))
    assert _report(sanitizer, "warp_operations", (ints(80), ints(19, 80)), block=80) == ""
    assert _report(sanitizer, "block_operations", (ints(7, 80), ints(3, 7), c(7)), block=80) == ""
    assert (
        _report(sanitizer, "row_sum<__nv_bfloat16>", (torch.randn(3, 72).bfloat16(), torch.zeros(3), c(72)), **ROWS)
        == ""
    )


@pytest.mark.verify
def test_faults_of_the_machine_come_out_of_a_sanitizers_process():
    args = (c(0), torch.zeros(64), None, c(64))
    for sanitizer in ("address", "undefined", "thread"):
        with pytest.raises(KernelFault, match=r"faulty\.cu:9: __syncthreads: divergent barrier: 40 of 64 threads wait"):
            Host(sanitizer=sanitizer, folder=HERE)(launch("faulty", args, source="faulty.cu"))
