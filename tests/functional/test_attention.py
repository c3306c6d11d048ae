"""The layer with a cache: whatever the cut, the padding and the row, as without one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F

CFG = F.AttentionConfig(
    hidden_size=24,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    v_head_dim=3,
    rope=F.RopeConfig(),
    window=6,
)


def params() -> F.Attention:
    return F.tree.map(lambda t: 20 * t, F.Attention.init(CFG, 0, dtype=torch.float64))


def nan_cache(batch: int, slots: int, cfg: F.AttentionConfig = CFG) -> F.KVCache:
    (cache,) = F.empty_caches([cfg], batch, slots, dtype=torch.float64)
    return F.tree.map(lambda t: t.fill_(torch.nan), cache)


@pytest.mark.parametrize("cuts", [[11], [1] * 11, [3, 1, 7], [5, 5, 1], [0, 11, 0]], ids=str)
@pytest.mark.parametrize("core", [F.dot_product_attention, F.decode_attention])
def test_any_cut_gives_the_whole(cuts, core):
    x, p = torch.randn(2, 11, 24, dtype=torch.float64), params()
    whole, _ = F.attention(p, x, CFG, positions=torch.arange(11)[None])
    cache, at, parts = nan_cache(2, 13), 0, []
    for n in cuts:
        positions = torch.arange(at, at + n).expand(2, -1)
        part, cache = F.attention(p, x[:, at : at + n], CFG, positions=positions, cache=cache, core=core)
        parts.append(part)
        at += n
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-11)
    assert bool(cache.k[:, 11:].isnan().all())


@pytest.mark.parametrize("side", ["left", "right", "both", "between"])
def test_padding_changes_no_byte_and_no_token(side):
    """Three rows of 4, 0 and 2 tokens in a call of 7, over a cache that holds 3, 5 and 0 already."""
    held, new, p = [3, 5, 0], [4, 0, 2], params()
    rows = [torch.randn(1, h + n, 24, dtype=torch.float64) for h, n in zip(held, new, strict=True)]
    alone, cache = [], nan_cache(3, 9)
    for i, (row, h) in enumerate(zip(rows, held, strict=True)):
        own = F.KVCache(k=cache.k[i : i + 1], v=cache.v[i : i + 1])
        if h:
            _, own = F.attention(p, row[:, :h], CFG, positions=torch.arange(h)[None], cache=own)
            cache = F.KVCache(
                k=torch.cat((cache.k[:i], own.k, cache.k[i + 1 :])), v=torch.cat((cache.v[:i], own.v, cache.v[i + 1 :]))
            )
        alone.append(F.attention(p, row, CFG, positions=torch.arange(row.shape[1])[None])[0][0, h:])
    x, positions = torch.full((3, 7, 24), 1e3, dtype=torch.float64), torch.full((3, 7), -1)
    places = {"left": lambda n: range(7 - n, 7), "right": range, "both": lambda n: range(1, n + 1)}
    places["between"] = lambda n: range(0, 2 * n, 2)
    for i, (row, h, n) in enumerate(zip(rows, held, new, strict=True)):
        for j, place in enumerate(places[side](n)):
            x[i, place], positions[i, place] = row[0, h + j], h + j
    before = F.tree.map(torch.clone, cache)
    out, after = F.attention(p, x, CFG, positions=positions, cache=cache)
    for i, n in enumerate(new):
        torch.testing.assert_close(out[i, list(places[side](n))], alone[i], rtol=1e-11, atol=1e-11)
    slots = before.k.shape[1]
    kept = torch.ones(3, slots, dtype=torch.bool)
    for i, (h, n) in enumerate(zip(held, new, strict=True)):
        kept[i, [at % slots for at in range(h, h + n)]] = False
    for old, now in ((before.k, after.k), (before.v, after.v)):
        assert torch.equal(old[kept].view(torch.int64), now[kept].view(torch.int64))
    assert torch.equal(before.k.view(torch.int64), cache.k.view(torch.int64)), "the argument was written"


def test_positions_of_any_integer_type_and_caches_of_one_dtype():
    x, p = torch.randn(1, 4, 24, dtype=torch.float64), params()
    for slots in (9, 5):
        out, new = F.attention(p, x, CFG, positions=torch.arange(4)[None], cache=nan_cache(1, slots))
        small, same = F.attention(
            p, x, CFG, positions=torch.arange(4, dtype=torch.int32)[None], cache=nan_cache(1, slots)
        )
        assert torch.equal(out, small)
        assert torch.equal(new.k.nan_to_num(), same.k.nan_to_num())
    with pytest.raises(TypeError, match=r"its dtype is torch\.float32, that of x torch\.float64"):
        F.attention(p, x, CFG, positions=torch.arange(4)[None], cache=F.tree.map(lambda t: t.float(), nan_cache(1, 9)))


def test_vmap_over_a_batch_with_a_cache():
    x, p = torch.randn(3, 2, 24, dtype=torch.float64), params()
    cache, positions = nan_cache(3, 5), torch.tensor([[0, 1], [0, -1], [-1, 0]])
    out, new = F.attention(p, x, CFG, positions=positions, cache=cache)

    def one(x, positions, cache):
        out, new = F.attention(p, x[None], CFG, positions=positions[None], cache=F.tree.map(lambda t: t[None], cache))
        return out[0], F.tree.map(lambda t: t[0], new)

    got, got_cache = torch.vmap(one)(x, positions, cache)
    torch.testing.assert_close(got, out)
    torch.testing.assert_close(got_cache.k, new.k, equal_nan=True)


def test_a_core_of_the_user_serves_a_plain_layer():
    cfg = F.AttentionConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    p, x = F.Attention.init(cfg, 0), torch.randn(2, 5, 24)

    def sdpa(q, k, v, *, causal, **told):
        assert set(told) == {"q_positions", "k_positions"}
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2)

    positions = torch.arange(5)[None]
    expected, _ = F.attention(p, x, cfg, positions=positions)
    torch.testing.assert_close(F.attention(p, x, cfg, positions=positions, core=sdpa)[0], expected)


def test_errors():
    p, x, positions = params(), torch.ones(2, 5, 24, dtype=torch.float64), torch.arange(5)[None]
    with pytest.raises(F.ShapeError) as error:
        F.attention(p, x[..., :20], CFG, positions=positions)
    assert_expected_inline(
        str(error.value),
        """\
attention(x=...): D is 24 in the config but 20 in x
    x: B S D = 2 5 20
                   ^^
    so far: D=24 E=4 V=3 B=2 S=5""",
    )
    with pytest.raises(ValueError, match="segment_ids with a cache"):
        F.attention(p, x, CFG, positions=positions, segment_ids=torch.zeros(2, 5), cache=nan_cache(2, 5))
    with pytest.raises(F.ShapeError) as error:
        F.attention(p, x, CFG, positions=positions, cache=nan_cache(2, 4))
    assert_expected_inline(str(error.value), """cache: 4 slots are too few for 5 new tokens""")
    with pytest.raises(ValueError, match="num_attention_heads=6 is no multiple of num_key_value_heads=4"):
        F.AttentionConfig(hidden_size=8, num_attention_heads=6, num_key_value_heads=4, head_dim=2)
    with pytest.raises(ValueError, match=r"head_dim=...\): a positive integer is needed, not True"):
        F.AttentionConfig(hidden_size=8, num_attention_heads=6, num_key_value_heads=3, head_dim=True)
    with pytest.raises(ValueError, match=r"AttentionConfig\(qk_norm_wide=True\): qk_norm must be an RMSNorm, not None"):
        dataclasses.replace(CFG, qk_norm=None, qk_norm_wide=True)


def test_params_and_config_must_ask_for_the_same():
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    cfg = F.AttentionConfig(**sizes)
    p, x, positions = F.Attention.init(cfg, 0), torch.ones(1, 3, 24), torch.arange(3)[None]
    texts = []
    for more in ({"norm": F.NormConfig()}, {"qkv_bias": True}, {"sinks": True}, {"num_key_value_heads": 3}):
        other = F.AttentionConfig(**{**sizes, **more})
        for params, config in ((p, other), (F.Attention.init(other, 0), cfg)):
            with pytest.raises(ValueError, match="attention") as error:
                F.attention(params, x, config, positions=positions)
            texts.append(str(error.value))
    with pytest.raises(F.ShapeError) as error:
        F.attention(p, x, cfg, positions=positions[0])
    with pytest.raises(TypeError, match="an integer is needed, not Generator"):
        F.Attention.init(cfg, torch.Generator())
    assert_expected_inline(
        "\n\n".join([*texts[:2], *texts[-2:], str(error.value)]),
        """\
attention: the config says norm=NormConfig(norm_type='rms_norm', eps=1e-05, zero_centered=False, scale_in_fp32=False, bias=False), but Attention lacks .norm
    fix: Attention.init(cfg, seed) makes what the config asks for

attention: the config says norm=None, but Attention has .norm
    fix: Attention.init(cfg, seed) makes what the config asks for

attention: the weights have 6 query and 2 key/value heads, the config 6 and 3

attention: the weights have 6 query and 3 key/value heads, the config 6 and 2

attention(positions=...): 2 dimensions are needed, but it has 1
    positions: B S = 3
    so far: D=24 E=4 V=4 B=1 S=3
    fix: positions[None], the same for each row""",
    )
