"""Latent attention under its layouts over gloo: what simulated ranks give, value by value and event by event.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from meshfn import functional as F
from meshfn import sharding as sh

from . import gloo
from . import latent_cases as cases
from .gloo import mesh_of
from .layer_cases import check, own, ran


@pytest.fixture(scope="module")
def two():
    return gloo.run(2, [evaluated, random_layouts])  # the first, before there is memory to have again


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [random_layouts, compiled])


@functools.cache
def chosen(ranks):
    """30 cases, 24 of them with uneven tokens or heads."""
    made = (cases.make(seed, ranks) for seed in itertools.count(7000))
    large = (case for case in made if case.sizes["S"] > 2)
    uneven = (c for c in large if c.sizes["S"] % ranks or c.sizes["H"] % (c.axes.get("u", 1) * c.axes.get("tp", 1)))
    return [*itertools.islice(uneven, 24), *itertools.islice(large, 6)]


def random_layouts():
    return [ran(case, F.mla, cases.dense) for case in chosen(dist.get_world_size())]


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_layouts(ranks, request):
    results = request.getfixturevalue({2: "two", 4: "four"}[ranks])["random_layouts"]
    check(results, chosen(ranks), cases.sharded, 20)
    assert len({case.layout.name.split("(")[0] for case in chosen(ranks)}) == 3


def compiled():
    """Graphs of a layer, and the collectives of each; compiled, it gives what it gives otherwise."""
    cfg, found = cases.config(output_gate=True, norm=F.NormConfig()), {}
    params = cases.weights(F.MLA.init(cfg, 0))
    x = torch.randn(2, 10, 10, dtype=torch.float64)
    for name, layout, axes in (
        ("latent", sh.mla_latent("u", "g"), {"g": 2, "u": 2}),
        ("packed", sh.mla_packed(overlap=True), {"u": 4}),
    ):
        mesh, graphs = mesh_of(**axes), gloo.Graphs()
        layer = sh.shard(F.mla, layout, mesh, S=10)
        shard = own(sh.cut(x, layout["x"][0], mesh))

        def run(params, x, layer=layer):
            return layer(params, x, cfg)[0]

        results = []
        for fn in (run, torch.compile(run, backend=graphs, fullgraph=True)):
            y = fn(params, shard)
            results.append([y, *torch.autograd.grad(y.square().sum(), [shard, *F.tree.leaves(params)])])
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
        found[name] = (graphs.frames, graphs.collectives)
    return found


def test_compiled_layers(four):
    for found in four["compiled"]:
        # Of what moves before the core and behind it, one collective a direction and a kind; each has its adjoint.
        assert found == {
            "latent": (1, {"forward": [3], "backward": [3]}),
            "packed": (1, {"forward": [3], "backward": [3]}),
        }


def evaluated():
    """Gradients before and after a pass in inference mode, whose memory the next exchanges may have again."""
    cfg, found = cases.config(), []
    params = cases.weights(F.MLA.init(cfg, 0))
    x = torch.randn(2, 9, 10, dtype=torch.float64)
    for layout, axes in (
        (sh.mla_latent(overlap=True), {"u": 2}),
        (sh.mla_packed(), {"u": 2}),
        (sh.mla_gather(), {"g": 2}),
    ):
        mesh = mesh_of(**axes)
        layer = sh.shard(F.mla, layout, mesh, S=9)
        shard = own(sh.cut(x, layout["x"][0], mesh))

        def gradients(layer=layer, shard=shard):
            return torch.autograd.grad(layer(params, shard, cfg)[0].square().sum(), [shard, *F.tree.leaves(params)])

        with torch.inference_mode():
            layer(params, shard, cfg)
        after = gradients()
        with torch.inference_mode():
            layer(params, shard, cfg)
        found.append(all(map(torch.equal, gradients(), after)))
    return found


def test_training_after_an_evaluation(two):
    assert two["evaluated"] == [[True] * 3] * 2
