"""What kernels do wrong is caught where it stands, and told with who waits where."""

from __future__ import annotations

import ctypes

import pytest
import torch
from expecttest import assert_expected_inline

from .cases import HERE, ORDERS, c, launch
from .harness import Host, KernelFault, Launch


def fault(which, *, order="forward", block=64, **how):
    """What `faulty.cu` is told of one of its faults."""
    y = torch.zeros(64)
    with pytest.raises(KernelFault) as caught:
        Host(order=order, folder=HERE)(
            launch("faulty", (c(which), y, None, c(64)), block=block, source="faulty.cu", **how)
        )
    return str(caught.value)


def test_divergent_barriers():
    assert_expected_inline(
        fault(0),
        """\
faulty.cu:9: __syncthreads: divergent barrier: 40 of 64 threads wait, 24 have exited
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-39: wait in __syncthreads at faulty.cu:9
    threads 40-63: exited
    fix: let every thread of the block reach the same barrier""",
    )
    assert_expected_inline(
        fault(1),
        """\
faulty.cu:13: __syncthreads: divergent barrier: threads of the block wait at another one
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-39: wait in __syncthreads at faulty.cu:13
    threads 40-63: wait in __syncthreads at faulty.cu:15
    fix: let every thread of the block reach the same barrier""",
    )
    assert all(fault(which, order=order) == fault(which) for which in (0, 1) for order in ORDERS)


def test_lanes_that_never_meet():
    assert_expected_inline(
        fault(2),
        """\
faulty.cu:19: __shfl_xor_sync: lanes of mask 0xffffffff never come
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-6, 8-31: wait in __shfl_xor_sync at faulty.cu:19, mask 0xffffffff
    thread 7: wait in __syncthreads at faulty.cu:18
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""",
    )
    assert_expected_inline(
        fault(6),
        """\
faulty.cu:28: __shfl_xor_sync: mask 0xffffffff names lanes that have exited: 0xffff0000
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-15, 32-47: wait in __shfl_xor_sync at faulty.cu:28, mask 0xffffffff
    threads 16-31, 48-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""",
    )
    assert_expected_inline(
        fault(7),
        """\
faulty.cu:32: __syncwarp: mask 0x000fffff overlaps 0xffff8000, which other lanes wait with
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-15: wait in __syncwarp at faulty.cu:32, mask 0x000fffff
    threads 16-31: wait in __syncwarp at faulty.cu:34, mask 0xffff8000
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""",
    )
    assert_expected_inline(
        fault(8),
        """\
faulty.cu:41: __all_sync: lanes of mask 0xffffffff never come
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0, 2, 4, 6, ...: wait in __all_sync at faulty.cu:41, mask 0xffffffff
    threads 1, 3, 5, 7, ...: wait in __any_sync at faulty.cu:39, mask 0xffffffff
    threads 32-63: exited
    fix: let every lane of a mask reach the same call, and name no other lane""",
    )
    assert all(fault(which, order=order) == fault(which) for which in (2, 6, 7, 8) for order in ORDERS)


def test_wrong_masks_and_lanes():
    assert_expected_inline(
        fault(3),
        """\
faulty.cu:21: __shfl_xor_sync: lane 16 is not in its own mask 0x0000ffff
    kernel faulty, block (0, 0, 0), thread (16, 0, 0)
    fix: a mask that names every lane which makes the call""",
    )
    assert_expected_inline(
        fault(4),
        """\
faulty.cu:23: __shfl_sync: lane 0 reads lane 20, which is not in the mask 0x0000ffff
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: let the lane that is read make the call too""",
    )
    assert_expected_inline(
        fault(5, block=45),
        """\
faulty.cu:25: __shfl_down_sync: lane 12 reads lane 13, which is not in the mask 0x00001fff
    kernel faulty, block (0, 0, 0), thread (44, 0, 0)
    fix: let the lane that is read make the call too""",
    )
    assert_expected_inline(
        fault(9),
        """\
faulty.cu:43: __shfl_xor_sync: a width of 12 lanes
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: 1, 2, 4, 8, 16 or 32""",
    )


def test_wrong_addresses():
    assert_expected_inline(
        fault(10),
        """\
faulty.cu:44: access to 'struct float4': the address is 8 bytes past a multiple of 16
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""",
    )
    assert_expected_inline(
        fault(11),
        """\
faulty.cu:45: __ldcs: the address is 4 bytes past a multiple of 16
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""",
    )
    assert_expected_inline(
        fault(12),
        """\
faulty.cu:47: atomicAdd: the address is 2 bytes past a multiple of 4
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a narrower access, or a base and a stride that are multiples of it""",
    )
    assert_expected_inline(
        fault(13),
        """\
faulty.cu:49: access to 'float' at a null pointer
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a tensor for this argument, or a test before the access""",
    )
    assert_expected_inline(
        fault(18),
        """\
faulty.cu:62: write of 4 bytes, 16 bytes over the end of argument 1
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a bound on the index, or a longer tensor""",
    )
    assert_expected_inline(
        fault(19),
        """\
faulty.cu:63: atomicAdd: write of 4 bytes, 8 bytes before the start of argument 1
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a bound on the index, or a longer tensor""",
    )
    assert_expected_inline(
        fault(20),
        """\
faulty.cu:64: __ldg: read of 4 bytes, 4 bytes over the end of argument 1
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a bound on the index, or a longer tensor""",
    )
    assert_expected_inline(
        fault(21),
        """\
faulty.cu:67: write of 4 bytes, 260 bytes over the end of dynamic shared memory
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: a bound on the index, or a longer tensor""",
    )
    assert_expected_inline(
        fault(22),
        """\
a thread used more than 128 KiB of stack
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    thread 0: exited
    threads 1-63: can run
    fix: smaller arrays in the kernel's frame""",
    )


def test_waits_that_never_end():
    assert_expected_inline(
        fault(14),
        """\
faulty.cu:52: atomicAdd: a wait that never ends: in 20000 turns of every thread nothing changed
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-2, 4-63: wait in __syncthreads at faulty.cu:54
    thread 3: can run in atomicAdd at faulty.cu:52
    fix: Launch(..., cooperative=True), where another block is waited for""",
    )
    assert_expected_inline(
        fault(15),
        """\
faulty.cu:57: volatile read: a wait that never ends: in 20000 turns of every thread nothing changed
    kernel faulty, block (0, 0, 0) of (1, 1, 1)
    threads 0-63: can run in volatile read at faulty.cu:57
    fix: Launch(..., cooperative=True), where another block is waited for""",
    )
    assert_expected_inline(
        fault(16),
        """\
faulty.cu:60: grid.sync: the launch is not cooperative
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: Launch(..., cooperative=True)""",
    )


def test_assertions():
    assert_expected_inline(
        fault(17),
        """\
faulty.cu:61: assert: y[0] == 1.0f does not hold
    kernel faulty, block (0, 0, 0), thread (0, 0, 0)
    fix: what made it false""",
    )


def test_limits_of_a_launch():
    def told(name="faulty", grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0):
        args = (c(99), torch.zeros(64), None, c(64)) if name == "faulty" else (torch.zeros(64),)
        with pytest.raises(KernelFault) as caught:
            Host(folder=HERE)(Launch("faulty.cu", name, grid, block, shared_bytes, args))
        return str(caught.value)

    assert_expected_inline(
        told(block=(33, 32, 1)),
        """\
block (33, 32, 1) has 1056 threads, over the limit of 1024 (at most 1024, 1024, 64 a dimension)
    kernel faulty
    fix: smaller blocks""",
    )
    assert_expected_inline(
        told(grid=(1, 70_000, 1)),
        """\
grid (1, 70000, 1) is over the limit (2147483647, 65535, 65535)
    kernel faulty
    fix: put the largest number first""",
    )
    assert_expected_inline(
        told(grid=(1, 0, 1)),
        """\
grid (1, 0, 1) of blocks (1, 1, 1) is empty
    kernel faulty
    fix: launch nothing where there is nothing to do""",
    )
    assert_expected_inline(
        told(shared_bytes=232_449),
        """\
shared memory of 232449 bytes, and 0 declared, is over the limit of 232448
    kernel faulty
    fix: smaller tiles""",
    )
    assert_expected_inline(
        told("too_much_declared"),
        """\
49156 bytes of __shared__ variables are over the limit of 49152
    kernel too_much_declared
    fix: dynamic shared memory, which may be larger""",
    )


def test_a_fault_in_any_thread_of_the_system_is_told():
    args = (c(0), torch.zeros(64), None, c(64))
    with pytest.raises(KernelFault, match="divergent barrier: 40 of 64 threads wait, 24 have exited"):
        Host(threads=2, folder=HERE)(launch("faulty", args, grid=9, source="faulty.cu"))


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
    assert_expected_inline(
        told(c(0), y),
        """\
faulty takes 4 arguments, not 2
    it takes: int, float*, float*, int""",
    )
    assert_expected_inline(
        told(c(0), y.half(), None, c(64)),
        """\
faulty: argument 1 is a torch.float16 tensor on cpu, the kernel takes `float*`
    fix: torch.float32 tensor on the CPU, or None""",
    )
    assert_expected_inline(
        told(ctypes.c_long(0), y, None, c(64)),
        """\
faulty: argument 0 is a c_long, the kernel takes `int`
    fix: ctypes.c_int(...)""",
    )
    assert_expected_inline(
        told(c(0), c(0), None, c(64)),
        """\
faulty: argument 1 is a c_int, the kernel takes `float*`
    fix: torch.float32 tensor on the CPU, or None""",
    )
    assert_expected_inline(
        told(0, y, None, c(64)),
        """\
faulty: argument 0 is a int, the kernel takes `int`
    fix: ctypes.c_int(...)""",
    )
    assert_expected_inline(
        told(c(0), y.to("meta"), None, c(64)),
        """\
faulty: argument 1 is a torch.float32 tensor on meta, the kernel takes `float*`
    fix: torch.float32 tensor on the CPU, or None""",
    )


def test_const_is_const():
    x, y = torch.ones(64), torch.zeros(64)
    with pytest.raises(KernelFault) as caught:
        Host(folder=HERE)(launch("writes_const", (x, y), source="faulty.cu"))
    assert_expected_inline(
        str(caught.value),
        """\
faulty.cu:111: write of 4 bytes into argument 0, which is const
    kernel writes_const, block (0, 0, 0), thread (0, 0, 0)
    fix: a parameter without const""",
    )
    Host(folder=HERE)(launch("writes_const", (y, y), source="faulty.cu"))  # it may be written as the other argument
