"""Gated delta nets whose exchanges overlap: what is computed while what flies, forward and backward, as planned."""

from __future__ import annotations

import importlib
import textwrap
import threading

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from . import gdn_cases as cases
from .test_overlap import Noting

B, S = 2, 11
CFG = cases.config()  # K=2 H=4 E=3 V=5 W=4
KINDS = {
    "plain": CFG,
    "interleaved": cases.config(interleaved=True),
    "ranks": cases.config(channel_decay=True, decay_rank=3, gate_rank=3),
}


def events(monkeypatch, layout, mesh, cached=False):
    """What rank 0 does: launches, waits, projections, gates, the rule, where states are taken in, and the gradient of
    the last weight; forward, then backward."""
    layer, record, first = sh.shard(F.gdn, layout, mesh, S=S), sh.trace(mesh), []
    x, params = torch.randn(B, S, 10, dtype=torch.float64), cases.weights(F.GDN.init(CFG, 0))
    (cache,) = F.empty_caches([CFG], B, S, dtype=torch.float64)
    module = importlib.import_module("meshfn.functional.gdn")  # which its function of that name hides
    late = sh.wires.LayoutWire.projection

    def note(patch, name, what, field=0):
        fn = getattr(module, name)

        def noted(*args, **told):
            found = fn(*args, **told)
            if isinstance(found, torch.Tensor):
                return Noting.apply(found, what, record.events)
            values = [Noting.apply(y, what, record.events) if i == field else y for i, y in enumerate(found)]
            return type(found)(*values) if hasattr(found, "_fields") else tuple(values)

        patch.setattr(module, name, noted)

    def projection(wire, weight):
        weight = Noting.apply(weight, "weight of out", record.events) if layout.overlap else weight
        project = late(wire, weight)
        return lambda x: Noting.apply(project(x), "project out", record.events)

    def body(at):
        if at.rank == 0:
            first.append(threading.get_ident())
        shard = sh.cut(x, layout["x"][0], at).requires_grad_()
        y, _ = layer(params, shard, CFG, cache=cache if cached else None, mesh=at.recording(record))
        y.sum().backward()

    with monkeypatch.context() as patch:
        patch.setattr(sh.wires.LayoutWire, "projection", projection)
        note(patch, "_project_decays", "project b,a")
        note(patch, "_project_gate", "project z")
        note(patch, "_gates", "gates")
        note(patch, "gated_delta_rule", "core")
        note(patch, "part_of", "core")
        note(patch, "joined", "states")
        sh.Threads(mesh).run(body)
    mine = [e for e in record.events if (e[0] in first if isinstance(e, tuple) else e.rank == 0)]
    said = [e[1] if isinstance(e, tuple) else f"{e.what} {e.call.title}" for e in mine]
    half = next(i for i, what in enumerate(said) if "backward" in what)
    forward = [what for what in said[:half] if not what.startswith("weight")]
    return forward, [what.removesuffix(" (backward)") for what in said[half:]]


def order(*args, **more):
    found = events(*args, **more)
    lines = (f"{way}: {' > '.join(part)}" for way, part in zip(("forward", "backward"), found, strict=True))
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)


def test_order_of_gdn_scan(monkeypatch):
    """The halo flies under the gates, states under the gate of the output; so do their gradients, and there the weight
    of the last projection too."""
    assert_expected_inline(
        order(monkeypatch, sh.gdn_scan(overlap=True), sh.Mesh(cp=3)),
        """\
forward: launch q, k, v > project b,a > gates > wait q, k, v > core > launch summary > project z >
    wait summary > states > project out
backward: project out > states > launch summary > project z > weight of out > wait summary > core >
    launch q, k, v > gates > project b,a > wait q, k, v""",
    )


def test_order_of_gdn_scan_with_a_cache(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, sh.gdn_scan(overlap=True), sh.Mesh(cp=3), cached=True),
        """\
forward: launch q, k, v > project b,a > gates > wait q, k, v > core > launch summary, tail, rows >
    project z > wait summary, tail, rows > states > project out
backward: project out > states > launch summary, tail, rows > project z > weight of out > wait
    summary, tail, rows > core > launch q, k, v > gates > project b,a > wait q, k, v""",
    )


def test_order_of_gdn_scan_without(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, sh.gdn_scan(), sh.Mesh(cp=3)),
        """\
forward: project b,a > gates > launch q, k, v > wait q, k, v > core > project z > launch summary >
    wait summary > states > project out
backward: project out > states > launch summary > wait summary > project z > core > launch q, k, v >
    wait q, k, v > gates > project b,a""",
    )


def test_order_of_gdn_ulysses(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, sh.gdn_ulysses(overlap=True), sh.Mesh(u=2)),
        """\
forward: project b,a > launch q, k, v, b, a > project z > wait q, k, v, b, a > gates > core > launch
    o > wait o > project out
backward: project out > launch o > weight of out > wait o > core > gates > launch q, k, v, b, a >
    project z > wait q, k, v, b, a > project b,a""",
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("made", "axes"), [(sh.gdn_scan, {"cp": 3}), (sh.gdn_scan, {"cp": 4}), (sh.gdn_ulysses, {"u": 2})]
)
def test_the_order_of_a_plan_is_what_happens(monkeypatch, made, axes, overlap):
    layout, mesh = made(overlap=overlap), sh.Mesh(**axes)
    sizes = {letter: n for letter, n in CFG.sizes.items() if letter in "HKEVW"}
    plan = layout.plan(mesh, B=B, S=S, **sizes)
    for planned, happened in zip(plan.order, events(monkeypatch, layout, mesh), strict=True):
        names = {"core", "states", *(["project b,a", "project z"] if overlap else [])}
        found = [what for what in happened if what in names or what.startswith(("launch", "wait"))]
        if "ulysses" in layout.name:  # where b and a go too, and nothing flies while they are made
            found = [what for what in found if what != "project b,a"]
        assert [what.split(" (")[0] for what in planned] == [what.replace(", ", ",") for what in found]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_equal(dtype, kind, cached):
    """Outputs, caches and every gradient, with exchanges that overlap and without."""
    cfg = KINDS[kind]
    params = cases.weights(F.GDN.init(cfg, 0, dtype=dtype), dtype=dtype)
    x, (cache,) = torch.randn(B, S, 10, dtype=dtype), F.empty_caches([cfg], B, S, dtype=dtype)
    cache = F.tree.map(lambda t: torch.randn_like(t).requires_grad_(), cache)
    for made, axes in ((sh.gdn_scan, {"cp": 3}), (sh.gdn_ulysses, {"u": 2})):
        found = []
        for overlap in (False, True):
            mesh, again = sh.Mesh(**axes), x.clone().requires_grad_()
            run = sh.simulate(sh.shard(F.gdn, made(overlap=overlap), mesh, S=S), mesh)
            y, new = run(params, again, cfg, cache=cache if cached else None)
            ys = [y, *F.tree.leaves(new)] if cached else [y]
            inputs = [again, *F.tree.leaves(params), *(F.tree.leaves(cache) if cached else [])]
            found.append([*ys, *torch.autograd.grad(ys, inputs, [torch.ones_like(y) / 7 for y in ys])])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert all(g.abs().max() > 0 for g in found[0])


def test_a_plan_says_what_flies_under_what():
    plan = sh.gdn_scan(overlap=True).plan(sh.Mesh(cp=3), B=B, S=S, H=4, K=2, E=3, V=5, W=4)
    assert_expected_inline(
        "\n".join(" > ".join(way) for way in plan.order),
        """\
launch q,k,v (cp) > project b,a > wait q,k,v (cp) > core > launch summary (cp) > project z > wait summary (cp) > states
states > launch summary (cp) > project z > wait summary (cp) > core > launch q,k,v (cp) > project b,a > wait q,k,v (cp)""",
    )
    without = sh.gdn_scan().plan(sh.Mesh(cp=3), B=B, S=S, H=4, K=2, E=3, V=5, W=4)
    assert plan.exchanges == without.exchanges
