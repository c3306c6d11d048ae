"""The gated delta net with a cache: cut anywhere, padded, begun anew; whatever the call, what a row alone would have."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F

from .gdn_cases import KINDS, close, config, given, gradients, module, rows, weights, zeros

SIDES = ["left", "right"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_is_one_call(kind, dtype, tolerance):
    cfg = config(kind, 2, 3)
    params, x = weights(cfg, dtype), given(S=140, dtype=dtype)
    with torch.no_grad():
        whole, end = F.gdn(params, x, cfg, cache=zeros(cfg, dtype=dtype))
        cache, parts, at = zeros(cfg, dtype=dtype), [], 0
        for tokens in (1, 2, 3, 64, 65, *[1] * 5):
            out, cache = F.gdn(params, x[:, at : at + tokens], cfg, cache=cache)
            parts.append(out)
            at += tokens
    close(torch.cat(parts, 1), whole, tolerance)
    close(whole, F.gdn(params, x, cfg)[0], tolerance)
    close(cache, end, tolerance)


@pytest.mark.parametrize("W", [2, 4, 7])
@pytest.mark.parametrize("S", [0, 1, 2, 3])
def test_prompts_shorter_than_the_convolution(S, W):
    cfg = config(conv_kernel_dim=W)
    params, x = weights(cfg), given(S=8)
    whole, end = F.gdn(params, x, cfg, cache=zeros(cfg))
    first, cache = F.gdn(params, x[:, :S], cfg, cache=zeros(cfg))
    if S < W:  # zeros for the tokens that never were
        assert not cache.q[..., : W - 1 - S].any()
        assert S == 0 or cache.q[..., W - 1 - S :].all()
    rest, cache = F.gdn(params, x[:, S:], cfg, cache=cache)
    close(torch.cat((first, rest), 1), whole, 1e-10)
    close(cache, end, 1e-10)


def test_gradients_pass_through_a_cache():
    """Two calls are one in backward too, and a cache has a gradient of its own."""
    cfg = config("kimi_linear", 2, 2)
    params, x = weights(cfg), given(S=40)
    cache = F.tree.map(lambda t: torch.randn_like(t).requires_grad_(), zeros(cfg))
    held = F.tree.leaves(cache)
    whole, end = F.gdn(params, x, cfg, cache=cache)
    first, between = F.gdn(params, x[:, :3], cfg, cache=cache)
    rest, last = F.gdn(params, x[:, 3:], cfg, cache=between)
    found = gradients(number([torch.cat((first, rest), 1)], [last]), params, x, *held)
    wanted = gradients(number([whole], [end]), params, x, *held)
    close(found, wanted, 1e-10)
    assert all(g.any() for g in wanted.values())


def number(outputs, caches):
    """Of rows and states, whatever batch they stand in."""
    return sum(out.sin().sum() for out in outputs) + sum(t.square().sum() for c in caches for t in F.tree.leaves(c))


def places(counts, S, side, first=0):
    """Positions `B S` of rows with so many tokens, padded in front or behind."""
    positions = torch.full((len(counts), S), -1)
    for row, n in enumerate(counts):
        positions[row, S - n if side == "left" else 0 :][:n] = torch.arange(n) + (first if n else 0)
    return positions


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_ragged_batch_are_rows_alone(kind, side, first):
    """Rows of 2, 0, 1, 40 and 3 tokens with NaN where none is, that begin or go on: outputs, states, every gradient."""
    counts, S = [2, 0, 1, 40, 3], 40
    cfg = config(kind)
    params, there = weights(cfg), places(counts, S, side, first)
    x = given(5, S).detach().masked_fill((there < 0)[..., None], torch.nan).requires_grad_()
    cache = F.tree.map(lambda t: torch.randn_like(t).requires_grad_(), zeros(cfg, 5))
    held = F.tree.leaves(cache)
    out, new = F.gdn(params, x, cfg, positions=there, cache=cache)
    assert out.isfinite().all()

    alone, ends = [], []
    for row, n in enumerate(counts):
        begun = rows(zeros(cfg, 5) if first == 0 and n else cache, row)
        one = x[row : row + 1][:, there[row] >= 0]
        each, end = F.gdn(params, one, cfg, cache=begun)
        alone.append(each)
        ends.append(end)
        close(out[row : row + 1, there[row] >= 0], each, 1e-10)
        close(rows(new, row), end, 1e-10)
    tokens = [out[row : row + 1, there[row] >= 0] for row in range(5)]
    found = gradients(number(tokens, [new]), params, x, *held)
    wanted = gradients(number(alone, ends), params, x, *held)
    assert all(g.isfinite().all() for g in found.values())
    close(found, wanted, 1e-10)
    assert not found["argument 0"][there < 0].any()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_cache_padding_has_no_effect(kind, side):
    counts, cfg = [2, 0, 9], config(kind)
    params, there = weights(cfg), places(counts, 9, side)
    x = given(3, 9).detach().masked_fill((there < 0)[..., None], torch.nan).requires_grad_()
    out, _ = F.gdn(params, x, cfg, positions=there)
    alone = [F.gdn(params, x[row : row + 1][:, there[row] >= 0], cfg)[0] for row in range(3)]
    tokens = [out[row : row + 1, there[row] >= 0] for row in range(3)]
    close(tokens, alone, 1e-10)
    close(gradients(number(tokens, []), params, x), gradients(number(alone, []), params, x), 1e-10)
    # The output of padding means nothing, but a loss may have it and multiply it by 0.
    out, _ = F.gdn(params, x, cfg, positions=there)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out.sum() * 0, params, x).values())


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_left_padding_is_that_of_transformers(kind):
    theirs, params, cfg = module(kind)
    x, there = torch.randn(3, 9, 11), places([4, 9, 1], 9, "left")
    out, _ = F.gdn(params, x, cfg, positions=there)
    want = theirs(x, attention_mask=(there >= 0).float())
    torch.testing.assert_close(out[there >= 0], want[there >= 0], rtol=2e-5, atol=2e-5)


def bytes_of(cache):
    return [leaf.contiguous().view(torch.uint8) for leaf in F.tree.leaves(cache)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("S", [0, 1, 5, 40])
@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear"])
def test_a_row_without_tokens_keeps_every_byte(kind, S, dtype):
    """NaN too, and -0, and it harms no other row."""
    cfg = config(kind)
    params, x = weights(cfg, dtype), torch.randn(3, S, 11, dtype=dtype)
    cache = F.tree.map(torch.randn_like, zeros(cfg, 3, dtype))
    for leaf in F.tree.leaves(cache):
        leaf[0].fill_(torch.nan)
        leaf[1].view(-1)[::2] = -0.0
    there = torch.stack((torch.full((S,), -1), torch.full((S,), -1), torch.arange(S) + 7))
    out, new = F.gdn(params, x, cfg, positions=there, cache=cache)
    for before, after in zip(bytes_of(rows(cache, 0, 1)), bytes_of(rows(new, 0, 1)), strict=True):
        assert torch.equal(before, after)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(number([out], [rows(new, 1, 2)]), params).values())
    alone, end = F.gdn(params, x[2:], cfg, positions=there[2:], cache=rows(cache, 2))
    close(out[2:].float(), alone.float(), 1e-10 if dtype is torch.float64 else 2e-2)
    assert all(leaf.isfinite().all() for leaf in F.tree.leaves(end))


@pytest.mark.parametrize("S", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_starts_forgets_what_the_cache_held(kind, S):
    """NaN; beside a row that goes on. Its gradient is finite, and what it forgot has none."""
    cfg = config(kind)
    params, x = weights(cfg), given(S=S)
    cache = F.tree.map(torch.randn_like, zeros(cfg))
    for leaf in F.tree.leaves(cache):
        leaf[0].fill_(torch.nan)
        leaf.requires_grad_()
    there = torch.stack((torch.arange(S), torch.arange(S) + 4))
    out, new = F.gdn(params, x, cfg, positions=there, cache=cache)
    for row, begun in enumerate((zeros(cfg, 1), rows(cache, 1))):
        alone, end = F.gdn(params, x[row : row + 1], cfg, cache=begun)
        close(out[row : row + 1], alone, 1e-10)
        close(rows(new, row), end, 1e-10)
    found = gradients(number([out], [new]), params, x, *F.tree.leaves(cache))
    assert all(g.isfinite().all() for g in found.values())
    assert not any(g[0].any() for path, g in found.items() if path.startswith("argument") and path != "argument 0")


def test_one_row_of_positions_stands_for_all():
    cfg = config()
    params, x = weights(cfg), given(3, 5)
    there = torch.tensor([[-1, -1, 0, 1, 2]])
    found = F.gdn(params, x, cfg, positions=there, cache=zeros(cfg, 3))
    wanted = F.gdn(params, x, cfg, positions=there.expand(3, -1), cache=zeros(cfg, 3))
    assert torch.equal(found[0], wanted[0])
    close(found[1], wanted[1], 0.0)


def test_empty_caches_of_every_kind():
    """As large as the rank's own heads, whatever the context; zeros; the state in fp32 at least."""
    cfg = config("kimi_linear", 2, 3, conv_kernel_dim=5)
    latent = F.MLAConfig(
        hidden_size=11, num_attention_heads=2, kv_lora_rank=3, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
    )
    found, other = F.empty_caches([cfg, latent], 3, 100, dtype=torch.bfloat16)
    assert isinstance(other, F.LatentCache)
    assert {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in F.tree.paths(found).items()} == {
        ".q": ((3, 12, 4), torch.bfloat16),
        ".k": ((3, 12, 4), torch.bfloat16),
        ".v": ((3, 30, 4), torch.bfloat16),
        ".state": ((3, 6, 5, 6), torch.float32),
    }
    assert not any(leaf.any() for leaf in F.tree.leaves(found))


@pytest.mark.parametrize("of_a_model", [False, True])
def test_empty_caches_of_one_config(of_a_model):
    cfg, fix = config("kimi_linear", 2, 3), "[cfg]"
    if of_a_model:
        layer = F.LayerConfig(attention=cfg, mlp=F.MLPConfig(hidden_size=cfg.hidden_size, intermediate_size=7))
        cfg = F.DecoderConfig(vocab_size=9, hidden_size=cfg.hidden_size, layers=(layer,))
        fix = "[layer.attention for layer in cfg.layers]"
    with pytest.raises(TypeError) as error:
        F.empty_caches(cfg, 1, 1, dtype=torch.float32)
    assert str(error.value) == (
        f"empty_caches(cfgs=...): one config a layer is needed, in a sequence, not {type(cfg).__name__}\n    fix: {fix}"
    )
