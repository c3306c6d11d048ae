"""Plans of gated delta nets: as printed, as the formulas say, and as what then happens."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding.schedules import schedule_of

from . import gdn_cases as cases

SMALL = {"B": 2, "S": 97, "H": 8, "K": 4, "E": 16, "W": 4}


def test_ulysses():
    assert_expected_inline(
        str(sh.gdn_ulysses().plan(sh.Mesh(u=3), **SMALL, V=32)),
        """\
gdn_ulysses("u")
mesh: u=3     sizes: B=2 S=97 H=8 K=4 E=16 V=32 W=4     float32     a state is carried

                         collective                                          sends            receives  copies
forward   q, k, v, b, a  all-to-all over u  S/u -> S, K -> K/u    52,800 to 76,800   52,000 to 102,400   1 + 0
          o              all-to-all over u  S -> S/u, K/u -> K    33,280 to 65,536    33,792 to 49,152   1 + 1
backward  o              all-to-all over u  S/u -> S, K -> K/u    33,792 to 49,152    33,280 to 65,536   1 + 1
          q, k, v, b, a  all-to-all over u  S -> S/u, K/u -> K   52,000 to 102,400    52,800 to 76,800   1 + 1
in all                                                          211,232 to 254,528  211,232 to 254,528

ranks  tokens  convolved        heads      flops  peak bytes
0          97         97  4 reading 2  2,383,872     527,040
1,2        97         97  2 reading 1  1,191,936     386,352

order, forward: launch q,k,v,b,a (u) > wait q,k,v,b,a (u) > core > launch o (u) > wait o (u)
order, backward: launch o (u) > wait o (u) > core > launch q,k,v,b,a (u) > wait q,k,v,b,a (u)
gradients: x, q, k, v, b, a whole; q_conv, k_conv, v_conv, a_log, dt_bias a pending sum over u; parameters over every
    axis that does not split them""",
    )


def test_value_heads_are_dealt_out_where_key_heads_are_few():
    assert_expected_inline(
        str(sh.gdn_ulysses(overlap=True).plan(sh.Mesh(u=4), **{**SMALL, "K": 2})),
        """\
gdn_ulysses("u", overlap=True)
mesh: u=4     sizes: B=2 S=97 H=8 K=2 E=16 W=4     float32     a state is carried

                         collective                                                      sends            receives  copies
forward   q, k, v, b, a  all-to-all over u  S/u -> S, K -> K@H/u, H -> H/u    39,168 to 40,800    39,168 to 39,712   1 + 0
          o              all-to-all over u  S -> S/u, H/u -> H                18,432 to 18,688    18,432 to 19,200   1 + 1
backward  o              all-to-all over u  S/u -> S, H -> H/u                18,432 to 19,200    18,432 to 18,688   1 + 1
          q, k, v, b, a  all-to-all over u  S -> S/u, K@H/u -> K, H/u -> H    39,168 to 39,712    39,168 to 40,800   1 + 1
in all                                                                      116,000 to 117,600  116,000 to 117,600

ranks  tokens  convolved        heads    flops  peak bytes
0          97         97  2 reading 1  595,968     204,928
1..3       97         97  2 reading 1  595,968     201,088

order, forward: launch q,k,v,b,a (u) > project z > wait q,k,v,b,a (u) > core > launch o (u) > wait o (u)
order, backward: launch o (u) > wait o (u) > core > launch q,k,v,b,a (u) > project z > wait q,k,v,b,a (u)
gradients: x, q, k, v, b, a whole; q_conv, k_conv, v_conv, a_log, dt_bias a pending sum over u; parameters over every
    axis that does not split them""",
    )


def test_scan():
    assert_expected_inline(
        str(sh.gdn_scan().plan(sh.Mesh(cp=4), **SMALL)),
        """\
gdn_scan("cp")
mesh: cp=4     sizes: B=2 S=97 H=8 K=4 E=16 W=4     float32     a state is carried

                   collective                                      sends            receives  copies
forward   q, k, v  all-to-all over cp      S/cp -> S          0 to 6,144          0 to 6,144   1 + 1
          summary  all-gather over cp      P/cp -> P              98,304              98,304   0 + 0
backward  summary  reduce-scatter over cp  P -> P/cp              98,304              98,304   0 + 0
          q, k, v  all-to-all over cp      S -> S/cp          0 to 6,144          0 to 6,144   1 + 1
in all                                                202,752 to 208,896  202,752 to 208,896

ranks  tokens  convolved        heads      flops  peak bytes
0          25         25  8 reading 4  1,228,800     451,904
1..3       24         27  8 reading 4  1,179,648     456,768

order, forward: launch q,k,v (cp) > wait q,k,v (cp) > core > launch summary (cp) > wait summary (cp) > states
order, backward: states > launch summary (cp) > wait summary (cp) > core > launch q,k,v (cp) > wait q,k,v (cp)
gradients: x, q, k, v, b, a whole; q_conv, k_conv, v_conv, a_log, dt_bias a pending sum over cp; parameters over every
    axis that does not split them""",
    )


def test_scan_of_channels_over_two_axes_within_tp():
    plan = sh.gdn_scan("g", "u", tp="tp").plan(
        sh.Mesh(tp=2, g=2, u=2), **SMALL, V=24, Y=16, D=64, cu_seqlens=[0, 40, 97]
    )
    assert_expected_inline(
        str(plan),
        """\
gdn_scan("g", "u", tp="tp")
mesh: tp=2 g=2 u=2     sizes: B=2 S=97 H=8 K=4 E=16 V=24 W=4 Y=16 D=64     float32     a state is carried, 2 documents

                   collective                                        sends            receives  copies
forward   q, k, v  all-to-all over g/u      S/g/u -> S          0 to 3,840          0 to 3,840   1 + 1
          summary  all-gather over g/u      P/g/u -> P              61,440              61,440   0 + 0
          out      all-reduce over tp                     12,288 to 12,800    12,288 to 12,800   0 + 0
backward  out      all-reduce over tp                     12,288 to 12,800    12,288 to 12,800   0 + 0
          summary  reduce-scatter over g/u  P -> P/g/u              61,440              61,440   0 + 0
          q, k, v  all-to-all over g/u      S -> S/g/u          0 to 3,840          0 to 3,840   1 + 1
in all                                                  151,296 to 155,136  151,296 to 155,136

ranks      tokens  convolved        heads    flops  peak bytes
0,4            25         25  4 reading 2  768,000     309,072
1..3,5..7      24         27  4 reading 2  737,280     311,056

order, forward: launch q,k,v (g/u) > wait q,k,v (g/u) > core > launch summary (g/u) > wait summary (g/u) > states >
    launch out (tp) > wait out (tp)
order, backward: launch out (tp) > wait out (tp) > states > launch summary (g/u) > wait summary (g/u) > core > launch
    q,k,v (g/u) > wait q,k,v (g/u)
gradients: q, k, v, b, a whole; x a pending sum over tp; q_conv, k_conv, v_conv, a_log, dt_bias a pending sum over g,
    u; parameters over every axis that does not split them""",
    )


def test_layouts_are_printed():
    assert_expected_inline(
        f"{sh.gdn_ulysses(tp='tp')}\n{sh.gdn_scan('g', 'u')}",
        """\
gdn_ulysses("u", tp="tp")
  x            B S/u D                               stays
  out          B S/u D +tp -> B S/u D                all-reduce over tp
  embedded     B S/u D +tp -> B S/u D                all-reduce over tp
  shares       P/tp B S/u N -> P B S/u N             all-gather over tp
  gdn.q        B S/u K/tp E -> B S K/tp/u E          all-to-all over u
  gdn.k        B S/u K/tp E -> B S K/tp/u E          all-to-all over u
  gdn.v        B S/u (K/tp G) V -> B S (K/tp/u G) V  all-to-all over u
  gdn.b        B S/u (K/tp G) -> B S (K/tp/u G)      all-to-all over u
  gdn.a        B S/u (K/tp G) Y -> B S (K/tp/u G) Y  all-to-all over u
  gdn.q_conv   (K/tp E) I W -> (K/tp/u E) I W        a slice
  gdn.k_conv   (K/tp E) I W -> (K/tp/u E) I W        a slice
  gdn.v_conv   (K/tp G V) I W -> (K/tp/u G V) I W    a slice
  gdn.a_log    (K/tp G) -> (K/tp/u G)                a slice
  gdn.dt_bias  (K/tp G Y) -> (K/tp/u G Y)            a slice
  gdn.o        B S (K/tp/u G) V -> B S/u (K/tp G) V  all-to-all over u
  h, logits, tokens, targets, weights, rope, rope_positions, loss, gdn.cache_q, gdn.cache_k,
  gdn.cache_v, gdn.cache_state: stay as they come
  gdn.q_positions, gdn.q_segment_ids, gdn.k_positions, gdn.k_segment_ids: whole on every rank
gdn_scan("g", "u")
  x                  B S/g/u D                           stays
  gdn.q              B S/g/u K E -> B S K E              W-1 tokens in front, all-to-all over g/u
  gdn.k              B S/g/u K E -> B S K E              W-1 tokens in front, all-to-all over g/u
  gdn.v              B S/g/u (K G) V -> B S (K G) V      W-1 tokens in front, all-to-all over g/u
  gdn.summary        P/g/u B (K G) N E -> P B (K G) N E  all-gather over g/u
  gdn.tail           P/g/u B (K C) U -> P B (K C) U      all-gather over g/u
  gdn.rows           P/g/u B -> P B                      all-gather over g/u
  gdn.q_positions    B S -> B S/g/u                      whole on every rank, then a slice
  gdn.q_segment_ids  B S -> B S/g/u                      whole on every rank, then a slice
  out, h, embedded, logits, tokens, targets, weights, rope, rope_positions, loss, gdn.b, gdn.a,
  gdn.q_conv, gdn.k_conv, gdn.v_conv, gdn.a_log, gdn.dt_bias, gdn.cache_q, gdn.cache_k, gdn.cache_v,
  gdn.cache_state, gdn.o: stay as they come
  gdn.k_positions, gdn.k_segment_ids: whole on every rank""",
    )


def test_bytes_of_a_scan_do_not_depend_on_the_sequence():
    mesh = sh.Mesh(cp=8)
    short, long = (sh.gdn_scan().plan(mesh, **{**SMALL, "S": S}) for S in (256, 2048))
    assert short.exchanges == long.exchanges
    assert [short.bytes(r) for r in range(8)] == [long.bytes(r) for r in range(8)]
    assert short.flops[1] * 8 == long.flops[1]


def chosen():
    """20 cases with tokens of each layout."""
    ways = [(cases.make(seed, kind=kind) for seed in itertools.count(3000)) for kind in ("ulysses", "scan")]
    return [case for way in ways for case in itertools.islice((case for case in way if case.x.shape[1]), 20)]


@pytest.mark.parametrize("case", chosen(), ids=lambda case: f"{case.layout.name.split('(')[0]} {case.seed}")
def test_the_plan_is_what_happens(case):
    """Every event of every rank, forward and backward, with its bytes and its copies."""
    mesh = sh.Mesh(**case.axes)
    record = sh.trace(mesh)
    cases.sharded(case, record.mesh)
    letters = "BSHKEVWYD" if "tp" in case.axes else "BSHKEVWY"
    sizes = {letter: n for letter, n in case.sizes.items() if letter in letters}
    plan = case.layout.plan(mesh, dtype=torch.float64, **sizes)
    for rank in range(mesh.size):
        assert facts(record.of(rank)) == facts(plan.of(rank).events), f"rank {rank}: {case}"


def facts(events):
    return [(e.what, e.kind, e.axes, e.call.title, e.sent, e.received, e.copies) for e in events]


@pytest.mark.parametrize(("layout", "axes"), [(sh.gdn_scan(), {"cp": 3}), (sh.gdn_ulysses(), {"u": 2})])
def test_parameters_are_counted_in_their_own_dtype(layout, axes):
    """Where activations are in half precision, those of the gates are in fp32, and so are their gradients."""
    params = F.GDN.init(cases.config(), 0, dtype=torch.bfloat16)
    schedule = schedule_of(layout.part("gdn"), sh.Mesh(**axes).axes)
    for name in ("a_log", "dt_bias", "q_conv", "k_conv", "v_conv"):
        assert (getattr(params, name).dtype == torch.float32) == (name in schedule.wide), name


def test_thousands_of_ranks():
    """As few classes as for a few ranks, each rehearsed once."""
    sizes = {**SMALL, "S": 1_000_003, "H": 64, "K": 64}
    plans = [
        sh.gdn_scan().plan(sh.Mesh(cp=4096), **sizes),
        sh.gdn_ulysses(tp="tp", dp="dp").plan(sh.Mesh(dp=64, tp=8, u=8), **{**sizes, "B": 64}, D=64),
    ]
    for plan in plans:
        assert sorted(itertools.chain(*(r.ranks for r in plan.classes))) == list(range(4096))
    assert [len(plan.classes) for plan in plans] == [4, 2]
    state = 2 * 64 * 16 * 32 * 4
    assert plans[0].forward[1].receives == (4095 * state, 4095 * state)


def test_what_a_plan_needs():
    said = []
    for layout, sizes in (
        (sh.gdn_scan(), {"B": 1, "S": 8, "H": 4, "K": 2, "E": 12}),
        (sh.gdn_ulysses(), {"S": 8, "H": 4, "E": 12, "W": 4}),
        (sh.gdn_scan(), {**SMALL, "N": 3}),
        (sh.gdn_scan(), {**SMALL, "P": 4}),
        (sh.gdn_scan(), {**SMALL, "L": 4}),
        (sh.gdn_ulysses(), {**SMALL, "H": 6}),
    ):
        with pytest.raises(sh.SpecError) as error:
            layout.plan(sh.Mesh(u=2, cp=1) if layout.name.startswith("gdn_u") else sh.Mesh(cp=2), **sizes)
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
a plan lacks sizes: W
    sizes: V=12 Y=1 B=1 S=8 H=4 K=2 E=12 G=2 N=24     fix: W=..., globally
a plan lacks sizes: B, K
    sizes: V=12 Y=1 S=8 H=4 E=12 W=4 N=12     fix: B=..., K=..., globally
N=3 and V=16 E=16 disagree
    fix: without N, which is 32
a plan has no place for P=4
    fix: B, S, H, K, E, V, W, G, Y or D
a plan has no place for L=4
    fix: B, S, H, K, E, V, W, G, Y or D
H=6 and K=4 disagree: H is K x G, and 4 does not divide 6
    fix: H=4, or another K""",
    )
