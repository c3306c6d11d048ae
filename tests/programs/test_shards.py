"""A rank's slices of a folder beside what it would cut of the whole, byte by byte; and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.functional import TreeError
from meshfn.sharding import SpecError

from .. import tiny
from ..families import family
from ..sharding import test_latent_models as models
from ..sharding.test_whole_models import DELTA, FEW, GATED

PLAIN = sh.spread(sh.all_gather(dp="dp", tp="tp"), experts="ep", parameters="dp")
LATENT = sh.spread(sh.mla_gather(dp="dp", tp="tp"), experts="ep", parameters="dp")
BOTH = sh.spread(
    sh.beside(sh.all_gather(dp="dp", tp="tp"), sh.gdn_scan("g", dp="dp", tp="tp")), experts="ep", parameters="dp"
)
SOURCES = {
    "llama": (PLAIN, {"dp": 2, "tp": 2}), "llama-tied": (PLAIN, {"dp": 3, "tp": 2}),
    "phi3": (PLAIN, {"dp": 2, "tp": 2}), "gpt_oss": (PLAIN, {"dp": 2, "tp": 2, "ep": 3}),
    "mixtral": (PLAIN, {"dp": 2, "ep": 2}), "deepseek_v3": (LATENT, {"tp": 2, "ep": 4}),
    "qwen3_next": (BOTH, {"dp": 2, "tp": 2, "ep": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_rank_reads_its_slices_alone(name, tmp_path):
    layout, axes = SOURCES[name]
    module = tiny.llama(tied=True) if name == "llama-tied" else tiny.llama() if name == "llama" else family(name)
    module.save_pretrained(tmp_path)
    whole, mesh = programs.load(tmp_path), sh.Mesh(**axes)
    model, read = sh.shard(F.next_token_loss, layout, mesh, S=8), []
    specs = model.specs(whole.params, whole.config)
    for rank in range(mesh.size):
        at = mesh.at(rank, object())
        mine = programs.load_shards(tmp_path, model, mesh=at)
        assert mine.config == whole.config
        wanted = F.tree.paths(sh.cut(whole.params, specs, at))
        for path, x in F.tree.paths(mine.params).items():
            assert torch.equal(x, wanted[path]), path
            assert x.dtype == wanted[path].dtype
            assert x.is_contiguous()
        assert mine.read == sum(x.numel() * x.element_size() for x in wanted.values())
        read.append(mine.read)
    # What all ranks have of a tensor is what the mesh has of it.
    sizes = {path: x.numel() * x.element_size() for path, x in F.tree.paths(whole.params).items()}
    split = {path: [axes[a] for a in each.spec.axes if a in axes] for path, each in F.tree.paths(specs).items()}
    assert sum(read) == sum(n * mesh.size // torch.tensor([1, *split[path]]).prod().item() for path, n in sizes.items())


def made():
    cfg, whole = models.model((DELTA, FEW), (GATED, models.MLP))
    return cfg, F.tree.map(lambda x: x.detach(), whole)


def test_what_cannot_be_read(tmp_path):
    cfg, whole = made()
    mesh, said = sh.Mesh(u=1), []
    specs = sh.shard(F.next_token_loss, sh.beside(sh.ulysses(), sh.gdn_ulysses()), mesh, S=8).specs(whole, cfg)
    programs.save_shards(whole, specs, mesh, tmp_path / "saved")
    cut = F.tree.replace(whole, {".embed": whole.embed[:5]})
    parts = {"a": whole.embed, "b": whole.norm.weight.bfloat16(), "c": whole.embed}
    programs.save_shards(parts, {n: F.tree.paths(specs)[".embed" if n != "b" else ".norm.weight"] for n in parts}, mesh,
                         tmp_path / "parts")  # fmt: skip
    others = {"b": whole.norm.weight, "d": whole.embed}
    of_others = {"b": F.tree.paths(specs)[".norm.weight"], "d": F.tree.paths(specs)[".embed"]}
    for make in (
        lambda: programs.save_shards(cut, specs, mesh, tmp_path / "cut"),
        lambda: programs.restore_shards(cut, specs, mesh, tmp_path / "saved"),
        lambda: programs.restore_shards(others, of_others, mesh, tmp_path / "parts"),
        lambda: programs.restore_shards(whole, specs, mesh, Path("nowhere")),
        lambda: programs.load_shards("nowhere", sh.shard(F.next_token_loss, PLAIN, mesh, S=8)),
        lambda: programs.load_shards("smollm2-135m", sh.shard(F.next_token_loss, PLAIN, mesh, S=8)),
        lambda: programs.save_shards(programs.Shards(cfg, whole, specs, 0), specs, mesh, tmp_path / "cut"),
        lambda: programs.restore_shards(programs.Shards(cfg, whole, specs, 0), specs, mesh, tmp_path / "saved"),
        lambda: programs.load_shards("nowhere", PLAIN),
        lambda: programs.load_shards("nowhere", sh.shard(F.next_token_loss, PLAIN, mesh, S=8), device="cuda"),
        lambda: programs.save_shards(whole, specs, sh.Mesh(u=2), tmp_path / "cut"),
    ):
        with pytest.raises((SpecError, TreeError, ValueError, TypeError)) as error:
            make()
        said.append(str(error.value))
    assert not (tmp_path / "cut").exists()
    assert_expected_inline(
        "\n".join(said),
        """\
embed is (5, 10), and this rank's shard is (31, 10)
    Z D
    mesh: u=1
embed is (5, 10), and this rank's shard is (31, 10)
    Z D
    mesh: u=1
the checkpoint "parts" does not match
    ['b']: torch.float64, but the checkpoint has torch.bfloat16
    ['d']: missing, it is (31, 10) in all
    ['a']: not expected, the checkpoint has it
    ['c']: not expected, the checkpoint has it
restore_shards(folder="nowhere"): no checkpoint that save_shards wrote is there
    fix: the folder that save_shards was given; a Hugging Face folder is for load_shards
source "nowhere" is no folder
    fix: a Hugging Face folder or the name of a cached one
source "smollm2-135m" is no folder
    fix: programs.save(programs.load("smollm2-135m"), folder), once; then load_shards(folder, model)
save_shards(params=...): a tree of tensors is needed, and .config of a Shards is a DecoderConfig
    fix: its .params
restore_shards(params=...): a tree of tensors is needed, and .config of a Shards is a DecoderConfig
    fix: its .params
load_shards(model=...): what sharding.shard made is needed, not Layout
    fix: sh.shard(F.next_token_loss, layout, mesh, S=...)
load_shards(device="cuda"): no CUDA device is available
    fix: load(..., abstract=True), and programs.plan(model, device="cuda", arch="sm_90") without one
save_shards(mesh=...): 2 ranks, and torch.distributed has 1, so that their files would not go together
    fix: torchrun, with ProcessGroup(device_mesh).mesh; a mesh of one rank needs neither""",
    )
