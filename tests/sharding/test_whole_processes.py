"""Whole models over gloo: a step of training on each mesh, as one rank has it, and checkpoints from mesh to mesh.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh

from . import gloo
from . import test_latent_models as models
from .layer_cases import own
from .test_whole_models import DENSE, EXPERTS, HYBRID, dp, tp

BOTH = sh.spread(sh.beside(sh.all_gather(**dp, **tp), sh.gdn_scan("g", **dp, **tp)), experts="ep", parameters="dp")
STEPS = [
    (sh.spread(sh.ulysses(**dp, **tp, overlap=True), parameters="dp"), {"dp": 2, "tp": 2}, DENSE),
    (sh.spread(sh.mla_latent(), experts="ep"), {"ep": 2, "u": 2}, EXPERTS),
    (sh.spread(sh.mla_gather(**dp), experts="ep", parameters="dp"), {"dp": 2, "ep": 2}, EXPERTS),
    (BOTH, {"g": 2, "ep": 2}, HYBRID),
]


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [steps, checkpoints], fresh=True)


def steps():
    """How far a rank is from one rank with everything, in loss and gradients."""
    found = []
    for layout, axes, parts in STEPS:
        (cfg, whole), ids = models.model(*parts), torch.randint(0, 31, (3, 13))
        total, count = F.next_token_loss(whole, ids[:, :-1], cfg, ids[:, 1:])
        dense = torch.autograd.grad(total / count, F.tree.leaves(whole))
        dense = F.tree.unflatten(F.tree.structure(whole), dense)
        mesh = gloo.mesh_of(**axes)
        loss_of = sh.shard(F.next_token_loss, layout, mesh, S=13)
        specs = loss_of.specs(whole, cfg)
        params = F.tree.map(own, sh.cut(whole, specs, mesh))
        batch = sh.shard_batch(ids, None, None, None, loss_of, mesh)
        mine, _ = loss_of(params, batch.tokens, cfg, batch.labels)
        loss = sh.counted_once(mine, loss_of, mesh) / batch.count
        grads = torch.autograd.grad(loss, F.tree.leaves(params))
        grads = sh.sum_gradients(F.tree.unflatten(F.tree.structure(params), grads), specs, mesh)
        everywhere = sh.reshard(loss.detach()[None], f"D +{'+'.join(axes)} -> D", mesh)
        pairs = zip(F.tree.leaves(grads), F.tree.leaves(sh.cut(dense, specs, mesh)), strict=True)
        errors = [
            (everywhere - total / count).abs().item(),
            *((a - b).abs().amax().item() for a, b in pairs if a.numel()),
        ]
        found.append(max(errors))
    return found


def test_a_step_on_each_mesh(four):
    for of_rank in four["steps"]:
        assert len(of_rank) == len(STEPS)
        assert max(of_rank) < 1e-10, of_rank


def compiled():
    """Graphs of a loss, and the collectives of each; compiled, it gives what it gives otherwise."""
    (cfg, whole), ids = models.model(DENSE[0]), torch.randint(0, 31, (4, 9))
    mesh, graphs = gloo.mesh_of(dp=2, tp=2), gloo.Graphs()
    loss_of = sh.shard(F.next_token_loss, STEPS[0][0], mesh, S=8)
    mine = F.tree.map(own, sh.cut(whole, loss_of.specs(whole, cfg), mesh))
    tokens, targets = (sh.cut(x, loss_of.layout["tokens"][0], mesh) for x in (ids[:, :-1], ids[:, 1:]))

    def run(params, tokens, targets):
        return loss_of(params, tokens, cfg, targets)[0]

    results = []
    for fn in (run, torch.compile(run, backend=graphs, fullgraph=True)):
        loss = fn(mine, tokens, targets)
        results.append([loss, *torch.autograd.grad(loss, F.tree.leaves(mine))])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
    return graphs.frames, graphs.collectives


@pytest.mark.verify
def test_a_compiled_loss():
    for frames, collectives in gloo.run(4, [compiled])["compiled"]:
        # Rows gathered, and looked up; a block each, gathered and summed; the head, gathered, and what its parts say.
        assert (frames, collectives) == (1, {"forward": [8], "backward": [8]})


MESHES = [({"tp": 2, "ep": 2}, BOTH), ({"dp": 4}, BOTH), ({"dp": 2, "tp": 2}, BOTH)]


def checkpoints():
    """Whether every rank has, on another mesh, what it would cut of the whole; and what it says of other trees."""
    (cfg, whole), found = models.model(*HYBRID), []
    whole = F.tree.map(lambda x: x.detach(), whole)
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    for i, (axes, layout) in enumerate(MESHES):
        mesh = gloo.mesh_of(**axes)
        specs = sh.shard(F.next_token_loss, layout, mesh, S=8).specs(whole, cfg)
        programs.save_shards(sh.cut(whole, specs, mesh), specs, mesh, Path(box[0]) / str(i))
        for axes, layout in MESHES:
            other = gloo.mesh_of(**axes)
            specs = sh.shard(F.next_token_loss, layout, other, S=8).specs(whole, cfg)
            mine = sh.cut(whole, specs, other)
            empty = F.tree.map(lambda x: torch.full_like(x, torch.nan), mine)
            back = programs.restore_shards(empty, specs, other, Path(box[0]) / str(i))
            found.append(all(map(torch.equal, F.tree.leaves(back), F.tree.leaves(mine))))
    one = sh.Mesh(u=1)
    specs = sh.shard(F.next_token_loss, sh.beside(sh.ulysses(), sh.gdn_ulysses()), one, S=8).specs(whole, cfg)
    alone = programs.restore_shards(whole, specs, one, Path(box[0]) / "1")
    found.append(all(map(torch.equal, F.tree.leaves(alone), F.tree.leaves(whole))))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
    return found


def test_checkpoints_of_other_meshes(four):
    for found in four["checkpoints"]:
        assert found == [True] * 10
