"""Attention under every layout equals attention on one rank, with every gradient; and who computes what."""

from __future__ import annotations

import functools
import itertools
import math
import re

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from meshfn.sharding import SpecError, rules
from torch.nn.attention.flex_attention import flex_attention

from . import attention_cases as cases


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", range(0, 240, 20))
def test_random_layouts(first):
    for seed in range(first, first + 20):
        case = cases.make(seed)
        y, grads = cases.sharded(case)
        want, wanted = cases.dense(case)
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")


def tensors(H, K, S=8, B=2, E=4, V=None):
    shapes = (B, S, H, E), (B, S, K, E), (B, S, K, V or E)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compare(layout, axes, H, K, S=8, core=F.dot_product_attention, **options):
    """Against one rank, with gradients; what each rank's core was given."""
    mesh, xs = sh.Mesh(**axes), tensors(H, K, S)
    seen = {}

    @functools.wraps(core)
    def spy(q, k, v, **told):
        seen[told["head_offset"]] = (q.shape[2], k.shape[2], told.get("kv_index"))
        return core(q, k, v, **told)

    run = sh.simulate(sh.shard(spy, layout, mesh, S=S, H=H, K=K), mesh)
    y, want = run(*xs, **options), core(*xs, **options)
    weights = torch.randn_like(want)
    equal(y, want)
    equal(torch.autograd.grad(y, xs, weights), torch.autograd.grad(want, xs, weights))
    return [seen[offset] for offset in sorted(seen)]


def test_six_heads_on_four_ranks():
    assert [q for q, _, _ in compare(sh.ulysses(), {"u": 4}, 6, 6, causal=True)] == [2, 2, 1, 1]


def test_a_layout_remembers_nothing_of_another():
    # The count of key/value heads of one model stayed behind in a process-wide slot, and split the next one by it.
    compare(sh.ulysses(), {"u": 2}, 6, 3)
    assert [q for q, _, _ in compare(sh.ulysses(), {"u": 4}, 12, 12, causal=True)] == [3, 3, 3, 3]


def test_two_models_in_turn():
    for heads in (3, 5, 3):
        found = compare(sh.ulysses(), {"u": 2}, heads, heads, causal=True)
        assert [q for q, _, _ in found] == {3: [2, 1], 5: [3, 2]}[heads]


def test_two_models_interleaved():
    mesh = sh.Mesh(u=2)
    three, five = (
        sh.simulate(sh.shard(F.dot_product_attention, sh.ulysses(), mesh, S=8, H=n, K=n), mesh) for n in (3, 5)
    )
    a, b = tensors(3, 3), tensors(5, 5)
    y, z = three(*a), five(*b)
    equal(y, F.dot_product_attention(*a))
    equal(z, F.dot_product_attention(*b))
    found = torch.autograd.grad([y.sum(), z.sum()], [*a, *b])
    equal(found[:3], torch.autograd.grad(F.dot_product_attention(*a).sum(), a))
    equal(found[3:], torch.autograd.grad(F.dot_product_attention(*b).sum(), b))


def test_query_heads_follow_their_key():
    assert compare(sh.ulysses(), {"u": 2}, 6, 3, causal=True) == [(4, 2, None), (2, 1, None)]


def test_one_key_head_on_two_ranks():
    assert compare(sh.ulysses(), {"u": 2}, 2, 1, causal=True) == [(1, 1, None), (1, 1, None)]


def test_three_key_heads_on_four_ranks():
    found = compare(sh.ulysses(), {"u": 4}, 12, 3, causal=True)
    assert [(q, k) for q, k, _ in found] == [(3, 1), (3, 2), (3, 2), (3, 1)]
    assert [i if i is None else i.tolist() for _, _, i in found] == [None, [0, 1, 1], [0, 0, 1], None]


def test_direct_exchange_of_odd_heads():
    mesh, x = sh.Mesh(u=2), torch.randn(1, 8, 3, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, *, mesh):
        y = sh.reshard(x, "B S/u K E -> B S K/u E", mesh, S=8)
        assert y.shape == (1, 8, 2 - mesh.rank, 2)
        return sh.reshard(y.square(), "B S K/u E -> B S/u K E", mesh, K=3)

    y = sh.simulate(there_and_back, mesh, "B S/u K E", "B S/u K E")(x)
    equal(y, x.square())
    equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)


def test_the_even_path_in_two_halves():
    mesh = sh.Mesh(u=2)
    record = sh.trace(mesh)
    q, k, v = tensors(4, 4)
    run = sh.simulate(sh.shard(F.dot_product_attention, sh.ulysses(overlap=True), mesh, S=8, H=4, K=4), record.mesh)
    y = run(q, k, v)
    equal(y, F.dot_product_attention(q, k, v))
    launched = [(e.call.edges, e.what) for e in record.of(0)]
    assert launched[:3] == [(("k", "v"), "launch"), (("q",), "launch"), (("k", "v"), "wait")]


def test_fewer_query_heads_than_ranks():
    with pytest.raises(SpecError) as error:
        sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=8), S=8, H=6, K=3)
    assert str(error.value).splitlines() == [
        'ulysses("u"): H=6 query heads are fewer than u=8 ranks',
        "    B S (K/u G) E",
        '    mesh: u=8     fix: Mesh(g=2, u=4) with hybrid(ulysses="u", gather="g")',
    ]
    compare(sh.hybrid(), {"g": 2, "u": 4}, 6, 3)
    with pytest.raises(SpecError, match="H=1 query heads are fewer than u=2 ranks"):
        sh.shard(F.dot_product_attention, sh.ulysses(), sh.Mesh(u=2), S=8, H=1, K=1)


def test_every_rank_refuses_alike_before_anything_moves():
    # A layer says its heads when it runs; still nothing has moved then.
    cfg = F.AttentionConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    mesh, params = sh.Mesh(u=4), F.Attention.init(cfg, 0)
    record = sh.trace(mesh)
    layer, x, raised = sh.shard(F.attention, sh.ulysses(), mesh, S=8), torch.randn(1, 8, 8), []

    def body(at):
        with pytest.raises(SpecError, match="H=2 query heads are fewer than u=4 ranks"):
            layer(params, x[:, 2 * at.rank : 2 * at.rank + 2], cfg, mesh=at.recording(record))
        raised.append(at.rank)

    sh.Threads(mesh).run(body)
    assert sorted(raised) == [0, 1, 2, 3]
    assert not len(record)


@pytest.mark.parametrize(
    ("axes", "H", "K"),
    [
        ({"tp": 2, "u": 2}, 4, 4),
        ({"tp": 2, "u": 2}, 8, 2),
        ({"tp": 2, "u": 3}, 12, 4),
        ({"tp": 4}, 9, 3),  # some ranks need two key/value heads, some share one
        ({"tp": 4, "u": 2}, 8, 2),
        ({"tp": 2, "u": 2}, 12, 3),
    ],
)
def test_the_local_count_matters(axes, H, K):
    # tp has split the heads before: 4 of 8 heads, or 1 of 2 key/value heads, are what u deals out.
    found = compare(sh.ulysses(tp="tp"), axes, H, K, causal=True)
    assert sum(q for q, _, _ in found) == H
    assert len(found) == math.prod(axes.values())


def test_heads_that_tp_cannot_split():
    with pytest.raises(SpecError, match=r"H=3 query heads over tp=4, which splits them before[\s\S]*fix: tp=1"):
        sh.shard(F.dot_product_attention, sh.ulysses(tp="tp"), sh.Mesh(tp=4, u=2), S=8, H=3, K=3)


MADE = [sh.ulysses, sh.hybrid, sh.all_gather, sh.mla_latent, sh.mla_packed, sh.mla_gather]


@pytest.mark.parametrize("made", MADE)
def test_what_is_advised_for_heads_that_do_not_fit_does_fit(made):
    layout, refused = made(tp="tp", zigzag=True), 0
    tokens = "u" if "u" in layout.axes else "g"
    for K, G, tp, n in itertools.product(range(1, 6), range(1, 4), range(1, 6), range(1, 8)):
        axes, heads = {"tp": tp, tokens: n}, {"H": K * G, "K": K}
        if made.__name__.startswith("mla") and G > 1:
            continue
        try:
            fits(layout, axes, heads)
        except SpecError as error:
            refused += 1
            for fix in str(error).split("fix: ")[1].split(", or "):
                if " with " in fix:
                    mesh, other = (eval(text, vars(sh)) for text in fix.split(" with "))
                    fits(other, dict(mesh.axes), heads)
                    assert mesh.size == tp * n
                else:
                    fits(layout, axes | {axis: int(n) for axis, n in re.findall(r"(\w+)=(\d+)", fix)}, heads)
    assert refused > 20


def fits(layout, axes, heads):
    rules.resolve(layout.name, layout.chains, sh.Mesh(**axes).axes, tuple(heads.values()))


@pytest.mark.parametrize("dims", ["B S H E", "S B H E"])
@pytest.mark.parametrize("layout", [sh.ulysses, sh.all_gather, sh.hybrid])
def test_sinks_with_large_values(layout, dims):
    # A sink that is zero hides that nobody reads it.
    made = layout(dims=dims)
    mesh = sh.Mesh(**dict.fromkeys(made.axes, 2))
    q, k, v = (x.detach().transpose(0, 1) if dims[0] == "S" else x.detach() for x in tensors(6, 3, V=5))
    sinks = torch.tensor([20.0, -20, 5, 0, 7, 3], dtype=torch.float64, requires_grad=True)

    def core(q, k, v, *, causal=False, **told):
        swap = (lambda x: x.transpose(0, 1)) if dims[0] == "S" else (lambda x: x)
        return swap(F.dot_product_attention(swap(q), swap(k), swap(v), causal=causal, **told))

    y = sh.simulate(sh.shard(core, made, mesh, S=8, H=6, K=3), mesh)(q, k, v, causal=True, sinks=sinks)
    want = core(q, k, v, causal=True, sinks=sinks)
    weights = torch.randn_like(want)
    equal(y, want)
    (found,), (wanted,) = (torch.autograd.grad(z, sinks, weights) for z in (y, want))
    equal(found, wanted)
    assert wanted.abs().min() > 0


def sdpa(q, k, v):
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_a_core_of_three_arguments_works_unchanged():
    mesh, xs = sh.Mesh(u=2), tensors(6, 3)
    y = sh.simulate(sh.shard(sdpa, sh.ulysses(), mesh, S=8, H=6, K=3), mesh)(*xs)
    equal(y, sdpa(*xs))


@pytest.mark.parametrize(("H", "K"), [(12, 3), (4, 1), (10, 2)])
def test_a_core_without_kv_index_gets_its_heads_repeated(H, K):
    mesh, xs = sh.Mesh(u=4), tensors(H, K)
    y = sh.simulate(sh.shard(sdpa, sh.ulysses(), mesh, S=8, H=H, K=K), mesh)(*xs)
    equal(y, sdpa(*xs))
    weights = torch.randn_like(y)
    equal(torch.autograd.grad(y, xs, weights), torch.autograd.grad(sdpa(*xs), xs, weights))


def test_a_core_that_cannot_know_where_it_stands():
    with pytest.raises(SpecError) as error:
        sh.shard(sdpa, sh.hybrid(), sh.Mesh(g=2, u=2), S=8, H=6, K=3)
    assert str(error.value) == (
        'hybrid(ulysses="u", gather="g"): sdpa takes no q_positions, and its queries are some of the tokens, its keys '
        "others: it could not tell which key a query stands at\n"
        "    B S/g (K/u G) E\n"
        "    mesh: g=2 u=2\n"
        "    fix: def core(q, k, v, *, q_positions, k_positions, **_): ..., or **_ alone where order plays no part"
    )
    # Where order plays no part, it says so.
    mesh, xs = sh.Mesh(g=2, u=2), tensors(6, 3)

    def bag(q, k, v, **_):
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*swapped, enable_gqa=True).transpose(1, 2)

    equal(sh.simulate(sh.shard(bag, sh.hybrid(), mesh, S=8, H=6, K=3), mesh)(*xs), bag(*xs))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_by_positions():
    seen = []

    def core(q, k, v, *, q_positions, k_positions, **_):
        def keep(score, b, h, i, j):
            return torch.where(q_positions[0, i] >= k_positions[0, j], score, -float("inf"))

        seen.append((q.shape[1], k.shape[1]))
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(*swapped, score_mod=keep, enable_gqa=True).transpose(1, 2)

    mesh, (q, k, v) = sh.Mesh(g=2, u=2), (x.detach().float() for x in tensors(6, 3, S=7))
    y = sh.simulate(sh.shard(core, sh.hybrid(), mesh, S=7, H=6, K=3), mesh)(q, k, v)
    torch.testing.assert_close(y, F.dot_product_attention(q, k, v, causal=True))
    assert sorted(set(seen)) == [(3, 7), (4, 7)]


def test_a_core_is_told_its_heads():
    told = {}

    def core(q, k, v, *, head_offset, local_heads, q_positions, k_positions):
        told[head_offset] = (local_heads, q_positions.shape, k_positions.shape)
        return q[..., :4]

    mesh = sh.Mesh(u=4)
    sh.simulate(sh.shard(core, sh.ulysses(), mesh, S=8, H=6, K=6), mesh)(*tensors(6, 6))
    assert told == {offset: (n, (1, 8), (1, 8)) for offset, n in ((0, 2), (2, 2), (4, 1), (5, 1))}


def test_gradients_of_any_order():
    mesh = sh.Mesh(g=2, u=2)
    run = sh.simulate(sh.shard(F.dot_product_attention, sh.hybrid(overlap=True), mesh, S=5, H=3, K=1), mesh)
    xs = tensors(3, 1, S=5, B=1, E=2)

    def loss(fn):
        return lambda *xs: fn(*xs, causal=True).square().sum()

    wanted = torch.func.grad(loss(F.dot_product_attention), (0, 1, 2))(*xs)
    equal(torch.func.grad(loss(run), (0, 1, 2))(*xs), wanted)
    assert torch.autograd.gradgradcheck(lambda q: run(q, *xs[1:], causal=True), (xs[0],))
    batch = torch.stack([xs[0], xs[0].roll(1, 1)])
    found = torch.func.vmap(lambda q: run(q, *xs[1:], causal=True))(batch)
    equal(found, torch.stack([F.dot_product_attention(q, *xs[1:], causal=True) for q in batch]))
