from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, *, see: Tensor | None = None, softcap=None, sinks=None, scale=None):
    """Attention a head, a query at a time, in fp64, straight from the formula."""
    (batch, queries, heads, _), groups = q.shape, q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b, s, h in itertools.product(range(batch), range(queries), range(heads)):
        keys = [t for t in range(k.shape[1]) if see is None or bool(see[b, h, s, t])]
        if not keys:
            continue
        scores = k[b, keys, h // groups] @ q[b, s, h] * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[h : h + 1].double()))
        out[b, s, h] = scores.softmax(0)[: len(keys)] @ v[b, keys, h // groups]
    return out


def inputs(B, S, T, H, K, E, V, dtype=torch.float64):
    """Non-contiguous on purpose: cut from one wider tensor each."""
    q = torch.randn(B, H, S, E + 1, dtype=dtype).transpose(1, 2)[..., 1:]
    k = torch.randn(B, T, K, 2 * E, dtype=dtype)[..., ::2]
    return q, k, torch.randn(B, K, T, V, dtype=dtype).transpose(1, 2)


def seen(B, H, S, T, rule):
    table = torch.zeros(B, H, S, T, dtype=torch.bool)
    for b, h, s, t in itertools.product(range(B), range(H), range(S), range(T)):
        table[b, h, s, t] = rule(b, h, s, t)
    return table


@pytest.mark.parametrize(
    "sizes", [(2, 5, 5, 3, 1, 4, 4), (1, 1, 1, 5, 5, 3, 2), (3, 3, 7, 6, 2, 4, 5), (2, 7, 3, 9, 3, 2, 6)]
)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True}, {"softmax_scale": 0.3}], ids=str)
def test_equals_the_formula(sizes, options):
    q, k, v = inputs(*sizes)
    options = {**options, "sinks": torch.randn(sizes[3], dtype=torch.float64) * 5} if "sinks" in options else options
    given = {"softcap": options.get("softcap"), "sinks": options.get("sinks"), "scale": options.get("softmax_scale")}
    torch.testing.assert_close(
        F.dot_product_attention(q, k, v, **options), reference(q, k, v, **given), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_decide_what_is_seen(causal, window):
    """A shard of the queries, keys out of order, some of both absent."""
    B, S, T, H, K = 2, 3, 7, 6, 2
    q, k, v = inputs(B, S, T, H, K, 4, 5)
    q_positions = torch.tensor([[4, 5, -1], [6, -1, 0]])
    k_positions = torch.stack([torch.tensor([3, 0, 1, -1, 2, 5, 4]), torch.randperm(7)])
    k = k.masked_fill((k_positions < 0)[..., None, None], torch.nan)
    v = v.masked_fill((k_positions < 0)[..., None, None], torch.nan)

    def rule(b, h, s, t):
        at, to = int(q_positions[b, s]), int(k_positions[b, t])
        far = window is not None and (at - to >= window or (not causal and to - at >= window))
        return at >= 0 and to >= 0 and not (causal and to > at) and not far

    expected = reference(q, k, v, see=seen(B, H, S, T, rule))
    options = {"causal": causal, "window": window, "q_positions": q_positions, "k_positions": k_positions}
    torch.testing.assert_close(F.dot_product_attention(q, k, v, **options), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(F.decode_attention(q, k, v, **options), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 6, 5, 7), (2, 6, 5, 7)], ids=str)
def test_masks_of_each_shape(shape):
    q, k, v = inputs(2, 5, 7, 6, 3, 4, 4)
    mask = torch.rand(shape) > 0.5
    mask[..., 2, :] = False
    expected = reference(q, k, v, see=mask.expand(2, 6, 5, 7))
    torch.testing.assert_close(F.dot_product_attention(q, k, v, mask=mask), expected, rtol=1e-12, atol=1e-12)


def test_segments_keep_documents_apart():
    q, k, v = inputs(2, 6, 6, 3, 3, 4, 4)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    whole = F.dot_product_attention(q, k, v, causal=True, segment_ids=ids)
    for b, row in enumerate(ids):
        for document in row.unique():
            part = row == document
            alone = F.dot_product_attention(q[b : b + 1, part], k[b : b + 1, part], v[b : b + 1, part], causal=True)
            torch.testing.assert_close(whole[b : b + 1, part], alone, rtol=1e-12, atol=1e-12)
    cut = F.dot_product_attention(
        q[:, 3:], k, v, causal=True, segment_ids=(ids[:, 3:], ids),
        q_positions=torch.arange(3, 6)[None], k_positions=torch.arange(6)[None],
    )  # fmt: skip
    torch.testing.assert_close(cut, whole[:, 3:], rtol=1e-12, atol=1e-12)


def test_kv_index_says_which_head_is_read():
    """12 query and 3 key/value heads over 4 ranks: the second rank has query heads 3 to 5, key/value heads 0 and 1."""
    q, k, v = inputs(2, 4, 4, 12, 3, 4, 4)
    whole = F.dot_product_attention(q, k, v, causal=True)
    index = torch.tensor([0, 1, 1])
    part = F.dot_product_attention(q[:, :, 3:6], k[:, :, :2], v[:, :, :2], causal=True, kv_index=index)
    torch.testing.assert_close(part, whole[:, :, 3:6])


@pytest.mark.parametrize(("S", "T"), [(0, 3), (3, 0), (1, 0), (0, 0)])
def test_empty(S, T):
    q, k, v = inputs(2, S, T, 3, 1, 4, 5)
    assert torch.equal(F.dot_product_attention(q, k, v), torch.zeros(2, S, 3, 5, dtype=torch.float64))


def test_sees_nothing_gives_zeros_and_clean_gradients():
    q, k, v = (x.detach().requires_grad_() for x in inputs(1, 3, 3, 2, 1, 4, 4))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    o = F.dot_product_attention(q, k, v, mask=mask)
    assert torch.equal(o[:, 1], torch.zeros_like(o[:, 1]))
    o.sum().backward()
    assert torch.equal(q.grad[:, 1], torch.zeros_like(q.grad[:, 1]))
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_gradients_to_second_order():
    B, S, T, H, K = 2, 3, 4, 4, 2
    q, k, v = (x.clone().requires_grad_() for x in inputs(B, S, T, H, K, 2, 3))
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    options = {
        "causal": True,
        "softcap": 2.0,
        "q_positions": torch.arange(1, 4)[None],
        "k_positions": torch.arange(4)[None],
    }
    for core in (F.dot_product_attention, F.decode_attention):
        fn = lambda q, k, v, sinks, core=core: core(q, k, v, sinks=sinks, **options)  # noqa: E731
        assert torch.autograd.gradcheck(fn, (q, k, v, sinks))
        assert torch.autograd.gradgradcheck(fn, (q, k, v, sinks))


def test_transforms_and_compile():
    q, k, v = inputs(3, 5, 5, 6, 2, 4, 4)
    fn = lambda q, k, v: F.dot_product_attention(q, k, v, causal=True, window=3)  # noqa: E731
    expected = fn(q, k, v)
    one = lambda q, k, v: fn(q[None], k[None], v[None])[0]  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.vmap(one)(q, k, v), expected)
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), expected)
        batched = torch.compile(torch.vmap(one), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(batched(q, k, v), expected)
    jacobian = torch.func.jacrev(one)(q[0], k[0], v[0])
    grad = torch.func.grad(lambda q: one(q, k[0], v[0]).sum())(q[0])
    torch.testing.assert_close(jacobian.sum((0, 1, 2)), grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_sdpa(dtype):
    q, k, v = (x.to(dtype) for x in inputs(2, 33, 33, 6, 2, 16, 16))
    exact = F.dot_product_attention(q.double(), k.double(), v.double(), causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    limit = 1.5 * (theirs - exact).abs().max()
    for core in (F.dot_product_attention, F.decode_attention):
        positions = torch.arange(33)[None]
        got = core(q, k, v, causal=True, q_positions=positions, k_positions=positions)
        assert got.dtype == dtype
        assert (got - exact).abs().max() <= limit


def test_errors():
    q, k, v = torch.ones(2, 5, 6, 8), torch.ones(2, 7, 3, 8), torch.ones(2, 7, 3, 8)
    cases = [
        ((q, torch.ones(2, 7, 3, 4), v), {}),
        ((q, k, torch.ones(2, 6, 3, 8)), {}),
        ((q[0], k, v), {}),
        ((q, k[:, :, :2].repeat(1, 1, 2, 1), v[:, :, :2].repeat(1, 1, 2, 1)), {}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"q_positions": torch.arange(5)[None]}),
        ((q, k, v), {"mask": torch.zeros(5, 7)}),
        ((q, k, v), {"mask": torch.zeros(2, 2, 5, 7, dtype=torch.bool)}),
        ((q, k, v), {"sinks": torch.ones(3)}),
        ((q, k, v), {"segment_ids": torch.zeros(2, 5)}),
        ((q, k, v), {"segment_ids": (torch.zeros(2, 5), None)}),
        ((q, k, v), {"mask": torch.zeros(2, 5, 7, dtype=torch.bool)}),
        ((q, k, v), {"window": 0}),
        ((q, k, v), {"softcap": -1.0}),
    ]
    texts = []
    for args, options in cases:
        with pytest.raises((ValueError, TypeError)) as error:
            F.dot_product_attention(*args, **options)
        texts.append(str(error.value))
    assert_expected_inline(
        "\n\n".join(texts),
        """\
dot_product_attention(k=...): E is 8 in q but 4 in k
    q: B S H E = 2 5 6 8
    k: B T K E = 2 7 3 4
                       ^
    so far: B=2 S=5 H=6 E=8 T=7 K=3

dot_product_attention(v=...): T is 7 in k but 6 in v
    k: B T K E = 2 7 3 8
    v: B T K V = 2 6 3 8
                   ^
    so far: B=2 S=5 H=6 E=8 T=7 K=3

dot_product_attention(q=...): 4 dimensions are needed, but it has 3
    q: B S H E = 5 6 8

dot_product_attention(k=...): H=6 query heads do not divide over K=4 key/value heads
    fix: pass kv_index (H), the key/value head of each query head

dot_product_attention: causal or window with S=5 queries and T=7 keys does not say which key each query stands at
    fix: pass q_positions (B S) and k_positions (B T)

dot_product_attention: q_positions is given without k_positions
    fix: pass both, or neither

dot_product_attention(mask=...): a boolean mask is needed, true where a query may see a key, not torch.float32
    fix: pass mask == 0 if it is additive

dot_product_attention(mask=...): H is 6 in q but 2 in mask
    q   : B S H E = 2 5 6 8
    mask: B H S T = 2 2 5 7
                      ^
    so far: B=2 S=5 H=6 E=8 T=7 K=3 V=8

dot_product_attention(sinks=...): H is 6 in q but 3 in sinks
    q    : B S H E = 2 5 6 8
    sinks: H = 3
               ^
    so far: B=2 S=5 H=6 E=8 T=7 K=3 V=8

dot_product_attention(k_segment_ids=...): T is 7 in k but 5 in k_segment_ids
    k            : B T K E = 2 7 3 8
    k_segment_ids: B T = 2 5
                           ^
    so far: B=2 S=5 H=6 E=8 T=7 K=3 V=8

dot_product_attention(segment_ids=...): ids of both sides are needed, B S and B T

dot_product_attention(mask=...): 4 dimensions are needed, but it has 3
    mask: B H S T = 2 5 7
    so far: B=2 S=5 H=6 E=8 T=7 K=3 V=8
    fix: mask[:, None], the same for each head

dot_product_attention(window=0): at least 1 token, the query's own

dot_product_attention(softcap=-1.0): must be above 0""",
    )


def test_no_gradient_comes_from_what_is_no_token():
    q, k, v = (x.clone() for x in inputs(2, 3, 4, 4, 2, 4, 4))
    q_positions, k_positions = torch.tensor([[0, 1, -1], [2, -1, 3]]), torch.tensor([[0, 1, -1, 2], [-1, 3, 2, 1]])
    q[q_positions < 0], k[k_positions < 0], v[k_positions < 0] = torch.nan, torch.nan, torch.nan
    for core in (F.dot_product_attention, F.decode_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        core(*leaves, causal=True, q_positions=q_positions, k_positions=k_positions).square().sum().backward()
        for leaf, positions in zip(leaves, (q_positions, k_positions, k_positions), strict=True):
            assert bool(leaf.grad.isfinite().all())
            assert not bool(leaf.grad[positions < 0].any())
