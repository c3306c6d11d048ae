"""Processes with gloo: what simulated ranks do, and what only processes can: graphs, checkpoints, peers that die.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshfn import sharding as sh
from meshfn.sharding.processes import time_limit
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from . import cases, gloo
from .gloo import breakable, gradients, layer, mesh_of, same, shards

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@functools.cache
def chosen(ranks):
    """60 cases, 48 of them collectives between shards of different sizes."""
    made = (cases.make(seed, ranks=ranks) for seed in itertools.count())
    uneven = itertools.islice(filter(functools.partial(is_uneven, ranks), made), 48)
    return [*uneven, *(cases.make(seed, ranks=ranks) for seed in range(10_000, 10_012))]


def is_uneven(ranks, case):
    at = [sh.Mesh(**case.axes).coordinates(r) for r in range(ranks)]
    sizes = [{tuple(map(len, cases.held(case, side, c))) for c in at} for side in (case.left, case.right)]
    return case.kind in COLLECTIVES and max(map(len, sizes)) > 1


def random_cases():
    found = []
    for case in chosen(dist.get_world_size()):
        record = sh.trace(mesh_of(**case.axes))
        found.append((cases.body(case, record.mesh), record.events))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_cases(ranks, request):
    # The same values, and byte by byte the same record as simulated ranks.
    results = request.getfixturevalue({2: "two", 4: "four"}[ranks])["random_cases"]
    moved = 0
    for i, case in enumerate(chosen(ranks)):
        record = sh.trace(sh.Mesh(**case.axes))
        sh.Threads(record.mesh).run(functools.partial(cases.body, case))
        for rank, of_rank in enumerate(results):
            right, events = of_rank[i]
            assert right == (True, True), f"rank {rank}: {case}"
            assert events == record.of(rank), f"rank {rank}: {case}"
        moved += is_uneven(ranks, case) and len(record) > 0
    assert moved >= 40


def siblings():
    rank = dist.get_rank()
    world = mesh_of(g=2, u=2)
    pair = [r for r in range(4) if r // 2 == rank // 2]
    nested = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("g", "u"))["u"]
    # A device mesh is made by every process of the world, those that are not in it included.
    halves = [DeviceMesh("cpu", torch.tensor(r), mesh_dim_names=("u",)) for r in ([0, 1], [2, 3])]
    for mesh in (world, sh.ProcessGroup(nested).mesh, sh.ProcessGroup(halves[rank // 2]).mesh):
        values = [10 * r + torch.arange(3 - r % 2) for r in pair]  # 3 and 2 of 5
        assert mesh["u"] == 2
        assert torch.equal(sh.reshard(values[rank % 2], "S/u -> S", mesh, S=5), torch.cat(values))
        assert sh.reshard(torch.tensor([rank]), "D +u -> D", mesh).item() == sum(pair)
    limits = {time_limit(g, "cpu") for mesh in (world, mesh_of(u=2, g=2)) for g in mesh.transport.groups.values()}
    assert limits == {time_limit(dist.group.WORLD, "cpu")} != {datetime.timedelta(minutes=30)}
    whole = torch.arange(21.0).reshape(7, 3)
    for axes, group in itertools.product(("g/u", "u/g"), (world, mesh_of(u=2, g=2))):
        texts = (f"S/{axes} D", f"S D/{axes}")
        rows, columns = (sh.Spec.parse(text).slices({"S": 7, "D": 3}, group, rank) for text in texts)
        assert torch.equal(sh.reshard(whole[rows], f"S/{axes} D -> S D", group, S=7), whole)
        assert torch.equal(sh.reshard(whole[rows], f"S/{axes} D -> S D/{axes}", group, S=7), whole[columns])
        assert torch.equal(sh.reshard(whole * (rank + 1), f"S D +g+u -> S/{axes} D", group), 10 * whole[rows])
    return True


def test_siblings_and_flattened_groups(four):
    assert all(four["siblings"])


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PAIRS = ("S/u D -> S D", "S/u D -> S D/u", "S D +u -> S/u D", "S D +u -> S D")


def dtypes():
    """Every dtype through every collective: even, uneven, with empty shards, with none but empty shards."""
    n, wrong, done = dist.get_world_size(), [], 0
    for dtype, pair, (s, d) in itertools.product(
        (*FLOATS, *WHOLE, torch.bool), PAIRS, ((2 * n, n), (n + 1, n - 1), (1, n), (0, 3))
    ):
        if dtype == torch.bool and "+" in pair:
            continue

        def body(mesh, dtype=dtype, pair=pair, s=s, d=d):
            rows = s if "+" in pair else s // n + (mesh.rank < s % n)
            made = torch.Generator().manual_seed(mesh.rank)
            x = torch.randn(rows, d, generator=made, dtype=dtype if dtype.is_complex else torch.float64)
            return sh.reshard((x if dtype in FLOATS else x.abs() * 100).to(dtype), pair, mesh, S=s, D=d)

        found, wanted = body(mesh_of(u=n)), sh.Threads(sh.Mesh(u=n)).run(body)[dist.get_rank()]
        # Bits: any order of two addends gives the same ones.
        loose = (4e-2 if dtype.itemsize == 2 else 1e-6) if dtype in FLOATS and "+" in pair and n > 2 else 0.0
        done += 1
        if found.dtype != dtype or not torch.allclose(found, wanted, rtol=loose, atol=loose):
            wrong.append((dtype, pair, s, d))
    return done, wrong


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_dtypes(ranks, request):
    assert request.getfixturevalue(ranks)["dtypes"] == [(168, [])] * {"two": 2, "four": 4}[ranks]


def compiled(backend=None):
    """Two head counts in turn and a batch that changes, against eager; then what was compiled for it."""
    ranks = dist.get_world_size()
    mesh, graphs, runs, counts = mesh_of(g=ranks // 2, u=2), gloo.Graphs(), {}, []
    for B, (K, G) in itertools.product((2, 3, 5), ((3, 3), (2, 1))):
        body = functools.partial(layer, S=7, K=K, G=G)
        if (K, G) not in runs:
            runs[K, G] = torch.compile(functools.partial(body, mesh=mesh), fullgraph=True, backend=backend or graphs)
        q, k = shards(mesh, B, 7, K, G)
        record = sh.trace(mesh)
        wanted = body(q, k, record.mesh)
        forward = record.count(rank=mesh.rank)
        want = (wanted, *gradients(wanted, (q, k)))
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 0)
        found = runs[K, G](q, k)
        same((found, *gradients(found, (q, k))), want)
        counts.append((forward, record.count(rank=mesh.rank) - forward))
    return graphs.frames, graphs.collectives, counts


def test_compiled_fullgraph(two):
    # Once for each head count, whatever the batch; six collectives each way, as eager has them.
    assert two["compiled"] == [(2, {"forward": [6, 6], "backward": [6, 6]}, [(6, 6)] * 6)] * 2


def inductor():
    return compiled()[:2], compiled("inductor")[2]


@pytest.mark.verify
def test_compiled_on_four_and_by_inductor():
    graphs = (2, {"forward": [6, 6], "backward": [6, 6]})
    assert gloo.run(4, [inductor], limit=400)["inductor"] == [(graphs, [(6, 6)] * 6)] * 4


def checkpointed():
    mesh = mesh_of(u=2)

    def body(x):
        y = sh.reshard(x.sin(), "S/u K -> S K/u", mesh, S=5, K=3).exp()
        y = sh.reshard(y, "S K/u -> S K", mesh, K=3).sin()
        return sh.reshard(y.cos(), "S K +u -> S/u K", mesh).square()

    ways = {
        "plain": body,
        "checkpoint": functools.partial(checkpoint, body, use_reentrant=False),
        "reentrant": functools.partial(checkpoint, body, use_reentrant=True),
        "selective": functools.partial(checkpoint, body, use_reentrant=False, context_fn=sh.keep_collectives),
    }
    found, wanted = {}, None
    for name, way in ways.items():
        x = torch.linspace(-1, 1, 9 - 3 * mesh.rank, dtype=torch.float64).reshape(-1, 3).requires_grad_()
        with gloo.Ran() as ran:
            y = way(x)
            forward = ran.count
            y.sum().backward()
        wanted = wanted or (y.detach(), x.grad)
        same((y.detach(), x.grad), wanted)
        found[name] = (forward, ran.count - forward)
    return found


def test_checkpointed(two):
    # In backward: each one's adjoint, and, where nothing was kept, each one again.
    found = {"plain": (3, 3), "checkpoint": (3, 6), "reentrant": (3, 6), "selective": (3, 3)}
    assert two["checkpointed"] == [found] * 2


def launched():
    record = sh.trace(mesh_of(u=2))
    mesh, marks = record.mesh, []
    lines = ("S/u (K G) -> S (K/u G)", {"S": 5, "K": 3, "G": 2}), ("S/u (K G) -> S (K G)", {"S": 5, "K": 3, "G": 2})
    made = torch.Generator().manual_seed(mesh.rank)
    xs = [torch.randn(3 - mesh.rank, 6, generator=made, dtype=torch.float64).requires_grad_() for _ in lines]
    wanted = [sh.reshard(x, pair, mesh, **sizes) for x, (pair, sizes) in zip(xs, lines, strict=True)]
    want = (*wanted, *gradients(torch.cat([*(y.flatten() for y in wanted), torch.ones(4)]), xs))
    record.clear()
    pending = [sh.launch(x, pair, mesh, **sizes) for x, (pair, sizes) in zip(xs, lines, strict=True)]
    leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)
    between = leaf * 2
    between.register_hook(lambda _: marks.append(len(record)))
    marks.append(len(record))
    found = [p.wait() for p in pending]
    marks.append(len(record))
    assert found[0] is pending[0].wait()
    got = gradients(torch.cat([*(y.flatten() for y in found), between]), [*xs, leaf])
    same((*found, *got[:-1]), want)
    return marks, [(e.what, e.kind, e.call.backward) for e in record]


def test_launch_and_wait(two):
    for marks, events in two["launched"]:
        assert [what for what, *_ in events] == ["launch", "launch", "wait", "wait"] * 2
        assert [backward for *_, backward in events] == [False] * 4 + [True] * 4
        kinds = ["all-to-all", "all-gather"] * 2 + ["reduce-scatter", "all-to-all"] * 2
        assert [kind for _, kind, _ in events] == kinds
        assert marks == [2, 4, 6]  # the computation lies between, in backward too


def transforms():
    def body(mesh):
        made = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(3 - mesh.rank, 3, generator=made, dtype=torch.float64)
        batch = torch.randn(2, 3 - mesh.rank, 3, generator=made, dtype=torch.float64)

        def there(x):
            y = sh.reshard(x.sin(), "S/u K -> S K/u", mesh, S=5, K=3)
            return sh.reshard(y * y, "S K/u -> S K", mesh, K=3)

        def loss(x):
            return (there(x) * torch.arange(15.0).reshape(5, 3)).sum()

        func = torch.func
        twice = func.grad(lambda x: func.grad(loss)(x).square().sum())
        found = [func.grad(loss)(x), func.vmap(there)(batch), func.vmap(func.grad(loss))(batch), func.jacrev(there)(x)]
        return [*found, func.vmap(there, in_dims=1)(batch.movedim(0, 1)), twice(x)]

    found, wanted = body(mesh_of(u=2)), sh.Threads(sh.Mesh(u=2)).run(body)[dist.get_rank()]
    same(found, wanted)
    return [tuple(x.shape) for x in found]


def test_transforms(two):
    for n, found in zip((3, 2), two["transforms"], strict=True):
        assert found == [(n, 3), (2, 5, 3), (2, n, 3), (5, 3, n, 3), (2, 5, 3), (n, 3)]


BAD = {
    "no axis": ("S/uu D -> S D", {"S": 5}),
    "no size": ("S/u D -> S D", {}),
    "takes 2": ("S/u D +g -> S D", {"S": 5}),
    "disagree": ("S/u (K G) -> S (K/u G)", {"S": 5, "H": 7, "K": 3, "G": 2}),
    "head-tail": ("S D +u -> S/u:zigzag D", {"S": 5}),
    "invented": ("S D -> S D F", {}),
    "pending": ("S D -> S D +u", {}),
    "a size is": ("S/u D -> S D", {"S": -5}),
}


def refused():
    record = sh.trace(mesh_of(u=2))
    found = []
    for (pair, sizes), verb in itertools.product(BAD.values(), (sh.reshard, sh.launch)):
        attempt = functools.partial(verb, torch.zeros(5, 6), pair, record.mesh, **sizes)
        found.append(broken(sh.SpecError, attempt)[0])
    told, _ = broken(sh.SpecError, lambda: sh.reshard(torch.ones(2) > 0, "D +u -> D", record.mesh))
    events = len(record)
    after = sh.reshard(torch.ones(3 - record.mesh.rank), "S/u -> S", record.mesh, S=5)
    return [*found, told], events, after.tolist()


def test_bad_input_is_refused_alike(two):
    first, second = two["refused"]
    assert first == second
    told, events, after = first
    assert (events, after) == (0, [1.0] * 5)
    for words, found in zip([w for w in BAD for _ in range(2)], told, strict=False):
        assert words in found
    assert "bool" in told[-1]


def nothing_to_lose():
    """Rank 1's part of the loss is zero, and then its shard is empty; it joins backward all the same."""
    mesh, found = mesh_of(u=2), []
    for size in (5, 1):
        rows = size // 2 + (mesh.rank < size % 2)
        x = torch.ones(rows, 3, requires_grad=True)
        y = sh.reshard(x, "S/u D -> S D/u", mesh, S=size, D=3)
        (y.sum() * (1 - mesh.rank)).backward()
        found.append(x.grad.tolist())
        x.grad = None
        sh.reshard(x, "S/u D -> S D", mesh, S=size).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))
    return found


def test_a_rank_with_nothing_to_lose(two):
    row = [1.0, 1.0, 0.0]  # columns 0 and 1 lie on rank 0, column 2 on rank 1
    assert two["nothing_to_lose"] == [[[row] * 3, [row]], [[row] * 2, []]]


def broken(error, fn):
    """What a rank is told, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(error) as found:
        fn()
    return str(found.value), time.monotonic() - start


def wrong_shard():
    """Rank 0 holds what it should not: it raises, and the other waits for it in vain."""
    mesh = breakable(1.5)
    x = torch.zeros(4 if mesh.rank == 0 else 2, 3)
    kind = sh.SpecError if mesh.rank == 0 else sh.TransportError
    return broken(kind, lambda: sh.reshard(x, "S/u D -> S D", mesh, S=5))


def test_a_wrong_shard_raises_on_its_rank(two):
    (mine, _), (other, seconds) = two["wrong_shard"]
    assert "rank 0 holds 3 D, but x is 4 3" in mine
    assert 'rank 1: all-gather over u with rank 0 failed: "S/u D -> S D"' in other
    assert seconds < 10


def slow_peer():
    mesh = breakable(1.5)
    time.sleep(4 * mesh.rank)
    x = torch.zeros(3 - mesh.rank, 3)
    return broken(sh.TransportError, lambda: sh.reshard(x, "S/u D -> S D/u", mesh, S=5, D=3))


def test_a_peer_slower_than_the_limit(two):
    for rank, (told, seconds) in enumerate(two["slow_peer"]):
        assert f'rank {rank}: all-to-all over u with rank {1 - rank} failed: "S/u D -> S D/u"' in told
        assert seconds < 10


def dead_peer():
    """The last scenario of its processes: rank 1 dies between two collectives of one backward."""
    mesh = mesh_of(u=2)
    x = torch.ones(3 - mesh.rank, 3, requires_grad=True)
    y = sh.reshard(x.sin(), "S/u D -> S D/u", mesh, S=5, D=3)
    if mesh.rank == 1:
        y.register_hook(lambda _: os._exit(17))
    z = sh.reshard(y, "S D/u -> S D", mesh, D=3)
    return broken(sh.TransportError, lambda: z.sum().backward())


def test_a_peer_that_dies(two):
    told, seconds = two.alone("dead_peer", 0)
    assert 'rank 0: all-to-all over u with rank 1 failed: "S/u D -> S D/u" (backward)' in told
    assert "a peer is gone" in told
    assert seconds < 25
    assert two.failure("dead_peer", 1) == "ended with exit code 17, in dead_peer"


@pytest.fixture(scope="module")
def two():
    found = [random_cases, dtypes, compiled, checkpointed, launched, transforms, refused, nothing_to_lose]
    return gloo.run(2, [*found, wrong_shard, slow_peer, dead_peer])


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [random_cases, siblings, dtypes])


EXAMPLE = Path(__file__).parents[2] / "examples/specs_torchrun.py"


def test_the_example_on_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as dense") == 1, done.stdout


def test_the_example_simulated():
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    q, k, v = example["inputs"]()
    record = sh.trace(sh.Mesh(u=2))
    specs = ("B S/u (K G) E", "B S/u K E", "B S/u K E")
    found = sh.simulate(example["body"], record.mesh, specs, "B S/u (K G) E", **example["SIZES"])(q, k, v)
    torch.testing.assert_close(found, example["attention"](q, k, v))
    assert record.count("all-to-all") == 4
