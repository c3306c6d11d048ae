"""A decode step of latent attention: against fp64, transformers, and itself in other orders."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.absorbed import absorbed_core
from meshfn.functional.shapes import ShapeError
from meshfn.kernels_cuda import mla_decode

from ..functional.latent_cases import deepseek, theirs
from .ops import host_ops

OP = torch.ops.meshfn_cuda.absorbed_core
NAN = float("nan")


def case(
    dtype: torch.dtype, rows: tuple[int, ...], heads: int, nope: int, rotary: int, v: int, latent: int, slots: int, *,
    window: int | None = None, ring: bool = False, wider: int = 0, seed: int = 0,
) -> tuple[list[torch.Tensor], dict[str, Any]]:  # fmt: skip
    """rows: the position of each row's query, -1 where it has none. Slots that hold no token, and the queries of such
    rows, are NaN. ring: slots hold the last tokens, in turn. wider: numbers between one latent and the next."""
    made = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).mul(scale).to(dtype)

    batch, positions, read = len(rows), torch.tensor(rows)[:, None], torch.arange(slots)
    held = positions - (positions - read) % slots if ring else torch.where(read <= positions, read, -1)
    held = torch.where((held >= 0) & (positions >= 0), held, -1)
    q, cache = randn(batch, 1, heads, nope + rotary), randn(batch, slots, latent + rotary + wider)
    cache[..., latent + rotary :] = NAN
    cache, kv_b = cache[..., : latent + rotary], randn(heads * (nope + v), latent, scale=latent**-0.5)
    q[positions < 0], cache[held < 0] = NAN, NAN
    told = {"nope_dim": nope, "softmax_scale": (nope + rotary) ** -0.5, "causal": True, "window": window}
    return [q, cache, kv_b], {**told, "q_positions": positions, "k_positions": held}


def run(args: list[torch.Tensor], options: dict[str, Any], **host: Any) -> torch.Tensor:
    with host_ops(**host) as launches:
        out = OP(*args, **options)
    assert [launch.source for launch in launches] == ["latent_heads.cu", "mla_decode.cu", "latent_heads.cu"]
    return out


def check(args: list[torch.Tensor], options: dict[str, Any], **host: Any) -> torch.Tensor:
    """The error against fp64 is at most 1.5 times the plain function's, in the same dtype."""
    found, usual = run(args, options, **host), absorbed_core(*args, **options)
    right = absorbed_core(*(x.double() for x in args), **options)
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)
    # Half precision rounds the result alone, so nothing else may be seen; fp32 rounds every step, in another order.
    floor = 1e-6 * right.abs().max() if found.dtype == torch.float32 else 0.0
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max() + floor
    return found


CASES = {
    "rows of 0, 1, 31, 32, 33 tokens": case(torch.bfloat16, (-1, 0, 30, 31, 32), 5, 12, 8, 10, 40, 40),
    "odd sizes, slots shared by blocks": case(torch.float16, (149, 65), 17, 7, 3, 9, 30, 150),
    "no rotary channels, a ring": case(torch.float32, (44, 2), 3, 8, 0, 12, 37, 20, window=20, ring=True),
    "a window within shares": case(torch.bfloat16, (139,), 33, 8, 8, 8, 24, 140, window=30, wider=8),
    "sizes of DeepSeek-V3": case(torch.bfloat16, (35, 70), 16, 128, 64, 128, 512, 72),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64_and_in_other_orders(name):
    args, options = CASES[name]
    found = check(args, options)
    assert torch.equal(found[options["q_positions"][:, 0] < 0].abs().sum(), found.new_zeros(()))
    for order in ("reversed", "shuffled:3"):
        assert torch.equal(found, run(args, options, order=order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_have_the_accuracy_of_fp32(dtype):
    """From flat to peaked. The root mean square sees it: queries and weights in half precision, in one part, make it 1.4
    to 2.7 times the plain function's."""
    for scale in (0.3, 3, 25):
        (q, *rest), options = case(dtype, (139, 120, 99), 16, 12, 8, 10, 40, 140)
        given = [q * scale, *rest]
        right = absorbed_core(*(x.double() for x in given), **options)
        found, usual = (x - right for x in (run(given, options), absorbed_core(*given, **options)))
        assert found.square().mean() <= 1.05 * usual.square().mean()


def test_large_scores_and_fp16_beyond_its_range():
    """Queries in the latent above 65,504, which fp16 does not hold."""
    (q, cache, kv_b), options = case(torch.float16, (39,), 3, 16, 8, 8, 40, 40)
    check([q * 3000, cache, (kv_b * 30).clamp(-60000, 60000)], {**options, "softmax_scale": 1e-6})
    check([q * 30, cache * 8, kv_b], options)


def test_a_nan_in_a_seen_slot_is_that_rows_alone():
    (q, cache, kv_b), options = case(torch.bfloat16, (20, 30), 3, 8, 8, 8, 24, 40)
    clean = run([q, cache, kv_b], options)
    cache = cache.clone()
    cache[1, 7, 3] = NAN
    found = run([q, cache, kv_b], options)
    assert torch.equal(found[0], clean[0])
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_layer_of_deepseek(dtype):
    """The last of ten tokens, beside transformers' own module in half precision, both against fp64."""
    torch.manual_seed(0)
    module, tables, params, cfg = deepseek(attention_bias=False, kv_lora_rank=24, qk_rope_head_dim=8)
    x, positions = torch.randn(2, 10, 36, dtype=torch.float64), torch.arange(10).expand(2, 10)
    with torch.no_grad():
        right = theirs(module, tables, x, positions)[:, -1:]
        module, x = module.to(dtype), x.to(dtype)
        params = F.tree.map(lambda t: t.to(dtype), params)
        cos, sin = tables(x, positions)
        mask = torch.full((10, 10), -torch.inf, dtype=dtype).triu(1)[None, None]
        usual = module(x, (cos, sin), mask)[0][:, -1:]
        (cache,) = F.empty_caches([cfg], 2, 12, dtype=dtype)
        cache.latent.fill_(NAN)
        _, cache = F.mla(params, x[:, :-1], cfg, positions=positions[:, :-1], cache=cache)
        with host_ops() as launches:
            found, _ = F.mla(
                params, x[:, -1:], cfg, positions=positions[:, -1:], cache=cache, absorbed=True,
                absorbed_core=lambda q, latent, kv_b, **told: OP(q, latent, kv_b, **told),
            )  # fmt: skip
    assert len(launches) == 3
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max()


def test_no_rows_and_no_slots():
    (q, cache, kv_b), options = CASES["rows of 0, 1, 31, 32, 33 tokens"]
    few = {name: options[name][:0] for name in ("q_positions", "k_positions")}
    with host_ops() as launches:
        assert OP(q[:0], cache[:0], kv_b, **{**options, **few}).shape == (0, 1, 5, 10)
    assert launches == []
    with host_ops():
        out = OP(q[1:], cache[1:, :0], kv_b, **{**options, "q_positions": torch.arange(4)[:, None],
                                                "k_positions": torch.empty(4, 0, dtype=torch.int64)})  # fmt: skip
    assert torch.equal(out, torch.zeros_like(out))


def test_opcheck_and_gradients():
    (q, cache, kv_b), options = case(torch.float32, (19, 7), 3, 6, 4, 5, 12, 20)
    cache = cache.nan_to_num(0.5)
    told = {name: options[name] for name in ("nope_dim", "softmax_scale", "causal", "window")}
    leaves = [x.requires_grad_() for x in (q, cache, kv_b)]
    flat = (q[:, 0].detach().requires_grad_(), *leaves[1:], options["q_positions"][:, 0], options["k_positions"])
    with host_ops():
        torch.library.opcheck(torch.ops.meshfn_cuda.mla_decode.default, flat, told)
        found = torch.autograd.grad(OP(*leaves, **options).square().sum(), leaves)
        by_func = torch.func.grad(lambda *x: OP(*x, **options).square().sum(), argnums=(0, 1, 2))(*leaves)
    right = torch.autograd.grad(absorbed_core(*leaves, **options).square().sum(), leaves)
    for f, g, r in zip(found, by_func, right, strict=True):
        torch.testing.assert_close(f, r)
        torch.testing.assert_close(g, r)


def test_what_it_does_not_take():
    (q, cache, kv_b), options = case(torch.bfloat16, (9,), 3, 8, 4, 5, 12, 10)
    nothing = dict.fromkeys(("mask", "q_segment_ids", "k_segment_ids"))
    given = {"q": q, "latent": cache, "kv_b": kv_b, **options, **nothing}
    assert mla_decode.supports(given, "sm_90") is None
    wide = torch.empty(1, 10, 700, dtype=q.dtype)
    changes = [
        {"latent": cache.float()}, {"q": q.expand(1, 2, 3, 12)}, {"mask": torch.ones(1, 10, dtype=torch.bool)},
        {"q_segment_ids": torch.zeros(1, 1)}, {"q_positions": None}, {"latent": wide}, {"kv_b": kv_b.T.contiguous().T},
    ]  # fmt: skip
    reasons = [mla_decode.supports({**given, **change}, "sm_90") for change in changes]
    reasons += [mla_decode.supports(given, "sm_75")]
    assert_expected_inline(
        "\n".join(map(str, reasons)),
        """\
float32 with bfloat16
2 tokens a row, only 1
a mask
documents
no positions
latents 700 wide, at most 640
kv_b by columns
sm_75 is older than sm_80""",
    )


def test_bad_input_is_refused_before_a_launch():
    (q, cache, kv_b), options = case(torch.bfloat16, (9, 4), 3, 8, 4, 5, 12, 10)
    messages = []
    wrong = [
        ([q, cache[..., :-1], kv_b], {}),
        ([q, cache, kv_b[:-1]], {}),
        ([q, cache, kv_b], {"nope_dim": 13}),
        ([q, cache.float(), kv_b], {}),
        ([q, cache[:, :-1], kv_b], {}),
    ]
    for args, change in wrong:
        with host_ops() as launches, pytest.raises((ShapeError, TypeError)) as error:
            OP(*args, **{**options, **change})
        assert launches == []
        messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
mla_decode(latent=...): it is 15 wide, not the L=12 of kv_b and the R=4 of q
mla_decode(kv_b=...): 38 rows are not N + V of each of 3 heads, with N=8 of E=12 and V above 0
mla_decode(kv_b=...): 39 rows are not N + V of each of 3 heads, with N=13 of E=12 and V above 0
mla_decode(latent=...): it is torch.float32, and q torch.bfloat16
    fix: latent.to(q.dtype)
mla_decode(k_positions=...): T is 9 in latent but 10 in k_positions
    latent     : B T LR = 2 9 16
    k_positions: B T = 2 10
                         ^^
    so far: B=2 H=3 E=12 T=9 LR=16 HNV=39 L=12""",
    )


def random_case(seed: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    r = random.Random(seed)
    slots = r.choice([1, 15, 16, 17, 70, 200])
    ring = r.random() < 0.3
    last = 2 * slots if ring else slots
    return case(
        r.choice([torch.float32, torch.bfloat16, torch.float16]),
        tuple(r.randrange(-1, last) for _ in range(r.choice([1, 2, 3, 8, 9]))),
        r.choice([1, 3, 16, 17, 40]),
        r.choice([1, 7, 16, 33]),
        r.choice([0, 1, 8, 16]),
        r.choice([1, 5, 16, 70]),
        r.choice([1, 13, 24, 64, 130, 256]),
        slots,
        window=slots if ring else r.choice([None, 1, 5, 40]),
        ring=ring,
        wider=r.choice([0, 3, 8]),
        seed=seed,
    )


@pytest.mark.verify
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_shapes(first):
    for seed in range(first, first + 50):
        found = check(*random_case(seed))
        assert torch.equal(found, run(*random_case(seed), order=f"shuffled:{seed}"))


@pytest.mark.verify
@pytest.mark.parametrize(("name", "sanitizer"), itertools.product(list(CASES)[:4], ["address", "undefined", "thread"]))
def test_sanitizers_are_silent(name, sanitizer):
    check(*CASES[name], sanitizer=sanitizer)
