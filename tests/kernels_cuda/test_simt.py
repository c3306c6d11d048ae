"""The machine that kernels run on without a GPU: right kernels give the same bits in every order, wrong ones are caught."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from .building import BuildError, Builder
from .harness import Host, KernelFault, Launch

HERE = Path(__file__).parent
ORDERS = ("forward", "reversed", "shuffled:1", "shuffled:2")


def c(n: int) -> ctypes.c_int:
    return ctypes.c_int(n)


def launch(name, args, grid=1, block=64, shared_bytes=0, source="right.cu", **how):
    return Launch(source, name, (grid, 1, 1), (block, 1, 1), shared_bytes, args, **how)


def in_every_order(make, **options):
    """The results of `make()`, which returns a launch and the tensors that it writes: one, in whichever order."""
    results = []
    for order in ORDERS:
        host = Host(order=order, folder=HERE, **options)
        asked, written = make()
        host(asked)
        results.append(written)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    return results[0]


def ints(*shape, low=-9, high=9):
    return torch.randint(low, high, shape, dtype=torch.int32)


def fault(which, *, order="forward", block=64, **how):
    """What `faulty.cu` is told of one of its faults."""
    y = torch.zeros(64)
    with pytest.raises(KernelFault) as caught:
        Host(order=order, folder=HERE)(
            launch("faulty", (c(which), y, None, c(64)), block=block, source="faulty.cu", **how)
        )
    return str(caught.value)


def test_warp_operations_are_what_they_say():
    x = ints(80)
    made = in_every_order(lambda: (launch("warp_operations", (x, y := ints(19, 80)), block=80), [y]))[0]
    warps = [x[i : i + 32].tolist() for i in (0, 32, 64)]

    def signed(n):
        return (n & 0xFFFFFFFF) - (n >> 31 & 1) * 2**32

    def up(v, i, delta, width):
        return v[i - delta] if i % width >= delta else v[i]

    def down(v, i, delta, width):
        return v[i + delta] if i % width + delta < width and i + delta < len(v) else v[i]

    def folded(op, v):
        total = v[0]
        for value in v[1:]:
            total = op(total, value)
        return total

    def swapped(v):
        return [v[i ^ 1] if i < 8 else v[i] for i in range(len(v))]

    rows = [
        lambda v, i: v[3],
        lambda v, i: v[i // 8 * 8 + 5],
        lambda v, i: up(v, i, 3, 32),
        lambda v, i: up(v, i, 1, 4),
        lambda v, i: down(v, i, 1, 4),
        lambda v, i: v[i ^ 2],
        lambda v, i: sum((value > 0) << lane for lane, value in enumerate(v)),
        lambda v, i: int(5 in v),
        lambda v, i: int(max(v) < 9),
        lambda v, i: sum(v),
        lambda v, i: min(v),
        lambda v, i: max(v),
        lambda v, i: min(v, key=lambda n: n & 0xFFFFFFFF),
        lambda v, i: folded(int.__and__, v),
        lambda v, i: folded(int.__or__, v),
        lambda v, i: folded(int.__xor__, v),
        lambda v, i: sum((value == v[i]) << lane for lane, value in enumerate(v)),
        lambda v, i: math.trunc(v[i ^ 1] + 0.5),
        lambda v, i: swapped(v)[i ^ 4],
    ]
    for row, rule in zip(made.tolist(), rows, strict=True):
        assert row == [signed(rule(v, i)) for v in warps for i in range(len(v))]


def test_barriers_count():
    x = ints(7, 80)
    made = in_every_order(lambda: (launch("block_operations", (x, y := ints(3, 7), c(7)), block=80), [y]))[0]
    assert torch.equal(made, torch.stack([(x > 0).sum(1), (x > -9).all(1), (x > 8).any(1)]).int())


def test_atomics():
    x = ints(5, 40, low=0)

    def make():
        i = torch.tensor([0, 0, 99, -99, 0, 0], dtype=torch.int32)
        u = torch.tensor([-1, 0, 0, 0, 0, 99, 0], dtype=torch.int32)
        f, d, n = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
        h, b = torch.zeros(2, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
        return launch("atomics", (x, i, u, f, d, n, h, b), grid=5, block=40), [i, u, f, d, n, h, b]

    i, u, f, d, n, h, b = in_every_order(make)
    bits = [1 << (v & 7) for v in x.flatten().tolist()]
    one = 0
    for bit in bits:
        one ^= bit
    assert i.tolist() == [x.sum(), -x.sum(), x.min(), x.max(), 0, x.sum()]
    assert u.tolist() == [~sum(set(bits)), sum(set(bits)), one, 200 % 7, -200 % 7, x.min(), x.max()]
    assert (f.item(), d.item(), n.tolist()) == (200, 100, [200 << 33, x.max() + 16])
    assert (h.tolist(), b.item()) == ([200, 400], 200)


@pytest.mark.parametrize(
    ("name", "dtype"), [("float", torch.float32), ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)]
)
def test_sums_of_rows(name, dtype):
    x = torch.randn(5, 72).to(dtype)
    shape = {"grid": 5, "block": 128, "shared_bytes": 4}
    made = in_every_order(lambda: (launch(f"row_sum<{name}>", (x, y := torch.zeros(5), c(72)), **shape), [y]))[0]
    torch.testing.assert_close(made, x.double().sum(1).float(), rtol=1e-5, atol=1e-5)


def test_threads_of_the_system_share_the_blocks():
    x, y, again = torch.randn(41, 72), torch.zeros(41), torch.zeros(41)
    for threads, into in ((1, y), (3, again)):
        host = Host(threads=threads, order="shuffled:5", folder=HERE)
        host(launch("row_sum<float>", (x, into, c(72)), grid=41, block=128, shared_bytes=4))
    assert torch.equal(y, again)
    torch.testing.assert_close(y, x.sum(1))


@pytest.mark.parametrize("cooperative", [False, True])
def test_every_block_finds_its_shared_memory_filled_with_nan(cooperative):
    how = {"grid": 6, "block": 40, "shared_bytes": 200, "cooperative": cooperative}
    made = in_every_order(lambda: (launch("poisoned", (y := torch.zeros(2, dtype=torch.int32), c(50)), **how), [y]))[0]
    assert made.tolist() == [6 * 33, 6 * 50]


@pytest.mark.parametrize("cooperative", [False, True])
def test_the_last_block_adds_up(cooperative):
    x = torch.randn(6, 32)

    def make():
        parts, done, y = torch.full((6,), torch.nan), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        return launch("last_block", (x, parts, done, y), grid=6, block=32, cooperative=cooperative), [y]

    torch.testing.assert_close(in_every_order(make)[0][0], x.double().sum().float())


def test_blocks_that_run_at_once_wait_for_each_other():
    x = ints(5, 32)

    def make():
        y, sums = ints(5, 32), ints(5, 32)
        args = (torch.zeros(1, dtype=torch.int32), x, y, sums)
        return launch("ring", args, grid=5, block=32, cooperative=True), [y, sums]

    y, sums = in_every_order(make)
    wanted = x.view(5, 16, 2).flip(2).reshape(5, 32).cumsum(0)
    assert torch.equal(y.long(), wanted)
    assert torch.equal(sums.long(), wanted.sum(0) + x)


def test_a_wait_for_a_block_that_does_not_run_yet():
    args = (torch.zeros(1, dtype=torch.int32), ints(5, 32), ints(5, 32), ints(5, 32))
    with pytest.raises(KernelFault, match=r"ring, block \(4, 0, 0\)[\s\S]*fix: Launch\(..., cooperative=True\)"):
        Host(order="reversed", folder=HERE)(launch("ring", args, grid=5, block=32))


def test_mathematics():
    x = torch.cat((torch.rand(60) * 4 + 0.01, torch.tensor([1.0, 0.5, 2.0])))
    make = lambda: (launch("functions", (x, y := torch.zeros(18, 63), b := ints(7, 63), c(63))), [y, b])  # noqa: E731
    y, b = in_every_order(make)
    X = x.double()
    wanted = [X.rsqrt(), X.exp(), X.log(), X.exp2(), X.log1p(), X.tanh(), X.erf(), 1 / X, 1 / X, X.sqrt(), X**1.5]
    wanted += [X.clamp(0, 1), X * X - 2, X.clamp(min=1), X.clamp(max=1), X, x.bfloat16().double(), x.half().double()]
    torch.testing.assert_close(y, torch.stack(wanted).float(), rtol=3e-7, atol=3e-7)
    words = [n & 0xFFFFFFFF for n in x.view(torch.int32).tolist()]
    assert b[0].tolist() == [n.bit_count() for n in words]
    assert b[1].tolist() == [(n & -n).bit_length() for n in words]
    assert b[2].tolist() == [32 - n.bit_length() for n in words]
    assert b[3].tolist() == [0] * 63
    assert b[4].tolist() == [n * n >> 32 for n in words]
    assert torch.equal(b[5], x.round().int())
    assert b[6].tolist() == [1] * 63


def test_cached_loads_and_stores():
    x = torch.randn(8, 4, 4)
    assert torch.equal(in_every_order(lambda: (launch("cached", (x, y := torch.zeros(8, 4, 4)), block=8), [y]))[0], x)


def test_divergent_barriers():
    assert_expected_inline(fault(0), """\
faulty.cu:9: __syncthreads: divergent barrier: 40 of 64 threads wait, 24 have exited
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-39: wait in __syncthreads at faulty.cu:9
    threads 40-63: exited
    fix: let every thread of the block reach the same barrier""")
    assert_expected_inline(fault(1), """\
faulty.cu:13: __syncthreads: divergent barrier: threads of the block wait at another one
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-39: wait in __syncthreads at faulty.cu:13
    threads 40-63: wait in __syncthreads at faulty.cu:15
    fix: let every thread of the block reach the same barrier""")
    assert all(fault(which, order=order) == fault(which) for which in (0, 1) for order in ORDERS)


def test_lanes_that_never_meet():
    assert_expected_inline(fault(2), """\
faulty.cu:19: __shfl_xor_sync: lanes of mask 0xffffffff never come
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-6, 8-31: wait in __shfl_xor_sync at faulty.cu:19, mask 0xffffffff
    thread 7: wait in __syncthreads at faulty.cu:18
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""")
    assert_expected_inline(fault(6), """\
faulty.cu:28: __shfl_xor_sync: mask 0xffffffff names lanes that have exited: 0xffff0000
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-15, 32-47: wait in __shfl_xor_sync at faulty.cu:28, mask 0xffffffff
    threads 16-31, 48-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""")
    assert_expected_inline(fault(7), """\
faulty.cu:32: __syncwarp: mask 0x000fffff overlaps 0xffff8000, which other lanes wait with
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-15: wait in __syncwarp at faulty.cu:32, mask 0x000fffff
    threads 16-31: wait in __syncwarp at faulty.cu:34, mask 0xffff8000
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""")
    assert_expected_inline(fault(8), """\
faulty.cu:41: __all_sync: lanes of mask 0xffffffff never come
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0, 2, 4, 6, ...: wait in __all_sync at faulty.cu:41, mask 0xffffffff
    threads 1, 3, 5, 7, ...: wait in __any_sync at faulty.cu:39, mask 0xffffffff
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""")
    assert all(fault(which, order=order) == fault(which) for which in (2, 6, 7, 8) for order in ORDERS)


def test_wrong_masks_and_lanes():
    assert_expected_inline(fault(3), """\
faulty.cu:21: __shfl_xor_sync: lane 16 is not in its own mask 0x0000ffff
    kernel faulty, block (0, 0, 0), thread (16, 0, 0)
    fix: a mask that names every lane which makes the call""")
    assert_expected_inline(fault(4), """\
faulty.cu:23: __shfl_sync: lane 0 reads lane 20, which is not in the mask 0x0000ffff
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: let the lane that is read make the call too""")
    assert_expected_inline(fault(5, block=45), """\
faulty.cu:25: __shfl_down_sync: lane 12 reads lane 13, which is not in the mask 0x00001fff
    kernel faulty, block (0, 0, 0), thread (44, 0, 0)
    fix: let the lane that is read make the call too""")
    assert_expected_inline(fault(9), """\
faulty.cu:43: __shfl_xor_sync: a width of 12 lanes
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: 1, 2, 4, 8, 16 or 32""")


def test_wrong_addresses():
    assert_expected_inline(fault(10), """\
faulty.cu:44: access to 'struct float4': the address is 8 bytes past a multiple of 16
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""")
    assert_expected_inline(fault(11), """\
faulty.cu:45: __ldcs: the address is 4 bytes past a multiple of 16
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""")
    assert_expected_inline(fault(12), """\
faulty.cu:47: atomicAdd: the address is 2 bytes past a multiple of 4
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""")
    assert_expected_inline(fault(13), """\
faulty.cu:49: access to 'float' at a null pointer
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a tensor for this argument, or a test before the access""")
    assert_expected_inline(fault(18), """""")


def test_waits_that_never_end():
    assert_expected_inline(fault(14), """\
faulty.cu:52: atomicAdd: a wait that never ends: in 20000 turns of every thread nothing changed
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-2, 4-63: wait in __syncthreads at faulty.cu:54
    thread 3: can run in atomicAdd at faulty.cu:52
    fix: Launch(..., cooperative=True), where another block is waited for""")
    assert_expected_inline(fault(15), """\
faulty.cu:57: volatile read: a wait that never ends: in 20000 turns of every thread nothing changed
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-63: can run in volatile read at faulty.cu:57
    fix: Launch(..., cooperative=True), where another block is waited for""")
    assert_expected_inline(fault(16), """\
faulty.cu:60: grid.sync: the launch is not cooperative
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: Launch(..., cooperative=True)""")


def test_assertions():
    assert_expected_inline(fault(17), """\
faulty.cu:61: assert: y[0] == 1.0f does not hold
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: what made it false""")


def test_limits_of_a_launch():
    def told(name="faulty", grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0):
        args = (c(99), torch.zeros(64), None, c(64)) if name == "faulty" else (torch.zeros(64),)
        with pytest.raises(KernelFault) as caught:
            Host(folder=HERE)(Launch("faulty.cu", name, grid, block, shared_bytes, args))
        return str(caught.value)

    assert_expected_inline(told(block=(33, 32, 1)), """\
block (33, 32, 1) has 1056 threads, over the limit of 1024 (at most 1024, 1024, 64 a dimension)
    kernel faulty
    fix: smaller blocks""")
    assert_expected_inline(told(grid=(1, 70_000, 1)), """\
grid (1, 70000, 1) is over the limit (2147483647, 65535, 65535)
    kernel faulty
    fix: put the largest number first""")
    assert_expected_inline(told(grid=(1, 0, 1)), """\
grid (1, 0, 1) of blocks (1, 1, 1) is empty
    kernel faulty
    fix: launch nothing where there is nothing to do""")
    assert_expected_inline(told(shared_bytes=232_449), """\
shared memory of 232449 bytes, and 0 declared, is over the limit of 232448
    kernel faulty
    fix: smaller tiles""")
    assert_expected_inline(told("too_much_declared"), """""")


def test_after_a_fault_the_next_launch_is_right():
    host, y = Host(folder=HERE), torch.zeros(64)
    for which in (0, 2, 14):
        with pytest.raises(KernelFault):
            host(launch("faulty", (c(which), torch.zeros(64), None, c(64)), source="faulty.cu"))
        host(launch("faulty", (c(99), y, None, c(64)), source="faulty.cu"))
    assert torch.equal(y, torch.full((64,), 3.0))


def test_arguments_are_those_of_the_signature():
    def told(*args, name="faulty"):
        with pytest.raises(ValueError, match="argument") as caught:
            Host(folder=HERE)(launch(name, args, source="faulty.cu"))
        return str(caught.value)

    y = torch.zeros(64)
    assert_expected_inline(told(c(0), y), """\
faulty takes 4 arguments, not 2
    it takes: int, float*, float*, int""")
    assert_expected_inline(told(c(0), y.half(), None, c(64)), """\
faulty: argument 1 is a torch.float16 tensor on cpu, the kernel takes `float*`
    fix: torch.float32 tensor on the CPU, or None""")
    assert_expected_inline(told(ctypes.c_long(0), y, None, c(64)), """\
faulty: argument 0 is a c_long, the kernel takes `int`
    fix: ctypes.c_int(...)""")
    assert_expected_inline(told(c(0), c(0), None, c(64)), """""")
    assert_expected_inline(told(0, y, None, c(64)), """""")
    assert_expected_inline(told(c(0), y.to("meta"), None, c(64)), """""")


def test_const_is_const():
    x, y = torch.ones(64), torch.zeros(64)
    with pytest.raises(KernelFault) as caught:
        Host(folder=HERE)(launch("writes_const", (x, y), source="faulty.cu"))
    assert_expected_inline(str(caught.value), """\
faulty.cu:96: write of 4 bytes into argument 0, which is const
    kernel writes_const, block (0, 0, 0), thread (0, 0, 0)
    fix: a parameter without const""")
    Host(folder=HERE)(launch("writes_const", (y, y), source="faulty.cu"))  # it may be written as the other argument


def test_errors_of_the_text_stand_at_its_line(tmp_path):
    (tmp_path / "broken.cu").write_text('#include "simt.hpp"\n__global__ void broken(float* y) {\n  y[0] = nowhere;\n}\n')
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
    assert _report(sanitizer, "row_sum<__nv_bfloat16>", (torch.randn(3, 72).bfloat16(), torch.zeros(3), c(72)), **ROWS) == ""


@pytest.mark.verify
def test_faults_of_the_machine_come_out_of_a_sanitizers_process():
    args = (c(0), torch.zeros(64), None, c(64))
    for sanitizer in ("address", "undefined", "thread"):
        with pytest.raises(KernelFault, match=r"faulty\.cu:9: __syncthreads: divergent barrier: 40 of 64 threads wait"):
            Host(sanitizer=sanitizer, folder=HERE)(launch("faulty", args, source="faulty.cu"))
