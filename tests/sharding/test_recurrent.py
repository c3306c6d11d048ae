"""Gated delta nets by heads and by tokens: values, gradients, what is sent, and what documents keep apart."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

from . import gdn_cases as cases
from .attention_cases import ids_of

RANDOM = 140


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_random_layouts_are_many():
    made = [cases.make(seed) for seed in range(RANDOM)]
    assert len({repr(case).split(": ", 1)[1] for case in made}) == RANDOM
    scans = [case for case in made if case.layout.name.startswith("gdn_scan")]
    heads = [case for case in made if case not in scans]
    assert min(len(scans), len(heads)) >= 60
    assert {case.x.shape[1] for case in made} == {*range(24)}
    assert {case.cfg.conv_kernel_dim for case in scans} == {2, 3, 4, 5}
    assert {case.over for case in scans} >= {2, 3, 4, 5, 6, 8}
    for some, least in (
        ((c.x.shape[1] < c.over for c in scans), 6),  # ranks without tokens
        ((0 < c.x.shape[1] // c.over < c.cfg.conv_kernel_dim - 1 for c in scans), 12),  # a halo of several ranks
        ((len(c.layout.split("S")) > 1 for c in scans), 15),
        ((tuple(a for a in c.axes if a in c.layout.split("S")) != c.layout.split("S") for c in scans), 8),
        ((c.cfg.num_key_heads // c.axes.get("tp", 1) < c.axes["u"] for c in heads), 12),
        ((c.cfg.num_key_heads % (c.axes.get("tp", 1) * c.axes["u"]) > 0 for c in heads), 15),
        (("tp" in c.axes and c.cfg.num_key_heads % c.axes["tp"] > 0 for c in made), 4),
        ((c.cfg.channel_decay for c in scans), 15),
        ((c.cfg.interleaved for c in made), 15),
        ((c.cfg.decay_rank is not None and c.cfg.gate_rank is not None for c in made), 5),
        (("positions" in c.options and "segment_ids" in c.options for c in made), 15),
        (("cu_seqlens" in c.options and c.x.shape[0] > 1 for c in made), 15),
    ):
        assert sum(some) >= least


@pytest.mark.parametrize("first", range(0, RANDOM, 20))
def test_random_layouts(first):
    for seed in range(first, first + 20):
        case = cases.make(seed)
        y, grads = cases.sharded(case)
        want, wanted = cases.dense(case)
        torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10, msg=lambda m, c=case: f"{c}\n{m}")
        torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, c=case: f"{c}\n{m}")
        if seed % 7 == 0:
            layout = dataclasses.replace(case.layout, overlap=not case.layout.overlap)
            other, others = cases.sharded(dataclasses.replace(case, layout=layout))
            assert all(torch.equal(a, b) for a, b in zip((y, *grads), (other, *others), strict=True)), repr(case)


B, S = 2, 11
CFG = cases.config()  # K=2 H=4 E=3 V=5 W=4


def record_of(layout, axes, S=S, cfg=CFG, backward=True, **options):
    """What happens in a layer under a layout, and in its backward."""
    mesh = sh.Mesh(**axes)
    record = sh.trace(mesh)
    x = torch.randn(B, S, 10, dtype=torch.float64, requires_grad=True)
    params = cases.weights(F.GDN.init(cfg, 0))
    y, _ = sh.simulate(sh.shard(F.gdn, layout, mesh, S=S), record.mesh)(params, x, cfg, **options)
    if backward:
        torch.autograd.grad(y.sum(), [x, *F.tree.leaves(params)])
    return record


def test_bytes_of_gdn_ulysses_are_the_formula():
    """Tokens of a rank with all heads become its heads of all tokens: s = 6 5, and of K=3 key heads k = 2 1."""
    K, G, E, V = 3, 2, 3, 5
    record = record_of(sh.gdn_ulysses(), {"u": 2}, cfg=cases.config(num_key_heads=K, num_value_heads=K * G))
    for rank, (s, k) in enumerate(((6, 2), (5, 1))):
        moved = [
            (s * (K - k) * (2 * E + G * (V + 2)), (S - s) * k * (2 * E + G * (V + 2))),
            ((S - s) * k * G * V, s * (K - k) * G * V),
        ]
        wanted = [(B * 8 * sent, B * 8 * received) for sent, received in moved]
        launches = [e for e in record.of(rank) if e.what == "launch"]
        assert [(e.sent, e.received) for e in launches if not e.call.backward] == wanted
        assert [(e.sent, e.received) for e in launches if e.call.backward] == [pair[::-1] for pair in wanted[::-1]]


@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2}])
def test_bytes_of_gdn_scan_do_not_depend_on_the_sequence(axes):
    K, H, E, V, W, P = 2, 4, 3, 5, 4, axes["cp"]
    for S in (12, 96, 768):
        record = record_of(sh.gdn_scan(), axes, S=S)
        for rank in range(P):
            halo = B * 8 * (W - 1) * (2 * K * E + H * V)
            state = B * 8 * (P - 1) * H * E * (E + V)
            launches = [e for e in record.of(rank) if e.what == "launch"]
            forward = [(halo * (rank < P - 1), halo * (rank > 0)), (state, state)]
            assert [(e.sent, e.received) for e in launches if not e.call.backward] == forward
            backward = [pair[::-1] for pair in forward[::-1]]
            assert [(e.sent, e.received) for e in launches if e.call.backward] == backward


def test_a_halo_reaches_as_far_as_it_must():
    """Of S=5 tokens over four ranks, s = 2 1 1 1, a convolution of W=5 reads four in front, of up to three ranks."""
    record = record_of(sh.gdn_scan(), {"cp": 4}, S=5, cfg=cases.config(conv_kernel_dim=5))
    token = B * 8 * (2 * 2 * 3 + 4 * 5)
    found = [next((e.sent // token, e.received // token) for e in record.of(rank)) for rank in range(4)]
    assert found == [(6, 0), (2, 2), (1, 3), (0, 4)]


def test_nothing_moves_on_one_rank():
    assert len(record_of(sh.gdn_scan(), {"cp": 1})) == 0
    assert len(record_of(sh.gdn_ulysses(), {"u": 1})) == 0


LAYOUTS = [
    (sh.gdn_ulysses(), {"u": 4}),
    (sh.gdn_scan(), {"cp": 4}),
    (sh.gdn_scan("g", "u"), {"u": 2, "g": 3}),
]


@pytest.mark.parametrize("boundaries", ["cu_seqlens", "segment_ids"])
@pytest.mark.parametrize(("layout", "axes"), LAYOUTS)
def test_a_document_has_no_part_in_another(layout, axes, boundaries):
    """Wherever a boundary lies: within a shard, between two, behind shards of one document."""
    mesh, S = sh.Mesh(**axes), 14
    params = cases.weights(F.GDN.init(CFG, 0))
    run = sh.simulate(sh.shard(F.gdn, layout, mesh, S=S), mesh)
    for cu in ([0, 4, S], [0, 1, 3, 11, S], [0, 7, 8, S], [0, 12, S]):
        told = cu if boundaries == "cu_seqlens" else ids_of(cu, B)
        x = torch.randn(B, S, 10, dtype=torch.float64)
        grad = torch.randn_like(x)
        for first, last in itertools.pairwise(cu):
            found = []
            for _ in range(2):
                again = x.clone().requires_grad_()
                y, _ = run(params, again, CFG, **{boundaries: told})
                mine = torch.zeros_like(x)
                mine[:, first:last] = grad[:, first:last]
                of_x, *rest = torch.autograd.grad(y, [again, *F.tree.leaves(params)], mine)
                none = torch.cat((of_x[:, :first], of_x[:, last:]), 1)
                equal(none, torch.zeros_like(none))
                found.append([y[:, first:last], of_x, *rest])
                others = torch.randn_like(x)
                others[:, first:last] = x[:, first:last]
                x = others
            equal(*found)
