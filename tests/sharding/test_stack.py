"""Whole stacks of two kinds of layer planned, beside what a trace has of them, and layouts of gated delta nets ranked."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError

from .test_latent_models import HEADS, LATENT, MLP, model

DELTA = F.GDNConfig(
    hidden_size=10, num_key_heads=4, num_value_heads=8, key_head_dim=3, value_head_dim=4, norm=F.NormConfig()
)  # fmt: skip
CHANNELS = F.GDNConfig(
    hidden_size=10, num_key_heads=4, num_value_heads=4, key_head_dim=4, value_head_dim=3, conv_kernel_dim=3,
    channel_decay=True, decay_rank=5, gate_rank=5, norm=F.NormConfig(),
)  # fmt: skip
# As transformers' configs of Qwen3.5's mixtures and of Kimi Linear are where nothing else is said.
QWEN = [{"D": 2048, "H": 32, "K": 16, "G": 2, "E": 128, "V": 128, "W": 4, "Y": 1}] * 3
QWEN += [{"D": 2048, "H": 16, "K": 2, "G": 8, "E": 256, "V": 256}]
KIMI = [{"D": 2304, "H": 32, "K": 32, "G": 1, "E": 128, "V": 128, "W": 4, "Y": 128, "L": 128}] * 3
KIMI += [{"D": 2304, "H": 32, "L": 512, "N": 128, "R": 64, "E": 192, "V": 128, "NV": 256, "LR": 576}]
ASKED = {"B": 1, "S": 32768, "dtype": torch.bfloat16, "causal": True}
EIGHT = sh.Mesh(g=2, u=4)


def test_a_stack_like_qwen():
    assert_expected_inline(
        str(sh.beside(sh.hybrid(), sh.gdn_scan("g", "u")).stack(EIGHT, QWEN * 10, **ASKED)),
        """\
40 layers by hybrid(ulysses="u", gather="g") beside gdn_scan("g", "u")
mesh: g=2 u=4     sizes: B=1 S=32768     bfloat16     causal
between layers activations lie as B S/g/u D

gated delta net: 30 layers, 0..2,4..6,8..10,...     each: D=2048 H=32 K=16 E=128 V=128 W=4
  reshard between layers: none
                     collective                                              sends                  receives  copies
  forward   q, k, v  all-to-all over g/u      S/g/u -> S               0 to 49,152               0 to 49,152   1 + 1
            summary  all-gather over g/u      P/g/u -> P                29,360,128                29,360,128   0 + 0
  backward  summary  reduce-scatter over g/u  P -> P/g/u                29,360,128                29,360,128   0 + 0
            q, k, v  all-to-all over g/u      S -> S/g/u               0 to 49,152               0 to 49,152   1 + 1
  in all                                                  58,769,408 to 58,818,560  58,769,408 to 58,818,560

attention: 10 layers, 3..39 by 4     each: D=2048 H=16 K=2 E=256 V=256
  reshard between layers: none
                     collective                                                       sends     receives  copies
  forward   q, k, v  all-to-all over u      S/g/u -> S/g, H -> H/u, K -> K@H/u   37,748,736   37,748,736   1 + 0
            k, v     all-gather over g      S/g -> S                             16,777,216   16,777,216   1 + 0
            o        all-to-all over u      S/g -> S/g/u, H/u -> H               25,165,824   25,165,824   0 + 1
  backward  o        all-to-all over u      S/g/u -> S/g, H -> H/u               25,165,824   25,165,824   1 + 0
            k, v     reduce-scatter over g  S -> S/g                             16,777,216   16,777,216   1 + 0
            q, k, v  all-to-all over u      S/g -> S/g/u, H/u -> H, K@H/u -> K   37,748,736   37,748,736   1 + 1
  in all                                                                        159,383,552  159,383,552

a step           layers  exchanges                           sends                        receives                            flops forward   peak bytes
gated delta net      30        120  1,763,082,240 to 1,764,556,800  1,763,082,240 to 1,764,556,800                          773,094,113,280  336,756,992
attention            10         60                   1,593,835,520                   1,593,835,520  5,497,893,683,200 to 16,493,009,960,960  226,492,416
in all               40        180  3,356,917,760 to 3,358,392,320  3,356,917,760 to 3,358,392,320  6,270,987,796,480 to 17,266,104,074,240  336,756,992""",
    )


def test_a_stack_like_kimi():
    layout = sh.beside(sh.mla_latent("u", "g"), sh.gdn_scan("g"))
    assert_expected_inline(
        str(layout.stack(EIGHT, KIMI * 6 + KIMI[:3], **ASKED)),
        """\
27 layers by mla_latent("u", "g") beside gdn_scan("g")
mesh: g=2 u=4     sizes: B=1 S=32768     bfloat16     causal
between layers activations lie as B S/g/u D

gated delta net: 21 layers, 0..2,4..6,8..10,...     each: D=2304 H=32 K=32 E=128 V=128 W=4 Y=128
  reshard in: B S/g/u D -> B S/g D
  reshard out: B S/g D -> B S/g/u D
                     collective                                 sends     receives  copies
  forward   x        all-gather over u      S/g/u -> S/g   56,623,104   56,623,104   0 + 0
            q, k, v  all-to-all over g      S/g -> S      0 to 73,728  0 to 73,728   1 + 1
            summary  all-gather over g      P/g -> P        4,194,304    4,194,304   0 + 0
  backward  summary  reduce-scatter over g  P -> P/g        4,194,304    4,194,304   0 + 0
            q, k, v  all-to-all over g      S -> S/g      0 to 73,728  0 to 73,728   1 + 1
            x        reduce-scatter over u  S/g -> S/g/u   56,623,104   56,623,104   0 + 0
  in all                                                  121,708,544  121,708,544

latent attention: 6 layers, 3..23 by 4     each: D=2304 H=32 L=512 N=128 R=64 V=128
  reshard between layers: none
                                 collective                                             sends     receives  copies
  forward   kv_latent, key_rope  all-gather over g/u      S/g/u -> S               33,030,144   33,030,144   1 + 0
            q                    all-to-all over u        S/g/u -> S/g, H -> H/u   37,748,736   37,748,736   1 + 0
            o                    all-to-all over u        S/g -> S/g/u, H/u -> H   25,165,824   25,165,824   0 + 1
  backward  o                    all-to-all over u        S/g/u -> S/g, H -> H/u   25,165,824   25,165,824   1 + 0
            q                    all-to-all over u        S/g -> S/g/u, H/u -> H   37,748,736   37,748,736   0 + 1
            kv_latent, key_rope  reduce-scatter over g/u  S -> S/g/u               33,030,144   33,030,144   1 + 0
  in all                                                                          191,889,408  191,889,408

a step            layers  exchanges          sends       receives                            flops forward     peak bytes
gated delta net       21        126  2,555,879,424  2,555,879,424                        2,164,663,517,184  1,712,775,424
latent attention       6         36  1,151,336,448  1,151,336,448  4,329,578,692,608 to 12,782,074,331,136    499,646,464
in all                27        162  3,707,215,872  3,707,215,872  6,494,242,209,792 to 14,946,737,848,320  1,712,775,424""",
    )


STACKS = [
    (sh.beside(sh.hybrid(), sh.gdn_scan("g", "u")), {"g": 2, "u": 2}, (DELTA, DELTA, HEADS, CHANNELS)),
    (sh.beside(sh.hybrid(overlap=True), sh.gdn_scan("g")), {"g": 2, "u": 2}, (DELTA, HEADS, DELTA, HEADS)),
    (sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 3}, (HEADS, DELTA, CHANNELS)),
    (sh.beside(sh.mla_latent(), sh.gdn_ulysses(overlap=True)), {"u": 4}, (DELTA, LATENT)),
    (sh.beside(sh.mla_latent("u", "g", dp="dp"), sh.gdn_scan("g", dp="dp")), {"g": 3, "u": 2, "dp": 2},
     (CHANNELS, CHANNELS, LATENT)),
    (sh.beside(sh.all_gather(exchange="needed"), sh.gdn_scan("g")), {"g": 4}, (DELTA, HEADS)),
    (sh.gdn_scan(), {"cp": 3}, (DELTA, CHANNELS)),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "axes", "attentions"), STACKS)
@pytest.mark.parametrize(("S", "dtype"), [(13, torch.float64), (3, torch.float64), (7, torch.bfloat16)])
def test_a_stack_is_what_a_trace_has(layout, axes, attentions, S, dtype):
    """Also in half precision, in which a state and what a shard does to it stay in fp32."""
    cfg, _ = model(*((attention, MLP) for attention in attentions))
    params = F.tree.map(lambda p: p.requires_grad_(), F.Decoder.init(cfg, 0, dtype=dtype))
    mesh, tokens = sh.Mesh(**axes), torch.randint(0, 31, (3, S))
    plan = layout.stack(
        mesh, [each.attention.sizes for each in cfg.layers], B=3, S=S, dtype=dtype, causal=True
    )  # fmt: skip
    record = sh.trace(mesh)
    run = sh.simulate(sh.shard(F.decoder, layout, mesh, S=S), record.mesh)
    run(params, tokens, cfg)[0].sum().backward()

    def said(events):
        return [(e.what, e.kind, e.axes, e.sent, e.received, e.call.edges, e.call.backward) for e in events]

    for rank in range(mesh.size):
        assert said(plan.events(rank)) == said(record.of(rank))
        assert plan.bytes(rank) == record.bytes(rank)
    assert plan.exchanges == record.count()


def test_layers_that_are_alike_are_one_kind():
    plan = sh.beside(sh.ulysses(), sh.gdn_ulysses()).stack(sh.Mesh(u=2), QWEN * 10, B=1, S=64)
    one = sh.beside(sh.ulysses(), sh.gdn_ulysses()).stack(sh.Mesh(u=2), QWEN, B=1, S=64)
    assert [len(kind.layers) for kind in plan.kinds] == [30, 10]
    assert plan.kinds[1].layers == tuple(range(3, 40, 4))
    assert plan.exchanges == 10 * one.exchanges
    assert plan.bytes(1) == tuple(10 * n for n in one.bytes(1))
    assert plan.flops == tuple(10 * n for n in one.flops)
    assert plan._repr_html_().startswith("<div")


def test_hundreds_of_ranks():
    plan = sh.beside(sh.hybrid(), sh.gdn_scan("g", "u")).stack(sh.Mesh(g=64, u=8), QWEN, **ASKED | {"S": 2**20})
    assert sum(len(found.ranks) for found in plan.kinds[0].plan.classes) == 512
    assert "in all" in str(plan)


def test_layouts_ranked():
    """Heads that move cost bytes by the token, a state that goes round costs arithmetic and one exchange."""
    costs = sh.Costs(dict.fromkeys(("u", "cp"), 2e-5), dict.fromkeys(("u", "cp"), 5e10), 4e14)
    found = []
    for S in (1024, 65536):
        sizes = {"B": 1, "S": S, "H": 32, "K": 16, "E": 128, "V": 128, "W": 4}
        layouts = [sh.gdn_ulysses("cp"), sh.gdn_scan("cp"), (sh.gdn_ulysses(), sh.Mesh(u=8)), sh.gdn_ulysses("g")]
        found.append(sh.best(layouts, sh.Mesh(cp=8), sizes, costs, dtype=torch.bfloat16))
    assert [ranking[0].layout.name for ranking in found] == ['gdn_ulysses("cp")', 'gdn_scan("cp")']
    assert_expected_inline(
        "\n\n".join(map(str, found)),
        """\
layout                     exchanges        core  peak bytes
gdn_ulysses("cp") on cp=8   0.191 ms  0.00302 ms   8,462,368  4 exchanges, 5,533,696 bytes, 10,808 elements a token, even work
gdn_ulysses("u") on u=8     0.191 ms  0.00302 ms   8,462,368  4 exchanges, 5,533,696 bytes, 10,808 elements a token, even work
gdn_scan("cp") on cp=8       1.26 ms  0.00604 ms  74,645,760  4 exchanges, 58,818,560 bytes, whatever S is, even work
gdn_ulysses("g")                   -           -           -  gdn_ulysses("g") does not use cp=8, over which tokens are split: each part would begin ...
exchanges: latency + bytes of the busiest rank / bandwidth, one after the other, forward and backward
core: 3 x flops of the busiest rank
elements a token: received forward by the busiest rank, for each token of a rank's share

layout                     exchanges      core   peak bytes
gdn_scan("cp") on cp=8       1.26 ms  0.387 ms  673,349,888  4 exchanges, 58,818,560 bytes, whatever S is, even work
gdn_ulysses("cp") on cp=8    7.16 ms  0.193 ms  541,073,440  4 exchanges, 354,156,544 bytes, 10,808 elements a token, even work
gdn_ulysses("u") on u=8      7.16 ms  0.193 ms  541,073,440  4 exchanges, 354,156,544 bytes, 10,808 elements a token, even work
gdn_ulysses("g")                   -         -            -  gdn_ulysses("g") does not use cp=8, over which tokens are split: each part would begin ...
exchanges: latency + bytes of the busiest rank / bandwidth, one after the other, forward and backward
core: 3 x flops of the busiest rank
elements a token: received forward by the busiest rank, for each token of a rank's share""",
    )


def test_what_cannot_be_a_stack():
    mesh, both = sh.Mesh(u=2), sh.beside(sh.ulysses(), sh.gdn_ulysses())
    said = []
    for layout, layers, sizes in (
        (sh.ulysses(), QWEN, {"B": 1, "S": 8}),
        (sh.gdn_ulysses(), QWEN, {"B": 1, "S": 8}),
        (both, [QWEN[3], QWEN[0] | {"H": 1, "K": 1, "G": 1}], {"B": 1, "S": 8}),
        (both, QWEN, {"B": 1}),
    ):
        with pytest.raises(SpecError) as error:
            layout.stack(mesh, layers, **sizes)
        said.append(str(error.value))
    layer = F.LayerConfig(attention=DELTA, mlp=F.MLPConfig(hidden_size=10, intermediate_size=6))
    cfg = F.DecoderConfig(vocab_size=9, hidden_size=10, layers=(layer,))
    for layers, sizes in (
        ([], {}),
        (cfg, {}),
        (cfg.layers, {}),
        ([DELTA.sizes, DELTA], {}),
        (DELTA.sizes, {}),
        ([DELTA.sizes], {"H": 4}),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            both.stack(mesh, layers, B=1, S=8, **sizes)
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
layers[0]: gated delta net, D=2048 H=32 K=16 G=2 E=128 V=128 W=4 Y=1, for which ulysses("u") has no rules
    mesh: u=2     fix: beside(attention, gdn), a layout of each
layers[3]: attention, D=2048 H=16 K=2 G=8 E=256 V=256, for which gdn_ulysses("u") has no rules
    mesh: u=2     fix: beside(attention, gdn), a layout of each
ulysses("u") beside gdn_ulysses("u"): H=1 value heads are fewer than u=2 ranks
    B S (K/u G) V
    mesh: u=2     fix: gdn_scan("u")
a plan lacks sizes: S
    sizes: V=128 Y=1 D=2048 H=32 K=16 G=2 E=128 W=4 B=1 N=128     fix: S=..., globally
stack(layers=...): at least one layer is needed
    fix: [each.attention.sizes for each in cfg.layers]
stack(layers=...): sizes of each layer are needed, in a sequence, not DecoderConfig
    fix: [each.attention.sizes for each in cfg.layers]
stack(layers=...): layers[0] is LayerConfig, not sizes by letter
    fix: [each.attention.sizes for each in cfg.layers]
stack(layers=...): layers[1] is GDNConfig, not sizes by letter
    fix: [each.sizes for each in layers]
stack(layers=...): sizes of each layer are needed, in a sequence, not dict
    fix: [each.attention.sizes for each in cfg.layers]
stack(H=4): layers[0] says H=8 itself
    fix: without H, or other sizes of this layer""",
    )
