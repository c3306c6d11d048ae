"""`reshard` on ranks that are threads: forward and gradient against numpy, copies, and what is differentiable."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from torch import Tensor

from .cases import body, make

BLOCKS, EACH = 8, 50
D = torch.float64


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_pairs_are_exact_forward_and_backward(block):
    for seed in range(block * EACH, (block + 1) * EACH):
        case = make(seed)
        found = sh.Threads(sh.Mesh(**case.axes)).run(functools.partial(body, case))
        assert all(forward and back for forward, back in found), (seed, case.pair, case.axes, case.sizes, found)


def uneven(case):
    """Whether some rank holds another shape than rank 0."""
    mesh = sh.Mesh(**case.axes)
    sides = [sh.Spec.parse(text) for text in case.pair.split("->")]
    return any(len({side.local(case.every, mesh, r) for r in range(mesh.size)}) > 1 for side in sides)


def test_the_random_pairs_are_of_every_kind_and_most_are_uneven():
    cases = [case for seed in range(BLOCKS * EACH) if (case := make(seed)).kind != "nothing"]
    kinds = Counter(case.kind for case in cases if sh.Mesh(**case.axes).size > 1)
    assert set(kinds) == {"all-gather", "all-to-all", "reduce-scatter", "all-reduce", "slice", "place in zeros"}
    assert min(kinds.values()) >= 20
    sharded = [case for case in cases if sh.Mesh(**case.axes).size > 1 and "/" in case.pair]
    assert sum(map(uneven, sharded)) > len(sharded) / 2


def on(body, *args, **axes):
    """What each rank returns."""
    return sh.Threads(sh.Mesh(**axes), timeout=10).run(lambda mesh: body(mesh, *args))


def cut(x, spec, mesh, **sizes):
    """A rank's shard, in memory of its own."""
    return x[sh.Spec.parse(spec).slices(sizes, mesh, mesh.rank)].clone()


def both_ways(x, pair, axes, move=sh.reshard, **sizes):
    """The move from the left to the right side, on each rank, equals a slice; so does the gradient of a linear loss."""
    left, right = pair.split(" -> ")
    weight = torch.arange(x.numel()).view(x.shape).to(x.dtype)

    def rank(mesh):
        mine = cut(x, left, mesh, **sizes)
        if x.dtype.is_floating_point:
            mine.requires_grad_()
        y = move(mine, pair, mesh, **sizes)
        assert torch.equal(y, cut(x, right, mesh, **sizes))
        if x.dtype.is_floating_point:
            y.backward(cut(weight, right, mesh, **sizes))
            assert torch.equal(mine.grad, cut(weight, left, mesh, **sizes))
        return tuple(y.shape)

    return sh.Threads(sh.Mesh(**axes), timeout=10).run(rank)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_dtype(dtype):
    x = torch.arange(2 * 7 * 3 * 2).view(2, 7, 3, 2).remainder(2 if dtype == torch.bool else 16).to(dtype)
    if dtype.is_floating_point:  # the weights of the loss are exact in half precision only below 256
        assert x.numel() < 256
    both_ways(x, "B S/u K E -> B S K/u E", {"u": 2}, B=2, S=7, K=3, E=2)


def test_the_order_s_b_h_e():
    x = torch.arange(7 * 2 * 3 * 2, dtype=D).view(7, 2, 3, 2)
    shapes = both_ways(x, "S/u B H E -> S B H/u E", {"u": 2}, S=7, B=2, H=3, E=2)
    assert shapes == [(7, 2, 2, 2), (7, 2, 1, 2)]


def test_empty_shards():
    x = torch.arange(2 * 2 * 3, dtype=D).view(2, 2, 3)
    shapes = both_ways(x, "B S/u K -> B S K/u", {"u": 4}, B=2, S=2, K=3)
    assert shapes == [(2, 2, 1)] * 3 + [(2, 2, 0)]
    both_ways(x[:0], "B S/u K -> B S K/u", {"u": 3}, B=0, S=2, K=3)
    gathered = on(lambda mesh: sh.reshard(cut(x, "B S/u K", mesh, B=2, S=2, K=3), "B S/u K -> B S K", mesh, S=2), u=3)
    assert all(torch.equal(y, x) for y in gathered)


def test_strides_do_not_matter():
    x = torch.arange(7 * 6 * 3, dtype=D).view(7, 6, 3)

    def rank(mesh):
        whole = cut(x, "S/u H E", mesh, S=7, H=6, E=3)
        want = cut(x, "S H/u E", mesh, S=7, H=6, E=3)
        for other in (whole.transpose(0, 2).contiguous().transpose(0, 2), torch.stack([whole, whole], -1)[..., 0]):
            assert not other.is_contiguous()
            assert torch.equal(sh.reshard(other, "S/u H E -> S H/u E", mesh, S=7), want)
        row = whole[:1, :1, :1].expand(whole.shape)
        assert torch.equal(sh.reshard(row, "S/u H E -> S H/u E", mesh, S=7)[0], row.new_zeros(3, 3))

    on(rank, u=2)


def copies(x_shape, pair, **sizes):
    """Copies before the exchange and after it, at most over the ranks, and in backward."""
    record = sh.trace(sh.Mesh(u=2))

    def rank(mesh):
        left = sh.Spec.parse(pair.split(" -> ")[0])
        letters = dict(zip(left.letters, x_shape, strict=True))
        x = torch.ones(left.local(letters, mesh, mesh.rank), dtype=D, requires_grad=True)
        y = sh.reshard(x, pair, mesh, **sizes)
        y.backward(torch.ones_like(y))

    sh.Threads(record.mesh, timeout=10).run(rank)
    found = {}
    for event in record:
        key = event.call.backward, event.what
        found[key] = max(found.get(key, 0), event.copies)
    return [found[key] for key in ((False, "launch"), (False, "wait"), (True, "launch"), (True, "wait"))]


def test_one_copy_before_and_one_after_at_most_and_none_where_the_blocks_lie_so():
    assert copies((2, 7, 4), "B S/u H -> B S H/u", S=7) == [1, 1, 1, 1]
    assert copies((2, 8, 4), "B S/u H -> B S H/u", S=8) == [1, 1, 1, 1]
    assert copies((1, 7, 4), "B S/u H -> B S H", S=7) == [0, 0, 0, 0]
    assert copies((1, 8, 4), "B S/u H -> B S H", S=8) == [0, 0, 0, 0]
    assert copies((7, 4), "S H/u -> S/u H", H=4) == [0, 1, 1, 0]
    assert copies((2, 7, 4), "B S/u H -> B S H", S=7) == [0, 1, 1, 0]


def test_a_pending_sum_of_bools_is_refused():
    for pair in ("B S +u -> B S", "B S +u -> B/u S"):
        with pytest.raises(sh.SpecError, match="a pending sum of bool cannot be added up"):
            on(lambda mesh, pair=pair: sh.reshard(torch.ones(2, 3, dtype=torch.bool), pair, mesh), u=2)


# The fault that started the project: head counts of one call that another one, or its own backward, is cut by.


def test_a_model_with_3_heads_does_not_change_how_12_heads_are_cut():
    three, twelve = (torch.arange(8 * h, dtype=D).view(8, h) for h in (3, 12))
    before = both_ways(twelve, "S/u H -> S H/u", {"u": 4}, S=8, H=12)
    assert both_ways(three, "S/u K -> S K/u", {"u": 4}, S=8, K=3) == [(8, 1)] * 3 + [(8, 0)]
    assert both_ways(twelve, "S/u H -> S H/u", {"u": 4}, S=8, H=12) == before == [(8, 3)] * 4
    # even sizes are cut evenly whatever else was passed
    assert both_ways(twelve, "S/u H -> S H/u", {"u": 4}, S=8, H=12, K=3) == before


def test_two_calls_in_opposite_directions_are_one_forward_and_one_backward():
    x = torch.randn(4, 3, dtype=D)

    def rank(mesh):
        mine = cut(x, "S/u H", mesh, S=4, H=3).requires_grad_()
        y = sh.reshard(mine, "S/u H -> S H/u", mesh, S=4)
        (grad,) = torch.autograd.grad(y, mine, y.detach())
        back = sh.reshard(y.detach(), "S H/u -> S/u H", mesh, H=3)
        assert torch.equal(grad, back)
        assert torch.equal(back, mine)
        assert y.shape == (4, 2 - mesh.rank)

    on(rank, u=2)


def test_query_heads_follow_key_value_heads():
    x = torch.arange(4 * 6 * 2, dtype=D).view(4, 6, 2)
    assert both_ways(x, "S/u (K G) E -> S (K/u G) E", {"u": 2}, S=4, K=3, H=6, E=2) == [(4, 4, 2), (4, 2, 2)]


def test_one_key_value_head_over_two_ranks():
    x = torch.arange(4 * 2, dtype=D).view(4, 1, 2)
    assert both_ways(x, "S/u K E -> S K/u E", {"u": 2}, S=4, K=1, E=2) == [(4, 1, 2), (4, 0, 2)]
    with pytest.raises(sh.SpecError, match="no size for K"):  # alike on every rank, before anything moves
        on(lambda mesh: sh.reshard(x[:, : 1 - mesh.rank], "S K/u E -> S/u K E", mesh), u=2)


def test_heads_that_several_ranks_need_are_sent_to_each_and_their_gradients_summed():
    k = torch.arange(8 * 3, dtype=D).view(8, 3)
    want = {0: [0], 1: [0, 1], 2: [1, 2], 3: [2]}

    def rank(mesh):
        mine = cut(k, "S/u K", mesh, S=8, K=3).requires_grad_()
        y = sh.reshard(mine, "S/u K -> S K@H/u", mesh, S=8, H=12)
        assert torch.equal(y, k[:, want[mesh.rank]])
        (grad,) = torch.autograd.grad(y.sum(), mine)
        assert torch.equal(grad, torch.tensor([[2.0, 2, 2]] * 2, dtype=D))
        back = sh.reshard(y, "S K@H/u -> S/u K", mesh, K=3, H=12)  # each from the first rank that holds it
        assert torch.equal(back, mine)

    on(rank, u=4)


PAIRS = [
    ("S/u D -> S D", "all-gather"),
    ("S D +u -> S D", "all-reduce"),
    ("S D +u -> S/u D", "reduce-scatter"),
    ("S/u D -> S D/u", "all-to-all"),
    ("S/u:zigzag D -> S D", "all-gather"),
    ("S D -> S/u D", "slice"),
    ("S/u D -> S D +u", "place in zeros"),
]


@pytest.mark.parametrize(("pair", "kind"), PAIRS)
@pytest.mark.parametrize("s", [3, 4])
def test_gradcheck_and_gradgradcheck(pair, kind, s):
    s = 4 if "zigzag" in pair else s
    left, right = pair.split(" -> ")
    mesh = sh.Mesh(u=2)

    def rank(x, mesh):
        mine = x * (mesh.rank + 1.5) if "+u" in left else x
        return sh.reshard(mine.sin() if kind != "slice" else mine, pair, mesh, S=s, D=3)

    run = sh.simulate(rank, mesh, left.removesuffix(" +u"), right, S=s, D=3)
    x = torch.randn(s, 3, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def cube(move, x, mesh):
    return (move(x, mesh) ** 3).sum()


def gathered(x, mesh):
    return sh.reshard(x, "S/u D -> S D", mesh, S=4)


def launched(x, mesh):
    flight = sh.launch(x, "S/u D -> S D", mesh, S=4)
    busy = (x * x).sum()
    assert flight.wait() is flight.wait()
    return flight.wait() + 0 * busy


@pytest.mark.parametrize("move", [gathered, launched])
def test_transforms_inside_the_body(move):
    x = torch.randn(4, 2, dtype=D)  # as many on every rank, since jacrev makes a batch of them
    rows = torch.randn(3, 4, 2, dtype=D)

    def rank(mesh):
        mine = cut(x, "S/u D", mesh, S=4, D=2)
        loss = lambda x: cube(move, x, mesh)  # noqa: E731
        # every rank has the whole loss, and each of them counts
        torch.testing.assert_close(torch.func.grad(loss)(mine), 2 * 3 * mine**2)
        twice = torch.func.grad(lambda x: (torch.func.grad(loss)(x) ** 2).sum())(mine)
        torch.testing.assert_close(twice, 2 * 36 * 2 * mine**3)
        hessian = torch.func.jacrev(torch.func.jacrev(loss))(mine)
        torch.testing.assert_close(hessian.sum((2, 3)), 2 * 6 * mine)
        some = torch.stack([cut(row, "S/u D", mesh, S=4, D=2) for row in rows])
        torch.testing.assert_close(torch.func.vmap(lambda x: move(x, mesh))(some), rows)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(some), 6 * some**2)
        last = torch.func.vmap(lambda x: move(x, mesh), in_dims=-1, out_dims=1)(some.movedim(0, -1))
        torch.testing.assert_close(last, rows.movedim(0, 1))

    on(rank, u=2)


@pytest.mark.parametrize("move", [gathered, launched])
def test_transforms_around_the_body(move):
    x, mesh = torch.randn(4, 2, dtype=D), sh.Mesh(u=2)
    run = sh.simulate(move, mesh, "S/u D", "S D")
    jacobian = torch.func.jacrev(run)(x)
    assert torch.equal(jacobian.view(8, 8), torch.eye(8, dtype=D))
    torch.testing.assert_close(torch.func.grad(lambda x: (run(x) ** 3).sum())(x), 3 * x**2)
    rows = torch.randn(3, 4, 2, dtype=D)
    assert torch.equal(torch.func.vmap(run)(rows), rows)


def test_backward_launches_where_forward_waited():
    record = sh.trace(sh.Mesh(u=2))

    def rank(mesh):
        x = torch.ones(2 - mesh.rank, 2, requires_grad=True)
        first, second = (sh.launch(x * n, "S/u D -> S D", mesh, S=3) for n in (2, 3))
        (first.wait() * second.wait()).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 24.0))

    sh.Threads(record.mesh, timeout=10).run(rank)
    assert [(e.what, e.call.backward) for e in record.of(1)] == [
        ("launch", False), ("launch", False), ("wait", False), ("wait", False),
        ("launch", True), ("launch", True), ("wait", True), ("wait", True),
    ]  # fmt: skip


def test_a_slice_is_a_view_and_one_rank_moves_nothing():
    x = torch.randn(4, 3)
    (first, second) = on(lambda mesh: sh.reshard(x, "S D -> S/u D", mesh), u=2)
    assert first.data_ptr() == x.data_ptr()
    assert second.data_ptr() == x[2].data_ptr()
    for mesh in (sh.Mesh(), sh.Mesh(u=1), sh.Mesh(u=1).at(0, sh.Local())):
        assert sh.reshard(x, "S/u D -> S D/u", mesh, S=4) is x
        assert sh.launch(x, "S D +u -> S D", mesh).wait() is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32_and_rounded_once(dtype):
    parts: list[Tensor] = [torch.tensor([n]).to(dtype) for n in (1.0, *[torch.finfo(dtype).eps / 4] * 7)]
    want = torch.stack(parts).float().sum(0).to(dtype)
    one_by_one = functools.reduce(torch.add, parts)
    assert not torch.equal(want, one_by_one)
    (*_, last) = on(lambda mesh: sh.reshard(parts[mesh.rank], "D +u -> D", mesh), u=8)
    assert torch.equal(last, want)


def collect(x, mesh):
    return sh.reshard(x, "B S/u -> B S", mesh, S=x.shape[1] if mesh.size == 1 else 6)


def test_a_rank_s_graph_and_mesh_are_of_no_use_after_the_run():
    kept: list = []

    def keep(x, mesh):
        kept[:] = [mesh, collect(x.detach().requires_grad_(), mesh)]
        return x

    sh.simulate(keep, sh.Mesh(u=3), "B S/u", "B S/u")(torch.ones(2, 6))
    with pytest.raises(sh.TransportError, match="its run is over"):
        kept[1].sum().backward()
    with pytest.raises(sh.TransportError, match="its run is over"):
        collect(torch.ones(2, 2), kept[0])


def test_a_trace_counts_and_prints():
    record = sh.trace(sh.Mesh(u=2))
    x = torch.ones(2, 5, requires_grad=True)
    f = sh.simulate(lambda x, mesh: sh.reshard(x, "B S/u -> B S", mesh, S=5), record.mesh, "B S/u", "B S")
    f(x).sum().backward()
    assert (record.count(), record.count("all-gather"), record.count("reduce-scatter", rank=1)) == (2, 1, 1)
    assert (record.bytes(0), record.bytes(1)) == ((24 + 16, 16 + 24), (16 + 24, 24 + 16))
    assert {event.group for event in record} == {(0, 1)}
    assert {e.call.site.split(" in ")[0].split(":")[0] for e in record} == {"test_reshard.py"}
    assert_expected_inline(
        str(record),
        """\
rank          collective      axes  sent  received  copies  pair
   0  launch  all-gather      u       24        16       0  B S/u -> B S
   0  wait    all-gather      u        0         0       1  B S/u -> B S
   0  launch  reduce-scatter  u       16        24       1  B S/u -> B S (backward)
   0  wait    reduce-scatter  u        0         0       0  B S/u -> B S (backward)
   1  launch  all-gather      u       16        24       0  B S/u -> B S
   1  wait    all-gather      u        0         0       1  B S/u -> B S
   1  launch  reduce-scatter  u       24        16       1  B S/u -> B S (backward)
   1  wait    reduce-scatter  u        0         0       0  B S/u -> B S (backward)""",
    )
    record.clear()
    assert len(record) == 0


def test_one_rank_is_the_function_itself():
    x = torch.randn(2, 6, dtype=D)
    for mesh in (sh.Mesh(), sh.Mesh(u=1, g=1)):
        f = sh.simulate(collect, mesh, "B S/u", "B S")
        assert torch.equal(f(x), x)
        torch.testing.assert_close(torch.func.grad(lambda x, f=f: (f(x) ** 2).sum())(x), 2 * x)
    local, call = sh.Local(), sh.Call("B -> B")
    works = [
        local.all_gather(x, [12], ("u",), call),
        local.reduce_scatter(x, [12], ("u",), call),
        local.all_to_all(x, [12], [12], ("u",), call),
        local.all_reduce(x, ("u",), call),
    ]
    assert all(work.wait() is x for work in works)
