"""The plan of a step of training beside what simulated ranks do and hold: collectives, bytes, memory, one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError

from . import test_latent_models as models
from .test_latent_models import HEADS, LATENT, MLP, MOE
from .test_peak import Watch, Watched
from .test_whole_models import DELTA, FEW, GATED, SHARED

CASES = [
    (sh.spread(sh.ulysses(dp="dp", tp="tp", overlap=True), parameters="dp"), {"dp": 2, "tp": 2}, ((HEADS, MLP),)),
    (sh.spread(sh.beside(sh.all_gather(dp="dp"), sh.gdn_scan("g", dp="dp")), parameters="dp"), {"dp": 2, "g": 2},
     ((DELTA, FEW), (GATED, MLP))),
    (sh.spread(sh.mla_latent(), experts="ep"), {"u": 2, "ep": 2}, ((LATENT, MOE),)),
    (sh.ulysses(tp="tp"), {"tp": 4}, ((SHARED, MLP),)),
]  # fmt: skip


def stepped(layout, axes, parts, S, B, **told):
    """The plan of a step, and of each rank its events and the most bytes that it held."""
    mesh, (cfg, params) = sh.Mesh(**axes), models.model(*parts)
    model = sh.shard(F.next_token_loss, layout, mesh, S=S)
    plan = model.step(F.Decoder.abstract(cfg, dtype=torch.float64), cfg, B=B, **told)
    ids, where, specs = torch.randint(0, 31, (B, S)), layout["tokens"][0], model.specs(params, cfg)
    record = sh.trace(mesh)

    def body(at):
        watch = Watch([])
        mine = F.tree.map(lambda t: t.detach().clone().requires_grad_(), sh.cut(params, specs, at))
        rows = sh.cut(ids, where, at).clone()
        bound = mesh.at(at.rank, Watched(at.transport, watch)).recording(record)
        watch.look([*F.tree.leaves(mine), rows])
        with watch:
            total, _ = model(mine, rows, cfg, rows, mesh=bound, **told)
            grads = torch.autograd.grad(total, F.tree.leaves(mine))
            del total
            sh.sum_gradients(F.tree.unflatten(F.tree.structure(mine), grads), specs, bound)
        return watch.peak

    return plan, record, sh.Threads(mesh).run(body)


@pytest.mark.parametrize(("layout", "axes", "parts"), CASES, ids=["dense", "hybrid", "experts", "shared"])
def test_a_step_is_what_a_trace_has(layout, axes, parts):
    told = {"cu_seqlens": (0, 3, 4, 15, 23)} if "g" in axes else {}
    plan, record, held = stepped(layout, axes, parts, S=23, B=5, **told)

    def said(events):
        routed = ("rows", "results")  # how many there are is the router's to say
        return [
            (e.what, e.kind, e.axes, e.call.edges, e.call.backward, *(() if e.call.edges[0] in routed else (e.sent, e.received)))
            for e in events
        ]  # fmt: skip

    for rank in range(plan.mesh.size):
        assert said(plan.events(rank)) == said(record.of(rank))
        if "ep" not in axes:
            assert plan.bytes(rank) == record.bytes(rank)
    assert plan.exchanges == record.count()
    peaks = [next(run.peak for run in plan.runs if rank in run.ranks) for rank in range(plan.mesh.size)]
    assert peaks == pytest.approx(held, rel=0.02 if "ep" not in axes else 0.2)


def test_a_step_is_printed():
    """With what lies whole though it need not."""
    cfg, _ = models.model(*[(LATENT, dataclasses.replace(MOE, num_experts=4))] * 2)
    cfg = dataclasses.replace(cfg, vocab_size=32)
    layout = sh.spread(sh.mla_latent(tp="tp", dp="dp"), experts="ep")
    model = sh.shard(F.next_token_loss, layout, sh.Mesh(dp=2, tp=2, ep=2), S=16)
    text = str(model.step(F.Decoder.abstract(cfg, dtype=torch.bfloat16), cfg, B=8))
    assert_expected_inline(
        text,
        """\
a step of next_token_loss, 2 layers by mla_latent("u", tp="tp", dp="dp") spread(experts="ep")
mesh: dp=2 tp=2 ep=2 u=1 (not in the mesh)     sizes: B=8 S=16     bfloat16, float32
between layers activations lie as B/dp/ep S/u D

embedding
                      collective            sends  receives  copies
  forward   embedded  all-reduce over tp      640       640   0 + 0
  backward  embedded  all-reduce over tp      640       640   0 + 0
  in all                                    1,280     1,280

latent attention, experts: 2 layers, 0,1     each: D=10 H=4 N=3 R=2 V=4 L=7 F=4 X=4
  reshard between layers: none
                     collective                        sends  receives  copies
  forward   out      all-reduce over tp                  640       640   0 + 0
            counts   all-gather over ep  P/ep -> P        32        32   0 + 0
            rows     all-to-all over ep  M/ep -> X/ep    640       640   0 + 0
            results  all-to-all over ep  X/ep -> M/ep    640       640   0 + 0
            out      all-reduce over tp                  640       640   0 + 0
            out      all-reduce over tp                  640       640   0 + 0
  backward  out      all-reduce over tp                  640       640   0 + 0
            out      all-reduce over tp                  640       640   0 + 0
            results  all-to-all over ep  M/ep -> X/ep    640       640   0 + 0
            rows     all-to-all over ep  X/ep -> M/ep    640       640   0 + 0
            out      all-reduce over tp                  640       640   0 + 0
  in all                                               6,432     6,432

head and loss
                    collective                         sends  receives  copies
  forward   shares  all-gather over tp      P/tp -> P    384       384   0 + 0
  backward  shares  reduce-scatter over tp  P -> P/tp    384       384   0 + 0
  in all                                                 768       768

sums of gradients
                       collective                           sends        receives  copies
  backward  gradients  all-reduce over dp/ep                3,408           3,408   1 + 0
            gradients  all-reduce over dp/ep/tp    1,660 to 1,672  1,660 to 1,672   1 + 0
            gradients  all-reduce over dp/ep/tp               560             560   1 + 0
            gradients  all-reduce over dp                     512             512   1 + 0
  in all                                           6,140 to 6,152  6,140 to 6,152

a step                     layers  exchanges             sends          receives  peak bytes
embedding                                  2             1,280             1,280       9,752
latent attention, experts       2         22            12,864            12,864      85,000
head and loss                              2               768               768      90,592
sums of gradients                          4    6,140 to 6,152    6,140 to 6,152      13,064
in all                          2         30  21,052 to 21,064  21,052 to 21,064      90,592
whole over dp=2, though their fields say D/dp: embed, layers[*].attention.q_a, layers[*].attention.kv_a,
    layers[*].attention.gate, layers[*].attention.o, layers[*].mlp.gate, layers[*].mlp.up, layers[*].mlp.down,
    layers[*].mlp.shared.gate, layers[*].mlp.shared.up, layers[*].mlp.shared.down, head; 5,800 bytes; fix:
    spread(layout, parameters="dp")
rows of experts: as if each were chosen as often as any other; what runs follows the router""",
    )


def test_what_is_no_step():
    cfg, _ = models.model((HEADS, MLP))
    said = []
    for make in (
        lambda: sh.shard(F.attention, sh.ulysses(), sh.Mesh(u=2), S=8).step(None, cfg, B=2),
        lambda: sh.shard(F.next_token_loss, sh.mla_latent(), sh.Mesh(u=2), S=8).step(F.Decoder.abstract(cfg), cfg, B=2),
        lambda: sh.shard(F.decoder, sh.ulysses(), sh.Mesh(u=2), S=8).step(F.Decoder.abstract(cfg), cfg, B=-1),
        lambda: sh.shard(F.decoder, sh.ulysses(), sh.Mesh(u=2), S=8).step(F.Decoder.abstract(cfg), cfg),
        lambda: sh.shard(F.decoder, sh.ulysses(), sh.Mesh(u=2), S=8).step(F.Decoder.abstract(cfg), cfg, B=2, S=4),
    ):
        with pytest.raises(SpecError) as error:
            make()
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
attention is no whole model, of which there is a step
    fix: Layout.plan, of a layer
next_token_loss(params=...): layers[0].attention is of class Attention, and mla_latent("u") has no rule for its k, v
    fix: a layout with rules for every kind of layer that there is
B=-1: a size is a whole number, 0 or more
    fix: B=..., its global size
a step lacks a size: B
    mesh: u=2     fix: B=..., globally
a step has no place for S=4
    fix: B alone""",
    )
