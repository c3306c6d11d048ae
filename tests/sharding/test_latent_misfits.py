"""Latent attention and layouts that do not go together: every error, before anything moves."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from . import latent_cases as cases


def refused(layout, axes, *, S=8, params=None, **options):
    """What every rank says, having sent nothing."""
    cfg, mesh = options.pop("cfg", cases.config()), sh.Mesh(**axes)
    params = cases.weights(F.MLA.init(cfg, 0)) if params is None else params
    x, record = torch.randn(2, S, 10, dtype=torch.float64), sh.trace(mesh)
    with pytest.raises((ValueError, TypeError)) as error:
        sh.simulate(sh.shard(F.mla, layout, mesh, S=S), record.mesh)(params, x, cfg, **options)
    said = str(error.value)
    if "tp" not in axes and "dp" not in axes and S % mesh.size == 0:  # each rank by itself, without a simulation
        layer = sh.shard(F.mla, layout, mesh, S=S)

        def body(at):
            with pytest.raises(type(error.value)) as mine:
                layer(params, sh.cut(x, layout["x"][0], at), cfg, mesh=at.recording(record), **options)
            return str(mine.value)

        assert set(sh.Threads(mesh).run(body)) == {said}
    assert not len(record)
    return "\n".join(line.rstrip() for line in said.split("\n"))


def equal(layout, axes, *, S=8, params=None, cfg=None, **options):
    cfg = cfg or cases.config()
    params, mesh = cases.weights(F.MLA.init(cfg, 0)) if params is None else params, sh.Mesh(**axes)
    x = torch.randn(2, S, 10, dtype=torch.float64)
    y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=S), mesh)(params, x, cfg, **options)
    want, _ = F.mla(params, x, cfg, positions=torch.arange(S)[None], **options)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-12)


def test_fewer_heads_than_ranks():
    three = cases.config(num_attention_heads=3)
    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 4}, cfg=three),
        """\
mla_latent("u"): H=3 query heads are fewer than u=4 ranks
    B S H/u E
    mesh: u=4     fix: Mesh(g=2, u=2) with mla_latent("u", "g")""",
    )
    assert_expected_inline(
        refused(sh.mla_packed(dp="dp"), {"dp": 2, "u": 4}, cfg=three),
        """\
mla_packed("u", dp="dp"): H=3 query heads are fewer than u=4 ranks
    B/dp S H/u E
    mesh: dp=2 u=4     fix: Mesh(dp=2, g=2, u=2) with mla_packed("u", "g", dp="dp")""",
    )
    # What the first of them says to do.
    equal(sh.mla_latent("u", "g"), {"g": 2, "u": 2}, cfg=three)


def test_fewer_heads_than_ranks_behind_another_axis():
    five = cases.config(num_attention_heads=5)
    assert_expected_inline(
        refused(sh.mla_latent(tp="tp"), {"tp": 2, "u": 3}, cfg=five),
        """\
mla_latent("u", tp="tp"): H=2 query heads (5 over tp=2) are fewer than u=3 ranks
    B S H/tp/u E
    mesh: tp=2 u=3     fix: Mesh(tp=2, g=3, u=1) with mla_latent("u", "g", tp="tp")""",
    )
    equal(sh.mla_latent("u", "g", tp="tp"), {"tp": 2, "g": 3, "u": 1}, cfg=five)
    equal(sh.mla_latent(tp="tp"), {"tp": 2, "u": 2}, cfg=five)  # 3 and 2 heads, each over two ranks
    equal(sh.mla_packed(tp="tp"), {"tp": 3}, cfg=five)


def test_fewer_heads_than_ranks_that_split_them_before():
    three = cases.config(num_attention_heads=3)
    assert_expected_inline(
        refused(sh.mla_gather(tp="tp"), {"tp": 4, "g": 2}, cfg=three),
        """\
mla_gather("g", tp="tp"): H=3 heads over tp=4, which splits them before
    B S/g H/tp E
    mesh: tp=4 g=2     fix: tp=3""",
    )
    equal(sh.mla_gather(tp="tp"), {"tp": 3, "g": 2}, cfg=three)
    assert_expected_inline(
        refused(sh.mla_packed(tp="tp"), {"tp": 4, "u": 2}, cfg=three),
        """\
mla_packed("u", tp="tp"): H=3 heads over tp=4, which splits them before
    B S/u H/tp E
    mesh: tp=4 u=2     fix: tp=1""",
    )
    equal(sh.mla_packed(tp="tp"), {"tp": 1, "u": 2}, cfg=three)
    assert_expected_inline(
        refused(sh.mla_latent(tp="tp"), {"tp": 2, "u": 2}, cfg=cases.config(num_attention_heads=1)),
        """\
mla_latent("u", tp="tp"): H=1 heads over tp=2, which splits them before
    B S/u H/tp E
    mesh: tp=2 u=2     fix: tp=1 and u=1""",
    )


def test_an_axis_of_tokens_that_a_layout_does_not_use():
    assert_expected_inline(
        refused(sh.mla_latent(), {"g": 2, "u": 2}),
        """\
mla_latent("u") does not use g=2, over which tokens are split: each part would attend to itself alone
    mesh: g=2 u=2     fix: Mesh without g, or mla_latent("u", "g")""",
    )
    assert_expected_inline(
        refused(sh.mla_packed(), {"g": 2, "u": 2}),
        """\
mla_packed("u") does not use g=2, over which tokens are split: each part would attend to itself alone
    mesh: g=2 u=2     fix: Mesh without g, or mla_packed("u", "g")""",
    )
    assert_expected_inline(
        refused(sh.mla_gather(), {"g": 2, "u": 2}),
        """\
mla_gather("g") does not use u=2, over which tokens are split: each part would attend to itself alone
    mesh: g=2 u=2     fix: Mesh without u, or mla_latent("u", "g")""",
    )


def test_axes_that_a_mesh_lacks_have_one_rank():
    equal(sh.mla_latent("u", "g"), {"u": 2})
    equal(sh.mla_packed("u", "g", dp="dp"), {"g": 2})


@pytest.mark.parametrize("made", [sh.mla_latent, sh.mla_packed])
def test_an_axis_named_twice(made):
    with pytest.raises(sh.SpecError, match='axis "u" splits S twice'):
        made("u", "u")
    with pytest.raises(sh.SpecError, match='axis "u" splits B and S'):
        made("u", dp="u")
    with pytest.raises(sh.SpecError, match='axis "u" splits S and'):
        made("u", tp="u")
    with pytest.raises(ValueError, match=r"exchange='some'; it is \"all\" or \"needed\""):
        made(exchange="some")


def test_the_absorbed_way_where_keys_and_values_move():
    assert_expected_inline(
        refused(sh.mla_packed(), {"u": 2}, absorbed=True),
        """\
mla(absorbed=True): keys and values of heads move here, between ranks, and the absorbed way has none
    fix: without it, or a layout that moves latents alone""",
    )
    assert "keys and values of heads move" in refused(sh.mla_packed("u", "g"), {"g": 2, "u": 2}, absorbed=True)
    assert "keys and values of heads move" in refused(sh.mla_packed("u", "g"), {"g": 2}, absorbed=True)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (sh.mla_latent(), {"u": 2}),
        (sh.mla_latent("u", "g", exchange="needed"), {"g": 2, "u": 2}),
        (sh.mla_latent(tp="tp"), {"tp": 2, "u": 2}),
        (sh.mla_gather(), {"g": 3}),
        (sh.mla_gather(zigzag=True, tp="tp", overlap=True), {"g": 2, "tp": 2}),
        (sh.mla_packed(tp="tp"), {"tp": 2}),  # where nothing moves but the sum at the end
    ],
)
def test_the_absorbed_way_where_latents_move(layout, axes):
    equal(layout, axes, absorbed=True)
    equal(layout, axes, absorbed=True, cfg=cases.config(window=3, causal=False, output_gate=True))


def test_needed_keys_without_a_gather_axis():
    said = []
    for made in (sh.mla_latent, sh.mla_packed, lambda **more: sh.Layout("mine", sh.ulysses().chains, **more)):
        with pytest.raises(sh.SpecError) as error:
            made(exchange="needed")
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
mla_latent("u", exchange="needed"): exchange="needed", and a rank has queries of every token, which need every key
    B S/u H E -> B S H/u E
    fix: exchange="all", or a gather axis, over which queries stay split
mla_packed("u", exchange="needed"): exchange="needed", and a rank has queries of every token, which need every key
    B S/u H E -> B S H/u E
    fix: exchange="all", or a gather axis, over which queries stay split
mine: exchange="needed", and a rank has queries of every token, which need every key
    B S/u (K G) E -> B S (K/u G) E
    fix: exchange="all", or a gather axis, over which queries stay split""",
    )


@pytest.mark.parametrize(
    ("layout", "axes"), [(sh.mla_gather, {"g": 3}), (functools.partial(sh.mla_packed, "u", "g"), {"g": 2, "u": 2})]
)
def test_needed_keys_where_every_query_sees_every_key(layout, axes):
    # Without causality, window and documents what is needed is all of it: as much is sent, and nothing is refused, as
    # documents may come with the next batch.
    cfg, records = cases.config(causal=False), []
    for exchange in ("all", "needed"):
        records.append(sh.trace(sh.Mesh(**axes)))
        layer = sh.simulate(sh.shard(F.mla, layout(exchange=exchange), records[-1].mesh, S=9), records[-1].mesh)
        layer(cases.weights(F.MLA.init(cfg, 0)), torch.randn(2, 9, 10, dtype=torch.float64), cfg)
    assert records[0].bytes() == records[1].bytes()
    equal(layout(exchange="needed"), axes, S=9, cfg=cfg)


@pytest.mark.parametrize("causal", [False, True])
def test_needed_with_a_window(causal):
    cfg, mesh = cases.config(window=2, causal=causal), sh.Mesh(g=4)
    record, token = sh.trace(mesh), 2 * 8 * (7 + 2)
    layer = sh.simulate(sh.shard(F.mla, sh.mla_gather(exchange="needed"), mesh, S=12), record.mesh)
    layer(cases.weights(F.MLA.init(cfg, 0)), torch.randn(2, 12, 10, dtype=torch.float64), cfg)
    # One token of the rank before, and without causality one of the rank behind.
    assert [record.bytes(r)[1] // token for r in range(4)] == ([0, 1, 1, 1] if causal else [1, 2, 2, 1])
    equal(sh.mla_gather(exchange="needed"), {"g": 4}, S=12, cfg=cfg)


def test_other_positions_with_needed_keys():
    given = {"positions": torch.arange(8).flip(0)[None]}
    assert_expected_inline(
        refused(sh.mla_gather(exchange="needed"), {"g": 2}, **given),
        """\
positions with exchange="needed": the keys that a query needs are worked out from 0 .. S-1 in each document, and these are others
    fix: exchange="all", or no positions""",
    )
    assert "these are others" in refused(sh.mla_latent("u", "g", exchange="needed"), {"g": 2, "u": 2}, **given)


def test_arguments_that_a_layout_has_no_place_for():
    assert_expected_inline(
        refused(sh.mla_gather(exchange="needed"), {"g": 2}, cache=object()),
        """\
mla(cache=...) under a layout: mla_gather("g", exchange="needed") sends needed keys alone, so that a rank lacks some of the others
    fix: exchange="all\"""",
    )
    assert_expected_inline(
        refused(sh.mla_gather(), {"g": 2}, wire=object()),
        """\
mla(wire=...) under a layout: the layout is the wire
    fix: without it""",
    )
    assert_expected_inline(
        refused(sh.mla_gather(), {"g": 2}, mask=torch.ones(4, 8, dtype=torch.bool)),
        """\
mask 4 8: S S, or B|1 H|1 S S, is needed, with all S=8 tokens on both sides
    fix: the global mask, which every rank gets whole and cuts itself""",
    )
    wrong_heads = torch.ones(1, 3, 8, 8, dtype=torch.bool)
    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 2}, mask=wrong_heads),
        """mask 1 3 8 8: B|1 H|1 S S is needed, and the layer has H=4 query heads""",
    )


def test_head_tail_order_of_tokens_that_do_not_divide():
    assert_expected_inline(
        refused(sh.mla_gather(zigzag=True), {"g": 2}, S=7),
        """\
S=7 does not divide over g=2 in head-tail order (needs a multiple of 4)
    B S/g:zigzag D
      ^^^^^^^^^^
    mesh: g=2     fix: pad S to 8, or drop ":zigzag" (without it shards may be uneven)""",
    )
    assert_expected_inline(
        refused(sh.mla_packed("u", "g", zigzag=True), {"g": 2, "u": 3}, S=10),
        """\
S=10 does not divide over g=2 in head-tail order (needs a multiple of 4)
    B S/g:zigzag/u D
      ^^^^^^^^^^^^
    mesh: g=2 u=3     fix: pad S to 12, or drop ":zigzag" (without it shards may be uneven)""",
    )
    equal(sh.mla_packed("u", "g", zigzag=True), {"g": 2, "u": 3}, S=8)  # over u shards may be uneven


def few(q, k, v, *, causal, q_positions, k_positions):
    """A core that takes no scale."""
    return F.dot_product_attention(q, k, v, causal=causal, q_positions=q_positions, k_positions=k_positions)


def enough(q, k, v, *, causal, q_positions, k_positions, softmax_scale):
    return F.dot_product_attention(
        q, k, v, causal=causal, q_positions=q_positions, k_positions=k_positions, softmax_scale=softmax_scale
    )


def in_order(q, k, v, *, causal, softmax_scale):
    """A core that takes queries and keys to begin at the same token, as fused ones do."""
    return F.dot_product_attention(q, k, v, causal=causal, softmax_scale=softmax_scale)


def test_a_core_that_lacks_arguments():
    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 2}, core=few),
        """\
mla(core=...): it is told softmax_scale, and does not take that
    fix: def core(..., *, softmax_scale, **_): ...""",
    )
    assert_expected_inline(
        refused(sh.mla_gather(), {"g": 2}, core=in_order),
        """\
mla_gather("g"): core takes no q_positions, and its queries are some of the tokens, its keys others: it could not tell which key a query stands at
    B S/g H E
    mesh: g=2
    fix: def core(q, k, v, *, q_positions, k_positions, **_): ..., or **_ alone where order plays no part""",
    )
    assert_expected_inline(
        refused(sh.mla_gather(), {"g": 2}, core=enough, cfg=cases.config(window=2)),
        """\
mla(core=...): it is told window, and does not take that
    fix: def core(..., *, window, **_): ...""",
    )
    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 2}, core=enough, mask=torch.rand(8, 8) > 0.5),
        """\
mask is given, but core takes none
    fix: def core(q, k, v, *, mask, **_): ...""",
    )
    equal(sh.mla_latent(), {"u": 2}, core=enough)
    equal(sh.mla_gather(), {"g": 2}, core=enough)


def test_an_absorbed_core_that_lacks_arguments():
    def core(q, latent, kv_b, *, nope_dim, causal, softmax_scale, q_positions, k_positions):
        told = {"causal": causal, "q_positions": q_positions, "k_positions": k_positions}
        return F.absorbed_attention(q, latent, kv_b, nope_dim=nope_dim, softmax_scale=softmax_scale, **told)

    def lacking(q, latent, kv_b, *, causal, q_positions, k_positions):
        raise AssertionError

    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 2}, absorbed=True, absorbed_core=lacking),
        """\
mla(absorbed_core=...): it is told softmax_scale, nope_dim, and does not take that
    fix: def absorbed_core(..., *, softmax_scale, nope_dim, **_): ...""",
    )
    equal(sh.mla_latent(), {"u": 2}, absorbed=True, absorbed_core=core)
    equal(sh.mla_gather(), {"g": 2}, absorbed=True, absorbed_core=core)


class Quantised(torch.Tensor):
    """As a library has them: a tensor whose rows are its own affair."""


def test_weights_that_are_not_plain_tensors():
    params = cases.weights(F.MLA.init(cases.config(), 0))
    strange = F.tree.replace(params, {".kv_b": params.kv_b.detach().as_subclass(Quantised)})
    assert_expected_inline(
        refused(sh.mla_latent(), {"u": 2}, params=strange),
        """\
mla(params=...): kv_b is a Quantised, and mla_latent("u") takes rows of it, which only a plain tensor is known to have
    fix: the plain weight, or a layout in which it stays whole""",
    )
    # Where no rank takes rows of it, it is used as it is.
    equal(sh.mla_gather(), {"g": 2}, params=strange)
    equal(sh.mla_latent(), {"u": 1}, params=strange)
    plain = F.tree.replace(params, {".kv_b": torch.nn.Parameter(params.kv_b.detach())})
    equal(sh.mla_latent(), {"u": 2}, params=plain)
