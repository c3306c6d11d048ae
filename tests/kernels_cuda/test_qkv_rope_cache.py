"""Norms, turns and the write into a cache: against fp64, transformers, and itself in other orders of threads."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.functional.primitive import PRIMITIVES
from meshfn.functional.shapes import ShapeError
from meshfn.kernels_cuda import qkv_rope_cache
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from .ops import host_ops

OP = torch.ops.meshfn_cuda.qkv_rope_cache.default
PLAIN = PRIMITIVES["qkv_rope_cache"]
NAN = float("nan")
NAMES = ("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "k_cache", "v_cache", "positions", "slots")
RESULTS = ("q", "k_positions", "k_cache", "v_cache")


def case(
    dtype: torch.dtype, positions: list[list[int]], slots: int, heads: tuple[int, int], widths: tuple[int, int], *,
    rotary: int = 0, norm: bool = False, asked: int | None = None, seed: int = 0, **options: Any,
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """Arguments of the primitive; the cache holds NaN."""
    made = torch.Generator().manual_seed(seed)
    (batch, tokens), (q_heads, kv_heads), (k_width, v_width) = (len(positions), len(positions[0])), heads, widths

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

    q = randn(batch, tokens, q_heads, 2 * k_width)[..., :k_width]  # beside a gate
    k, v = randn(batch, tokens, kv_heads, k_width), randn(batch, tokens, kv_heads, v_width)
    angles = 3 * torch.randn(1 if seed % 2 else batch, tokens, rotary // 2, generator=made, dtype=torch.float64)
    tables = [angles.cos().to(dtype), angles.sin().to(dtype)] if rotary else [None, None]
    norms = [randn(k_width), randn(k_width)] if norm else [None, None]
    caches = [torch.full((batch, slots, kv_heads, width), NAN, dtype=dtype) for width in widths]
    read = torch.arange(slots if asked is None else asked)
    return [q, k, v, *tables, *norms, *caches, torch.tensor(positions), read], options


def results(call: Any, args: list[Any], options: dict[str, Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """What is returned, and the caches after it; arguments stay as they are."""
    args = [x.clone() if isinstance(x, Tensor) else x for x in args]
    if dtype is not None:
        args = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    with torch.no_grad():
        return [*call(*args, **options), *args[7:9]]


def run(args: list[Any], options: dict[str, Any], **host: Any) -> list[Tensor]:
    with host_ops(**host) as launches:
        found = results(OP, args, options)
    assert [launch.source for launch in launches] == ["qkv_rope_cache.cu"]
    return found


CASES = {
    "llama": case(torch.bfloat16, [[5], [-1], [0]], 9, (4, 2), (64, 64), rotary=64),
    "norms, part of a head turns in pairs": case(
        torch.float16, [[7], [3]], 12, (3, 1), (80, 96), rotary=24, norm=True, interleaved=True, seed=1, asked=8
    ),
    "1 + w, odd widths": case(
        torch.float32, [[6], [2]], 7, (2, 2), (33, 20), rotary=32, norm=True, zero_centered=True, scale_in_fp32=True
    ),
    "a ring": case(torch.float32, [[600], [-1], [3]], 514, (2, 1), (8, 8), rotary=8, ring=513, asked=513),
    "three tokens a row": case(torch.bfloat16, [[4, 5, 6], [-1, 0, 1]], 9, (2, 1), (16, 16), rotary=16, seed=1),
    "no positions in heads": case(torch.bfloat16, [[3]], 9, (2, 1), (16, 16)),
}


def check(args: list[Any], options: dict[str, Any], **host: Any) -> list[Tensor]:
    """The error is at most 1.5 times the plain function's in the same dtype. No byte changes but those of the slots
    that tokens go to."""
    found = run(args, options, **host)
    right, usual = results(PLAIN, args, options, torch.float64), results(PLAIN, args, options)
    assert torch.equal(found[1], right[1])
    for what, f, u, r in zip(RESULTS, found, usual, right, strict=True):
        assert (f.shape, f.dtype) == (u.shape, u.dtype), what
        assert torch.equal(f.isnan(), r.isnan()), what
        f, u, r = (x.nan_to_num(0) for x in (f, u, r))
        assert (f - r).abs().max() <= 1.5 * (u - r).abs().max() + 1e-7 * r.abs().max(), what
    return found


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name):
    found = check(*CASES[name])
    for order in ("reversed", "shuffled:3"):
        for what, f, other in zip(RESULTS, found, run(*CASES[name], order=order), strict=True):
            assert torch.equal(f.nan_to_num(0), other.nan_to_num(0)), (order, what)


def random_case(seed: int) -> tuple[list[Any], dict[str, Any]]:
    r = random.Random(seed)
    slots = r.choice([3, 33, 600, r.randrange(3, 700)])
    ring = r.choice([None, None, slots, max(1, slots - 5)])
    tokens = 1 if ring else r.choice([1, 1, 2, 3])
    rows = []
    for _ in range(r.choice([1, 2, 4])):
        last = r.randrange(3 * slots if ring else slots)
        rows.append([-1 if r.random() < 0.2 or last - i < 0 else last - i for i in range(tokens)][::-1])
    k_width = r.choice([64, 80, 128, 256, r.randrange(1, 257)])
    rotary = 2 * r.randrange(k_width // 2 + 1)
    dtype, heads = r.choice([torch.float32, torch.bfloat16, torch.float16]), (r.choice([1, 4, 7]), r.choice([1, 2, 5]))
    given = {"rotary": rotary, "norm": r.random() < 0.5, "asked": r.randrange(1, (ring or slots) + 1), "seed": seed}
    options = {name: r.random() < 0.5 for name in ("interleaved", "zero_centered", "scale_in_fp32")}
    return case(dtype, rows, slots, heads, (k_width, r.choice([k_width, 96])), **given, ring=ring, **options)


@pytest.mark.verify
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_shapes(first):
    for seed in range(first, first + 20):
        check(*random_case(seed), order=f"shuffled:{seed}")


@pytest.mark.verify
@pytest.mark.parametrize(("name", "sanitizer"), itertools.product(CASES, ["address", "undefined", "thread"]))
def test_sanitizers_are_silent(name, sanitizer):
    check(*CASES[name], sanitizer=sanitizer)


def test_bad_input_is_refused_before_a_launch():
    args, options = case(torch.float32, [[4], [-1]], 6, (2, 1), (16, 16), rotary=16, norm=True)
    changes: list[dict[str, Any]] = [
        {"k": args[1][..., :8]},
        {"v_cache": args[8][:, :5]},
        {"k_norm": None},
        {"cos": torch.ones(2, 1, 9), "sin": torch.ones(2, 1, 9)},
        {"q_norm": args[5].half()},
    ]
    messages = []
    for change in changes:
        with host_ops() as launches, pytest.raises((ShapeError, TypeError)) as error:
            OP(**{**dict(zip(NAMES, args, strict=True)), **change}, **options)
        assert launches == []
        messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
qkv_rope_cache(k=...): E is 16 in q but 8 in k
    q: B S H E = 2 1 2 16
    k: B S K E = 2 1 1 8
                       ^
    so far: B=2 S=1 H=2 E=16 K=1
qkv_rope_cache(v_cache=...): T is 6 in k_cache but 5 in v_cache
    k_cache: B T K E = 2 6 1 16
    v_cache: B T K V = 2 5 1 16
                         ^
    so far: B=2 S=1 H=2 E=16 K=1 V=16 Q=8 T=6
qkv_rope_cache(k_norm=None): q_norm and k_norm are needed together
    fix: pass both, or neither
qkv_rope_cache(cos=...): R is 18, more than E=16 in q
qkv_rope_cache(q_norm=...): it is torch.float16, and q torch.float32
    fix: q_norm.to(q.dtype)""",
    )


def test_against_transformers():
    """Qwen 3's norms of heads and its turns."""
    args, _ = case(torch.float32, [[4], [2]], 6, (4, 2), (16, 16), rotary=16, norm=True, seed=2)
    turned, _, k_cache, v_cache = run(args, {"eps": 1e-6})
    q, k, v, cos, sin, q_norm, k_norm = args[:7]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        layer = Qwen3RMSNorm(16, eps=1e-6)
        layer.weight.data = weight
        return layer(x).transpose(1, 2)

    tables = (torch.cat((x, x), -1) for x in (cos, sin))
    with torch.no_grad():
        q, k = apply_rotary_pos_emb(normed(q, q_norm), normed(k, k_norm), *tables)
    torch.testing.assert_close(turned, q.transpose(1, 2))
    for row, slot in ((0, 4), (1, 2)):
        torch.testing.assert_close(k_cache[row, slot], k[row, :, 0])
        assert torch.equal(v_cache[row, slot], v[row, 0])


def test_as_an_op():
    args, _ = case(torch.float32, [[4], [-1]], 6, (2, 1), (16, 16), rotary=16, norm=True)
    for i in (7, 8):
        args[i] = args[i].nan_to_num(0)
    defaults = {"interleaved": False, "ring": None, "eps": 1e-6, "zero_centered": False, "scale_in_fp32": False}
    op = torch.ops.meshfn_cuda.qkv_rope_write.default
    with host_ops(), torch.no_grad():
        torch.library.opcheck(op, args, defaults)
    args[0].requires_grad_()
    with host_ops(), pytest.raises(RuntimeError) as error:
        op(*args, **defaults)
    assert_expected_inline(
        str(error.value),
        """\
qkv_rope_write(q=...): it needs a gradient, and k_cache is written in place
    fix: torch.no_grad(), or the plain function to train""",
    )


def test_what_it_does_not_take():
    def reason(arch: str = "sm_90", **changes: Any) -> str | None:
        args, _ = case(torch.float32, [[4], [-1]], 6, (2, 1), (16, 16), rotary=16, norm=True)
        return qkv_rope_cache.supports({**dict(zip(NAMES, args, strict=True)), **changes}, arch)

    assert reason() is None
    found = [
        reason("sm_75"),
        reason(k_norm=torch.ones(16, dtype=torch.bfloat16)),
        reason(k_cache=torch.empty(2, 16, 1, 6).transpose(1, 3)),
        reason(q=torch.empty(2, 9, 2, 16)),
        reason(q=torch.empty(2, 1, 2, 257)),
        reason(positions=torch.zeros(2, 1, dtype=torch.int32)),
    ]
    assert_expected_inline(
        "\n".join(map(str, found)),
        """\
sm_75 is older than sm_80
float32 with bfloat16
k_cache by columns
9 tokens a row, at most 8
heads of 257, at most 256
positions that are no int64""",
    )
