"""Gated delta nets under their layouts over gloo: what simulated ranks give, value by value and event by event.

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

from . import gdn_cases as cases
from . import gloo
from . import test_latent_models as latents
from . import test_recurrent_models as models
from .attention_cases import ids_of
from .gloo import mesh_of
from .layer_cases import check, own, ran


@pytest.fixture(scope="module")
def two():
    return gloo.run(2, [random_layouts, compiled])


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [random_layouts, hybrids])


@functools.cache
def chosen(ranks):
    """30 cases, 24 of them with uneven tokens or heads; 18 are scans."""
    found = []
    for kind, first, many in (("scan", 7000, 18), ("ulysses", 8000, 12)):
        made = (cases.make(seed, ranks, kind) for seed in itertools.count(first))
        large = (case for case in made if case.x.shape[1] > 2)
        uneven = (c for c in large if c.x.shape[1] % ranks or c.sizes["K"] % (c.axes.get("u", 1) * c.axes.get("tp", 1)))
        found += [*itertools.islice(uneven, many - 3), *itertools.islice(large, 3)]
    return found


def random_layouts():
    return [ran(case, F.gdn, cases.dense) for case in chosen(dist.get_world_size())]


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_layouts(ranks, request):
    results = request.getfixturevalue({2: "two", 4: "four"}[ranks])["random_layouts"]
    check(results, chosen(ranks), cases.sharded, 25)


def hybrids():
    """The furthest that a rank is from one rank with everything, in loss and gradients of decoders of both kinds."""
    cfg, whole = latents.model((models.DELTA, latents.MLP), (models.PLAIN, latents.MOE), (models.KIMI, latents.MLP))
    ids, cu, errors = torch.randint(0, 31, (4, 13)), [0, 3, 4, 11, 13], {}
    targets = torch.full_like(ids, -100)
    for a, b in itertools.pairwise(cu):
        targets[:, a : b - 1] = ids[:, a + 1 : b]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])[None]
    total, count = F.next_token_loss(whole, ids, cfg, targets, positions=positions, segment_ids=ids_of(cu, 4))
    dense = torch.autograd.grad(total / count, F.tree.leaves(whole))
    dense = F.tree.unflatten(F.tree.structure(whole), dense)
    for layout, axes in HYBRIDS:
        mesh = mesh_of(**axes)
        loss_of = sh.shard(F.next_token_loss, layout, mesh, S=13)
        specs, tokens = loss_of.specs(whole, cfg), layout["tokens"][0]
        params = F.tree.map(own, sh.cut(whole, specs, mesh))
        batch = sh.shard_batch(ids, None, None, cu, tokens, mesh)
        mine, _ = loss_of(params, batch.tokens, cfg, batch.labels, cu_seqlens=cu)
        loss = sh.counted_once(mine, tokens, mesh) / batch.count
        grads = torch.autograd.grad(loss, F.tree.leaves(params), allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, F.tree.leaves(params), strict=True)]
        grads = sh.sum_gradients(F.tree.unflatten(F.tree.structure(params), grads), specs, mesh)
        everywhere = sh.reshard(loss.detach()[None], f"D +{'+'.join(axes)} -> D", mesh)
        pairs = zip(F.tree.leaves(grads), F.tree.leaves(sh.cut(dense, specs, mesh)), strict=True)
        errors[layout.name] = max(
            (everywhere - total / count).abs().item(), *((a - b).abs().max().item() for a, b in pairs)
        )
    return errors


HYBRIDS = [
    (sh.beside(sh.ulysses(tp="tp"), sh.gdn_ulysses(tp="tp")), {"tp": 2, "u": 2}),
    (sh.beside(sh.hybrid(), sh.gdn_scan("g", "u")), {"g": 2, "u": 2}),
    (sh.beside(sh.all_gather(dp="dp", exchange="needed"), sh.gdn_scan("g", dp="dp")), {"dp": 2, "g": 2}),
]


def test_hybrid_models(four):
    for errors in four["hybrids"]:
        assert errors.keys() == {layout.name for layout, _ in HYBRIDS}
        assert max(errors.values()) < 1e-11, errors


def compiled():
    """Graphs of a layer, and the collectives of each; compiled, it gives what it gives otherwise."""
    cfg, found = cases.config(), {}
    params = cases.weights(F.GDN.init(cfg, 0))
    x = torch.randn(2, 11, 10, dtype=torch.float64)
    for layout, options in ((sh.gdn_ulysses("u"), {}), (sh.gdn_scan("u"), {"cu_seqlens": (0, 3, 4, 9, 11)})):
        mesh, graphs = mesh_of(u=2), gloo.Graphs()
        layer = sh.shard(F.gdn, layout, mesh, S=11)
        shard = own(sh.cut(x, layout["x"][0], mesh))

        def run(params, x, layer=layer, options=options):
            return layer(params, x, cfg, **options)[0]

        results = []
        for fn in (run, torch.compile(run, backend=graphs, fullgraph=True)):
            y = fn(params, shard)
            results.append([y, *torch.autograd.grad(y.square().sum(), [shard, *F.tree.leaves(params)])])
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
        found[layout.name] = (graphs.frames, graphs.collectives)
    return found


def test_compiled_layers(two):
    for found in two["compiled"]:
        # What comes in and what goes out, or the halo and the summary; each has its adjoint.
        assert found == {
            'gdn_ulysses("u")': (1, {"forward": [2], "backward": [2]}),
            'gdn_scan("u")': (1, {"forward": [2], "backward": [2]}),
        }
