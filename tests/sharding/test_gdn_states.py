"""Caches of gated delta nets under layouts: states in and out, by heads or whole, beside one rank in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError

from .latent_cases import weights
from .test_layers import equal

MESHES = [
    (sh.gdn_ulysses(), {"u": 2}, (4, 2)),
    (sh.gdn_ulysses(overlap=True), {"u": 2}, (3, 1)),
    (sh.gdn_ulysses(), {"u": 4}, (2, 3)),  # value heads dealt out: one key head on two ranks
    (sh.gdn_ulysses(), {"u": 3}, (1, 4)),
    (sh.gdn_ulysses(tp="tp", dp="dp"), {"tp": 2, "dp": 2, "u": 2}, (4, 1)),
    (sh.gdn_scan(), {"cp": 3}, (2, 2)),
    (sh.gdn_scan(overlap=True), {"cp": 6}, (1, 3)),  # shards of 1 or 2 tokens, and 3 in front of each
    (sh.gdn_scan("g", "u"), {"g": 2, "u": 2}, (2, 1)),
    (sh.gdn_scan(tp="tp", dp="dp"), {"cp": 2, "dp": 2, "tp": 2}, (2, 2)),
    (sh.gdn_scan(), {"cp": 1}, (2, 2)),
]


def config(K, G, **more):
    sizes = {"num_key_heads": K, "num_value_heads": K * G, "key_head_dim": 3, "value_head_dim": 4}
    return F.GDNConfig(hidden_size=10, norm=F.NormConfig(), initializer_range=0.4, **sizes, **more)


def made(cfg, B, S):
    """Parameters, x and a cache, which all need a gradient."""
    torch.manual_seed(0)
    params, x = weights(F.GDN.init(cfg, 0)), torch.randn(B, S, 10, dtype=torch.float64, requires_grad=True)
    (cache,) = F.empty_caches([cfg], B, S, dtype=torch.float64)
    return params, x, F.tree.map(lambda t: torch.randn_like(t).requires_grad_(), cache)


def run(layout, mesh, S):
    return sh.simulate(sh.shard(F.gdn, layout, sh.Mesh(**dict(mesh.axes)), S=S), mesh)


def compare(found, right, inputs):
    """Results and, of each, the gradients of every input."""
    equal(found, right)
    grads = [torch.randn_like(t) for t in right]
    for some in (slice(None), slice(1), slice(1, None)):  # all, the output alone, the cache alone
        mine, theirs = (
            torch.autograd.grad(of[some], inputs, grads[some], retain_graph=True, materialize_grads=True)
            for of in (found, right)
        )
        equal(mine, theirs)


@pytest.mark.parametrize("channel_decay", [False, True])
@pytest.mark.parametrize(("layout", "axes", "heads"), MESHES)
def test_states_in_and_out(layout, axes, heads, channel_decay):
    cfg, mesh = config(*heads, channel_decay=channel_decay), sh.Mesh(**axes)
    params, x, cache = made(cfg, 2, 11)
    y, new = F.gdn(params, x, cfg, cache=cache)
    z, ours = run(layout, mesh, 11)(params, x, cfg, cache=cache)
    inputs = [x, *F.tree.leaves(cache), *F.tree.leaves(params)]
    compare((z, *F.tree.leaves(ours)), (y, *F.tree.leaves(new)), inputs)


@pytest.mark.parametrize(("layout", "axes", "heads"), MESHES)
@pytest.mark.parametrize("cut", [1, 5])
def test_a_sequence_in_two_calls_is_one(layout, axes, heads, cut):
    cfg, mesh = config(*heads), sh.Mesh(**axes)
    params, x, cache = made(cfg, 2, 7)
    y, new = F.gdn(params, x, cfg, cache=cache)
    first, between = run(layout, mesh, cut)(params, x[:, :cut], cfg, cache=cache)
    second, last = run(layout, mesh, 7 - cut)(params, x[:, cut:], cfg, cache=between)
    inputs = [x, *F.tree.leaves(cache), *F.tree.leaves(params)]
    compare((torch.cat([first, second], 1), *F.tree.leaves(last)), (y, *F.tree.leaves(new)), inputs)


# 9 tokens: none, in front, behind, all of it anew, going on; one token alone; those of one rank alone.
ROWS = [
    [-1] * 9,
    [-1, -1, -1, -1, 0, 1, 2, 3, 4],
    [-1, -1, -1, -1, 7, 8, 9, 10, 11],
    [3, 4, 5, -1, -1, -1, -1, -1, -1],
    [*range(9)],
    [*range(20, 29)],
    [-1, -1, -1, -1, -1, -1, -1, -1, 6],
    [-1, -1, -1, 5, 6, -1, -1, -1, -1],
]


@pytest.mark.parametrize(("layout", "axes"), [
    (sh.gdn_ulysses(dp="dp"), {"dp": 2, "u": 2}), (sh.gdn_scan(), {"cp": 4}), (sh.gdn_scan(dp="dp"), {"dp": 2, "cp": 3})
])  # fmt: skip
def test_rows_that_begin_anew_go_on_or_have_no_token(layout, axes):
    """Padding has no effect, and a row without a token keeps its cache to the byte, whatever that holds."""
    cfg, positions = config(2, 2), torch.tensor(ROWS)
    params, x, cache = made(cfg, len(ROWS), 9)
    with torch.no_grad():
        for leaf in F.tree.leaves(cache):
            leaf[0], leaf[1], leaf[4] = torch.nan, torch.nan, torch.inf  # nothing reads these
    y, new = F.gdn(params, x, cfg, cache=cache, positions=positions)
    z, ours = run(layout, sh.Mesh(**axes), 9)(params, x, cfg, cache=cache, positions=positions)
    absent = (positions < 0)[..., None]
    assert z.isfinite().all()
    for leaf, old in zip(F.tree.leaves(ours), F.tree.leaves(cache), strict=True):
        assert torch.equal(leaf[0].isnan(), old[0].isnan())
    one, two = ([y.masked_fill(absent, 0), *(leaf[1:] for leaf in F.tree.leaves(c))] for y, c in ((y, new), (z, ours)))
    compare(two, one, [x, *F.tree.leaves(cache), *F.tree.leaves(params)])


@pytest.mark.parametrize(("layout", "axes"), [
    (sh.gdn_ulysses(dp="dp"), {"dp": 2, "u": 2}), (sh.gdn_scan(), {"cp": 4}), (sh.gdn_scan("g", "u"), {"u": 2, "g": 3})
])  # fmt: skip
def test_a_row_begins_anew_wherever_it_holds_position_0(layout, axes):
    """Though it be on a later rank: those before read nothing of the cache either."""
    rows = [[5, 6, 7, 8, 9, 0, 1, 2, 3], [5, 0, 1, 2, 3, 4, 5, 6, 7], [-1, -1, 5, 6, 7, 8, 0, -1, -1], [*range(3, 12)]]
    cfg, positions = config(2, 2), torch.tensor(rows)
    params, x, cache = made(cfg, len(rows), 9)
    y, new = F.gdn(params, x, cfg, cache=cache, positions=positions)
    z, ours = run(layout, sh.Mesh(**axes), 9)(params, x, cfg, cache=cache, positions=positions)
    absent = (positions < 0)[..., None]
    one, two = ([y.masked_fill(absent, 0), *F.tree.leaves(c)] for y, c in ((y, new), (z, ours)))
    compare(two, one, [x, *F.tree.leaves(cache), *F.tree.leaves(params)])


def test_a_rank_has_its_heads_of_a_cache_or_all_of_it():
    cfg = config(2, 3)
    params, x, cache = made(cfg, 1, 8)
    for layout, mesh, shape in (
        (sh.gdn_ulysses(), sh.Mesh(u=4), [(2, 3), (1, 3), (1, 3), (2, 3)]),
        (sh.gdn_scan(), sh.Mesh(cp=2), [(6, 6), (6, 6)]),
    ):
        layer = sh.shard(F.gdn, layout, mesh, S=8)
        seen = {}

        def body(params, x, cfg, cache, mesh, layer=layer, seen=seen):
            out, new = layer(params, x, cfg, cache=cache, mesh=mesh)
            assert F.tree.structure(new) == F.tree.structure(cache)
            assert [t.shape for t in F.tree.leaves(new)] == [t.shape for t in F.tree.leaves(cache)]
            seen[mesh.rank] = (new.state.shape[1], new.q.shape[1])
            return out

        specs = layer.in_specs({"params": params, "x": x, "cfg": cfg, "cache": cache})
        specs = tuple(specs[name] for name in ("params", "x", "cfg", "cache"))
        run = sh.simulate(body, mesh, specs, layer.chains["out"][-1], S=8)
        equal(run(params, x, cfg, cache), F.gdn(params, x, cfg, cache=cache)[0])
        wanted = [(2, 3), (2, 6), (1, 3), (1, 3)] if "u" in dict(mesh.axes) else shape
        assert [seen[rank] for rank in range(mesh.size)] == wanted


@pytest.mark.parametrize("S", [2, 11])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("layout", [sh.gdn_scan("u"), sh.gdn_ulysses(), sh.gdn_scan("u", overlap=True)])
def test_backward_of_each_rank_by_itself(layout, cached, S):
    """As in processes: what a rank does not need of an exchange it sends back all the same, and in one order. Of what
    lies on every rank, gradients are pending sums."""
    cfg, mesh = config(4, 1), sh.Mesh(u=3)
    params, x, cache = made(cfg, 2, S)
    whole = layout.name.startswith("gdn_scan")
    y, new = F.gdn(params, x, cfg, cache=cache if cached else None)
    dy, leaves = torch.randn_like(y), F.tree.leaves(params)
    loss = (y * dy).sum() + (new.state.square().sum() + new.q.sum() if cached else 0)
    states = F.tree.leaves(cache) if cached else []
    wanted = torch.autograd.grad(loss, [x, *leaves, *states])
    layer = sh.shard(F.gdn, layout, mesh, S=S)
    specs = layer.in_specs({"params": params, "cfg": cfg, "cache": cache})["cache"]
    copies = 3 if whole else 1  # of the new cache

    def cut(t, spec, at):
        return sh.reshard(t.detach(), f"{spec.replace('/u', '')} -> {spec}", at, **cfg.sizes, S=S).requires_grad_()

    def body(at):
        mine = F.tree.map(lambda p: p.detach().requires_grad_(), params)
        held = F.tree.map(lambda t, spec: cut(t, str(spec), at), cache, specs) if cached else None
        shard, grad = (cut(t, "B S/u D", at) for t in (x, dy))
        out, after = layer(mine, shard, cfg, cache=held, mesh=at)
        ours = (out * grad).sum() + ((after.state.square().sum() + after.q.sum()) / copies if cached else 0)
        inputs = [shard, *F.tree.leaves(mine), *(F.tree.leaves(held) if cached else [])]
        return torch.autograd.grad(ours, inputs, materialize_grads=True)  # a rank without tokens reads no gates

    ranks = sh.Threads(mesh).run(body)
    found = [torch.cat([of[0] for of in ranks], 1), *(sum(of[i] for of in ranks) for i in range(1, len(leaves) + 1))]
    for i in range(len(leaves) + 1, len(wanted)):
        parts = [of[i] for of in ranks]
        found.append(sum(parts) if whole else torch.cat(parts, 1))
    equal(found, list(wanted))


def test_what_a_cache_adds_to_an_exchange():
    """No exchange more, and of each row the end of the convolution and one number, whatever S is."""
    cfg, mesh = config(2, 2), sh.Mesh(cp=4)
    counted = {}
    for S in (8, 64):
        params, x, cache = made(cfg, 3, S)
        for given in (None, cache):
            record = sh.trace(mesh)
            run(sh.gdn_scan(), record.mesh, S)(params, x, cfg, cache=given)
            counted[S, given is None] = (record.count(), record.bytes(0)[0])
    assert counted[8, True][0] == counted[8, False][0] == 2
    more = 8 * 3 * ((2 * 2 * 3 + 4 * 4) * 3 + 1) * 3  # to each of 3 others, 3 rows, 3 tokens of q, k and v
    assert counted[8, False][1] - counted[8, True][1] == counted[64, False][1] - counted[64, True][1] == more


def test_caches_that_do_not_fit():
    cfg, mesh = config(2, 2), sh.Mesh(u=2)
    params, x, cache = made(cfg, 2, 8)

    def refused(kind, cache, layout=None, **options):
        record = sh.trace(mesh)
        with pytest.raises(kind) as error:
            run(layout or sh.gdn_ulysses(), record.mesh, 8)(params, x, cfg, cache=cache, **options)
        assert not len(record)
        return str(error.value)

    (more,) = F.empty_caches([config(4, 2)], 2, 8, dtype=torch.float64)
    keys = F.KVCache(k=torch.zeros(2, 8, 2, 3), v=torch.zeros(2, 8, 2, 4))
    turned = dataclasses.replace(cache, state=cache.state.mT)
    said = [
        refused(SpecError, more),
        refused(TypeError, keys),
        refused(ValueError, turned),
        refused(ValueError, cache, cu_seqlens=[0, 4, 8]),
        refused(SpecError, more, sh.gdn_scan("u")),
    ]
    assert_expected_inline(
        "\n\n".join(said),
        """\
cache.q does not fit its spec: K E is 6, but the tensor has 12 (2 12 3)
    B (K/u E) U
       ^^^^^
    mesh: u=2     sizes: D=10 K=2 H=4 G=2 E=3 V=4 W=4 U=3 Y=1 M=22 J=4 I=1 B=2
    fix: 6 there, of all ranks together, or other sizes of K E everywhere else

gdn(cache=...): a GDNCache is needed, not KVCache, of another kind of layer
    fix: empty_caches(configs, ...) makes one a layer

cache.state does not fit its spec: V is 4, but the tensor has 3 (2 4 3 4)
    B (K/u G) V E
              ^
    mesh: u=2     sizes: D=10 K=2 H=4 G=2 E=3 V=4 W=4 U=3 Y=1 M=22 J=4 I=1 B=2
    fix: 4 there, of all ranks together, or V=3 everywhere else

gdn: segment_ids with a cache
    fix: give each document a row of the cache

cache.q does not fit its spec: K E is 6, but the tensor has 12 (2 12 3)
    B (K E) U
       ^^^
    mesh: u=2     sizes: D=10 K=2 H=4 G=2 E=3 V=4 W=4 U=3 Y=1 M=22 J=4 I=1 B=2
    fix: 6 there, of all ranks together, or other sizes of K E everywhere else""",
    )


def test_a_shard_of_a_cache_that_does_not_fit():
    """Handed over by hand: a rank's own, before anything moves."""
    cfg, mesh = config(2, 2), sh.Mesh(u=2)
    params, x, cache = made(cfg, 2, 8)
    layer, record = sh.shard(F.gdn, sh.gdn_ulysses(), mesh, S=8), sh.trace(mesh)

    def body(x, mesh):
        return layer(params, x, cfg, cache=cache, mesh=mesh)[0]

    with pytest.raises(F.ShapeError) as error, torch.no_grad():
        sh.simulate(body, record.mesh, "B S/u D", "B S/u D", S=8)(x.detach())
    assert not len(record)
    assert_expected_inline(
        str(error.value),
        """\
gdn(cache_q=...): (K E) is 3 in the config but 6 in cache_q
    cache_q: B (K E) U = 2 6 3
                           ^
    so far: D=10 G=2 E=3 V=4 W=4 U=3 Y=1 M=22 J=4 I=1 K=1 H=2 B=2 S=4""",
    )
