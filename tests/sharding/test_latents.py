"""Latent attention under its layouts equals latent attention on one rank, with every gradient; and what it sends."""

from __future__ import annotations

import importlib
import textwrap
import threading

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from . import latent_cases as cases
from .test_overlap import Noting

LAYOUTS = {
    "mla_latent": (sh.mla_latent, ("u",), {"u": 3}),
    "mla_packed": (sh.mla_packed, ("u",), {"u": 3}),
    "mla_gather": (sh.mla_gather, ("g",), {"g": 3}),
    "mla_latent around a gather": (sh.mla_latent, ("u", "g"), {"g": 2, "u": 2}),
    "mla_packed around a gather": (sh.mla_packed, ("u", "g"), {"g": 2, "u": 2}),
}


def layout_of(name, **options):
    made, axes, mesh = LAYOUTS[name]
    return made(*axes, **options), sh.Mesh(**mesh)


def test_random_layouts_are_many():
    assert len({repr(cases.make(seed)).split(": ", 1)[1] for seed in range(200)}) == 200


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_layouts(first):
    for seed in range(first, first + 20):
        case = cases.make(seed)
        y, grads = cases.sharded(case)
        want, wanted = cases.dense(case)
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")
        torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")


# What each layout sends. S=11 tokens and H=4 heads over three ranks: s = 4 4 3, h = 2 1 1.
CFG = cases.config()
B, S, H, L, N, R, V, E = 2, 11, 4, 7, 3, 2, 4, 5


def record_of(name, cu=None, **options):
    """What happens in a layer under a layout, and in its backward."""
    layout, mesh = layout_of(name, **options)
    record = sh.trace(mesh)
    size = 12 if cu is not None else S
    x = torch.randn(B, size, 10, dtype=torch.float64, requires_grad=True)
    params = cases.weights(F.MLA.init(CFG, 0))
    y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=size), record.mesh)(params, x, CFG, cu_seqlens=cu)
    torch.autograd.grad(y.sum(), [x, *F.tree.leaves(params)])
    return record


def shown(record, rank=0):
    """The launches of a rank."""
    return "\n".join(
        f"{'backward' if e.call.backward else 'forward'}: {e.kind} over {'/'.join(e.axes)} of {', '.join(e.call.edges)}"
        for e in record.of(rank) if e.what == "launch"
    )  # fmt: skip


def test_collectives_of_mla_latent():
    assert_expected_inline(
        shown(record_of("mla_latent")),
        """\
forward: all-gather over u of kv_latent, key_rope
forward: all-to-all over u of q
forward: all-to-all over u of o
backward: all-to-all over u of o
backward: all-to-all over u of q
backward: reduce-scatter over u of kv_latent, key_rope""",
    )


def test_collectives_of_mla_packed():
    assert_expected_inline(
        shown(record_of("mla_packed")),
        """\
forward: all-gather over u of key_rope
forward: all-to-all over u of kv, q
forward: all-to-all over u of o
backward: all-to-all over u of o
backward: all-to-all over u of kv, q
backward: reduce-scatter over u of key_rope""",
    )


def test_collectives_of_mla_gather():
    assert_expected_inline(
        shown(record_of("mla_gather")),
        """\
forward: all-gather over g of kv_latent, key_rope
backward: reduce-scatter over g of kv_latent, key_rope""",
    )


def test_collectives_of_mla_latent_around_a_gather():
    assert_expected_inline(
        shown(record_of("mla_latent around a gather")),
        """\
forward: all-gather over g/u of kv_latent, key_rope
forward: all-to-all over u of q
forward: all-to-all over u of o
backward: all-to-all over u of o
backward: all-to-all over u of q
backward: reduce-scatter over g/u of kv_latent, key_rope""",
    )


def test_collectives_of_mla_packed_around_a_gather():
    assert_expected_inline(
        shown(record_of("mla_packed around a gather")),
        """\
forward: all-gather over g/u of key_rope
forward: all-to-all over u of kv, q
forward: all-gather over g of kv
forward: all-to-all over u of o
backward: all-to-all over u of o
backward: reduce-scatter over g of kv
backward: all-to-all over u of kv, q
backward: reduce-scatter over g/u of key_rope""",
    )


def by_heads(s, h, width):
    """Elements that a rank sends and receives where its tokens, with all heads, become its heads, of all tokens."""
    return s * (H - h) * width, (S - s) * h * width


def gathered(s, width, ranks=3):
    return s * (ranks - 1) * width, (S - s) * width


@pytest.mark.parametrize(
    ("name", "formulas"),
    [
        ("mla_latent", lambda s, h: [gathered(s, L + R), by_heads(s, h, E), by_heads(s, h, V)[::-1]]),
        ("mla_packed", lambda s, h: [gathered(s, R), by_heads(s, h, E + N + V), by_heads(s, h, V)[::-1]]),
        ("mla_gather", lambda s, h: [gathered(s, L + R)]),
    ],
)
def test_bytes_are_the_formulas(name, formulas):
    record = record_of(name)
    for rank, (s, h) in enumerate(zip((4, 4, 3), (2, 1, 1), strict=True)):
        launches = [e for e in record.of(rank) if e.what == "launch"]
        wanted = [(B * 8 * sent, B * 8 * received) for sent, received in formulas(s, h)]
        assert [(e.sent, e.received) for e in launches if not e.call.backward] == wanted
        # Each gradient goes back the way its value came.
        back = [pair[::-1] for pair in reversed(wanted)]
        assert [(e.sent, e.received) for e in launches if e.call.backward] == back


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_what_was_gathered_are_scattered(name):
    record = record_of(name)
    kinds = [e.kind for e in record.of(0) if e.what == "launch"]
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") > 0
    assert "all-reduce" not in kinds


@pytest.mark.parametrize("name", ["mla_latent", "mla_latent around a gather"])
def test_a_rank_has_the_gradient_of_its_own_heads_rows(name):
    layout, mesh = layout_of(name)
    x = torch.randn(B, S, 10, dtype=torch.float64)
    params = cases.weights(F.MLA.init(CFG, 0))
    layer = sh.shard(F.mla, layout, mesh, S=S)

    def body(at):
        y, _ = layer(params, sh.cut(x, layout["x"][0], at), CFG, mesh=at)
        return torch.autograd.grad(y.sum(), params.kv_b)[0]

    found = sh.Threads(mesh).run(body)
    want, _ = F.mla(params, x, CFG, positions=torch.arange(S)[None])
    (wanted,) = torch.autograd.grad(want.sum(), params.kv_b)
    torch.testing.assert_close(sum(found), wanted, rtol=1e-11, atol=1e-12)
    heads = {3: [{0, 1}, {2}, {3}], 4: [{0, 1}, {2, 3}] * 2}[mesh.size]
    for grad, mine in zip(found, heads, strict=True):
        of_head = grad.unflatten(0, (H, N + V)).abs().amax((1, 2))
        assert {i for i, n in enumerate(of_head.tolist()) if n > 0} == mine


def of_heads(x, head_offset, local_heads):
    """A factor of each head that x has, by its number among all; those of one rank are told nothing."""
    first, count = head_offset or 0, x.shape[2] if local_heads is None else local_heads
    assert x.shape[2] == count
    return (1 + torch.arange(first, first + count, dtype=x.dtype))[:, None]


def test_cores_and_rotary_embeddings_know_their_heads():
    def core(q, k, v, *, head_offset=None, local_heads=None, **told):
        return F.dot_product_attention(q, k, v, **told) * of_heads(q, head_offset, local_heads)

    def absorbed_core(q, latent, kv_b, *, head_offset=None, local_heads=None, **told):
        return F.absorbed_attention(q, latent, kv_b, **told) * of_heads(q, head_offset, local_heads)

    def rotary(x, cos, sin, *, interleaved, head_offset=None, local_heads=None):
        y = F.apply_rope(x, cos, sin, interleaved=interleaved)
        return y if x.shape[2] == 1 else y * of_heads(x, head_offset, local_heads)

    x, params = torch.randn(B, S, 10, dtype=torch.float64), cases.weights(F.MLA.init(CFG, 0))
    own = {"core": core, "absorbed_core": absorbed_core, "rotary": rotary}
    want, _ = F.mla(params, x, CFG, positions=torch.arange(S)[None], **own)
    around = [
        *(layout_of(name) for name in LAYOUTS),
        (sh.mla_latent(tp="tp"), sh.Mesh(tp=2, u=2)),
        (sh.mla_gather(tp="tp"), sh.Mesh(g=2, tp=2)),
    ]
    for layout, mesh in around:
        layer = sh.simulate(sh.shard(F.mla, layout, mesh, S=S), mesh)
        for absorbed in (False, True) if "packed" not in layout.name else (False,):
            found, _ = layer(params, x, CFG, absorbed=absorbed, **own)
            torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


def test_needed_sends_nothing_where_no_document_crosses():
    cu = [0, 4, 8, 12]
    assert len(record_of("mla_gather", cu, exchange="needed")) == 0
    for name in ("mla_latent around a gather", "mla_packed around a gather"):
        record = record_of(name, [0, 6, 12], exchange="needed")
        # Half of the tokens are on two ranks, which send to each other alone.
        sent = {e.kind: e.sent for e in record.of(0) if e.what == "launch" and "key_rope" in e.call.edges}
        width = L + R if name.startswith("mla_latent") else R
        assert sent == {"all-to-all": B * 8 * 3 * width}
        assert not any(e.axes == ("g",) for e in record)


def test_needed_sends_what_is_needed_and_no_more():
    # Rank 1 holds 4..7 of the document 2..9, whose start is rank 0's; rank 2 holds 8 and 9 of it.
    record = record_of("mla_gather", [0, 2, 10, 12], exchange="needed")
    token = B * 8 * (L + R)
    facts = [next(e for e in record.of(rank)) for rank in range(3)]
    assert [e.received // token for e in facts] == [0, 2, 6]
    assert [e.sent // token for e in facts] == [4, 4, 0]
    assert {e.kind for e in record} == {"all-to-all"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_overlap_is_bitwise_equal(name, dtype):
    cfg = cases.config(output_gate=True, norm=F.NormConfig())
    params = cases.weights(F.MLA.init(cfg, 0), dtype=dtype)
    x, found = torch.randn(B, S, 10, dtype=dtype, requires_grad=True), []
    for overlap in (False, True):
        layout, mesh = layout_of(name, overlap=overlap)
        y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=S), mesh)(params, x, cfg)
        found.append([y, *torch.autograd.grad(y, [x, *F.tree.leaves(params)], torch.ones_like(y) / 7)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(g.abs().max() > 0 for g in found[0])


def order(monkeypatch, name, overlap):
    """What rank 0 does: launches, waits, the projections, and where their weights have gradients of their own those too."""
    layout, mesh = layout_of(name, overlap=overlap)
    layer = sh.shard(F.mla, layout, mesh, S=S)
    record, first = sh.trace(mesh), []
    module = importlib.import_module("meshfn.functional.mla")  # which its function of that name hides
    linear, x, params = module.linear, torch.randn(B, S, 10, dtype=torch.float64), cases.weights(F.MLA.init(CFG, 0))
    late, weights = sh.wires.LayoutWire.projection, {L: "kv", 16: "out"}  # by the width of what is projected

    def noted(x, weight, *rest):
        y = linear(x, weight, *rest)
        return Noting.apply(y, "project q", record.events) if x.shape[-1] == 6 else y

    def projection(wire, weight):
        what = weights[weight.shape[1]]
        if overlap:
            weight = Noting.apply(weight, f"weight of {what}", record.events)
        project = late(wire, weight)
        return lambda x: Noting.apply(project(x), f"project {what}", record.events)

    def core(q, k, v, **told):
        return Noting.apply(F.dot_product_attention(q, k, v, **told), "core", record.events)

    def body(at):
        if at.rank == 0:
            first.append(threading.get_ident())
        shard = sh.cut(x, layout["x"][0], at).requires_grad_()
        layer(params, shard, CFG, core=core, mesh=at.recording(record))[0].sum().backward()

    with monkeypatch.context() as patch:
        patch.setattr(module, "linear", noted)
        patch.setattr(sh.wires.LayoutWire, "projection", projection)
        sh.Threads(mesh).run(body)
    mine = [e for e in record.events if (e[0] in first if isinstance(e, tuple) else e.rank == 0)]
    said = [e[1] if isinstance(e, tuple) else f"{e.what} {e.call.title}" for e in mine]
    half = next(i for i, what in enumerate(said) if "backward" in what)
    forward = [what for what in said[:half] if not what.startswith("weight")]
    ways = {"forward": forward, "backward": [what.removesuffix(" (backward)") for what in said[half:]]}
    told = (f"{way}: {' > '.join(part)}" for way, part in ways.items())
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in told)


def test_order_of_mla_latent(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "mla_latent", True),
        """\
forward: launch kv_latent, key_rope > project q > launch q > wait kv_latent, key_rope > project kv >
    wait q > core > launch o > wait o > project out
backward: project out > launch o > weight of out > wait o > core > launch q > project kv > launch
    kv_latent, key_rope > weight of kv > wait q > project q > wait kv_latent, key_rope""",
    )


def test_order_of_mla_latent_without(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "mla_latent", False),
        """\
forward: project q > launch kv_latent, key_rope > wait kv_latent, key_rope > project kv > launch q >
    wait q > core > launch o > wait o > project out
backward: project out > launch o > wait o > core > launch q > wait q > project kv > launch
    kv_latent, key_rope > wait kv_latent, key_rope > project q""",
    )


def test_order_of_mla_packed(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "mla_packed", True),
        """\
forward: launch key_rope > project kv > launch kv > project q > launch q > wait key_rope > wait kv >
    wait q > core > launch o > wait o > project out
backward: project out > launch o > weight of out > wait o > core > launch q > launch kv > launch
    key_rope > wait q > project q > wait kv > project kv > weight of kv > wait key_rope""",
    )


def test_order_of_mla_gather(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "mla_gather", True),
        """\
forward: launch kv_latent, key_rope > project q > wait kv_latent, key_rope > project kv > core >
    project out
backward: project out > weight of out > core > project kv > launch kv_latent, key_rope > weight of
    kv > project q > wait kv_latent, key_rope""",
    )


def test_order_of_mla_packed_around_a_gather(monkeypatch):
    assert_expected_inline(
        order(monkeypatch, "mla_packed around a gather", True),
        """\
forward: launch key_rope > project kv > launch kv > project q > launch q > wait key_rope > wait kv >
    launch kv > wait q > wait kv > core > launch o > wait o > project out
backward: project out > launch o > weight of out > wait o > core > launch kv > launch q > wait kv >
    launch kv > launch key_rope > wait q > project q > wait kv > project kv > weight of kv > wait
    key_rope""",
    )
