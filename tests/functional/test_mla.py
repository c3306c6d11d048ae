"""Latent attention: expanded, absorbed, a range of heads, against transformers and against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from meshfn import functional as F
from meshfn.functional.mla import is_absorbed

from .latent_cases import YARN, deepseek, theirs, tiny

CASES = {
    "yarn-40": {},
    "half-split": {"rope_interleave": False},
    "no-query-rank": {"q_lora_rank": None, "attention_bias": False},
    "plain-rope": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
    "equal-mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "v_head_dim": 16},
}


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_with_gradients(name, absorbed):
    """Lengths 0, 1, 3 and 19, batch 3, x not contiguous, positions far beyond the original context of 16."""
    module, tables, params, cfg = deepseek(**CASES[name])
    for size in (0, 1, 3, 19):
        x = torch.randn(size, 3, 36, dtype=torch.float64).transpose(0, 1).requires_grad_()
        positions = torch.arange(size)[None] + torch.tensor([0, 100, 600])[:, None]
        weight = torch.randn(3, size, 36, dtype=torch.float64)
        mine, none = F.mla(params, x, cfg, positions=positions, absorbed=absorbed)
        if size == 0:
            assert mine.shape == (3, 0, 36)
            continue
        assert none is None
        wanted = theirs(module, tables, x, positions)
        # Tables are fp32 on both sides, and their norms are in fp32 whatever x is.
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)
        leaves = [x, *F.tree.leaves(params)]
        found = torch.autograd.grad((mine * weight).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad((wanted * weight).sum(), leaves), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def kinds():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 1]])
    mask = torch.rand(2, 3, 7, 7) < 0.6
    mask[0, :, 3] = False  # a row that may see nothing
    return {
        "causal": ({}, {}),
        "whole": ({"causal": False}, {}),
        "window": ({"window": 3}, {}),
        "window-both-sides": ({"window": 2, "causal": False}, {}),
        "mask": ({"causal": False}, {"mask": mask}),
        "mask-of-all": ({}, {"mask": mask[0, 0]}),
        "documents": ({}, {"segment_ids": ids}),
        "gate": ({"output_gate": True}, {}),
        "nope": ({"rope": None, "qk_rope_head_dim": 3}, {}),
        "scale": ({"softmax_scale": 0.7, "norm": F.NormConfig(), "post_norm": F.NormConfig(zero_centered=True)}, {}),
        "padding": ({}, {"positions": torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, -1, -1, -1]])}),
    }


@pytest.mark.parametrize("name", kinds())
def test_absorbed_equals_expanded_with_gradients(name):
    torch.manual_seed(3)
    options, given = kinds()[name]
    cfg = tiny(**options)
    params = F.tree.map(
        lambda t: (t + 0.1 * torch.randn_like(t)).requires_grad_(), F.MLA.init(cfg, 0, dtype=torch.float64)
    )
    x = torch.randn(2, 7, 20, dtype=torch.float64, requires_grad=True)
    given = {"positions": torch.arange(7)[None], **given}
    weight = torch.randn(2, 7, 20, dtype=torch.float64)
    found = []
    for absorbed in (False, True):
        out, _ = F.mla(params, x, cfg, absorbed=absorbed, **given)
        found.append((out, *torch.autograd.grad((out * weight).sum(), [x, *F.tree.leaves(params)])))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    if name == "mask":  # zeros from the core, and the projection keeps them
        assert found[0][0][0, 3].abs().max() == 0
    check = torch.autograd.gradgradcheck if name == "window" else None
    if check:
        fn = lambda x: F.mla(params, x, cfg, absorbed=True, **given)[0]  # noqa: E731
        assert check(fn, (x,), atol=1e-4)


def test_gated_nope_layer_in_the_shape_of_kimi_k3():
    """Query rank, a shared key that never turns, V other than N + R, a sigmoid gate of full rank: the formula, head by
    head and row by row."""
    torch.manual_seed(0)
    cfg = tiny(rope=None, output_gate=True, qk_rope_head_dim=3, softmax_scale=None)
    p = F.tree.map(lambda t: t + 0.1 * torch.randn_like(t), F.MLA.init(cfg, 1, dtype=torch.float64))
    x = torch.randn(2, 6, 20, dtype=torch.float64)

    def rms(a, w):
        return a / (a.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w

    wanted = torch.zeros(2, 6, 20, dtype=torch.float64)
    for b in range(2):
        c_q = rms(x[b] @ p.q_a.T, p.q_norm)
        down = x[b] @ p.kv_a.T
        c, shared = rms(down[:, :13], p.kv_norm), down[:, 13:]
        heads = []
        for h in range(3):
            q = c_q @ p.q_b[8 * h : 8 * h + 8].T  # N + R = 8
            up = c @ p.kv_b[12 * h : 12 * h + 12].T  # N + V = 12
            k, v = torch.cat((up[:, :5], shared), 1), up[:, 5:]
            rows = []
            for s in range(6):
                scores = (k[: s + 1] @ q[s]) / math.sqrt(8)
                e = (scores - scores.max()).exp()
                rows.append((e / e.sum()) @ v[: s + 1])
            gate = 1 / (1 + (-(x[b] @ p.gate[7 * h : 7 * h + 7].T)).exp())
            heads.append(torch.stack(rows) * gate)
        wanted[b] = torch.cat(heads, 1) @ p.o.T
    for absorbed in (False, True):
        found, _ = F.mla(p, x, cfg, positions=torch.arange(6)[None], absorbed=absorbed)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("query_rank", [8, None])
def test_stages_compose_to_the_layer_for_any_range_of_heads(query_rank):
    cfg = tiny(q_lora_rank=query_rank, output_gate=True, norm=F.NormConfig())
    params = F.MLA.init(cfg, 0, dtype=torch.float64)
    x, positions = torch.randn(2, 5, 20, dtype=torch.float64), torch.arange(5)[None]
    wanted, _ = F.mla(params, x, cfg, positions=positions)
    q_latent, kv_latent, key_rope = F.mla_latents(params, x, cfg)
    assert (kv_latent.shape, key_rope.shape) == ((2, 5, 13), (2, 5, 4))
    cos, sin = F.rope_tables(positions, cfg.rope, 4, torch.float64)
    key_rope = F.apply_rope(key_rope[:, :, None], cos, sin)[:, :, 0]
    outs = []
    for heads in ((0, 1), range(1, 3)):
        q = F.mla_queries(params, q_latent, cfg, heads=heads)
        q = torch.cat((q[..., :5], F.apply_rope(q[..., 5:], cos, sin)), -1)
        k, v = F.mla_expand(params, kv_latent, key_rope, cfg, heads=heads)
        outs.append(F.dot_product_attention(q, k, v, causal=True, softmax_scale=cfg.scale))
    torch.testing.assert_close(F.mla_output(params, torch.cat(outs, 2), x, cfg), wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_gives_what_the_whole_gives(window):
    """Token by token, in chunks, in rows of other lengths; unwritten slots hold NaN; both ways to compute it."""
    cfg = tiny(window=window)
    params = F.MLA.init(cfg, 0, dtype=torch.float64)
    x = torch.randn(2, 9, 20, dtype=torch.float64)
    wanted, _ = F.mla(params, x, cfg, positions=torch.arange(9)[None])
    lengths = torch.tensor([9, 6])
    for chunks in ([1] * 9, [4, 5], [3, 1, 1, 4]):
        for absorbed in (False, True, None):
            (cache,) = F.empty_caches([cfg], 2, 12, dtype=torch.float64)
            assert cache.latent.shape == (2, 12 if window is None else 4, 13 + 4)
            cache = F.tree.map(lambda t: t.fill_(torch.nan), cache)
            outs, at = [], 0
            for size in chunks:
                here = torch.arange(at, at + size)[None].expand(2, -1)
                here = torch.where(here < lengths[:, None], here, -1)
                out, cache = F.mla(params, x[:, at : at + size], cfg, positions=here, cache=cache, absorbed=absorbed)
                outs.append(out)
                at += size
            found = torch.cat(outs, 1)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(found[1, :6], wanted[1, :6], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("absorbed", [False, True])
def test_empty_slots_have_no_part_in_gradients(absorbed):
    cfg = tiny()
    params = F.tree.map(lambda t: t.requires_grad_(), F.MLA.init(cfg, 0, dtype=torch.float64))
    x, positions = torch.randn(2, 4, 20, dtype=torch.float64), torch.arange(4)[None]
    found = []
    for value in (torch.nan, 0.0):
        cache = F.LatentCache(latent=torch.full((2, 9, 17), value, dtype=torch.float64))
        out, _ = F.mla(params, x, cfg, positions=positions, cache=cache, absorbed=absorbed)
        found.append(torch.autograd.grad(out.square().sum(), F.tree.leaves(params)))
    assert all(map(torch.equal, *found))
    assert all(grad.isfinite().all() for grad in found[0])


def test_a_core_of_ones_own_is_never_passed_over():
    """Over a cache too, where the absorbed way would be cheaper; and what it and a rotary return is looked at."""
    cfg = tiny()
    params, x = F.MLA.init(cfg, 0), torch.randn(1, 1, 20)
    (cache,) = F.empty_caches([cfg], 1, 8, dtype=torch.float32)
    seen = []

    def core(*args, **given):
        seen.append(1)
        return F.dot_product_attention(*args, **given)

    F.mla(params, x, cfg, positions=torch.zeros(1, 1, dtype=torch.long), cache=cache, core=core)
    assert seen == [1]
    given = {"positions": torch.zeros(1, 1, dtype=torch.long)}
    with pytest.raises(
        F.ShapeError, match=r"mla\(core=...\): B S H V = \(1, 1, 3, 7\) is needed, but it returned \(1, 1, 3, 5\)"
    ):
        F.mla(params, x, cfg, core=lambda q, k, v, **_: v[:, :1, :, :5], **given)
    with pytest.raises(F.ShapeError, match=r"mla\(rotary=...\): it made \(1, 1, 3, 2\) of B S H R = \(1, 1, 3, 4\)"):
        F.mla(params, x, cfg, rotary=lambda x, cos, sin, **_: x[..., :2] if x.shape[2] > 1 else x, **given)


def test_half_precision_is_as_near_as_transformers():
    """Absorbed and expanded: at most 1.5 times the error of transformers' own run in bfloat16, against double."""
    module, tables, params, cfg = deepseek(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    x, positions = torch.randn(4, 19, 36).bfloat16(), torch.arange(19)[None]
    exact = theirs(module, tables, x.double(), positions)
    half = F.tree.map(lambda t: t.detach().bfloat16(), params)
    cos, sin = tables(x.float(), positions)
    mask = torch.full((19, 19), -torch.inf, dtype=torch.bfloat16).triu(1)[None, None]
    with torch.no_grad():
        error = (module.bfloat16()(x, (cos.bfloat16(), sin.bfloat16()), mask)[0].double() - exact).norm()
        for absorbed in (False, True):
            found, _ = F.mla(half, x, cfg, positions=positions, absorbed=absorbed)
            assert (found.double() - exact).norm() <= 1.5 * error


def test_the_way_is_chosen_by_arithmetic():
    """One query in the latent, a long chunk expanded; V3's turning point is between 128 and 256 queries."""
    v3 = F.MLAConfig(
        hidden_size=7168, num_attention_heads=128, kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    assert [is_absorbed(v3, s, 4096) for s in (1, 8, 128, 256, 4096)] == [True, True, True, False, False]
    assert not is_absorbed(v3, 64, 64)


def test_callbacks_know_what_they_are_told():
    cfg = tiny()
    params = F.MLA.init(cfg, 0)
    x, positions = torch.randn(2, 5, 20), torch.arange(5)[None]
    seen = []

    def rotary(x, cos, sin, **told):
        seen.append((tuple(x.shape), sorted(told)))
        return F.apply_rope(x, cos, sin, interleaved=told["interleaved"])

    def core(q, k, v, *, causal, q_positions, k_positions, softmax_scale):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        swap = [t.transpose(1, 2) for t in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(
            *swap, is_causal=True, scale=softmax_scale
        ).mT.mT.transpose(1, 2)

    found, _ = F.mla(params, x, cfg, positions=positions, rotary=rotary, core=core)
    torch.testing.assert_close(found, F.mla(params, x, cfg, positions=positions)[0], rtol=1e-4, atol=1e-5)
    assert seen == [
        ((2, 5, 1, 4), ["interleaved"]),
        ((2, 5, 3, 4), ["interleaved"]),
        ((2, 5, 3, 9), (2, 5, 3, 9), (2, 5, 3, 7)),
    ]


def test_transforms_and_compile():
    cfg = tiny(output_gate=True)
    params = F.MLA.init(cfg, 0, dtype=torch.float64)
    x, positions = torch.randn(4, 2, 5, 20, dtype=torch.float64), torch.arange(5)[None]
    for absorbed in (False, True):

        def loss(params, x, absorbed=absorbed):
            return F.mla(params, x, cfg, positions=positions, absorbed=absorbed)[0].square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        for i in range(4):
            alone = torch.func.grad(loss)(params, x[i])
            for a, b in zip(F.tree.leaves(each), F.tree.leaves(alone), strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-10)
        run = torch.compile(loss, fullgraph=True, backend="eager")
        torch.testing.assert_close(run(params, x[0]), loss(params, x[0]))
