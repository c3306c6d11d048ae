"""Layouts of one's own for latent attention: which of their edges are keys is known, and what cannot be is refused."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from meshfn.sharding.layouts import WHOLE

from . import latent_cases as cases
from .test_latent_misfits import equal, refused
from .test_latent_models import both

MADE = [
    (sh.mla_latent(), ("kv_latent", "key_rope")),
    (sh.mla_latent("u", "g"), ("kv_latent", "key_rope")),
    (sh.mla_packed(), ("kv", "key_rope")),
    (sh.mla_packed("u", "g"), ("kv", "key_rope")),
    (sh.mla_gather(), ("kv_latent", "key_rope")),
    (sh.hybrid(), ("k", "v")),
    (both(sh.hybrid(), sh.mla_packed("u", "g")), ("k", "v", "kv", "key_rope")),
    (both(sh.all_gather(), sh.mla_gather()), ("k", "v", "kv_latent", "key_rope")),
    (sh.Layout("mlp", {"x": "B S/u D", "h": "B S/u F", "out": "B S/u D"}), ()),
]


@pytest.mark.parametrize(("layout", "keys"), MADE)
def test_keys_are_known_by_their_edges(layout, keys):
    assert layout.keys == keys
    assert sh.Layout("mine", layout.chains).keys == keys
    assert sh.Layout("mine", layout.chains, keys=keys).keys == keys


def mine(base=None, **rules):
    """`mla_latent`, or another, with other rules for some edges."""
    base = base or sh.mla_latent()
    edges = {edge: chain for edge, chain in base.chains if edge not in (*WHOLE, "sinks")}
    return sh.Layout("mine", {**edges, **rules}, exchange=base.exchange)


@pytest.mark.parametrize("exchange", ["all", "needed"])
@pytest.mark.parametrize(
    ("base", "axes"),
    [
        (sh.mla_latent, {"g": 2, "u": 2}),
        (sh.mla_packed, {"g": 2, "u": 2}),
        (sh.mla_packed, {"g": 3}),
    ],
)
def test_layouts_of_ones_own_name_no_keys(base, axes, exchange):
    for cfg in (cases.config(), cases.config(window=3), cases.config(window=2, causal=False)):
        equal(mine(base("u", "g", exchange=exchange)), axes, S=11, cfg=cfg)


@pytest.mark.parametrize("axes", [{"g": 2, "u": 2}, {"g": 2}, {"u": 3}])
def test_latents_gathered_over_one_axis_and_what_is_made_of_them_over_the_other(axes):
    queries = {"q": "B S/g/u H E", "o": "B S/g/u H V", "kv_b": "(H NV) L"}
    layout = mine(sh.mla_latent("u", "g"), **queries, kv_latent="B S/g/u L -> B S/g L", kv="B S/g H NV -> B S H NV")
    assert layout.keys == ("kv", "key_rope")
    equal(layout, axes, S=11)
    equal(layout, axes, S=11, cfg=cases.config(window=3, causal=False))


def test_keys_and_values_projected_whole_and_then_sliced():
    kv = "B T H NV -> B T H/u NV"
    for absorbed in (None, False):
        equal(mine(kv=kv, kv_b="(H NV) L"), {"u": 2}, cfg=cases.config(window=2), absorbed=absorbed)
    equal(mine(sh.mla_latent("u", "g"), kv=kv, kv_b="(H NV) L"), {"g": 2, "u": 2})


@pytest.mark.parametrize(("heads", "latents", "axes"), [
    (sh.hybrid(), sh.mla_packed("u", "g"), {"g": 2, "u": 2}),
    (sh.all_gather(), sh.mla_gather(), {"g": 3}),
])  # fmt: skip
def test_a_plan_of_a_layout_of_both_kinds_is_of_latents(heads, latents, axes):
    mesh, sizes = sh.Mesh(**axes), {"B": 2, "S": 31, "H": 5, "L": 7, "N": 3, "R": 2, "V": 4}
    given = {"causal": True, "cu_seqlens": [0, 9, 31]}
    found, wanted = (
        sh.Layout("mine", x.chains, exchange="needed").plan(mesh, **sizes, **given)
        for x in (both(heads, latents), latents)
    )
    for rank in range(mesh.size):
        assert found.of(rank)[1:-1] == wanted.of(rank)[1:-1]
        assert found.bytes(rank) == wanted.bytes(rank)


def test_heads_of_keys_that_are_not_those_of_queries():
    # Queries of all heads would be grouped over half of the keys, without a word.
    queries = {"q": "B S/u H E", "o": "B S/u H V"}
    assert_expected_inline(
        refused(mine(**queries), {"u": 2}),
        """\
mine: q and kv meet, but heads lie over no axis in one and over u in the other
    B T H/u NV
    mesh: u=2     fix: the same axes in both""",
    )
    assert_expected_inline(
        refused(mine(kv_b="(H NV) L"), {"u": 2}),
        """\
mine: kv_b and kv meet, but heads lie over no axis in one and over u in the other
    B T H/u NV
    mesh: u=2     fix: the same axes in both""",
    )


def test_latents_that_stay_split():
    assert_expected_inline(
        refused(mine(key_rope="B S/u R"), {"u": 2}),
        """\
mine: key_rope stays split over u, so a query would see only some of its keys
    B S/u R
    ^^^^^^^
    mesh: u=2     fix: one more spec for key_rope, in which S is whole""",
    )
    assert_expected_inline(
        refused(mine(kv_latent="B S/u L"), {"u": 2}),
        """\
mine: kv_latent stays split over u, so a query would see only some of its keys
    B S/u L
    ^^^^^^^
    mesh: u=2     fix: one more spec for kv_latent, in which S is whole""",
    )
    assert_expected_inline(
        refused(mine(sh.mla_packed(), kv="B S/u H NV", q="B S/u H E", o="B S/u H V"), {"u": 2}),
        """\
mine: kv stays split over u, so a query would see only some of its keys
    B S/u H NV
    ^^^^^^^^^^
    mesh: u=2     fix: one more spec for kv, in which S is whole""",
    )


def test_what_is_made_of_latents_has_their_tokens():
    assert_expected_inline(
        refused(mine(sh.mla_packed(), kv_latent="B S/u L -> B S L"), {"u": 2}),
        """\
mine: kv_latent and kv meet, but S lies as S in one and as S/u in the other
    B S/u H NV
    mesh: u=2     fix: S in kv too""",
    )
    assert_expected_inline(
        refused(mine(sh.mla_gather(), kv="B S H NV"), {"g": 2}),
        """\
mine: kv is made of the latents that a rank's queries see, and S in it is all tokens
    B S H NV
      ^
    mesh: g=2     fix: T, as many as are seen""",
    )
    equal(mine(sh.mla_gather(), kv="B T H NV"), {"g": 2})


def test_keys_that_are_none():
    said = []
    for keys in (("kv", "key_rope"), ("kv_latents", "key_rope")):
        with pytest.raises(sh.SpecError) as error:
            sh.Layout("mine", sh.mla_latent().chains, keys=keys)
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
mine: keys names "kv", and of kv_latent and kv, which is made of it, kv_latent is the first to hold all key tokens
    B S/u L -> B S L
    fix: no keys, as they are known of these edges
mine: keys names "kv_latents", which is no edge of it
    fix: did you mean "kv_latent"?""",
    )
