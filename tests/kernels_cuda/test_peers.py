"""Links between two ranks: both get one or both the same reason, and nothing is left behind. On memory of a CPU."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from meshfn.kernels_cuda import peers
from meshfn.kernels_cuda.peers import CudaMemory, Link, Place, connect

from .harness import FOREVER
from .ops import host_ops
from .two_gpus import TwoGpus, tell_of

MESH = sh.Mesh(tp=2)


def connected(gpus, change=lambda memory, rank: None, dtype=torch.bfloat16):
    """What each rank gets where its memory was changed, and the link is closed again."""

    def body(at):
        def memory():
            made = gpus.of(at)
            change(made, at.rank)
            return made

        link = connect(memory, at.rank, tell_of(at), dtype, limit_s=1e-5)
        if isinstance(link, Link):
            link.close()
            return "a link"
        return link

    with host_ops(gpus):
        return sh.Threads(MESH).run(body)


def test_a_link_and_its_sums():
    gpus = TwoGpus()

    def body(at):
        link = connect(lambda: gpus.of(at), at.rank, tell_of(at), torch.float32, limit_s=60.0)
        found = [link.sum(torch.full((n,), float(at.rank + n))) for n in (3, 0, 5000)]
        assert link.failure() is None
        link.close()
        link.close()
        with pytest.raises(RuntimeError, match="this link is closed\n    fix: connect again, on both ranks"):
            link.sum(torch.zeros(1))
        return found

    with host_ops(gpus):
        for of_rank in sh.Threads(MESH).run(body):
            for n, sum_ in zip((3, 0, 5000), of_rank, strict=True):
                assert torch.equal(sum_, torch.full((n,), 2.0 * n + 1))
    assert gpus.live == {}
    assert len(gpus.launches) == 2 * (3 + 2)  # a trial of three sums; a sum of nothing launches nothing


def refusing(method, why):
    def change(memory, rank):
        def refuse(*_):
            raise RuntimeError(why)

        if rank == 1:
            setattr(memory, method, refuse)

    return change


def same(**fields):
    def change(memory, rank):
        memory.place = memory.place._replace(**fields)

    return change


def elsewhere(memory, rank):
    memory.place = memory.place._replace(host=f"host {rank}")


def gone(gpus):
    """A GPU that runs nothing from the second launch on, as behind a link that carries one way alone."""
    gpus.sleeps = lambda rank, number: (0, FOREVER) if rank == 1 and number == 1 else (0, 0)
    return gpus


def no_kernel(memory, rank):
    if rank == 0:
        raise RuntimeError("NVRTC is not here\n    fix: pip install")


def test_a_refusal_is_the_same_on_both_ranks_and_leaves_nothing():
    cases = [
        (TwoGpus(), no_kernel),
        (TwoGpus(), refusing("allocate", "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")),
        (TwoGpus(), refusing("check_access", "cuda:1 has no peer access to cuda:0")),
        (TwoGpus(), refusing("map", "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")),
        (TwoGpus(), elsewhere),
        (TwoGpus(), same(process=7)),
        (TwoGpus(), same(device="gpu")),
        (gone(TwoGpus()), lambda memory, rank: None),
    ]
    lines = []
    for gpus, change in cases:
        one, two = connected(gpus, change)
        assert one == two
        assert gpus.live == {}
        lines.append(one)
    assert connected(TwoGpus()) == ["a link"] * 2
    assert_expected_inline(
        "\n".join(lines),
        """\
rank 0 of the pair: NVRTC is not here
rank 1 of the pair: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY
rank 1 of the pair: cuda:1 has no peer access to cuda:0
rank 1 of the pair: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE
the two ranks are on two hosts
the two ranks are one process, which maps no memory of its own
the two ranks are on one GPU
rank 0 of the pair: a trial went wrong: the peer's message 2 of channel 0 did not come within 1e-05 s; rank 1 of the pair: a trial went wrong: the peer's message 3 of channel 0 did not come within 1e-05 s""",
    )


def test_a_wrong_sum_is_no_link(monkeypatch):
    """On one rank alone."""
    usual = peers.one_shot_all_reduce
    monkeypatch.setattr(peers, "one_shot_all_reduce", lambda x, *rest: usual(x, *rest) + rest[3])
    gpus = TwoGpus()
    assert connected(gpus) == ["rank 1 of the pair: a trial went wrong: another sum came out"] * 2
    assert gpus.live == {}


def test_a_peer_that_does_not_come_to_the_close():
    """What it may still have mapped is left alone; nothing waits where nobody is asked to."""
    gpus = TwoGpus()

    def body(at, asked):
        words = []

        def tell(word):
            words.append(word)
            if len(words) > 3:
                raise sh.TransportError("a peer is gone")
            return tell_of(at)(word)

        connect(lambda: gpus.of(at), at.rank, tell, torch.float16, limit_s=60.0).close(together=asked)
        return len(words)

    with host_ops(gpus):
        assert sh.Threads(MESH).run(functools.partial(body, asked=True)) == [4, 4]
        assert sh.Threads(MESH).run(functools.partial(body, asked=False)) == [3, 3]
    assert list(gpus.live.values()) == [0] * 4


def test_two_links_do_not_meet():
    """Two pairs at once, in turn, each with a rank 0."""
    gpus = TwoGpus()

    def body(at):
        place = at.coordinates(at.rank)

        def memory():
            made = gpus.of(at)
            made.place = Place("host", at.rank, f"gpu {at.rank}")
            return made

        links = [connect(memory, place["tp"], tell_of(at), torch.float32, limit_s=60.0) for _ in range(2)]
        found = [link.sum(torch.full((9,), 10.0**at.rank * k)) for k in (1, 2) for link in links]
        for link in links:
            link.close()
        return [int(each[0]) for each in found]

    with host_ops(gpus):
        found = sh.Threads(sh.Mesh(dp=2, tp=2)).run(body)
    assert found == [[11, 11, 22, 22]] * 2 + [[1100, 1100, 2200, 2200]] * 2
    assert gpus.live == {}


class FakeDriver:
    """What `CudaMemory` asks of the driver, call by call."""

    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    def __call__(self, function, *args):
        self.calls.append(function)
        if function == self.fails:
            raise RuntimeError(f"{function}: CUDA_ERROR_NOT_SUPPORTED")
        return {"cuMemAlloc": 4096, "cuIpcOpenMemHandle": 8192}.get(function)


def test_memory_that_cannot_be_shared_is_given_back(monkeypatch):
    """A GPU's own: without one only the order of its calls can be seen."""
    driver = FakeDriver(fails="cuIpcGetMemHandle")
    memory = object.__new__(CudaMemory)
    memory.device = torch.device("cuda", 0)
    monkeypatch.setattr(CudaMemory, "_call", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: host_ops())
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"):
        memory.allocate(64)
    assert driver.calls == ["cuMemAlloc", "cuMemsetD8", "cuIpcGetMemHandle", "cuMemFree"]


def test_the_handle_of_the_driver_holds_64_bytes():
    driver = pytest.importorskip("cuda.bindings.driver")
    import ctypes

    one, two = driver.CUipcMemHandle(), driver.CUipcMemHandle()
    ctypes.memmove(one.getPtr(), bytes(range(64)), 64)
    ctypes.memmove(two.getPtr(), ctypes.string_at(one.getPtr(), 64), 64)
    assert ctypes.string_at(two.getPtr(), 64) == bytes(range(64))
