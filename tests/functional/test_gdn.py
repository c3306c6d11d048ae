"""The gated delta net as a layer: against its formula and transformers' modules, differentiated, transformed, rounded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from meshfn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from .delta_cases import CHUNKED, SCAN, STEP, all_of, case
from .delta_cases import KINDS as DELTAS
from .gdn_cases import KINDS, close, config, formula, given, gradients, module, read, settings, total, weights, zeros

HEADS = [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2)]
LENGTHS = [0, 1, 2, 3, 65]


@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize(("K", "G"), HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_formula(kind, K, G, S):
    """The output and the gradient of every leaf and of x."""
    cfg = config(kind, K, G)
    params, x = weights(cfg), given(S=S)
    out, cache = F.gdn(params, x, cfg)
    want = formula(params, x, cfg)
    assert cache is None
    close(out, want, 1e-10)
    close(gradients(total(out), params, x), gradients(total(want), params, x), 1e-10)


@pytest.mark.parametrize("W", [2, 3, 7])
def test_other_convolutions(W):
    cfg = config("kimi_linear", 2, 3, E=4, V=7, conv_kernel_dim=W)
    params, x = weights(cfg), given(B=3, S=5)
    close(F.gdn(params, x, cfg)[0], formula(params, x, cfg), 1e-10)


def test_the_norm_in_front():
    norm = F.NormConfig(eps=1e-3, zero_centered=True)
    cfg = config(norm=norm)
    params, x = weights(cfg), given()
    normed = F.normalize(x, params.norm.weight, **norm.options)
    want, _ = F.gdn(dataclasses.replace(params, norm=None), normed, dataclasses.replace(cfg, norm=None))
    out, _ = F.gdn(params, x, cfg)
    close(gradients(total(out), params, x), gradients(total(want), params, x), 1e-12)


@pytest.mark.parametrize("S", LENGTHS[1:])
@pytest.mark.parametrize(("K", "G"), HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_layer_of_transformers(kind, K, G, S):
    """Ours in fp64; theirs computes in fp32. The gradients are those of their parameters, which ours reads."""
    theirs, params, cfg = module(kind, K, G)
    x = given(B=3, S=S, dtype=torch.float32)
    out, _ = F.gdn(F.tree.map(torch.Tensor.double, params), x.double(), cfg)
    want, leaves = theirs(x), [x, *theirs.parameters()]
    torch.testing.assert_close(out.float(), want, rtol=2e-5, atol=2e-5)
    mine, right = torch.autograd.grad(total(out), leaves), torch.autograd.grad(total(want), leaves)
    for a, b in zip(mine, right, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(kind):
    """After a prompt and after steps; their state is key-major, and their convolution keeps W tokens or W-1."""
    theirs, params, cfg = module(kind)
    x, cache = torch.randn(2, 12, 11), zeros(cfg, dtype=torch.float32)
    held, at = DynamicCache(config=settings(kind)), 0
    with torch.no_grad():
        for tokens in (7, 1, 1, 3):
            part = x[:, at : at + tokens]
            out, cache = F.gdn(params, part, cfg, cache=cache)
            torch.testing.assert_close(out, theirs(part, cache=held), rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(cache.state.mT, held.get_recurrent_state(0, state_idx=0), rtol=2e-5, atol=2e-5)
            conv = held.get_conv_state(0, state_idx=0)[..., -(cfg.conv_kernel_dim - 1) :]
            torch.testing.assert_close(torch.cat((cache.q, cache.k, cache.v), 1), conv, rtol=2e-5, atol=2e-5)
            at += tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_errs_no_more_than_transformers(kind, dtype):
    """Against fp64 on the same rounded weights. Theirs rounds beta to half precision; here it is fp32, as g is in both,
    so that a long decode does not drift. What is left of the error is that of the projections."""
    mine, right = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        theirs, _, cfg = module(kind, 3, 2, E=16, V=12)
        theirs = theirs.to(dtype)
        params, x = read(theirs), torch.randn(2, 65, 11).to(dtype)
        exact = formula(F.tree.map(torch.Tensor.double, params), x.double(), cfg)
        with torch.no_grad():
            out = F.gdn(params, x, cfg)[0]
            assert out.dtype == dtype
            mine.append((out - exact).norm())
            right.append((theirs(x) - exact).norm())
    assert sum(mine) <= 1.5 * sum(right), (mine, right)


def loss(params, x, cfg, cache=None, positions=None):
    return total(*F.gdn(params, x, cfg, cache=cache, positions=positions))


@pytest.mark.parametrize(
    ("kind", "S", "cached"), [("qwen3_next", 37, False), ("olmo_hybrid", 1, True), ("kimi_linear", 37, True)]
)
def test_transforms(kind, S, cached):
    """With a cache one row goes on, padded behind, and one begins."""
    cfg = config(kind)
    params, x, cache, there = weights(cfg), given(S=S), None, None
    if cached:
        cache, there = F.tree.map(torch.randn_like, zeros(cfg)), torch.arange(S) + torch.tensor([[5], [0]])
        there[0, 30:] = -1
    wanted = gradients(loss(params, x, cfg, cache, there), params)
    close(F.tree.paths(torch.func.grad(loss)(params, x, cfg, cache, there)), wanted, 1e-10)

    def one(p, *of_row):
        row, held, places = F.tree.map(lambda t: None if t is None else t[None], of_row)
        return loss(p, row, cfg, held, places)

    dims = (None, 0, 0, 0) if cached else (None, 0, None, None)
    each = F.tree.leaves(torch.vmap(torch.func.grad(one), in_dims=dims)(params, x, cache, there))
    for row in range(2):
        of_row = F.tree.map(lambda t, row=row: None if t is None else t[row], (x, cache, there))
        alone = gradients(one(params, *of_row), params)
        close([g[row] for g in each], list(alone.values()), 1e-10)

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    close(gradients(compiled(params, x, cfg, cache, there), params), wanted, 1e-10)
    told = {"cache": cache, "positions": there}
    with torch.no_grad():
        found = torch.compile(F.gdn, fullgraph=True, backend="aot_eager")(params, x, cfg, **told)
        right = F.gdn(params, x, cfg, **told)
    close(found, right, 1e-10)


def test_recomputed_activations_give_the_same_gradients():
    cfg = config()
    params, x = weights(cfg), given(S=37)
    again = checkpoint(loss, params, x, cfg, use_reentrant=False)
    found, wanted = gradients(again, params, x), gradients(loss(params, x, cfg), params, x)
    assert all(torch.equal(found[path], wanted[path]) for path in wanted)


@pytest.mark.parametrize("by_channel", DELTAS.values(), ids=DELTAS)
@pytest.mark.parametrize(("fn", "S"), [(SCAN, 5), (CHUNKED, 40), (STEP, 1)])
def test_autocast_leaves_the_rule_in_fp32(fn, S, by_channel):
    """To the bit, and the gradients by hand of the chunked form where the backward is under autocast as well."""
    inputs = case(S=S, by_channel=by_channel, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = all_of(fn, inputs)
    wanted = all_of(fn, inputs)
    same = len(wanted) if fn is CHUNKED else 2
    assert all(torch.equal(a, b) for a, b in zip(found[:same], wanted[:same], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_errs_no_more_than_transformers(kind):
    """Outputs and gradients, against fp64."""
    errors = torch.zeros(2, 2)
    for seed in range(3):
        torch.manual_seed(seed)
        theirs, params, cfg = module(kind, 3, 2)
        x, leaves = torch.randn(2, 65, 11), list(theirs.parameters())
        exact = formula(F.tree.map(torch.Tensor.double, params), x.double(), cfg)
        right = torch.cat([g.flatten() for g in torch.autograd.grad(exact.square().sum(), leaves)])
        with torch.autocast("cpu", torch.bfloat16):
            for i, out in enumerate((F.gdn(params, x, cfg)[0], theirs(x))):
                assert out.dtype == torch.bfloat16
                found = torch.autograd.grad(out.float().square().sum(), leaves)
                errors[0, i] += (out - exact).norm().item()
                errors[1, i] += (torch.cat([g.flatten() for g in found]) - right).norm()
    assert (errors[:, 0] <= 1.5 * errors[:, 1]).all(), errors


@pytest.mark.parametrize("S", [1, 5, 40])
def test_autocast_with_a_cache(S):
    cfg = config()
    params, x, cache = weights(cfg, torch.float32), torch.randn(2, 45, 11), zeros(cfg, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        whole, end = F.gdn(params, x[:, : 5 + S], cfg, cache=cache)
        _, cache = F.gdn(params, x[:, :5], cfg, cache=cache)
        out, cache = F.gdn(params, x[:, 5 : 5 + S], cfg, cache=cache)
    assert {leaf.dtype for leaf in F.tree.leaves(cache)} == {torch.float32}
    torch.testing.assert_close(out, whole[:, 5:], rtol=2e-2, atol=2e-2)
    close(cache, end, 1e-2)
