"""Gated delta nets and layouts that do not go together: every error, before anything moves, on every rank alike."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from . import gdn_cases as cases
from .test_latent_models import HEADS, MLP, model
from .test_recurrent_models import PLAIN

CFG = cases.config()  # K=2 H=4
DELTA = cases.config(num_key_heads=4, num_value_heads=8)


def refused(layout, axes, *, S=8, cfg=CFG, **options):
    """What every rank says of a layer, having sent nothing."""
    params, x = cases.weights(F.GDN.init(cfg, 0)), torch.randn(2, S, 10, dtype=torch.float64)
    return _refused(F.gdn, layout, axes, S, (params, x, cfg), options)


def refused_model(layout, axes, *attentions, S=8, **options):
    """The same of a decoder with these attentions."""
    cfg, params = model(*((attention, MLP) for attention in attentions))
    return _refused(F.decoder, layout, axes, S, (params, torch.randint(0, 31, (2, S)), cfg), options)


def _refused(fn, layout, axes, S, args, options):
    mesh, record = sh.Mesh(**axes), sh.trace(sh.Mesh(**axes))
    with pytest.raises((ValueError, TypeError)) as error:
        sh.simulate(sh.shard(fn, layout, mesh, S=S), record.mesh)(*args, **options)
    said = str(error.value)
    if not {"tp", "dp"} & {*axes}:  # each rank by itself, without a simulation
        layer, (params, x, cfg) = sh.shard(fn, layout, mesh, S=S), args
        edge = layout["x" if fn is F.gdn else "tokens"][0]

        def body(at):
            with pytest.raises(type(error.value)) as mine:
                layer(params, sh.cut(x, edge, at), cfg, mesh=at.recording(record), **options)
            return str(mine.value)

        assert {text.split("\n    rank ")[0] for text in sh.Threads(mesh).run(body)} == {said.split("\n    rank ")[0]}
    assert not len(record)
    return "\n".join(line.rstrip() for line in said.split("\n"))


def made(make):
    """Why a layout cannot be made, or not for a function."""
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    return "\n".join(line.rstrip() for line in str(error.value).split("\n"))


SCANS = [(sh.gdn_scan(), {"cp": 2}), (sh.gdn_ulysses(), {"u": 2})]


def test_a_mask_in_the_place_of_positions():
    """Of which every entry would be a token."""
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    positions = torch.where(mask > 0, mask.cumsum(-1) - 1, -1)
    assert positions[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    said = [refused(layout, axes, positions=mask) for layout, axes in SCANS]
    said += [refused_model(sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 2}, DELTA, PLAIN, positions=mask)]
    q, v, g = torch.zeros(2, 8, 1, 3), torch.zeros(2, 8, 1, 5), torch.zeros(2, 8, 1)
    said += [made(lambda: F.gated_delta_rule_scan(q, q, v, g, g, positions=mask))]
    said += [made(lambda: F.causal_conv(g, torch.ones(1, 2), positions=mask.to(torch.uint8)))]
    assert_expected_inline(
        "\n".join(dict.fromkeys(said)),
        """\
gdn(positions=...): places in a row are needed, -1 for padding, not torch.bool
    fix: torch.where(mask > 0, mask.cumsum(-1) - 1, -1) if it is a mask, true where a token is
decoder(positions=...): places in a row are needed, -1 for padding, not torch.bool
    fix: torch.where(mask > 0, mask.cumsum(-1) - 1, -1) if it is a mask, true where a token is
gated_delta_rule_scan(positions=...): places in a row are needed, -1 for padding, not torch.bool
    fix: torch.where(mask > 0, mask.cumsum(-1) - 1, -1) if it is a mask, true where a token is
causal_conv(positions=...): places in a row are needed, -1 for padding, not torch.uint8
    fix: torch.where(mask > 0, mask.cumsum(-1) - 1, -1) if it is a mask, true where a token is""",
    )


def test_padding_between_the_tokens_of_a_row():
    """Of which a rank with its own tokens alone may see nothing."""
    narrow = cases.config(conv_kernel_dim=2)
    rows = torch.tensor([[*range(8)], [0, 1, -1, -1, 4, 5, 6, 7]])
    for layout, axes in (*SCANS, (sh.gdn_scan(), {"cp": 4})):
        said = refused(layout, axes, cfg=narrow, positions=rows)
        assert said.startswith("gdn(positions=...): padding lies between the tokens of row 1, at token 2, and")


@pytest.mark.parametrize(("layout", "axes"), SCANS)
def test_documents_that_do_not_cover_the_tokens(layout, axes):
    assert_expected_inline(
        "\n".join(
            refused(layout, axes, cu_seqlens=cu)
            for cu in ([0, 3, 7], torch.tensor([0, 3, 9]), [1, 8], [0, 5, 3, 8], [0, 4.5, 8])
        ),
        """\
cu_seqlens=[0, 3, 7] ends with 7, but there are S=8 tokens
    fix: append 8: padding is then a document of its own
cu_seqlens=[0, 3, 9] ends with 9, but there are S=8 tokens
    fix: end with 8
cu_seqlens=[1, 8]: it starts with 0 and ends with S=8
cu_seqlens=[0, 5, 3, 8]: 3 comes after 5; it must ascend
cu_seqlens=[0, 4.5, 8]: whole numbers are needed, such as [0, 3, 10]""",
    )
    assert_expected_inline(
        refused(layout, axes, segment_ids=torch.zeros(2, 4, dtype=torch.int64)),
        """\
segment_ids 2 4: 2 8 is needed, rows of all S=8 tokens
    fix: all tokens of these rows, which every rank gets whole, not this rank's part of them""",
    )
    assert_expected_inline(
        refused(layout, axes, cu_seqlens=[0, 8], segment_ids=torch.zeros(2, 8, dtype=torch.int64)),
        """\
cu_seqlens and segment_ids both say where documents are
    fix: cu_seqlens alone""",
    )
    assert_expected_inline(
        refused(layout, axes, positions=torch.arange(4)[None]),
        """\
positions 1 4: 1 8 is needed, rows of all S=8 tokens
    fix: all tokens of these rows, which every rank gets whole, not this rank's part of them""",
    )


def test_heads_that_cannot_be_dealt_out():
    assert_expected_inline(
        refused(sh.gdn_ulysses(), {"u": 5}),
        """\
gdn_ulysses("u"): H=4 value heads are fewer than u=5 ranks
    B S (K/u G) V
    mesh: u=5     fix: gdn_scan("u")""",
    )
    assert_expected_inline(
        refused(sh.gdn_ulysses(tp="tp"), {"tp": 2, "u": 3}),
        """\
gdn_ulysses("u", tp="tp"): H=2 value heads (4 over tp=2) are fewer than u=3 ranks
    B S (K/tp/u G) V
    mesh: tp=2 u=3     fix: gdn_scan("u", tp="tp")""",
    )
    assert_expected_inline(
        refused(sh.gdn_scan(tp="tp"), {"tp": 3, "cp": 2}),
        """\
gdn_scan("cp", tp="tp"): K=2 key heads over tp=3: value heads are dealt out then, and the ends of convolutions are handed on by key heads
    B S/cp (K/tp G) V
    mesh: tp=3 cp=2     fix: tp=2, or gdn_ulysses""",
    )
    assert_expected_inline(
        refused(sh.gdn_ulysses(tp="tp"), {"tp": 4}, cfg=cases.config(num_value_heads=8, interleaved=True)),
        """\
gdn_ulysses("u", tp="tp"): ba has its rows by key heads, K=2 of J=8 rows each, and tp=4 ranks would need parts of one
    (K/tp J) D
    mesh: tp=4     fix: tp=2 at most""",
    )


def test_axes_of_tokens_that_a_layout_does_not_use():
    assert_expected_inline(
        refused(sh.gdn_ulysses(), {"cp": 2, "u": 2}),
        """\
gdn_ulysses("u") does not use cp=2, over which tokens are split: each part would begin without a state
    mesh: cp=2 u=2     fix: Mesh without cp, or gdn_scan("cp", "u")""",
    )
    assert_expected_inline(
        refused(sh.gdn_scan(), {"g": 2, "cp": 2}),
        """\
gdn_scan("cp") does not use g=2, over which tokens are split: each part would begin without a state
    mesh: g=2 cp=2     fix: Mesh without g, or a layout that names g""",
    )


def test_tokens_in_head_tail_order_within_a_scan():
    chains = {
        edge: tuple(spec.replace("S/cp", "S/cp:zigzag") for spec in chain) for edge, chain in sh.gdn_scan().chains
    }
    assert_expected_inline(
        made(lambda: sh.shard(F.gdn, sh.Layout("mine", chains), sh.Mesh(cp=2), S=8)),
        """\
mine: a state goes from one token to the next, and in head-tail order a rank has two pieces that are far apart
    B S/cp:zigzag K E -> B S K E
      ^^^^^^^^^^^
    fix: S/cp, in plain order""",
    )


def test_arguments_that_a_layer_has_no_place_for():
    assert_expected_inline(
        refused(sh.gdn_scan(), {"cp": 2}, mask=torch.ones(8, 8, dtype=torch.bool)),
        """gdn(mask=...) under a layout: it passes no edge mask that would bring it""",
    )
    both = sh.beside(sh.ulysses(), sh.gdn_scan("u"))
    assert_expected_inline(
        refused_model(both, {"u": 2}, DELTA, PLAIN, mask=torch.ones(8, 8, dtype=torch.bool)),
        """\
decoder(mask=...): layers[0].attention is of class GDN, which reads a state and no tokens, so there is nothing to mask
    fix: positions of -1 for padding, cu_seqlens or segment_ids for documents""",
    )
    assert_expected_inline(
        refused(sh.gdn_scan(), {"cp": 2}, core=F.gated_delta_rule_scan, attention_mask=torch.ones(2, 8)),
        """\
gdn under a layout: unknown arguments
    core, attention_mask
    known: params, x, cfg, positions, segment_ids, cache, q_positions, k_positions, cu_seqlens, mask""",
    )
    assert_expected_inline(
        made(lambda: sh.shard(F.gdn, sh.gdn_scan(), sh.Mesh(cp=2), s=8)),
        """\
shard(gdn, ..., s=...): no edge of gdn_scan("cp") has a dimension s
    fix: S""",
    )


def test_layouts_of_one_kind_for_a_model_of_both():
    assert_expected_inline(
        refused_model(sh.ulysses(), {"u": 2}, DELTA, PLAIN),
        """\
decoder(params=...): layers[0].attention is of class GDN, and ulysses("u") has no rule for its b, a, q_conv, k_conv, v_conv, a_log, dt_bias
    fix: a layout with rules for every kind of layer that there is; beside(..., gdn_scan(...)) makes one of two""",
    )
    assert_expected_inline(
        refused_model(sh.gdn_scan("u"), {"u": 2}, DELTA, PLAIN),
        """\
decoder(params=...): layers[1].attention is of class Attention, and gdn_scan("u") has no rule for its q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, mask, sinks, o
    fix: a layout with rules for every kind of layer that there is""",
    )
    assert_expected_inline(
        made(lambda: sh.shard(F.attention, sh.gdn_scan("u"), sh.Mesh(u=2), S=8)),
        """\
gdn_scan("u") has no rule for q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, mask, sinks, o, which attention passes
    fix: Layout("...", {..., "q": "its spec"})""",
    )
    assert_expected_inline(
        made(lambda: sh.shard(F.gdn, sh.ulysses(), sh.Mesh(u=2), S=8)),
        """\
ulysses("u") has no rule for b, a, q_conv, k_conv, v_conv, a_log, dt_bias, which gdn passes
    fix: gdn_ulysses or gdn_scan, or Layout("...", {..., "b": "its spec"})""",
    )
    assert_expected_inline(
        made(lambda: sh.shard(F.gdn, sh.beside(sh.ulysses(), sh.gdn_scan("u")), sh.Mesh(u=2), S=8)),
        """\
ulysses("u") beside gdn_scan("u") moves k, o, q, v, which gdn does not pass
    fix: for a layer alone, that of the two layouts which is of its kind""",
    )
    assert_expected_inline(
        made(lambda: sh.shard(F.attention, sh.beside(sh.ulysses(), sh.gdn_scan("u")), sh.Mesh(u=2), S=8)),
        """\
ulysses("u") beside gdn_scan("u") moves gdn.k, gdn.q, gdn.rows, gdn.summary, gdn.tail, gdn.v, which attention does not pass
    fix: for a layer alone, that of the two layouts which is of its kind""",
    )


def test_a_plan_of_one_kind_given_the_sizes_of_another():
    mesh, sizes = sh.Mesh(u=2), {"B": 1, "S": 8}
    both = sh.beside(sh.ulysses(), sh.gdn_scan("u"))
    (note,) = both.plan(mesh, **sizes, H=4, K=2, E=3).notes
    assert note == "not counted: gated delta nets, which layout.stack(mesh, [sizes of each layer], ...) plans beside it"
    plans = [lambda layout=layout: layout.plan(mesh, **sizes, **DELTA.sizes) for layout in (both, sh.gdn_scan("u"))]
    assert_expected_inline(
        "\n".join(map(made, plans)),
        """\
a plan has no place for W=4 U=3 Y=1 M=26 J=4 I=1
    fix: layout.stack(mesh, [sizes of each layer], B=..., S=...) for gated delta nets, or B, S, H, K, E, V, G or D
a plan has no place for U=3 M=26 J=4 I=1
    fix: B, S, H, K, E, V, W, G, Y or D""",
    )


def test_axes_that_are_no_names():
    makes = (
        lambda: sh.ulysses(["u"]),
        lambda: sh.all_gather("g u"),
        lambda: sh.mla_latent("u", ("g",)),
        lambda: sh.gdn_scan("g/u"),
        lambda: sh.gdn_scan(sh.Mesh(u=2)),
        lambda: sh.gdn_ulysses("u", dp="1"),
    )
    assert_expected_inline(
        "\n".join(map(made, makes)),
        """\
an axis of a layout is named by one word, not by ['u']
    fix: "u", or "g", "u" where it takes several
an axis of a layout is named by one word, not by 'g u'
    fix: "u", or "g", "u" where it takes several
an axis of a layout is named by one word, not by ('g',)
    fix: "u", or "g", "u" where it takes several
an axis of a layout is named by one word, not by 'g/u'
    fix: "u", or "g", "u" where it takes several
an axis of a layout is named by one word, not by Mesh(u=2)
    fix: "u", or "g", "u" where it takes several
an axis of a layout is named by one word, not by '1'
    fix: "u", or "g", "u" where it takes several""",
    )


def test_layouts_that_do_not_stand_beside_each_other():
    assert_expected_inline(
        "\n".join(
            made(lambda pair=pair: sh.beside(*pair))
            for pair in (
                (sh.gdn_scan("u"), sh.ulysses()),
                (sh.ulysses(), sh.all_gather()),
                (sh.gdn_scan("u"), sh.gdn_ulysses("u")),
                (sh.ulysses(tp="tp"), sh.gdn_scan("u")),
                (sh.mla_latent(dp="dp"), sh.gdn_scan("u")),
                (sh.ulysses(dims="S B H E"), sh.gdn_scan("u")),
            )
        ),
        """\
beside(attention, gdn): ulysses("u") is in the place of the other
    fix: a layout of attention, then one of gated delta nets
beside(attention, gdn): all_gather("g") is in the place of the other
    fix: a layout of attention, then one of gated delta nets
beside(attention, gdn): gdn_scan("u") is in the place of the other
    fix: a layout of attention, then one of gated delta nets
ulysses("u", tp="tp") beside gdn_scan("u"): K lies as K/tp in one and as K in the other
    fix: tp="..." in both
mla_latent("u", dp="dp") beside gdn_scan("u"): B lies as B/dp in one and as B in the other
    fix: dp="..." in both
ulysses("u", dims="S B H E") beside gdn_scan("u"): activations are S/u B D in one and B S/u D in the other
    fix: without dims="S B H E", an order that gated delta nets do not have""",
    )
    heads = sh.beside(sh.ulysses(), sh.gdn_scan("cp"))
    assert_expected_inline(
        refused_model(heads, {"u": 2, "cp": 2}, DELTA, HEADS),
        """\
ulysses("u") beside gdn_scan("cp") does not use cp=2, over which tokens are split: each part would attend to itself alone
    mesh: u=2 cp=2     fix: Mesh without cp, or hybrid(ulysses="u", gather="cp")""",
    )
