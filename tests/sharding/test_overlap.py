"""Overlap: the same bits, another order, and less waiting."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import textwrap
import threading
import time

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from .attention_cases import HIDDEN, slow_projection

LAYOUTS = {"ulysses": {"u": 2}, "all_gather": {"g": 2}, "hybrid": {"g": 2, "u": 2}}


def layer_of(name, **options):
    mesh = sh.Mesh(**LAYOUTS[name])
    return sh.shard(F.attention, getattr(sh, name)(**options), mesh, S=11), mesh


CFG = F.AttentionConfig(
    hidden_size=24, num_attention_heads=6, num_key_value_heads=3, head_dim=4, rope=F.RopeConfig(), norm=F.NormConfig(),
    qk_norm=F.NormConfig(), qkv_bias=True, sinks=True,
)  # fmt: skip


def params(dtype=torch.float32, cfg=CFG):
    made = F.Attention.init(cfg, 0, dtype=dtype)
    return F.tree.map(lambda p: (p + 0.3 * torch.randn_like(p)).requires_grad_(), made)


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 3), (torch.bfloat16, 3), (torch.float32, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bitwise_equal(name, dtype, heads):
    cfg = dataclasses.replace(CFG, num_key_value_heads=heads)
    weights, x = params(dtype, cfg), torch.randn(2, 11, 24, dtype=dtype, requires_grad=True)
    found = []
    for overlap in (False, True):
        layer, mesh = layer_of(name, overlap=overlap)
        y, _ = sh.simulate(layer, mesh)(weights, x, cfg)
        grads = torch.autograd.grad(y, [x, *F.tree.leaves(weights)], torch.ones_like(y) / 7)
        found.append([y, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(g.abs().max() > 0 for g in found[0])


class Noting(torch.autograd.Function):
    """Nothing, that a record knows of when it happens and when its gradient does."""

    @staticmethod
    def forward(ctx, x, what, record):
        ctx.rest = what, record
        record.append((threading.get_ident(), what))
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        what, record = ctx.rest
        record.append((threading.get_ident(), f"{what} (backward)"))
        return g, None, None


def order(monkeypatch, name, overlap):
    """What rank 0 does: launches, waits, the projection of queries and the core."""
    layer, mesh = layer_of(name, overlap=overlap)
    trace = sh.trace(mesh)
    module = importlib.import_module("meshfn.functional.attention")  # which its function of that name hides
    project, first = module.project_q, []
    x, weights = torch.randn(2, 11, 24), params()

    def noted(params, x, cfg):
        q, gate = project(params, x, cfg)
        return Noting.apply(q, "project q", trace.events), gate

    def core(q, k, v, **told):
        return Noting.apply(F.dot_product_attention(q, k, v, **told), "core", trace.events)

    def body(at):
        if at.rank == 0:
            first.append(threading.get_ident())
        shard = sh.cut(x, layer.layout["x"][0], at).requires_grad_()
        layer(weights, shard, CFG, core=core, mesh=at.recording(trace))[0].sum().backward()

    with monkeypatch.context() as patch:
        patch.setattr(module, "project_q", noted)
        sh.Threads(mesh).run(body)
    mine = [e for e in trace.events if (e[0] in first if isinstance(e, tuple) else e.rank == 0)]
    said = [e[1] if isinstance(e, tuple) else f"{e.what} {e.call.title}" for e in mine]
    half = next(i for i, what in enumerate(said) if "backward" in what)
    ways = {"forward": said[:half], "backward": [what.removesuffix(" (backward)") for what in said[half:]]}
    told = (f"{way}: {' > '.join(part)}" for way, part in ways.items())
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in told)


def test_order_of_ulysses(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "ulysses", True),
        """\
forward: launch k, v > project q > launch q > wait k, v > wait q > core > launch o > wait o
backward: launch o > wait o > core > launch q > launch k, v > wait q > project q > wait k, v""",
    )


def test_order_of_all_gather(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "all_gather", True),
        """\
forward: launch k, v > project q > wait k, v > core
backward: core > launch k, v > project q > wait k, v""",
    )


def test_order_of_hybrid(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "hybrid", True),
        """\
forward: launch k, v > project q > launch q > wait k, v > launch k, v > wait q > wait k, v > core >
    launch o > wait o
backward: launch o > wait o > core > launch k, v > launch q > wait k, v > launch k, v > wait q >
    project q > wait k, v""",
    )


def test_order_of_hybrid_without(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "hybrid", False),
        """\
forward: project q > launch q, k, v > wait q, k, v > launch k, v > wait k, v > core > launch o >
    wait o
backward: launch o > wait o > core > launch k, v > wait k, v > launch q, k, v > wait q, k, v >
    project q""",
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_order_is_the_plan(name):
    for overlap in (False, True):
        layer, mesh = layer_of(name, overlap=overlap)
        trace = sh.trace(mesh)
        weights, x = params(), torch.randn(2, 11, 24, requires_grad=True)
        sh.simulate(layer, trace.mesh)(weights, x, CFG)[0].sum().backward()
        plan = layer.plan(B=2, H=6, K=3, E=4)
        for rank in range(mesh.size):
            said = [(e.what, e.call.title, e.sent, e.received, e.copies) for e in plan.of(rank).events]
            assert said == [(e.what, e.call.title, e.sent, e.received, e.copies) for e in trace.of(rank)]


@pytest.mark.verify  # a clock, which other work on the machine can upset
def test_queries_are_projected_while_keys_fly(monkeypatch):
    # Latency of 20 ms a tensor, and a projection of queries that takes 40. Keys and values (40) hide behind it; in the
    # hybrid queries (20) hide behind the gather too. At least half of that is saved in each pass.
    slow_projection(monkeypatch)
    weights, x = params(), torch.randn(2, 11, 24, requires_grad=True)
    seconds = {}
    for name, overlap in itertools.product(HIDDEN, (False, True)):
        layer, mesh = layer_of(name, overlap=overlap)
        run = sh.simulate(layer, mesh, latency=lambda rank, call: 0.02 * len(call.edges))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run(weights, x, CFG)[0].sum().backward()
            times.append(time.perf_counter() - start)
        seconds[name, overlap] = min(times)
    for name, hidden in HIDDEN.items():
        assert seconds[name, False] - seconds[name, True] > 0.5 * 2 * hidden, (name, seconds)
