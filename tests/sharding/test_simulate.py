"""`simulate`: gradients from outside equal dense or raise, what crosses, and ranks that disagree."""

from __future__ import annotations

import functools
import re
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from meshfn.functional import tree
from meshfn.functional.tree import Tree, dim, pytree
from torch import Tensor

D = torch.float64
MESH = sh.Mesh(g=2, u=2)
GATHER = "B S/u -> B S"


def body(x, w, mesh):
    """Two exchanges around something that is not linear; over g the tokens stay."""
    y = sh.reshard(x @ w, "B S/g/u D -> B S/g D/u", mesh, S=7)
    return sh.reshard(y * y.sin(), "B S/g D/u -> B S/g/u D", mesh, S=7, D=3)


def dense(x, w):
    return (x @ w) * (x @ w).sin()


run = sh.simulate(body, MESH, ("B S/g/u D", None), "B S/g/u D")


@pytest.fixture
def xw():
    return torch.randn(2, 7, 3, dtype=D), torch.randn(3, 3, dtype=D)


def loss(f):
    return lambda x, w: (f(x, w) ** 2).sum()


ALONG = {
    "grad": lambda f, x, w: torch.func.grad(loss(f), (0, 1))(x, w),
    "grad of grad": lambda f, x, w: torch.func.grad(lambda w: (torch.func.grad(loss(f), 1)(x, w) ** 3).sum())(w),
    "jacrev": lambda f, x, w: torch.func.jacrev(f, 1)(x, w),
    "hessian": lambda f, x, w: torch.func.jacrev(torch.func.jacrev(loss(f), 1), 1)(x, w),
    "vmap": lambda f, x, w: torch.func.vmap(f, (None, 0))(x, torch.stack([w, 2 * w])),
    "vmap of both": lambda f, x, w: torch.func.vmap(f, (0, 2))(torch.stack([x, -x]), torch.stack([w, 2 * w], 2)),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(loss(f)), (0, None))(torch.stack([x, 2 * x]), w),
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](x),
}


@pytest.mark.parametrize("name", ALONG)
def test_torch_func_around_it_equals_dense(name, xw):
    found, want = ALONG[name](run, *xw), ALONG[name](dense, *xw)
    torch.testing.assert_close(found, want)
    assert all(t.abs().max() > 0 for t in ([found] if isinstance(found, Tensor) else found))


def test_autograd_around_it_equals_dense(xw):
    x, w = (t.requires_grad_() for t in xw)
    grads = []
    for f in (run, dense):
        first = torch.autograd.grad(loss(f)(x, w), (x, w), create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, w), create_graph=True)
        third = torch.autograd.grad(sum((g.sin()).sum() for g in second), (x, w))
        y = loss(f)(x, w)
        y.backward(retain_graph=True)
        y.backward()
        grads.append([*first, *second, *third, x.grad, w.grad])
        x.grad = w.grad = None
    torch.testing.assert_close(*grads)
    # one of the two alone, and neither
    torch.testing.assert_close(
        torch.autograd.grad(loss(run)(x.detach(), w), w), torch.autograd.grad(loss(dense)(x.detach(), w), w)
    )
    assert not run(x.detach(), w.detach()).requires_grad


def test_forward_mode_is_refused_and_never_zero(xw):
    x, w = xw
    for fn in (torch.func.jvp, lambda f, xs, ts: torch.func.jacfwd(f, (0, 1))(*xs)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            fn(run, (x, w), (x, w))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        run(torch.autograd.forward_ad.make_dual(x, x), w)


HELD: dict[str, Any] = {}


def by_closure(q):
    return lambda x, mesh: x * q


def by_container(q):
    held = {"a": [q]}
    return lambda x, mesh: x * held["a"][0]


def by_global(q):
    HELD["q"] = q
    return lambda x, mesh: x * HELD["q"]


def by_partial(q):
    return functools.partial(lambda x, q, mesh: x * q, q=q)


def by_default(q):
    return lambda x, q=q, *, mesh: x * q


class ByObject:
    def __init__(self, q):
        self.q = q

    def __call__(self, x, mesh):
        return x * self.q


CAPTURES = [by_closure, by_container, by_global, by_partial, by_default, ByObject]


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_body_that_closes_over_what_needs_a_gradient_is_refused(capture):
    x, q = torch.randn(2, 4), torch.randn(4)

    def scaled(q):
        return sh.simulate(capture(q), MESH, "B S", "B S")(x)

    assert torch.equal(scaled(q), x * q)
    with torch.no_grad():
        assert torch.equal(scaled(q.clone().requires_grad_()), x * q)
    with pytest.raises(ValueError, match=r"tensor of \(4,\) that requires a gradient"):
        scaled(q.clone().requires_grad_())
    for along in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(ValueError, match=r"tensor of \(4,\) that a transform around it"):
            along(lambda q: scaled(q).sum())(q)
    with pytest.raises(ValueError, match="that a transform around it"):
        torch.func.vmap(scaled)(torch.stack([q, q]))
    HELD.clear()


@pytest.mark.parametrize("make", [lambda q: q, lambda q: q * 2])
def test_a_body_that_returns_what_it_closes_over_is_refused_too(make):
    q = make(torch.randn(4, requires_grad=True))
    with pytest.raises(ValueError, match="requires a gradient"):
        sh.simulate(lambda x, mesh: q, MESH, None, None)(torch.randn(2))


@pytree
class Mlp(Tree):
    up: Tensor = dim("F/u D")
    down: Tensor = dim("D F/u")


class Config:
    sizes = {"F": 5, "D": 3}  # noqa: RUF012


def mlp(params, x, mesh):
    return sh.reshard((x @ params.up.T).relu() @ params.down.T, "B D +u -> B D", mesh)


def test_a_tree_of_parameters_with_its_specs():
    params = Mlp.init(Config(), 0, dtype=D)
    x, mesh = torch.randn(2, 3, dtype=D), sh.Mesh(u=2)
    split = sh.simulate(mlp, mesh, (params.specs(), "B D"), "B D")
    whole = lambda params, x: (x @ params.up.T).relu() @ params.down.T  # noqa: E731
    torch.testing.assert_close(split(params, x), whole(params, x))
    found, want = (torch.func.grad(lambda p, f=f: (f(p, x) ** 2).sum())(params) for f in (split, whole))
    assert isinstance(found, Mlp)
    torch.testing.assert_close(tree.leaves(found), tree.leaves(want))
    back = sh.simulate(lambda params, mesh: params, mesh, (params.specs(),), params.specs())(params)
    assert isinstance(back, Mlp)
    assert all(map(torch.equal, tree.leaves(back), tree.leaves(params)))


def test_what_crosses_besides_one_tensor():
    x, ids = torch.randn(2, 6), torch.arange(6)

    def several(pair, ids, n, mesh):
        x, y = pair
        return {"ids": ids * n, "x": x, "n": n, "none": None, "word": "a"}, [y, x.sum().double()]

    out = ({"ids": "S/u", "x": "B S/u", "n": None, "none": None, "word": None}, ["B S", "+u"])
    f = sh.simulate(several, sh.Mesh(u=4), (("B S/u", None), "S/u", None), out)
    x.requires_grad_()
    named, (y, total) = f((x, x), ids, 3)
    assert (named["n"], named["none"], named["word"]) == (3, None, "a")
    assert torch.equal(named["ids"], ids * 3)
    assert not named["ids"].requires_grad
    assert total.dtype == D
    (named["x"].sum() + 2 * y.sum() + 3 * total).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 6.0))
    assert sh.simulate(lambda mesh: mesh.size, MESH, (), None)() == 4


def test_copies_that_differ_and_results_that_do_not_fit():
    x, mesh = torch.zeros(2, 6), sh.Mesh(u=2)
    with pytest.raises(sh.SpecError, match="whole over u in its spec, but ranks 0 and 1 return different values") as e:
        sh.simulate(lambda x, mesh: x + mesh.rank, mesh, None, "B S")(x)
    assert 'fix: "B S +u" if it is a pending sum' in str(e.value)
    assert sh.simulate(lambda x, mesh: x + mesh.rank, mesh, None, "B S +u")(x).unique().tolist() == [1]
    with pytest.raises(sh.SpecError, match="rank 1 returned 1x6 float32, and 2x6 float32 is its shard"):
        sh.simulate(lambda x, mesh: x[mesh.rank :], mesh, "B S", "B S")(x)
    with pytest.raises(sh.SpecError, match="rank 1 returned 2x6 float64, and 2x6 float32"):
        sh.simulate(lambda x, mesh: x.double() if mesh.rank else x, mesh, None, None)(x)
    with pytest.raises(sh.SpecError, match="rank 1 returns another structure than rank 0"):
        sh.simulate(lambda x, mesh: (x,) if mesh.rank else x, mesh, None, None)(x)
    with pytest.raises(sh.SpecError, match="a pending sum of bool"):
        sh.simulate(lambda x, mesh: x.bool(), mesh, None, "B S +u")(x)
    nan = sh.simulate(lambda x, mesh: x / 0, mesh, None, "B S")(x)  # copies of NaN agree
    assert nan.isnan().all()


def test_a_simulation_inside_another():
    def outer(x, mesh):
        return sh.simulate(lambda y, mesh: y * y, sh.Mesh(g=2), "B S/g", "B S/g")(x)

    x = torch.randn(2, 5, requires_grad=True)
    y = sh.simulate(outer, sh.Mesh(u=2), "B S/u", "B S/u")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x)


def test_sixteen_ranks():
    mesh, x = sh.Mesh(dp=2, cp=2, g=2, u=2), torch.randn(3, 37, dtype=D)
    pair = "B/dp S/cp/g/u -> B/dp S"
    f = sh.simulate(lambda x, mesh: sh.reshard(x, pair, mesh, B=3, S=37), mesh, "B/dp S/cp/g/u", "B/dp S")
    assert torch.equal(f(x), x)
    torch.testing.assert_close(torch.func.grad(lambda x: (f(x) ** 3).sum())(x), 3 * x**2)


def test_modes_of_the_caller_hold_on_the_ranks():
    def modes(x, mesh):
        return x @ x.T, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    f, x = sh.simulate(modes, sh.Mesh(u=2), None, None), torch.randn(2, 2, requires_grad=True)
    assert f(x)[1:] == (True, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert f(x)[0].dtype == torch.bfloat16
    with torch.no_grad():
        assert f(x)[1:] == (False, False)
        assert not f(x)[0].requires_grad
    with torch.inference_mode():
        assert f(x)[1:] == (False, True)


def test_random_numbers_are_the_same_in_each_run():
    def noise(mesh):
        a = torch.rand(2)
        return sh.reshard(a + torch.rand(2), "S/u -> S", mesh, S=8)

    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(sh.simulate(noise, sh.Mesh(u=4), (), "S")())
    assert torch.equal(*found)
    assert len(found[0].unique()) == 8


def collected(x, mesh):
    return sh.reshard(x, GATHER, mesh, S=6)


def three(body, **options):
    return sh.simulate(body, sh.Mesh(u=3), "B S/u", None, **options)(torch.ones(2, 6))


def test_ranks_that_disagree_are_told_and_the_same_mesh_works_again():
    def another(x, mesh):
        return sh.reshard(x, GATHER if mesh.rank else "B S/u -> B/u S", mesh, S=6)

    def turned(x, mesh):
        pairs = ["B S/g -> B S", "B S/u -> B S"]
        for pair in pairs if mesh.rank in (0, 3) else reversed(pairs):
            sh.reshard(x, pair, mesh, S=4)
        return x

    found = []
    for run in (lambda: three(another), lambda: sh.simulate(turned, MESH, None, None)(torch.ones(2, 2))):
        with pytest.raises(sh.TransportError) as error:
            run()
        found.append(re.sub(r"test_simulate\.py:\d+", "test_simulate.py:NN", str(error.value)))
        assert three(collected).shape == (2, 6)
    assert_expected_inline(
        "\n\n".join(found),
        """\
rank 0 and rank 1 make different calls: all-to-all for "B S/u -> B/u S" and all-gather for "B S/u -> B S"
    rank 0   waits in all-to-all over u for rank 2: "B S/u -> B/u S"  test_simulate.py:NN in another
    rank 1   waits in all-gather over u for rank 2: "B S/u -> B S"  test_simulate.py:NN in another
    rank 2   has its turn to come
    mesh: u=3

the ranks wait for each other: they do not make the same calls in the same order
    rank 0   waits in all-gather over g for rank 2: "B S/g -> B S"  test_simulate.py:NN in turned
    rank 1   waits in all-gather over u for rank 0: "B S/u -> B S"  test_simulate.py:NN in turned
    rank 2   waits in all-gather over u for rank 3: "B S/u -> B S"  test_simulate.py:NN in turned
    rank 3   waits in all-gather over g for rank 1: "B S/g -> B S"  test_simulate.py:NN in turned
    mesh: g=2 u=2""",
    )


def early(x, mesh):
    return x if mesh.rank == 1 else collected(x, mesh)


def again(x, mesh):
    return collected(x, mesh) if mesh.rank != 1 else collected(collected(x, mesh)[:, :2], mesh)


DISAGREE = {
    "shapes that differ in the dimensions that stay": lambda x, mesh: collected(x[: 2 - (mesh.rank == 1)], mesh),
    "rank 0 and rank 1 bring blocks of different sizes": lambda x, mesh: sh.reshard(
        x, GATHER, mesh, S=6 - (mesh.rank == 1)
    ),
    "rank 0 and rank 2 bring different dtypes: float32 and float64": lambda x, mesh: collected(
        x.double() if mesh.rank == 2 else x, mesh
    ),
    "rank 1 returned, and a peer waits for it": early,
    "rank 0 returned, and a peer waits for it": again,
    "rank 0 and rank 1 differ in whether x requires a gradient": lambda x, mesh: collected(
        x.requires_grad_() if mesh.rank else x, mesh
    ),
}


@pytest.mark.parametrize("why", DISAGREE)
def test_disagreements(why):
    with pytest.raises(sh.TransportError, match=why) as error:
        three(DISAGREE[why])
    assert len(re.findall(r"    rank \d", str(error.value))) == 3
    assert three(collected).shape == (2, 6)


def test_a_rank_that_raises_is_heard_with_a_note_on_the_others():
    def raises(x, mesh):
        if mesh.rank == 2:
            raise KeyError("boo")
        return collected(x, mesh)

    with pytest.raises(KeyError, match="boo") as error:
        three(raises)
    (note,) = error.value.__notes__
    assert note.startswith("rank 2 raised KeyError\n    rank 0   waits in all-gather over u for rank 2")

    def interrupted(x, mesh):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        three(interrupted)
    with pytest.raises(OSError, match="link down"):
        three(collected, fault=lambda rank, call: OSError("link down") if rank == 1 and call.text == GATHER else None)
    assert three(collected).shape == (2, 6)


def test_slow_ranks_and_slow_links():
    go_on = threading.Event()

    def slow(x, mesh):
        if mesh.rank == 1:
            while not go_on.is_set():
                time.sleep(0.01)
        return collected(x, mesh)

    with pytest.raises(sh.TransportError, match=r"computed for longer than the time limit of 0\.3 s") as error:
        three(slow, timeout=0.3)
    go_on.set()
    assert re.search(r"rank 1   runs  test_simulate\.py:\d+ in slow", str(error.value))
    start = time.monotonic()
    assert three(collected, latency=lambda rank, call: 0.4 * (rank == 1), timeout=0.3).shape == (2, 6)
    assert time.monotonic() - start >= 0.4  # a link's time is no rank's


def test_every_rank_joins_backward_whatever_its_part_of_the_loss():
    def part(x, mesh):
        y = collected(x, mesh)
        return [(y * 0).sum(), y.sum(), torch.zeros(())][mesh.rank]

    x = torch.randn(2, 6, requires_grad=True)
    sh.simulate(part, sh.Mesh(u=3), "B S/u", "+u")(x).backward()
    assert torch.equal(x.grad, torch.ones(2, 6))
    unused = sh.simulate(lambda x, mesh: (collected(x, mesh), x * 2)[1], sh.Mesh(u=3), "B S/u", "B S/u")
    assert torch.equal(torch.autograd.grad(unused(x).sum(), x)[0], torch.full((2, 6), 2.0))


@pytest.mark.parametrize("name", ["specs", "layouts"])
def test_the_notebooks_run(name):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}_notebook.py"))
