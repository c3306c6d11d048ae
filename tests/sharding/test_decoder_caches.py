"""Caches of decoders under layouts: a prompt in pieces beside one rank in fp64, what ranks keep, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import sharding as sh

from .test_latent_models import HEADS, LATENT, MLP, MOE, model
from .test_recurrent_models import DELTA, KIMI, NEXT, PLAIN, equal

FEW = dataclasses.replace(PLAIN, num_key_value_heads=1)
RING = dataclasses.replace(HEADS, num_attention_heads=8, num_key_value_heads=4, window=6)
DIRECT = dataclasses.replace(LATENT, window=5)

# As Qwen3.5 has them, three to one; key/value heads fewer than ranks beside a window; as Kimi Linear has them.
STACKS = {
    "qwen": ((DELTA, MLP), (NEXT, MOE), (DELTA, MLP), (PLAIN, MLP)),
    "few": ((DELTA, MLP), (FEW, MLP), (RING, MLP)),
    "plain": ((PLAIN, MLP),),
    "kimi": ((KIMI, MLP), (KIMI, MOE), (LATENT, MLP), (DIRECT, MLP)),
}
CASES = [
    ("qwen", sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 2}),
    ("qwen", sh.beside(sh.ulysses(), sh.gdn_scan("u")), {"u": 4}),
    ("qwen", sh.beside(sh.ulysses(tp="tp"), sh.gdn_scan("u", tp="tp")), {"tp": 2, "u": 2}),
    ("qwen", sh.beside(sh.ulysses(dp="dp"), sh.gdn_ulysses(dp="dp")), {"dp": 2, "u": 2}),
    ("few", sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 4}),
    ("few", sh.beside(sh.ulysses(overlap=True), sh.gdn_scan("u", overlap=True)), {"u": 2}),
    ("kimi", sh.beside(sh.mla_latent(), sh.gdn_ulysses()), {"u": 2}),
    ("kimi", sh.beside(sh.mla_latent(), sh.gdn_scan("u")), {"u": 4}),
    ("kimi", sh.beside(sh.mla_latent(tp="tp"), sh.gdn_scan("u", tp="tp")), {"tp": 2, "u": 2}),
    ("kimi", sh.beside(sh.mla_latent(overlap=True), sh.gdn_ulysses(overlap=True)), {"u": 4}),
    ("few", sh.beside(sh.all_gather(), sh.gdn_scan("g")), {"g": 3}),
    ("qwen", sh.beside(sh.hybrid(tp="tp"), sh.gdn_scan("g", "u", tp="tp")), {"g": 2, "u": 2, "tp": 2}),
    ("kimi", sh.beside(sh.mla_gather(tp="tp"), sh.gdn_scan("g", tp="tp")), {"tp": 2, "g": 2}),
    ("kimi", sh.beside(sh.mla_latent("u", "g"), sh.gdn_scan("g", "u")), {"g": 2, "u": 2}),
]
B, SLOTS = 2, 16


def made(kind):
    """A model, and caches that need gradients."""
    cfg, params = model(*STACKS[kind])
    torch.manual_seed(0)
    caches = F.empty_caches([each.attention for each in cfg.layers], B, SLOTS, dtype=torch.float64)
    return cfg, params, F.tree.map(lambda t: torch.randn_like(t).requires_grad_(), caches)


def places(*counts):
    """Positions of each call of so many tokens, the second row padded in front in the first."""
    first = torch.arange(counts[0])
    found, at = [torch.stack([first, torch.where(first < 2, -1, first - 2)])], counts[0]
    for n in counts[1:]:
        more = torch.arange(at, at + n)
        found.append(torch.stack([more, more - 2]))
        at += n
    return found


def ran(run, params, cfg, caches, ids, positions):
    """Logits of each call, 0 where no token is, and the caches behind all of them."""
    found, at = [], 0
    for each in positions:
        n = each.shape[1]
        y, caches = run(n)(params, ids[:, at : at + n], cfg, positions=each, cache=caches)
        found.append(y.masked_fill((each < 0)[..., None], 0))
        at += n
    return found, caches


@pytest.mark.parametrize(("kind", "layout", "axes"), CASES, ids=[f"{k} {x.name} {a}" for k, x, a in CASES])
def test_a_prompt_in_two_calls(kind, layout, axes):
    """Outputs, caches, and gradients of the second call's loss, which go back through the first."""
    cfg, params, caches = made(kind)
    mesh, ids, positions = sh.Mesh(**axes), torch.randint(0, 31, (B, 11)), places(7, 4)

    def sharded(n):
        return sh.simulate(sh.shard(F.decoder, layout, mesh, S=n), mesh)

    (first, second), new = ran(sharded, params, cfg, caches, ids, positions)
    (one, two), kept = ran(lambda n: F.decoder, params, cfg, caches, ids, positions)
    equal((first, second), (one, two))
    equal(F.tree.leaves(new), F.tree.leaves(kept))
    assert F.tree.structure(new) == F.tree.structure(kept)
    inputs = [*F.tree.leaves(params), *F.tree.leaves(caches)]
    grads = [torch.randn_like(t) for t in (two, *F.tree.leaves(kept))]
    for some in (slice(1), slice(None)):  # of the output alone, and with the caches
        mine, theirs = (
            torch.autograd.grad(
                [y, *F.tree.leaves(c)][some], inputs, grads[some], retain_graph=True, materialize_grads=True
            )
            for y, c in ((second, new), (two, kept))
        )
        equal(mine, theirs)
        assert sum(g.abs().max() > 0 for g in mine) > len(F.tree.leaves(params)) // 2


def test_a_prompt_in_many_calls_ends_as_in_one():
    """Down to one token a call, of which most ranks have none."""
    cfg, params, caches = made("qwen")
    layout, mesh = sh.beside(sh.ulysses(), sh.gdn_scan("u")), sh.Mesh(u=4)
    ids, runs = torch.randint(0, 31, (B, 11)), {}

    def sharded(n):
        return runs.setdefault(n, sh.simulate(sh.shard(F.decoder, layout, mesh, S=n), mesh))

    with torch.no_grad():
        parts, new = ran(sharded, params, cfg, caches, ids, places(6, 1, 1, 3))
        (whole,), kept = ran(lambda n: F.decoder, params, cfg, caches, ids, places(11))
    equal(torch.cat(parts, 1), whole)
    equal([leaf for c in new if isinstance(c, F.GDNCache) for leaf in F.tree.leaves(c)],
          [leaf for c in kept if isinstance(c, F.GDNCache) for leaf in F.tree.leaves(c)])  # fmt: skip


def test_what_a_rank_keeps():
    """Its own heads by heads, key/value heads that two ranks need on both, states of a scan and latents whole."""
    said = []
    for kind, layout in (
        ("few", sh.beside(sh.ulysses(), sh.gdn_ulysses())),
        ("qwen", sh.beside(sh.ulysses(), sh.gdn_scan("u"))),
        ("kimi", sh.beside(sh.mla_latent(), sh.gdn_ulysses())),
    ):
        cfg, params, caches = made(kind)
        mesh = sh.Mesh(u=4)
        layer = sh.shard(F.decoder, layout, mesh, S=8)
        specs = layer.in_specs({"params": params, "cfg": cfg, "cache": caches, "positions": torch.arange(8)[None]})
        mine = sh.Threads(mesh).run(lambda at, caches=caches, specs=specs: sh.cut(caches, specs["cache"], at))[1]
        for i, (cache, of_rank) in enumerate(zip(specs["cache"], mine, strict=True)):
            leaves = zip(F.tree.paths(cache).items(), F.tree.leaves(of_rank), strict=True)
            said += [f"{kind} {i}{path}  {spec}  {' '.join(map(str, x.shape))}" for (path, spec), x in leaves]
    assert_expected_inline(
        "\n".join(dict.fromkeys(said)),
        """\
few 0.q  B (K/u E) U  2 3 3
few 0.k  B (K/u E) U  2 3 3
few 0.v  B (K/u G V) U  2 10 3
few 0.state  B (K/u G) V E  2 2 5 3
few 1.k  B T K@H/u E  2 16 1 4
few 1.v  B T K@H/u V  2 16 1 4
few 2.k  B T K/u E  2 6 1 4
few 2.v  B T K/u V  2 6 1 4
qwen 0.q  B (K E) U  2 12 3
qwen 0.k  B (K E) U  2 12 3
qwen 0.v  B (K G V) U  2 40 3
qwen 0.state  B (K G) V E  2 8 5 3
qwen 1.q  B (K E) U  2 6 3
qwen 1.k  B (K E) U  2 6 3
qwen 1.v  B (K G V) U  2 40 3
qwen 1.state  B (K G) V E  2 8 5 3
qwen 2.q  B (K E) U  2 12 3
qwen 2.k  B (K E) U  2 12 3
qwen 2.v  B (K G V) U  2 40 3
qwen 2.state  B (K G) V E  2 8 5 3
qwen 3.k  B T K/u E  2 16 1 4
qwen 3.v  B T K/u V  2 16 1 4
kimi 0.q  B (K/u E) U  2 3 3
kimi 0.k  B (K/u E) U  2 3 3
kimi 0.v  B (K/u G V) U  2 5 3
kimi 0.state  B (K/u G) V E  2 1 5 3
kimi 1.q  B (K/u E) U  2 3 3
kimi 1.k  B (K/u E) U  2 3 3
kimi 1.v  B (K/u G V) U  2 5 3
kimi 1.state  B (K/u G) V E  2 1 5 3
kimi 2.latent  B T LR  2 16 9
kimi 3.latent  B T LR  2 5 9""",
    )


def refused(layout, axes, kind, caches, **options):
    """What every rank says, having sent nothing."""
    cfg, params, usual = made(kind)
    mesh = sh.Mesh(**axes)
    record, fn = sh.trace(mesh), sh.shard(F.decoder, layout, mesh, S=8)
    given = {"positions": torch.arange(8)[None], "cache": usual if caches is None else caches(cfg, usual), **options}
    ids = torch.randint(0, 31, (B, 8))
    with pytest.raises((ValueError, TypeError)) as error:
        sh.simulate(fn, record.mesh)(params, ids, cfg, **given)

    def body(at):
        with pytest.raises(type(error.value)) as mine:
            fn(params, sh.cut(ids, layout["tokens"][0], at), cfg, mesh=at.recording(record), **given)
        return str(mine.value).split("\n    rank ")[0]

    said = sh.Threads(mesh).run(body)[0]
    assert not len(record)
    wanted = str(error.value).split("\n    rank ")[0]
    return wanted if said == wanted else f"{wanted}\n--- on a rank\n{said}"


def test_layouts_that_keep_no_cache():
    said = [
        refused(layout, axes, kind, None)
        for kind, layout, axes in (
            ("qwen", sh.beside(sh.all_gather(exchange="needed"), sh.gdn_scan("g")), {"g": 2}),
            ("kimi", sh.beside(sh.mla_gather(exchange="needed"), sh.gdn_scan("g")), {"g": 2}),
            ("kimi", sh.beside(sh.mla_packed(), sh.gdn_ulysses()), {"u": 2}),
        )
    ]
    assert_expected_inline(
        "\n".join(said),
        """\
decoder(cache=...) under a layout: layers[3].attention is of class Attention, and all_gather("g", exchange="needed") beside gdn_scan("g") sends needed keys alone, so that a rank lacks some of the others
    fix: exchange="all"
decoder(cache=...) under a layout: layers[2].attention is of class MLA, and mla_gather("g", exchange="needed") beside gdn_scan("g") sends needed keys alone, so that a rank lacks some of the others
    fix: exchange="all"
decoder(cache=...) under a layout: layers[2].attention is of class MLA, and latents of mla_packed("u") beside gdn_ulysses("u") stay split over u, so that no rank has all of them
    fix: mla_latent("u"), or no cache""",
    )


def test_caches_that_do_not_fit():
    layout, axes = sh.beside(sh.ulysses(), sh.gdn_ulysses()), {"u": 2}
    keys = F.KVCache(k=torch.zeros(2, 8, 2, 3), v=torch.zeros(2, 8, 2, 4))
    said = [
        refused(layout, axes, "qwen", lambda cfg, caches: (keys, *caches[1:])),
        refused(layout, axes, "qwen", lambda cfg, caches: caches[:2]),
        refused(layout, axes, "qwen", None, positions=None),
        refused(sh.ulysses(), axes, "plain", None, mask=torch.ones(8, 8, dtype=torch.bool)),
    ]
    # By simulation a cache is whole, and on a rank its own.
    wider = dataclasses.replace(PLAIN, num_key_value_heads=8)
    (other,) = F.empty_caches([wider], B, SLOTS, dtype=torch.float64)
    said += [refused(layout, axes, "qwen", lambda cfg, caches: (*caches[:3], other))]
    assert_expected_inline(
        "\n".join(said),
        """\
decoder(cache=...): cache[0] is a KVCache, and layers[0].attention is of class GDN
    fix: empty_caches(configs, ...) makes one a layer
decoder(cache=...): 2 entries for 4 layers
    fix: empty_caches([layer.attention for layer in cfg.layers], ...), and then what decoder returns
decoder(positions=...): needed with a cache, which does not say how full it is
decoder(mask=...) with a cache under a layout: S S says nothing of the tokens before
    fix: positions of -1 for padding
cache[3].k does not fit its spec: K is 4, but the tensor has 8 (2 16 8 4)
    B T K/u E
        ^^^
    mesh: u=2     sizes: D=10 H=8 K=4 G=2 E=4 V=4 A=2 B=2 T=16
    fix: 4 there, of all ranks together, or K=8 everywhere else
--- on a rank
decoder(cache=...): cache[0].q does not fit its spec: rank 0 holds B 6 3, but it is 2 12 3
    B (K/u E) U -> B (K/u E) U
       ^^^^^
    mesh: u=2, rank 0     sizes: K=4 H=8 G=2 E=3 U=3
    fix: global sizes, and a shard as the left side says: sh.show draws who holds what""",
    )


@pytest.mark.parametrize(("kind", "layout", "axes"), CASES, ids=[f"{k} {x.name} {a}" for k, x, a in CASES])
def test_a_stack_with_caches_is_what_a_trace_has(kind, layout, axes):
    """Every event of every rank, and the bytes that each layer's cache has there."""
    cfg, params, caches = made(kind)
    mesh, S = sh.Mesh(**axes), 9
    sizes = [each.attention.sizes for each in cfg.layers]
    options = {"B": B, "S": S, "dtype": torch.float64, "causal": True, "cache": SLOTS}
    plan, record = layout.stack(mesh, sizes, **options), sh.trace(mesh)
    fn = sh.shard(F.decoder, layout, mesh, S=S)
    y, _ = sh.simulate(fn, record.mesh)(
        params, torch.randint(0, 31, (B, S)), cfg, cache=caches, positions=torch.arange(S)[None]
    )
    y.sum().backward()

    def said(events):
        events = [e for e in events if e.call.edges not in (("embedded",), ("h",)) and "tp" not in e.axes]
        return [(e.what, e.kind, e.axes, e.call.edges, e.call.backward, e.sent, e.received, e.copies) for e in events]

    assert all(said(record.of(rank)) == said(plan.events(rank)) for rank in range(mesh.size))
    given = {"params": params, "cfg": cfg, "cache": caches, "positions": torch.arange(S)[None]}
    specs = fn.in_specs(given)["cache"]
    ranks = sh.Threads(mesh).run(lambda at: sh.cut(caches, specs, at))
    for found in plan.kinds:
        for i in found.layers:
            held = [sum(x.nbytes for x in F.tree.leaves(of_rank[i])) for of_rank in ranks]
            if getattr(cfg.layers[i].attention, "window", None) is None:  # of which a stack has the same for all layers
                assert found.plan.cache == (min(held), max(held))


def test_what_a_cache_adds_to_a_plan():
    sizes = {"B": 2, "S": 97, "H": 8, "K": 4, "E": 16}
    scan, latent = sh.gdn_scan(overlap=True), {"B": 2, "S": 97, "H": 8, "L": 12, "N": 4, "R": 4, "V": 4}
    found = []
    for layout, mesh, given in (
        (scan, sh.Mesh(cp=4), {**sizes, "W": 4}),
        (sh.gdn_ulysses(), sh.Mesh(u=3), {**sizes, "W": 4}),
        (sh.ulysses(), sh.Mesh(u=8), sizes),
        (sh.mla_latent(), sh.Mesh(u=4), latent),
    ):
        without, cached = layout.plan(mesh, **given), layout.plan(mesh, **given, cache=128)
        found.append(sh.diff(without, cached))
    window = sh.ulysses().plan(sh.Mesh(u=2), **sizes, causal=True, window=32, cache=128)
    assert window.cache == (2 * 32 * 2 * 32 * 4,) * 2  # B, slots of a ring, K of a rank, E and V, fp32
    assert_expected_inline(
        "\n".join(found),
        """\
- gdn_scan("cp", overlap=True)
+ gdn_scan("cp", overlap=True)
-   summary  all-gather over cp  P/cp -> P  98,304  98,304  0 + 0
- backward  summary  reduce-scatter over cp  P -> P/cp  98,304  98,304  0 + 0
+   summary, tail, rows  all-gather over cp  P/cp -> P  116,760  116,760  1 + 0
+ backward  summary, tail, rows  reduce-scatter over cp  P -> P/cp  116,760  116,760  1 + 0
- in all  202,752 to 208,896  202,752 to 208,896
+ in all  239,664 to 245,808  239,664 to 245,808
- 0  25  25  8 reading 4  1,228,800  451,904
+ 0  25  25  8 reading 4  1,228,800  514,440
- 1..3  24  27  8 reading 4  1,179,648  456,768
+ 1..3  24  27  8 reading 4  1,179,648  520,328
- order, forward: launch q,k,v (cp) > project b,a > wait q,k,v (cp) > core > launch summary (cp) > project z > wait
+ order, forward: launch q,k,v (cp) > project b,a > wait q,k,v (cp) > core > launch summary,tail,rows (cp) > project z >
-   summary (cp) > states
+   wait summary,tail,rows (cp) > states
- order, backward: states > launch summary (cp) > project z > wait summary (cp) > core > launch q,k,v (cp) > project b,a
+ order, backward: states > launch summary,tail,rows (cp) > project z > wait summary,tail,rows (cp) > core > launch
-   > wait q,k,v (cp)
+   q,k,v (cp) > project b,a > wait q,k,v (cp)
+ cache: 22,528 bytes on a rank, and as many for the new one; not in peak bytes
- gdn_ulysses("u")
+ gdn_ulysses("u")
+ cache: 5,632 to 11,264 bytes on a rank, and as many for the new one; not in peak bytes
- ulysses("u")
+ ulysses("u")
+ cache: 32,768 bytes on a rank, and as many for the new one; not in peak bytes
- mla_latent("u")
+ mla_latent("u")
+ cache: 16,384 bytes on a rank, and as many for the new one; not in peak bytes""",
    )


def test_plans_of_caches_that_cannot_be():
    sizes, said = {"B": 2, "S": 97, "H": 8, "K": 4, "E": 16, "cache": 128}, []
    for layout, mesh, more in (
        (sh.all_gather(exchange="needed"), sh.Mesh(g=2), {}),
        (sh.ulysses(), sh.Mesh(u=2), {"cu_seqlens": [0, 40, 97]}),
        (sh.ulysses(), sh.Mesh(u=2), {"cache": 0}),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            layout.plan(mesh, **{**sizes, **more})
        said.append(str(error.value))
    assert_expected_inline(
        "\n".join(said),
        """\
plan(cache=128): all_gather("g", exchange="needed") sends needed keys alone, so that a rank lacks some of the others
    mesh: g=2     fix: exchange="all"
plan(cu_seqlens=...) with a cache
    fix: give each document a row of the cache
plan(cache=0): how many slots it has, at least 1""",
    )


def test_slots_that_are_read_are_the_same_on_every_rank():
    """One tensor of them for all layers, or one each; and one row of positions for all."""
    cfg, params = model((PLAIN, MLP), (RING, MLP))
    caches = F.empty_caches([each.attention for each in cfg.layers], B, SLOTS, dtype=torch.float64)
    mesh, ids, told = sh.Mesh(u=4), torch.randint(0, 31, (B, 6)), {"positions": torch.arange(6)[None]}
    run = sh.simulate(sh.shard(F.decoder, sh.ulysses(), mesh, S=6), mesh)
    for read in (torch.arange(6), [torch.arange(9), torch.arange(6)]):
        y, _ = run(params, ids, cfg, cache=caches, read=read, **told)
        equal(y, F.decoder(params, ids, cfg, cache=caches, read=read, **told)[0])
