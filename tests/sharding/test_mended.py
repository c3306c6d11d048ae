"""Faults that were found by trying to break it; each failed before."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from meshfn import sharding as sh
from torch.utils.checkpoint import checkpoint

TWO = sh.Mesh(u=2)
x64 = torch.linspace(-1, 1, 8, dtype=torch.float64)


def gathered(x, *, mesh):
    return sh.reshard(x.sin(), "S/u -> S", mesh, S=8)


def test_heads_of_several_ranks_over_axes_in_another_order_than_the_meshs():
    mesh, x, spec = sh.Mesh(dp=3, u=2), torch.arange(5.0), sh.Spec.parse("K@H/u/dp")
    for y in sh.Threads(mesh).run(
        lambda m: sh.reshard(x[spec.slices({"K": 5, "G": 2}, m, m.rank)], "K@H/u/dp -> K", m, K=5, G=2)
    ):
        assert y.tolist() == [0, 1, 2, 3, 4]


def test_heads_of_several_ranks_count_once_in_a_pending_sum():
    run = sh.simulate(
        lambda x, *, mesh: sh.reshard(x, "K@H/u -> K +u", mesh, H=12, K=3), sh.Mesh(u=4), "K@H/u", "K +u", H=12, K=3
    )
    x = torch.ones(3, requires_grad=True)
    y = run(x)
    assert y.tolist() == [1, 1, 1]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("pair", ["K/u/g -> K +u", "K/u/g -> K/g +u", "A K/g/u E -> A K E/tp:zigzag/u +g"])
def test_an_axis_that_becomes_a_pending_sum_is_not_gathered_with_others(pair):
    steps = sh.explain(pair, sh.Mesh(u=2, g=2, tp=2), A=2, K=8, E=8).steps
    assert steps[0].split(" -> ")[0] == pair.split(" -> ")[0]
    assert steps[-1].split(" -> ")[1] == pair.split(" -> ")[1]
    for step in steps:
        assert len(sh.explain(step, sh.Mesh(u=2, g=2, tp=2), A=2, K=8, E=8).steps) == 1


def test_a_gradient_that_runs_the_body_again_draws_the_same():
    run = sh.simulate(lambda x, *, mesh: torch.nn.functional.dropout(x, 0.5), TWO, "B/u", "B/u")
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    y = run(x)
    state = torch.get_rng_state()
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    transformed = torch.func.grad(lambda x: run(x).sum())(x.detach())
    assert torch.equal(once, y.detach())
    assert torch.equal(once, again)
    assert torch.equal(once, transformed)


def test_a_gradient_that_runs_the_body_again_has_its_autocast():
    run = sh.simulate(lambda a, w, *, mesh: (a @ w).float(), TWO, ("B/u D", None), "B/u D")
    a, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(a, w)
    (once,) = torch.autograd.grad(y.square().sum(), w, retain_graph=True)
    (again,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    torch.testing.assert_close(once, again, rtol=0, atol=0)


W = torch.ones(8, dtype=torch.float64, requires_grad=True)


def test_a_tensor_that_reaches_others_through_a_collective_alone_is_refused_too():
    def body(x, *, mesh):
        y = sh.reshard(x * W, "B +u -> B", mesh)
        return y if mesh.rank == 1 else x * 0

    with pytest.raises(ValueError, match=r"closes over a tensor of .8,. that requires a gradient"):
        sh.simulate(body, TWO, "B", "B +u")(x64)


def test_half_precision_is_summed_in_fp32():
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    y = sh.simulate(lambda x, *, mesh: x * 0.1, sh.Mesh(u=512), "B", "B +u")(x)
    assert y.item() == torch.tensor(0.10009765625 * 512, dtype=torch.bfloat16).item()
    assert torch.autograd.grad(y, x)[0].item() == y.item()


def test_a_graph_may_be_used_from_several_threads():
    x = x64.clone().requires_grad_()
    y = sh.simulate(gathered, TWO, "S/u", "S +u")(x)
    (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    found = []

    def again():
        for _ in range(5):
            found.append(torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], want))

    threads = [threading.Thread(target=again, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 20


def test_a_recomputed_body_makes_the_same_calls_each_time():
    t = sh.trace(TWO)
    x = x64.clone().requires_grad_()
    y = sh.simulate(
        lambda x, *, mesh: checkpoint(lambda x: gathered(x, mesh=mesh).cos(), x, use_reentrant=False),
        t.mesh,
        "S/u",
        "S +u",
    )(x)
    counts = [len(t)]
    for _ in range(3):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        counts.append(len(t))
    assert {b - a for a, b in itertools.pairwise(counts)} == {8}


@pytest.mark.parametrize("pair", ["A/u B -> A B", "A B/u -> A B", "A/u B -> A B/u", "A B +u -> A B"])
def test_a_result_may_be_written_to(pair):
    def body(x, *, mesh):
        y = sh.reshard(x, pair, mesh, A=4, B=4)
        y.mul_(2)
        return y

    left, right = pair.split(" -> ")
    x = torch.randn(4, 4, requires_grad=True)
    if "+" in left:
        ys = sh.Threads(TWO).run(lambda mesh: body(torch.ones(4, 4, requires_grad=True), mesh=mesh))
        assert (ys[0] == 4).all()
        return
    y = sh.simulate(body, TWO, left, right)(x)
    assert torch.equal(y, 2 * x)
    assert (torch.autograd.grad(y.sum(), x)[0] == 2).all()


def test_a_trace_made_in_the_body_still_joins_backward():
    def body(x, *, mesh):
        y = sh.reshard(x, "S/u -> S", sh.trace(mesh).mesh, S=8)
        return y if mesh.rank == 1 else torch.zeros_like(y)

    x = x64.clone().requires_grad_()
    run = sh.simulate(body, TWO, "S/u", "S +u")
    assert (torch.autograd.grad(run(x).sum(), x)[0] == 1).all()
    assert (torch.func.grad(lambda x: run(x).sum())(x.detach()) == 1).all()


def test_dtypes_that_cannot_be_added_move_and_are_refused_a_sum():
    small = torch.ones(2).to(torch.float8_e4m3fn)
    for y in sh.Threads(TWO).run(lambda mesh: sh.reshard(small, "A/u:zigzag -> A", mesh, A=4)):
        assert (y.float() == 1).all()
    with pytest.raises(sh.SpecError, match="a pending sum of float8_e4m3fn cannot be added up"):
        sh.Threads(TWO).run(lambda mesh: sh.reshard(small, "A +u -> A", mesh))


def test_what_a_cache_holds_does_not_decide_what_is_a_size():
    one, x = sh.Mesh(u=1), torch.ones(1)
    assert sh.reshard(x, "S -> S", one, S=1) is x
    assert sh.reshard(x, "S -> S", one, S=np.int64(1)) is x
    for wrong in (1.0, True, None, "1", [1], {}, -1, 10**25):
        with pytest.raises(sh.SpecError, match="a size is a whole number"):
            sh.reshard(x, "S -> S", one, S=wrong)


def test_letters_may_be_named_as_arguments_are():
    assert sh.reshard(torch.ones(2, 3, 4), "x pair mesh -> x pair mesh", sh.Mesh(u=1), x=2, pair=3, mesh=4).dim() == 3
    with pytest.raises(sh.SpecError, match="is an option of simulate"):
        sh.simulate(lambda x, *, mesh: x, TWO, "timeout/u", "timeout/u")(x64)


def test_a_tangent_that_no_argument_brought_is_refused():
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(x64, x64)
        with pytest.raises(ValueError, match="tangent"):
            sh.simulate(lambda x, *, mesh: x * q, TWO, None, None)(x64)


def test_results_that_are_no_tensors_must_be_alike():
    assert sh.simulate(lambda x, *, mesh: (x, mesh.size), TWO, None, None)(x64)[1] == 2
    with pytest.raises(sh.SpecError, match="must be alike on every rank"):
        sh.simulate(lambda x, *, mesh: mesh.rank, TWO, None, None)(x64)


@pytest.mark.parametrize("name", ["a/b", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "u:zigzag"])
def test_an_axis_has_a_name_that_a_spec_can_say(name):
    with pytest.raises(ValueError, match="an axis has a name of letters"):
        sh.Mesh(**{name: 2})
    with pytest.raises(KeyError, match="no axis"):
        TWO["uu"]


@pytest.mark.parametrize("timeout", [None, "3", float("inf"), float("nan"), 0])
def test_a_time_limit_is_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="a number of seconds above 0"):
        sh.simulate(gathered, TWO, "S/u", "S", timeout=timeout)


def test_what_is_no_spec_mesh_or_device_mesh_is_said():
    for call in (
        lambda: sh.simulate(gathered, TWO, 3, 3)(x64),
        lambda: sh.simulate(gathered, None, "S/u", "S"),
        lambda: sh.reshard(x64, ["S"], TWO),
        lambda: sh.reshard(x64, "S -> S", 2),
    ):
        with pytest.raises(TypeError, match=r"not (int|NoneType|list|str)"):
            call()
    with pytest.raises(ValueError, match="a DeviceMesh whose dimensions have names is needed"):
        sh.ProcessGroup(None)


def test_threads_are_not_compiled():
    def body(x, *, mesh):
        return torch.compile(lambda x: sh.reshard(x, "S/u -> S", mesh, S=8), backend="eager", fullgraph=True)(x)

    with pytest.raises(Exception, match=r"threads cannot be compiled|Observed exception"):
        sh.simulate(body, TWO, "S/u", "S")(x64)
    one = torch.compile(lambda x: sh.reshard(x, "S/u -> S", sh.Mesh(u=1), S=8).sin(), backend="eager", fullgraph=True)
    assert torch.equal(one(x64), x64.sin())


def test_a_body_that_takes_other_arguments_is_told_before_any_rank_starts():
    for body in (lambda x: x, lambda x, y, *, mesh: x, lambda *, mesh: mesh):
        with pytest.raises(TypeError, match=r"def body\(x0, \*, mesh\)"):
            sh.simulate(body, TWO, "S/u", "S/u")(x64)
    assert sh.simulate(lambda x, **rest: x, TWO, "S/u", "S/u")(x64) is not x64


def test_a_pending_sum_stands_by_itself():
    with pytest.raises(sh.SpecError, match=r'a space before the pending sum: "D \+tp"'):
        sh.Spec.parse("B S D+tp")


def test_an_axis_that_the_mesh_lacks_is_in_no_group():
    t = sh.trace(TWO)
    y = sh.simulate(lambda x, *, mesh: sh.reshard(x, "S/dp/u -> S", mesh, S=8), t.mesh, "S/dp/u", "S")(x64)
    assert torch.equal(y, x64)
    assert {event.axes for event in t} == {("u",)}


def test_head_tail_order_on_one_rank_is_any_order():
    for one in (sh.Mesh(cp=1), sh.Mesh(u=1)):
        x = torch.arange(97.0)
        assert torch.equal(sh.reshard(x, "S/cp:zigzag -> S", one, S=97), x)
        assert sh.Spec.parse("S/cp:zigzag").slices({"S": 97}, one, 0) == (slice(0, 97),)


def test_a_mesh_knows_its_ranks_and_axes():
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        TWO.coordinates(5)
    with pytest.raises(KeyError, match="no axis"):
        TWO.ranks(("zz",), 1)


def test_a_tangent_does_not_get_lost_in_an_exchange():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(x64[:4], x64[:4])
        with pytest.raises(NotImplementedError, match="jvp"):
            sh.Threads(TWO).run(lambda mesh: sh.reshard(x, "S/u -> S", mesh, S=8))
