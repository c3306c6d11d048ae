"""Packed documents: only the keys that a rank's queries may see are sent and attended to."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

from . import attention_cases as cases


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def tensors(S, B=2, H=6, K=3, E=4):
    shapes = (B, S, H, E), (B, S, K, E), (B, S, K, E)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def alone(xs, cu, **options):
    """Each document by itself: no mask of ours has a part in it."""
    parts = [
        F.dot_product_attention(*(x[:, a:b] for x in xs), **options) for a, b in itertools.pairwise(cu) if b > a
    ]  # fmt: skip
    return torch.cat(parts, 1)


BOUNDARIES = [
    [0, 13],
    [0, 1, 2, 3, 13],  # lengths of 1
    [0, 5, 12, 13],
    [0, 0, 3, 3, 13, 13, 13],  # empty documents, as where cu_seqlens is padded to a fixed length
    [0, 11, 13],  # padding at the tail, a document of its own
    list(range(14)),
]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("axes", [{"g": 3}, {"g": 2, "u": 2}, {"u": 2}, {"g": 4}])
def test_needed_equals_all_equals_each_document_alone(axes, causal, zigzag):
    for cu in BOUNDARIES:
        if zigzag:
            cu = [*cu[:-1], 16 if axes.get("g") != 3 else 18]
        xs, options = tensors(cu[-1]), {"causal": causal}
        want = alone(xs, cu, **options)
        weights = torch.randn_like(want)
        wanted = torch.autograd.grad(want, xs, weights)
        for exchange in ("all", "needed") if "g" in axes else ("all",):
            made = {("g",): sh.all_gather, ("u",): sh.ulysses}.get(tuple(axes), sh.hybrid)
            layout = made(zigzag=zigzag, **({"exchange": exchange} if "g" in axes else {}))
            mesh = sh.Mesh(**axes)
            core = sh.shard(F.dot_product_attention, layout, mesh, S=cu[-1], H=6, K=3)
            y = sh.simulate(core, mesh)(*xs, cu_seqlens=torch.tensor(cu), **options)
            equal(y, want)
            equal(torch.autograd.grad(y, xs, weights), wanted)


def seen_by(layout, mesh, cu, **options):
    """What each rank's core got: queries, keys, and of how many tokens the memory is in which they lie."""
    seen = []

    def core(q, k, v, *, q_positions, **told):
        both = (k.numel() + v.numel()) // k.shape[1]
        seen.append((q.shape[1], k.shape[1], k.untyped_storage().nbytes() // k.element_size() // both))
        return F.dot_product_attention(q, k, v, q_positions=q_positions, causal=True, **told)

    record = sh.trace(mesh)
    run = sh.simulate(sh.shard(core, layout, mesh, S=cu[-1], H=6, K=3), record.mesh)
    xs = tensors(cu[-1])
    y = run(*xs, cu_seqlens=cu, **options)
    torch.autograd.grad(y.sum(), xs)
    return sorted(seen), record


@pytest.mark.parametrize("cu", [[0, 12], [0, 7, 12], [0, 3, 6, 9, 12], [0, 1, 12]])
def test_bytes_and_keys_are_those_of_the_plan(cu):
    mesh = sh.Mesh(g=4)
    for exchange in ("all", "needed"):
        layout = sh.all_gather(exchange=exchange)
        plan = layout.plan(mesh, B=2, S=12, H=6, K=3, E=4, dtype=torch.float64, causal=True, cu_seqlens=cu)
        # A core of no causal argument: it is the layout that must be told.
        core = sh.shard(F.dot_product_attention, layout, mesh, S=12, H=6, K=3)
        record, xs = sh.trace(mesh), tensors(12)
        y = sh.simulate(core, record.mesh)(*xs, cu_seqlens=cu, causal=True)
        torch.autograd.grad(y.sum(), xs)
        for rank in range(4):
            assert record.bytes(rank) == plan.bytes(rank)
            found = [(e.what, e.kind, e.sent, e.received, e.copies) for e in record.of(rank)]
            assert found == [(e.what, e.kind, e.sent, e.received, e.copies) for e in plan.of(rank).events]


def test_needed_sends_what_is_needed_and_no_more():
    mesh = sh.Mesh(g=4)
    plan = sh.all_gather(exchange="needed").plan(
        mesh, B=2, S=12, H=6, K=3, E=4, dtype=torch.float64, causal=True, cu_seqlens=[0, 2, 7, 12]
    )
    token = 2 * 3 * (4 + 4) * 8  # bytes of a key and a value of all heads and rows
    # Rank 1 holds 3..5 of the document 2..6: it wants 2 of rank 0. Rank 2 holds 6..8: 2..5, of ranks 0 and 1.
    # Rank 3 holds 9..11 of the document 7..11, and wants 7 and 8 of rank 2.
    receives = [plan.of(r).events[0].received // token for r in range(4)]
    sends = [plan.of(r).events[0].sent // token for r in range(4)]
    assert receives == [0, 1, 4, 2]
    assert sends == [2, 3, 2, 0]
    assert [plan.of(r).keys for r in range(4)] == [3, 4, 7, 5]
    gathered = sh.all_gather().plan(mesh, B=2, S=12, H=6, K=3, E=4, dtype=torch.float64, causal=True)
    assert [gathered.of(r).events[0].received // token for r in range(4)] == [9] * 4


def test_nothing_is_sent_where_no_document_crosses():
    mesh = sh.Mesh(g=4)
    found, record = seen_by(sh.all_gather(exchange="needed"), mesh, [0, 3, 6, 9, 12])
    assert len(record) == 0
    assert [(q, k) for q, k, _ in found] == [(3, 3)] * 4
    plan = sh.all_gather(exchange="needed").plan(mesh, B=1, S=12, H=6, K=3, E=4, cu_seqlens=[0, 3, 6, 9, 12])
    assert plan.exchanges == ()
    assert "nothing moves" in str(plan)


def test_only_the_needed_interval_is_attended_to_as_a_view():
    mesh = sh.Mesh(g=3)
    found, _ = seen_by(sh.all_gather(), mesh, [0, 7, 12])  # 0..3, 4..7, 8..11: of 7 documents end
    # The core has no causal argument, so whole documents count.
    assert found == [(4, 5, 12), (4, 7, 12), (4, 12, 12)]


def test_a_window_bounds_what_is_sent():
    mesh = sh.Mesh(g=4)
    plan = sh.all_gather(exchange="needed").plan(mesh, B=1, S=16, H=2, K=1, E=1, causal=True, window=3)
    assert [plan.of(r).keys for r in range(4)] == [4, 6, 6, 6]
    assert [plan.of(r).events[0].received for r in range(4)] == [0] + [2 * 2 * 4] * 3
    xs = tensors(16)
    core = sh.shard(F.dot_product_attention, sh.all_gather(exchange="needed"), mesh, S=16, H=6, K=3)
    y, want = (fn(*xs, causal=True, window=3) for fn in (sh.simulate(core, mesh), F.dot_product_attention))
    equal(y, want)
    equal(torch.autograd.grad(y.sum(), xs), torch.autograd.grad(want.sum(), xs))


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 5], "cu_seqlens=[0, 5] ends with 5, but there are S=12 tokens\n    fix: append 12: padding is then a document"),
        ([0, 5, 13], "ends with 13, but there are S=12 tokens\n    fix: end with 12"),
        ([0, 7, 5, 12], "5 comes after 7; it must ascend"),
        ([1, 12], "it starts with 0 and ends with S=12"),
        ([0], "it starts with 0"),
        ([0.0, 12.0], "whole numbers are needed"),
        (torch.tensor([0.0, 12.0]), "one dimension of whole numbers is needed, not float32 2"),
        (torch.tensor([[0, 12]]), "one dimension of whole numbers is needed, not int64 1x2"),
        ((torch.tensor([0, 12]), torch.tensor([0, 5, 12])), "cu_seqlens differ between queries and keys: [0, 12] and [0, 5"),
        ("0 12", "whole numbers are needed"),
    ],
)  # fmt: skip
def test_boundaries_that_cannot_be(cu, message):
    mesh = sh.Mesh(g=2)
    record = sh.trace(mesh)
    core = sh.shard(F.dot_product_attention, sh.all_gather(exchange="needed"), mesh, S=12, H=6, K=3)
    with pytest.raises(ValueError, match="cu_seqlens") as error:
        sh.simulate(core, record.mesh)(*tensors(12), cu_seqlens=cu)
    assert message in str(error.value)
    assert not len(record)


def test_documents_said_twice():
    core = sh.shard(F.dot_product_attention, sh.all_gather(), sh.Mesh(g=2), S=4, H=6, K=3)
    with pytest.raises(ValueError, match="cu_seqlens and segment_ids both say"):
        sh.simulate(core, sh.Mesh(g=2))(
            *tensors(4), cu_seqlens=[0, 4], segment_ids=torch.zeros(2, 4, dtype=torch.int64)
        )


def test_other_positions_with_needed_keys():
    mesh, xs = sh.Mesh(g=2), tensors(6)
    core = sh.shard(F.dot_product_attention, sh.all_gather(exchange="needed"), mesh, S=6, H=6, K=3)
    usual, other = torch.arange(6)[None], torch.arange(6).flip(0)[None]
    y = sh.simulate(core, mesh)(*xs, causal=True, q_positions=usual, k_positions=usual)
    equal(y, F.dot_product_attention(*xs, causal=True))
    with pytest.raises(
        ValueError, match=r"positions with exchange=.needed.[\s\S]*fix: exchange=.all., or no positions"
    ):
        sh.simulate(core, mesh)(*xs, causal=True, q_positions=other, k_positions=other)
    every = sh.shard(F.dot_product_attention, sh.all_gather(), mesh, S=6, H=6, K=3)
    y = sh.simulate(every, mesh)(*xs, causal=True, q_positions=other, k_positions=other)
    equal(y, F.dot_product_attention(*xs, causal=True, q_positions=other, k_positions=other))


@pytest.mark.parametrize("text", ["B S/g/u D", "B S/g:zigzag/u D", "S/u B", "M B S/g", "S"])
def test_positions_of_any_spec(text):
    mesh, cu = sh.Mesh(g=2, u=2), [0, 3, 4, 16]
    within = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])
    spec = sh.Spec.parse(text)
    for rank in range(4):
        (atom,) = [atom for atom in spec.atoms if atom.name == "S"]
        held = sh.Spec.parse(str(atom)).slices({"S": 16}, mesh, rank)
        found = sh.positions_of(text, mesh, rank, cu_seqlens=cu)
        assert torch.equal(found, within[held][None])
        assert torch.equal(sh.positions_of(text, mesh, rank, S=16), torch.arange(16)[held][None])
    cos, _ = F.rope_tables(sh.positions_of("B S/g", mesh, 3, cu_seqlens=cu), F.RopeConfig(), 8, torch.float64)
    whole, _ = F.rope_tables(within[None], F.RopeConfig(), 8, torch.float64)
    equal(cos, whole[:, 8:])


def test_positions_of_no_tokens():
    with pytest.raises(sh.SpecError, match="positions are those of a dimension S"):
        sh.positions_of("B T/u", sh.Mesh(u=2), 0, S=4)
    with pytest.raises(sh.SpecError, match="no size for S"):
        sh.positions_of("B S/u", sh.Mesh(u=2), 0)


def test_random_documents():
    for seed in range(40):
        case = cases.make(1000 + seed, tp=False)
        S = case.sizes["S"]
        case.options.pop("segment_ids", None)
        case.options["cu_seqlens"] = [0, *sorted(torch.randint(0, S + 1, (3,)).tolist()), S]
        (y, grads), (want, wanted) = cases.sharded(case), cases.dense(case)
        torch.testing.assert_close(
            [y, *grads], [want, *wanted], rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}"
        )
