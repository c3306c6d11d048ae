"""Plans of latent attention: as printed, as the formulas say, and as what then happens."""

from __future__ import annotations

import random

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from torch._subclasses import FakeTensorMode

V3 = {"B": 1, "S": 8192, "H": 128, "L": 512, "N": 128, "R": 64, "V": 128}
SMALL = {"B": 2, "S": 96, "H": 5, "L": 32, "N": 16, "R": 8, "V": 16}


def test_latent():
    assert_expected_inline(
        str(sh.mla_latent("u", "g").plan(sh.Mesh(g=2, u=2), causal=True, **SMALL)),
        """\
mla_latent("u", "g")
mesh: g=2 u=2     sizes: B=2 S=96 H=5 L=32 N=16 R=8 V=16     float32     causal

                               collective                                                 sends         receives  copies
forward   kv_latent, key_rope  all-gather over g/u      S/g/u -> S                       23,040           23,040   1 + 0
          q                    all-to-all over u        S/g/u -> S/g, H -> H/u  9,216 to 13,824  9,216 to 13,824   1 + 1
          o                    all-to-all over u        S/g -> S/g/u, H/u -> H   6,144 to 9,216   6,144 to 9,216   1 + 1
backward  o                    all-to-all over u        S/g/u -> S/g, H -> H/u   6,144 to 9,216   6,144 to 9,216   1 + 1
          q                    all-to-all over u        S/g -> S/g/u, H/u -> H  9,216 to 13,824  9,216 to 13,824   1 + 1
          kv_latent, key_rope  reduce-scatter over g/u  S -> S/g/u                       23,040           23,040   1 + 0
in all                                                                                   84,480           84,480

ranks  queries  keys        heads      flops  peak bytes
0           48    48  3 reading 3  1,154,304     224,256
1           48    48  2 reading 2    769,536     175,104
2           48    96  3 reading 3  2,850,048     313,344
3           48    96  2 reading 2  1,900,032     239,616

order, forward: launch kv_latent,key_rope (g/u) > wait kv_latent,key_rope (g/u) > launch q (u) > wait q (u) > core >
    launch o (u) > wait o (u)
order, backward: launch o (u) > wait o (u) > core > launch q (u) > wait q (u) > launch kv_latent,key_rope (g/u) > wait
    kv_latent,key_rope (g/u)
gradients: x, q, kv_latent, key_rope whole; kv_b a pending sum over g, u; parameters over every axis that does not
    split them""",
    )


def test_packed():
    assert_expected_inline(
        str(sh.mla_packed().plan(sh.Mesh(u=2), **SMALL)),
        """\
mla_packed("u")
mesh: u=2     sizes: B=2 S=96 H=5 L=32 N=16 R=8 V=16     float32     every key is seen

                    collective                                            sends          receives  copies
forward   key_rope  all-gather over u      S/u -> S                       3,072             3,072   0 + 1
          kv, q     all-to-all over u      S/u -> S, H -> H/u  43,008 to 64,512  43,008 to 64,512   1 + 0
          o         all-to-all over u      S -> S/u, H/u -> H  12,288 to 18,432  12,288 to 18,432   1 + 1
backward  o         all-to-all over u      S/u -> S, H -> H/u  12,288 to 18,432  12,288 to 18,432   1 + 1
          kv, q     all-to-all over u      S -> S/u, H/u -> H  43,008 to 64,512  43,008 to 64,512   1 + 1
          key_rope  reduce-scatter over u  S -> S/u                       3,072             3,072   1 + 0
in all                                                                  144,384           144,384

ranks  queries  keys        heads      flops  peak bytes
0           96    96  3 reading 3  5,406,720     433,152
1           96    96  2 reading 2  3,932,160     368,640

order, forward: launch key_rope (u) > wait key_rope (u) > launch kv,q (u) > wait kv,q (u) > core > launch o (u) > wait
    o (u)
order, backward: launch o (u) > wait o (u) > core > launch kv,q (u) > wait kv,q (u) > launch key_rope (u) > wait
    key_rope (u)
gradients: x, q, kv_latent, key_rope whole; kv_b a pending sum over u; parameters over every axis that does not split
    them""",
    )


def test_latents_fly_while_queries_are_projected_and_queries_while_keys_are():
    plan = sh.mla_latent("u", "g", overlap=True).plan(sh.Mesh(g=2, u=2), **SMALL)
    assert_expected_inline(
        "\n".join(" > ".join(order) for order in plan.order),
        """\
launch kv_latent,key_rope (g/u) > launch q (u) > wait kv_latent,key_rope (g/u) > wait q (u) > core > launch o (u) > wait o (u)
launch o (u) > wait o (u) > core > launch q (u) > launch kv_latent,key_rope (g/u) > wait q (u) > wait kv_latent,key_rope (g/u)""",
    )


def test_volumes_are_those_of_the_formulas():
    """Elements a token of a rank, forward, DeepSeek-V3's sizes over 8 ranks."""
    one, other = sh.Mesh(u=8), sh.Mesh(g=8)
    plans = {
        "materialised": sh.ulysses().plan(one, **V3),
        "packed": sh.mla_packed().plan(one, **V3),
        "latent": sh.mla_latent().plan(one, **V3),
        "gather": sh.mla_gather().plan(other, **V3),
    }
    found = {name: sum(e.receives[1] for e in plan.forward) / 4 / 1024 for name, plan in plans.items()}
    assert found == {"materialised": 71_680, "packed": 64_960, "latent": 39_872, "gather": 4_032}
    assert {name: plan.volume for name, plan in plans.items()} == found
    assert found["latent"] / found["packed"] <= 0.62
    assert found["latent"] / found["materialised"] <= 0.56
    back = {name: sum(e.sends[1] for e in plan.backward) / 4 / 1024 for name, plan in plans.items()}
    assert back == found  # each exchange once more, the other way
    kinds = {name: [e.kind for e in plan.exchanges] for name, plan in plans.items()}
    assert kinds["packed"] == ["all-gather", *["all-to-all"] * 4, "reduce-scatter"]
    assert kinds["latent"] == ["all-gather", *["all-to-all"] * 4, "reduce-scatter"]
    assert kinds["gather"] == ["all-gather", "reduce-scatter"]
    # The up-projection of every head runs on every rank of a gather, and once in the others.
    project = 2 * 8192 * 512 * 128 * 256
    pairs = 2 * 128 * (192 + 128) * 8192 * 8192
    for name in ("latent", "packed", "materialised"):
        assert plans[name].flops[1] * 8 == pairs + project
    assert plans["gather"].flops[1] * 8 == pairs + 8 * project


def test_head_tail_order_evens_out_the_work_and_moves_as_much():
    mesh, sizes = sh.Mesh(g=4, u=2), {**SMALL, "H": 4}
    for make in (sh.mla_latent, sh.mla_packed):
        plain, zigzag = (make("u", "g", zigzag=z).plan(mesh, causal=True, **sizes) for z in (False, True))
        projected = 2 * 2 * 2 * 32 * 32  # of a token: B=2, two heads of N + V from L
        core = [[p.of(r).flops - projected * p.of(r).keys for r in range(8)] for p in (plain, zigzag)]
        if make is sh.mla_packed:  # each rank projects its own tokens, all heads
            core = [[p.of(r).flops - 2 * projected * 12 for r in range(8)] for p in (plain, zigzag)]
        assert [len(set(each)) for each in core] == [4, 1]
        assert sum(core[0]) == sum(core[1])
        assert [e[:3] + e[4:6] for e in plain.exchanges] == [e[:3] + e[4:6] for e in zigzag.exchanges]
    assert_expected_inline(
        "\n".join(str(sh.mla_packed("u", "g", zigzag=True)).splitlines()[:6]),
        """\
mla_packed("u", "g", zigzag=True)
  x              B S/g:zigzag/u D                                          stays
  q              B S/g:zigzag/u H E -> B S/g:zigzag H/u E                  all-to-all over u
  o              B S/g:zigzag H/u V -> B S/g:zigzag/u H V                  all-to-all over u
  key_rope       B S/g:zigzag/u R -> B S R                                 all-gather over g/u
  kv             B S/g:zigzag/u H NV -> B S/g:zigzag H/u NV -> B S H/u NV  all-to-all over u, then all-gather over g""",
    )


def test_heads_that_stay_where_they_are_split():
    plan = sh.mla_gather(tp="tp").plan(sh.Mesh(tp=3, g=2), **SMALL)
    assert [plan.of(rank).heads for rank in range(6)] == [2, 2, 2, 2, 1, 1]
    assert plan.flops == (plan.of(4).flops, 2 * plan.of(4).flops)


def test_gradients_are_named():
    plan = sh.mla_latent("u", "g", tp="tp").plan(sh.Mesh(tp=2, g=2, u=2), D=64, **{**SMALL, "H": 6})
    assert dict(plan.pending) == {"x": ("tp",), "q": (), "kv_latent": ("tp",), "key_rope": ("tp",), "kv_b": ("g", "u")}
    assert plan.forward[-1].kind == "all-reduce"


LAYOUTS = [
    (sh.mla_latent, ("u",)),
    (sh.mla_latent, ("u", "g")),
    (sh.mla_packed, ("u",)),
    (sh.mla_packed, ("u", "g")),
    (sh.mla_gather, ("g",)),
]


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_what_happens(seed):
    """Every event of every rank, forward and backward, with its bytes. (Copies are those of contiguous tensors.)"""
    draw = random.Random(seed)
    make, axes = LAYOUTS[seed % len(LAYOUTS)]
    tp = draw.random() < 0.3
    exchange = draw.choice(["all", "needed"] if "g" in axes else ["all"])
    options = {"overlap": draw.random() < 0.5, "exchange": exchange}
    zigzag = draw.random() < 0.4
    layout = make(*axes, **options, zigzag=zigzag, **({"tp": "tp"} if tp else {}))
    mesh = sh.Mesh(**({"tp": 2} if tp else {}), **{axis: draw.choice([2, 3]) for axis in sorted(axes)})
    chunks = 2 * mesh[axes[-1]]
    S = chunks * draw.randint(1, 3) if zigzag else draw.randint(5, 20)
    B, H = draw.randint(1, 3), draw.choice([6, 8] if tp else [3, 4, 5, 7])
    cfg = F.MLAConfig(
        hidden_size=12, num_attention_heads=H, kv_lora_rank=6, q_lora_rank=draw.choice([None, 5]), qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=3, rope=F.RopeConfig(), causal=draw.random() < 0.7,
    )  # fmt: skip
    cu = sorted({0, S, *(draw.randrange(S) for _ in range(3))}) if draw.random() < 0.5 else None
    params = F.tree.map(lambda t: t.requires_grad_(), F.MLA.init(cfg, 0))
    x = torch.randn(B, S, 12, requires_grad=True)
    record = sh.trace(mesh)
    given = {} if cu is None else {"cu_seqlens": cu}
    y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=S), record.mesh)(params, x, cfg, **given)
    torch.autograd.grad(y.sum(), [x, *F.tree.leaves(params)])
    plan = layout.plan(mesh, B=B, S=S, H=H, L=6, N=4, R=2, V=3, causal=cfg.causal, **given, **({"D": 12} if tp else {}))
    for rank in range(mesh.size):
        mine = [(e.what, e.kind, e.axes, e.sent, e.received) for e in record.events if e.rank == rank]
        said = [(e.what, e.kind, e.axes, e.sent, e.received) for e in plan.of(rank).events]
        assert mine == said


def test_what_a_plan_needs():
    with pytest.raises(sh.SpecError) as error:
        sh.mla_latent().plan(sh.Mesh(u=2), B=1, S=8, H=4, E=12)
    lacking = str(error.value)
    with pytest.raises(sh.SpecError) as error:
        sh.mla_latent().plan(sh.Mesh(u=8), **SMALL)
    assert_expected_inline(
        f"{lacking}\n{error.value}",
        """\
a plan lacks sizes: L, N, R, V
    sizes: K=4 B=1 S=8 H=4 E=12 G=1     fix: L=..., N=..., R=..., V=..., globally
mla_latent("u"): H=5 query heads are fewer than u=8 ranks
    B S H/u E
    mesh: u=8     fix: Mesh(g=2, u=4) with mla_latent("u", "g")""",
    )


def test_layouts_ranked():
    costs = sh.Costs({"u": 1e-5, "g": 1e-5}, {"u": 4e11, "g": 4e11}, 4e14)
    found = sh.best(
        [sh.ulysses(), sh.mla_latent(), sh.mla_packed(), (sh.mla_gather(), sh.Mesh(g=8)),
         (sh.mla_latent("u", "g"), sh.Mesh(g=2, u=4))],
        sh.Mesh(u=8), V3, costs, causal=True, dtype=torch.bfloat16,
    )  # fmt: skip
    assert_expected_inline(
        str(found),
        """\
layout                           exchanges     core     peak bytes
mla_latent("u") on u=8            0.468 ms  2.83 ms    330,432,512  6 exchanges, 163,315,712 bytes, 39,872 elements a token, even work
mla_packed("u") on u=8            0.725 ms  2.83 ms    404,881,408  6 exchanges, 266,076,160 bytes, 64,960 elements a token, even work
ulysses("u") on u=8               0.774 ms  2.83 ms    536,870,912  4 exchanges, 293,601,280 bytes, 71,680 elements a token, even work
mla_latent("u", "g") on g=2 u=4   0.416 ms  4.38 ms    464,650,240  6 exchanges, 142,344,192 bytes, 34,752 elements a token, work 2.83 to 1
mla_gather("g") on g=8           0.0613 ms  6.89 ms  1,219,624,960  2 exchanges, 16,515,072 bytes, 4,032 elements a token, work 11.88 to 1
exchanges: latency + bytes of the busiest rank / bandwidth, one after the other, forward and backward
core: 3 x flops of the busiest rank
elements a token: received forward by the busiest rank, for each token of a rank's share""",
    )


@pytest.mark.parametrize(("layout", "axes"), [
    (sh.ulysses(tp="tp"), {"tp": 2, "u": 3}),
    (sh.all_gather(zigzag=True, exchange="needed"), {"g": 2}),
    (sh.hybrid(dp="dp"), {"dp": 2, "g": 2, "u": 2}),
])  # fmt: skip
def test_a_plan_of_materialised_keys_is_that_of_attention_and_of_what_makes_them(layout, axes):
    mesh, sizes, given = sh.Mesh(**axes), {**SMALL, "B": 3, "H": 7}, {"causal": True, "cu_seqlens": [0, 40, 96]}
    found = layout.plan(mesh, **sizes, **given)
    plain = layout.plan(mesh, B=3, S=96, H=7, K=7, E=24, V=16, **given)
    assert found.exchanges == plain.exchanges
    for rank in range(mesh.size):
        B, S, H, _ = sh.Spec.parse(layout["k"][0]).local({**sizes, "K": 7, "G": 1, "E": 24}, mesh, rank)
        assert found.of(rank).flops - plain.of(rank).flops == 2 * B * S * H * 32 * (16 + 16)
        assert found.of(rank).memory == plain.of(rank).memory
    assert "keys and values materialised from latents" in str(found)
    assert found.volume == plain.volume


def test_sizes_that_disagree():
    said = []
    for more in ({"K": 1}, {"E": 16}):
        with pytest.raises(sh.SpecError) as error:
            sh.ulysses().plan(sh.Mesh(u=2), **SMALL, **more)
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
latent attention has keys of every head, and H=5 K=1
    fix: without K
E=16 and N=16 R=8 disagree
    fix: without E, which is 24""",
    )


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "fake tensors": FakeTensorMode,
    "device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_knows_nothing_of_its_callers_modes(mode):
    for layout in (sh.ulysses(), sh.mla_latent(overlap=True)):
        wanted = layout.plan(sh.Mesh(u=2), **SMALL)
        with MODES[mode]():
            found = layout.plan(sh.Mesh(u=2), **SMALL)
        assert str(found) == str(wanted)
        assert found.classes == wanted.classes


def test_a_plan_within_a_transform():
    def scaled(x):
        return x * sh.mla_packed(overlap=True).plan(sh.Mesh(u=2), **SMALL).peak

    peak = sh.mla_packed(overlap=True).plan(sh.Mesh(u=2), **SMALL).peak
    assert torch.func.grad(scaled)(torch.tensor(1.0)) == peak
    assert torch.func.vmap(scaled)(torch.ones(2)).tolist() == [peak, peak]


def test_rankings_that_cannot_be():
    two, both = sh.Mesh(u=2), {"u": 1e-5, "g": 1e-5}
    costs, layouts = sh.Costs(both, both, 1e12), [sh.mla_latent(), (sh.mla_gather(), sh.Mesh(g=2))]
    asked = [
        lambda: sh.best(layouts, two, {**SMALL, "E": 5}, costs),
        lambda: sh.best(layouts, two, {**SMALL, "S": 1.5}, costs),
        lambda: sh.best([sh.mla_packed(), sh.mla_latent()], two, {**SMALL, "H": 1}, costs),
        lambda: sh.best([*layouts, (sh.mla_gather(), sh.Mesh(g=4))], two, SMALL, costs),
        lambda: sh.best(layouts, two, SMALL, sh.Costs({"u": 1e-5}, {"u": 1e9}, 1e12)),
        lambda: sh.best(layouts, two, SMALL, None),
        lambda: sh.best(sh.mla_latent(), two, SMALL, costs),
        lambda: sh.best([(two, sh.mla_latent())], two, SMALL, costs),
        lambda: sh.Costs({"u": 1e-5, "g": 1e-5}, {"u": 1e9}, 1e12),
        lambda: sh.Costs({}, {"u": 1e9}, 1e12),
        lambda: sh.Costs({"u": 1e-5}, {"u": 0}, 1e12),
        lambda: sh.Costs({"u": -1}, {"u": 1e9}, 1e12),
        lambda: sh.Costs({"u": 1e-5}, {"u": 1e9}, float("nan")),
    ]
    said = []
    for each in asked:
        with pytest.raises((ValueError, TypeError)) as error:
            each()
        said.append(f"{type(error.value).__name__}: {error.value}")
    assert_expected_inline(
        "\n".join(said),
        """\
SpecError: E=5 and N=16 R=8 disagree
    fix: without E, which is 24
SpecError: S=1.5: a size is a whole number, 0 or more
    fix: S=..., its global size
SpecError: best: none of 2 layouts can be on this mesh
    mla_packed("u"): H=1 query heads are fewer than u=2 ranks
    mla_latent("u"): H=1 query heads are fewer than u=2 ranks
    mesh: u=2
ValueError: best(layouts=...): mla_gather("g") is on g=4, 4 ranks, and mesh has 2
    fix: the same ranks over other axes
ValueError: costs of g are not known     known: u
    fix: a latency and a bandwidth of "g", which measure(mesh) finds on a mesh that has it
TypeError: best(costs=...): Costs are needed, not NoneType
    fix: measure(mesh), or Costs(...)
TypeError: best(layouts=...): several are needed, not one Layout
    fix: [layout, ...]
TypeError: best(layouts=...): each is a Layout, or a pair of a Layout and a Mesh, and that at 0 has Mesh, Layout
    fix: (layout, Mesh(...))
ValueError: Costs: no bandwidth of g
    fix: bandwidth={..., "g": ...}
ValueError: Costs: no latency of u
    fix: latency={..., "u": ...}
ValueError: Costs: bandwidth of u is 0
    fix: more than 0, what is done in a second
ValueError: Costs: latency of u is -1
    fix: seconds, 0 or more
ValueError: Costs: flops of a rank is nan
    fix: more than 0, what is done in a second""",
    )
