"""Faults of layouts that readers found, each with the test that would have shown it."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.functional.wire import edges, identity
from meshfn.sharding import SpecError

LAYOUTS = {"ulysses": {"u": 2}, "all_gather": {"g": 2}, "hybrid": {"g": 2, "u": 2}}
QKV = {"q": "B S/u (K G) E -> B S (K/u G) E", "o": "B S (K/u G) V -> B S/u (K G) V"}


def tensors(S=8, H=4, K=2, B=2):
    return [torch.randn(B, S, h, 3, dtype=torch.float64, requires_grad=True) for h in (H, K, K)]


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def simulated(core, layout, axes, S=8, H=4, K=2):
    mesh = sh.Mesh(**axes)
    return sh.simulate(sh.shard(core, layout, mesh, S=S, H=H, K=K), mesh)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_core_whose_window_means_something_else(name):
    # Flash attention's "no window" is -1, and was taken for a window of -1 tokens, which no key is in.
    def core(q, k, v, *, window=-1, causal=False, **told):
        return F.dot_product_attention(q, k, v, causal=causal, window=None if window < 0 else window, **told)

    xs = tensors()
    equal(
        simulated(core, getattr(sh, name)(), LAYOUTS[name])(*xs, causal=True), F.dot_product_attention(*xs, causal=True)
    )
    run = simulated(core, getattr(sh, name)(), LAYOUTS[name])
    for wrong in (0, -1, 2.0, True, (-1, -1)):
        with pytest.raises(ValueError, match=r"window=.*: at least 1 token, the query's own, or None"):
            run(*xs, window=wrong)


@pytest.mark.parametrize("name", ["all_gather", "hybrid"])
def test_a_core_that_uses_positions_without_a_mask(name):
    # Asked not to be causal, it was told no positions, and its biases were those of the shard.
    def alibi(q, k, v, *, causal=False, q_positions=None, k_positions=None, **told):
        scores = torch.einsum("bshe,bthe->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
        here = torch.arange(q.shape[1])[None] if q_positions is None else q_positions
        there = torch.arange(k.shape[1])[None] if k_positions is None else k_positions
        scores = scores - (here[:, :, None] - there[:, None]).abs()[:, None]
        return torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))

    xs = tensors()
    equal(simulated(alibi, getattr(sh, name)(), LAYOUTS[name])(*xs), alibi(*xs))


def test_keys_that_are_whole_beside_queries_by_heads():
    # Which key/value head a query head reads depends on those that the rank holds, not on its queries alone.
    mine = sh.Layout("mine", {**QKV, "k": "B S/u K E -> B S K E", "v": "B S/u K V -> B S K V"})
    xs = tensors()

    def core(q, k, v, *, q_positions, k_positions, kv_index=None):
        rest = {"q_positions": q_positions, "k_positions": k_positions, "kv_index": kv_index}
        return F.dot_product_attention(q, k, v, causal=True, **rest)

    y = simulated(core, mine, {"u": 2})(*xs)
    equal(y, F.dot_product_attention(*xs, causal=True))
    less = sh.Layout("less", {**QKV, "k": "B S/u K E -> B S K/u E", "v": "B S/u K V -> B S K/u V",
                              "q": "B S/u (K G) E -> B S (K G) E", "o": "B S (K G) V -> B S/u (K G) V"})  # fmt: skip
    with pytest.raises(SpecError, match=r"rank 0 has query heads 0:4 and key/value heads 0:1; 1 is missing"):
        simulated(core, less, {"u": 2})(*xs)


def test_parameters_that_nothing_says_how_to_split():
    # Each rank got whole weights, and the sum over ranks was as many times too large.
    @edges(x="B S D", h="B S F", out="B S D")
    def mine(weights, x, *, wire=identity):
        h = wire.pass_(h=wire.pass_(x=x) @ weights["up"].mT)
        return wire.pass_(out=h @ weights["down"].mT)

    mesh = sh.Mesh(tp=2, u=2)
    layer = sh.simulate(sh.shard(mine, sh.Layout("mine", {
        "x": "B S/u D", "h": "B S/u F/tp", "out": "B S/u D +tp -> B S/u D"}), mesh, S=4), mesh)  # fmt: skip
    weights = {"up": torch.randn(6, 4), "down": torch.randn(4, 6)}
    with pytest.raises(SpecError, match=r"mine\(weights=...\): mine splits F, and nothing says how a dict lies"):
        layer(weights, torch.randn(1, 4, 4))


def test_weights_that_were_not_cut():
    # A sum over tp of whole hidden layers is twice the whole. A layer says the size of its letters, and each edge is
    # compared with its spec.
    cfg, mesh = F.MLPConfig(hidden_size=8, intermediate_size=6), sh.Mesh(tp=2, u=2)
    layout = sh.Layout("mlp", {"x": "B S/u D", "h": "B S/u F/tp", "out": "B S/u D +tp -> B S/u D"})
    params, x = F.MLP.init(cfg, 0), torch.randn(1, 4, 8)
    layer = sh.shard(F.mlp, layout, mesh, S=4)
    torch.testing.assert_close(sh.simulate(layer, mesh)(params, x, cfg), F.mlp(params, x, cfg))

    def body(at):
        with pytest.raises(SpecError, match=r"h does not fit its spec: rank \d holds B 2 3, but it is 1 2 6"):
            layer(params, x[:, :2], cfg, mesh=at)

    sh.Threads(mesh).run(body)


def test_a_mask_that_a_layer_makes_itself():
    # The wire cuts the mask that it was given; one that a layer made was dropped.
    @edges(x="B S D", q="B S (K G) E", k="B T K E", v="B T K V", mask="B (K G) S T", o="B S (K G) V")
    def layer(x, *, wire=identity):
        wire = wire.layer(H=2, K=2)
        q = wire.pass_(x=x).unflatten(-1, (2, -1))
        own = torch.ones(4, 4, dtype=torch.bool).tril()
        q, mask, k, v = wire.receive(wire.send(k=q, v=q), q=q, mask=own)
        return wire.pass_(o=F.dot_product_attention(q, k, v, mask=mask))

    mesh = sh.Mesh(u=2)
    chains = {n: " -> ".join(c) for n, c in sh.ulysses().chains if n in ("x", "q", "k", "v", "mask", "o")}
    run = sh.simulate(sh.shard(layer, sh.Layout("mine", chains), mesh, S=4), mesh)
    with pytest.raises(SpecError, match="this layer passes a mask of its own, which is not known as a whole"):
        run(torch.randn(1, 4, 8))


def test_an_argument_that_a_layer_would_not_get():
    @edges(x="B S D", out="B S D")
    def layer(x, *, mask=None, wire=identity):
        return wire.pass_(out=wire.pass_(x=x))

    mesh = sh.Mesh(u=2)
    run = sh.simulate(sh.shard(layer, sh.Layout("mine", {"x": "B S/u D", "out": "B S/u D"}), mesh, S=4), mesh)
    with pytest.raises(
        ValueError, match=r"layer\(mask=...\) under a layout: it passes no edge mask that would bring it"
    ):
        run(torch.randn(1, 4, 2), mask=torch.ones(4, 4, dtype=torch.bool))


def test_ranks_that_were_told_other_things():
    # The collectives agree, and the results would be wrong in silence.
    mesh = sh.Mesh(g=2)
    core = sh.shard(F.dot_product_attention, sh.all_gather(), mesh, S=8, H=4, K=2)
    xs = [torch.randn(1, 4, h, 3) for h in (4, 2, 2)]
    for options in ({"causal": True}, {"cu_seqlens": [0, 3, 8]}, {"window": 2}):

        def body(at, options=options):
            return core(*xs, mesh=at, **(options if at.rank else {}))

        with pytest.raises(
            sh.TransportError, match=r"were told other things of what a query sees \(causal, window, cu_seq"
        ):
            sh.Threads(mesh).run(body)


def test_one_row_over_two_ranks_of_rows():
    xs = tensors(B=1)
    for layout in (sh.ulysses(dp="dp"), sh.all_gather("u", dp="dp")):
        y = simulated(F.dot_product_attention, layout, {"dp": 2, "u": 2})(*xs, causal=True)
        equal(y, F.dot_product_attention(*xs, causal=True))


def test_a_pair_of_ids_by_rows():
    xs = tensors()
    q_ids, k_ids = torch.randint(0, 2, (2, 8)), torch.randint(0, 2, (2, 8))
    run = simulated(F.dot_product_attention, sh.ulysses(dp="dp"), {"dp": 2, "u": 2})
    equal(run(*xs, segment_ids=(q_ids, k_ids)), F.dot_product_attention(*xs, segment_ids=(q_ids, k_ids)))


def test_tables_of_one_row_for_all():
    cfg = F.AttentionConfig(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, rope=F.RopeConfig()
    )
    params, x, positions = F.Attention.init(cfg, 0), torch.randn(3, 8, 8), torch.arange(8)[None]
    rope, mesh = F.rope_tables(positions, cfg.rope, 4, torch.float32), sh.Mesh(g=2, u=2)
    y, _ = sh.simulate(sh.shard(F.attention, sh.hybrid(), mesh, S=8), mesh)(params, x, cfg, rope=rope)
    torch.testing.assert_close(y, F.attention(params, x, cfg, positions=positions)[0])


def test_two_gathers_of_what_is_needed():
    with pytest.raises(SpecError, match=r'exchange="needed" gathers k in one step, and this takes 2'):
        sh.shard(sh.shard(F.dot_product_attention, sh.all_gather("a", exchange="needed"), sh.Mesh(g=2, a=2), S=8, H=2, K=2),
                 sh.all_gather("g"), sh.Mesh(g=2, a=2))  # fmt: skip
    both = sh.shard(sh.shard(F.dot_product_attention, sh.all_gather("a"), sh.Mesh(g=2, a=2), S=8, H=4, K=2),
                    sh.all_gather("g"), sh.Mesh(g=2, a=2))  # fmt: skip
    xs = tensors()
    equal(sh.simulate(both, sh.Mesh(g=2, a=2))(*xs, causal=True), F.dot_product_attention(*xs, causal=True))


def plain(q, k, v):
    return q


@pytest.mark.parametrize(
    ("core", "options", "message"),
    [
        (plain, {"cu_seqlens": [0, 8]}, "segment_ids is given, but plain takes none"),
        (plain, {"causal": True}, "causal is given, but plain takes none"),
        (plain, {"sinks": torch.zeros(4)}, "sinks is given, but plain takes none"),
        (plain, {"positions": torch.arange(8)[None]}, "q_positions is given, but plain takes none"),
        (F.dot_product_attention, {"casual": True}, "casual is given, but dot_product_attention takes none"),
        (F.dot_product_attention, {"segment_ids": (1, 2, 3)}, "segment_ids: B S, or a pair"),
        (F.dot_product_attention, {"positions": [0, 1]}, "positions: a tensor is needed, not list"),
        (
            F.dot_product_attention,
            dict.fromkeys(("positions", "q_positions", "k_positions"), torch.arange(8)[None]),
            "positions and q_positions both say where tokens stand",
        ),
    ],
)
def test_what_a_core_does_not_take_is_said_before_anything_moves(core, options, message):
    mesh = sh.Mesh(u=2)
    record = sh.trace(mesh)
    with pytest.raises((TypeError, ValueError)) as error:
        sh.simulate(sh.shard(core, sh.ulysses(), mesh, S=8, H=4, K=2), record.mesh)(*tensors(), **options)
    assert message in str(error.value)
    assert not len(record)


def test_cores_that_are_none():
    mesh = sh.Mesh(u=2)
    with pytest.raises(TypeError, match=r"does not say which arguments it takes\n    fix: lambda q, k, v"):
        sh.shard(torch.nn.functional.scaled_dot_product_attention, sh.ulysses(), mesh, S=8, H=4, K=2)
    for returned in ((1, 2), None):

        def core(q, k, v, returned=returned):
            return returned

        with pytest.raises(TypeError, match=f"the core returned {type(returned).__name__}: one tensor is needed"):
            simulated(core, sh.ulysses(), {"u": 2})(*tensors())


def test_a_cap_on_what_positions_of_takes():
    for wrong in ([], 8, ([0, 8], [0, 8])):
        with pytest.raises((ValueError, TypeError)):
            sh.positions_of("B S/u", sh.Mesh(u=2), 0, cu_seqlens=wrong)


def test_plans_and_rankings_of_nothing():
    mesh, sizes = sh.Mesh(u=2), {"B": 1, "S": 8, "H": 4, "K": 2, "E": 2}
    for change, message in (
        ({"H": 0, "K": 0}, "a plan needs heads, and H=0 K=0"),
        ({"window": 0}, "window=0: at least 1 token"),
        ({"Q": 9}, "a plan has no place for Q=9"),
        ({"dtype": torch.int32}, "a plan is of tensors with gradients"),
        ({"dtype": "fp32"}, "a plan is of tensors with gradients"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            sh.ulysses().plan(mesh, **{**sizes, **change})
    with pytest.raises(SpecError, match=r"shard\(attention, ..., Q=...\): no edge of ulysses"):
        sh.shard(F.attention, sh.ulysses(), mesh, S=8, Q=9)
    with pytest.raises(ValueError, match="at least one layout is needed"):
        sh.best([], mesh, sizes, sh.Costs({}, {}, 1.0))
    with pytest.raises(ValueError, match="costs of g are not known     known: u"):
        sh.Costs({"u": 1.0}, {"u": 1.0}, 1.0).seconds(("g", "u"), 8)


def test_sums_of_a_whole_tree_by_one_spec():
    def body(at):
        return sh.sum_gradients({"a": torch.ones(2), "b": [torch.ones(1) * at.rank]}, "D", at)

    found = sh.Threads(sh.Mesh(u=2)).run(body)
    assert all(x["a"].tolist() == [2.0, 2.0] and x["b"][0].tolist() == [1.0] for x in found)


def test_a_fitting_hybrid_keeps_what_was_asked():
    with pytest.raises(SpecError, match=r'hybrid\(ulysses="u", gather="g", tp="tp", zigzag=True\)'):
        sh.shard(F.dot_product_attention, sh.ulysses(tp="tp", zigzag=True), sh.Mesh(tp=2, u=4), S=16, H=4, K=2)


@pytest.mark.parametrize("fn", [F.attention, F.dot_product_attention])
def test_a_function_of_other_dimensions(fn):
    with pytest.raises(SpecError, match=r'(q|x) is "B S .*" in .*attention, and other dimensions here'):
        sh.shard(fn, sh.ulysses(dims="S B H E"), sh.Mesh(u=2), S=8, H=4, K=2)


def test_nothing_flies_longer_than_it_must():
    # The buffers of an exchange were kept until the graph was gone.
    mesh = sh.Mesh(u=2)
    core = sh.shard(F.dot_product_attention, sh.ulysses(overlap=True), mesh, S=8, H=4, K=2)
    xs = [x.detach()[:, :4].requires_grad_() for x in tensors()]

    def held(at):
        y = core(*xs, mesh=at)
        stack, found, seen = [y.grad_fn], [], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            found.append(getattr(node, "flight", None))
            stack += [parent for parent, _ in node.next_functions]
        flights = [flight for flight in found if flight is not None]
        return len(flights), [flight.started for flight in flights]

    for count, started in sh.Threads(mesh).run(held):
        assert count
        assert started == [None] * count


def test_the_sum_after_the_last_projection_is_in_the_plan():
    cfg = F.AttentionConfig(hidden_size=8, num_attention_heads=4, num_key_value_heads=4, head_dim=2)
    params = F.tree.map(lambda p: p.requires_grad_(), F.Attention.init(cfg, 0))
    mesh, layout = sh.Mesh(tp=2, u=2), sh.ulysses(tp="tp")
    record = sh.trace(mesh)
    layer, x = sh.shard(F.attention, layout, mesh, S=8), torch.randn(1, 8, 8, requires_grad=True)
    y, _ = sh.simulate(layer, record.mesh)(params, x, cfg)
    torch.autograd.grad(y, x, torch.randn_like(y))
    plan = layer.plan(B=1, H=4, K=4, E=2, D=8)
    for rank in range(4):
        facts = [[(e.what, e.kind, e.call.title, e.sent, e.received) for e in events]
                 for events in (plan.of(rank).events, record.of(rank))]  # fmt: skip
        assert facts[0] == facts[1]
        assert ("launch", "all-reduce", "out", 128, 128) in facts[0]
    assert "not counted: the sum of out, B S/u D +tp -> B S/u D, for want of D=" in str(layer.plan(B=1, H=4, K=4, E=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": "B S/u:zigzag K E -> B S K/u E"}, "q and k meet, but S lies as S/u in one and as S/u:zigzag in the other"),
        ({"q_positions": "B S -> B S/u"}, "q and q_positions meet, but S lies as S in one and as S/u in the other"),
        ({"o": "B S (K G) V -> B S/u (K G) V"}, "q and o meet, but K lies as K/u in one and as K in the other"),
        ({"sinks": "(K G)"}, "q and sinks meet, but K lies as K/u in one and as K in the other"),
    ],
)  # fmt: skip
def test_edges_that_meet_lie_alike(change, message):
    edges_of = {**QKV, "k": "B S/u K E -> B S K/u E", "v": "B S/u K V -> B S K/u V", **change}
    with pytest.raises(SpecError) as error:
        sh.Layout("mine", edges_of).plan(sh.Mesh(u=2), B=1, S=8, H=4, K=2, E=2)
    assert str(error.value).startswith(f"mine: {message}")


def test_needed_keys_of_thousands_of_ranks():
    # Every rank was rehearsed for itself, against every other.
    sizes = {"B": 1, "S": 131072, "H": 33, "K": 3, "E": 64}
    plan = sh.all_gather(exchange="needed").plan(sh.Mesh(g=4096), **sizes, causal=True)
    token, chunk = 3 * 128 * 4, 131072 // 4096
    for rank in (0, 1, 2047, 4095):  # each sends its keys to all behind it, and gets those of all before it
        launch = plan.of(rank).events[0]
        assert launch.sent == (4095 - rank) * chunk * token
        assert launch.received == rank * chunk * token
        assert plan.of(rank).keys == (rank + 1) * chunk


@pytest.mark.parametrize("seed", range(12))
def test_what_is_worked_out_for_other_ranks_is_what_they_do(seed):
    made = torch.Generator().manual_seed(seed)
    g, u, S = (int(torch.randint(1, n, (), generator=made)) for n in (5, 3, 30))
    cu = [0, *sorted(torch.randint(0, S + 1, (3,), generator=made).tolist()), S]
    zigzag, overlap = seed % 3 == 0, seed % 2 == 0
    S = cu[-1] = S + -S % (2 * g) if zigzag else S
    mesh, sizes = sh.Mesh(g=g, u=u), {"S": S, "H": 6, "K": 3}
    layout = sh.hybrid(exchange="needed", zigzag=zigzag, overlap=overlap)
    options = {"causal": seed % 4 != 1, "window": [None, 3][seed % 5 == 2], "cu_seqlens": cu}
    plan = layout.plan(mesh, B=2, E=2, dtype=torch.float64, **sizes, **options)
    record = sh.trace(mesh)
    xs = [torch.randn(2, S, h, 2, dtype=torch.float64, requires_grad=True) for h in (6, 3, 3)]
    y = sh.simulate(sh.shard(F.dot_product_attention, layout, mesh, **sizes), record.mesh)(*xs, **options)
    torch.autograd.grad(y, xs, torch.randn_like(y))
    for rank in range(mesh.size):
        facts = [[(e.what, e.kind, e.call.title, e.sent, e.received, e.copies) for e in events]
                 for events in (plan.of(rank).events, record.of(rank))]  # fmt: skip
        assert facts[0] == facts[1], rank


def test_a_batch_is_cut_as_the_model_takes_it():
    # Said twice by hand, the two could differ in silence.
    mesh, ids = sh.Mesh(dp=2, u=2), torch.arange(32).reshape(4, 8)
    model = sh.shard(F.next_token_loss, sh.ulysses(dp="dp", zigzag=True), mesh, S=8)
    for rank in range(4):
        at = mesh.at(rank, object())
        found = [sh.shard_batch(ids, None, None, None, spec, at) for spec in (model, model.layout, "B/dp S/u:zigzag")]
        assert all(torch.equal(batch.tokens, found[0].tokens) for batch in found)
        assert found[0].tokens.shape == (2, 4)
    with pytest.raises(ValueError, match="S=6 tokens a row, and the model is of S=8"):
        sh.shard_batch(ids[:, :6], None, None, None, model, mesh.at(0, object()))


def test_an_edge_that_was_misspelt():
    with pytest.raises(
        SpecError, match=r'mine has an edge "key", which this core does not pass\n    fix: did you mean "k"'
    ):
        sh.shard(lambda q, k, v: q, sh.Layout("mine", {**QKV, "key": "B S/u K E -> B S/u K E", "k": "B S K E", "v": "B S K V"}),
                 sh.Mesh(u=2), S=8, H=4, K=2)  # fmt: skip


def test_a_core_that_must_be_told_kv_index():
    def core(q, k, v, *, kv_index):
        return F.dot_product_attention(q, k, v, kv_index=kv_index)

    xs = tensors(H=12, K=3)
    equal(simulated(core, sh.ulysses(), {"u": 5}, H=12, K=3)(*xs), F.dot_product_attention(*xs))
