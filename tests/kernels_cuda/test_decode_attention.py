"""A few queries a row against a cache: against fp64, transformers, and itself in other orders of threads."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.kernels_cuda import decode_attention
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from .ops import host_ops

OP = torch.ops.meshfn_cuda.decode_attention.default
NAN = float("nan")


def case(
    dtype: torch.dtype, lengths: list[int], slots: int, heads: tuple[int, int], widths: tuple[int, int], *,
    tokens: int = 1, ring: bool = False, sinks: bool = False, gate: bool = False, seed: int = 0, **rules: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the primitive. lengths: of each row with its queries; 0 for a row without a token. Slots that no row
    has written hold NaN, and keys and values are views of a longer cache."""
    made = torch.Generator().manual_seed(seed)
    batch, (kv_heads, groups) = len(lengths), heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

    last = torch.tensor(lengths)[:, None] - 1
    q_positions = last - torch.arange(tokens - 1, -1, -1)
    q_positions = q_positions.masked_fill((last < 0) | (q_positions < 0), -1)
    slot = torch.arange(slots)
    held = last - (last - slot) % slots if ring else torch.where(slot <= last, slot, -1)
    k_positions = torch.where((held >= 0) & (last >= 0), held, -1)
    k, v = (randn(batch, slots + 3, kv_heads, width)[:, :slots] for width in widths)
    for x in (k, v):
        x[k_positions < 0] = NAN
    q = randn(batch, tokens, kv_heads * groups, 2 * widths[0])[..., : widths[0]]  # beside a gate
    q[q_positions < 0] = NAN
    given = {"q": q, "k": k, "v": v, "q_positions": q_positions, "k_positions": k_positions, **rules}
    given |= {"sinks": randn(kv_heads * groups)} if sinks else {}
    return given | ({"gate": randn(batch, tokens, kv_heads * groups, widths[1] + 8)[..., 8:]} if gate else {})


def run(given: dict[str, Any], **host: Any) -> Tensor:
    q, k, v, *_ = given.values()
    with host_ops(**host) as launches, torch.no_grad():
        out: Tensor = OP(q, k, v, **{name: x for name, x in given.items() if name not in "qkv"})
    assert [launch.source for launch in launches] == ["decode_attention.cu"]
    return out


def plain(given: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    there = {
        n: x.to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()
    }
    with torch.no_grad():
        return F.decode_attention(**there)


CASES = {
    "lengths that end in, at and behind a tile": case(
        torch.bfloat16, [0, 1, 31, 32, 33, 4097], 4097, (1, 2), (64, 64), seed=1
    ),
    "three heads a key, softcap and a window": case(
        torch.float16, [5, 140, 77], 150, (2, 3), (96, 96), softcap=3.0, window=40, gate=True
    ),
    "odd widths, sinks": case(torch.float32, [70, 0, 1], 70, (3, 1), (33, 20), sinks=True, softmax_scale=0.3),
    "more queries than a block takes": case(torch.bfloat16, [130], 200, (1, 12), (192, 128)),
    "three tokens, both ways, wide": case(
        torch.float32, [100, 2], 128, (1, 2), (256, 80), tokens=3, causal=False, window=30
    ),
    "a ring, several tokens": case(
        torch.bfloat16, [100, 20], 40, (2, 2), (80, 80), ring=True, tokens=2, window=39, gate=True
    ),
}


def check(given: dict[str, Any]) -> Tensor:
    """The error is at most 1.5 times the plain function's in the same dtype; a row that sees nothing gives zeros; and
    all bits are the same in another order of threads."""
    right, usual, found = plain(given, torch.float64), plain(given), run(given)
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)
    floor = 8 * torch.finfo(found.dtype).eps * (1e-1 if found.dtype == torch.float32 else 0.25)
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max() + floor * right.abs().max()
    empty = given["q_positions"] < 0
    assert torch.equal(found[empty], torch.zeros_like(found[empty]))
    assert torch.equal(run(given, order="shuffled:3"), found)
    return found


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name):
    found = check(CASES[name])
    assert torch.equal(run(CASES[name], order="reversed"), found)


def random_case(seed: int) -> dict[str, Any]:
    r = random.Random(seed)
    slots = r.choice([1, 7, 32, 33, 200, r.randrange(1, 700)])
    tokens = min(slots, r.choice([1, 1, 1, 2, 3]))
    ring = r.random() < 0.3 and tokens == 1
    lengths = [
        r.choice([0, 1, r.randrange(slots + 1), slots + ring * r.randrange(99)]) for _ in range(r.choice([1, 3]))
    ]
    widths = [r.choice([64, 80, 96, 128, 192, 256, r.randrange(1, 257)]) for _ in "kv"]
    rules = {"softcap": r.choice([None, 2.0]), "window": r.choice([None, 1, 20]), "causal": r.random() < 0.8}
    heads, dtype = (
        (r.choice([1, 3]), r.choice([1, 2, 3, 5, 11])),
        r.choice([torch.float32, torch.bfloat16, torch.float16]),
    )
    more = {"tokens": tokens, "ring": ring, "sinks": r.random() < 0.3, "gate": r.random() < 0.3, "seed": seed}
    return case(dtype, lengths, slots, heads, (widths[0], widths[r.random() < 0.3]), **more, **rules)


@pytest.mark.verify
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_shapes(first):
    for seed in range(first, first + 20):
        check(random_case(seed))


@pytest.mark.verify
@pytest.mark.parametrize(("name", "sanitizer"), itertools.product(CASES, ["address", "undefined", "thread"]))
def test_sanitizers_are_silent(name, sanitizer):
    found = run(CASES[name], sanitizer=sanitizer)
    torch.testing.assert_close(found, plain(CASES[name]), rtol=0.02, atol=0.02)


def test_bad_input_is_refused_before_a_launch():
    given = case(torch.float32, [9, 0], 20, (2, 2), (16, 16))
    changes = [
        {"q": given["q"][:, :, :3]},
        {"k_positions": given["k_positions"][:, :-1]},
        {"v": given["v"][:, :-1]},
        {"k": given["k"].bfloat16()},
    ]
    messages = []
    for change in changes:
        with host_ops() as launches, pytest.raises((F.ShapeError, TypeError)) as error:
            OP(**{**given, **change})
        assert launches == []
        messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
decode_attention(k=...): H=3 query heads do not divide over K=2 key/value heads
decode_attention(k_positions=...): T is 20 in k but 19 in k_positions
    k          : B T K E = 2 20 2 16
    k_positions: B T = 2 19
                         ^^
    so far: B=2 S=1 H=4 E=16 T=20 K=2 V=16
decode_attention(v=...): T is 20 in k but 19 in v
    k: B T K E = 2 20 2 16
    v: B T K V = 2 19 2 16
                   ^^
    so far: B=2 S=1 H=4 E=16 T=20 K=2
decode_attention(k=...): it is torch.bfloat16, and q torch.float32
    fix: k.to(q.dtype)""",
    )


def test_a_row_is_the_same_whatever_rows_are_beside_it():
    given = case(torch.float32, [50, 9, 0], 64, (1, 2), (16, 16))
    batch = run(given)
    for i in range(3):
        alone = {name: x[i : i + 1] for name, x in given.items()}
        assert torch.equal(run(alone)[0], batch[i])


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_against_transformers(family):
    """Its own attention, in fp64: sinks of gpt_oss, softcap of Gemma 2."""
    given = case(torch.float32, [37], 40, (2, 3), (16, 16), seed=4)
    given["sinks" if family == "gpt_oss" else "softcap"] = torch.randn(6) if family == "gpt_oss" else 2.0
    q, k, v = (given[name].double().transpose(1, 2) for name in "qkv")
    k, v = k[:, :, :37], v[:, :, :37]
    if family == "gpt_oss":
        layer = SimpleNamespace(num_key_value_groups=3, sinks=given["sinks"].double(), training=False)
        right, _ = gpt_oss_attention(layer, q, k, v, None, scaling=0.25)
    else:
        layer = SimpleNamespace(num_key_value_groups=3, head_dim=16, training=False)
        right, _ = gemma2_attention(layer, q, k, v, None, scaling=0.25, softcap=2.0)
    torch.testing.assert_close(run(given).double(), right.double(), rtol=1e-5, atol=1e-6)


def test_as_an_op():
    given = case(torch.float32, [9, 0], 20, (1, 2), (16, 16), sinks=True, gate=True)
    args = [given[name].clone() for name in ("q", "k", "v", "q_positions", "k_positions", "sinks", "gate")]
    args[1:3] = [x.nan_to_num(0) for x in args[1:3]]
    args[0] = args[0].nan_to_num(0)
    options = {"causal": True, "window": None, "softcap": None, "softmax_scale": None}
    trained = (*args[:3], *args[5:])
    for x in trained:
        x.requires_grad_()
    with host_ops():
        torch.library.opcheck(torch.ops.meshfn_cuda.decode_attention_split.default, args, options)
        found = torch.ops.meshfn_cuda.decode_attention_split.default(*args, **options).sum()
    q, k, v, q_positions, k_positions, sinks, gate = args
    wanted = F.decode_attention(q, k, v, q_positions=q_positions, k_positions=k_positions, sinks=sinks, gate=gate).sum()
    torch.testing.assert_close(torch.autograd.grad(found, trained), torch.autograd.grad(wanted, trained))


def test_what_it_does_not_take():
    def reason(arch: str = "sm_90", **changes: Any) -> str | None:
        given = case(torch.float32, [9, 0], 20, (1, 2), (16, 16))
        defaults = dict.fromkeys(("mask", "kv_index", "sinks", "gate"))
        return decode_attention.supports({**defaults, **given, **changes}, arch)

    k = case(torch.float32, [9, 0], 20, (1, 2), (16, 16))["k"]
    assert reason() is None
    found = [
        reason("sm_75"),
        reason(k=k.bfloat16()),
        reason(k=k.transpose(1, 3)),
        reason(mask=torch.ones(1, 20, dtype=torch.bool)),
        reason(kv_index=torch.tensor([0, 0])),
        reason(q=torch.empty(2, 9, 2, 16)),
        reason(q=torch.empty(2, 1, 2, 257), k=torch.empty(2, 20, 1, 257)),
        reason(k_positions=torch.zeros(2, 20, dtype=torch.int32)),
    ]
    assert_expected_inline(
        "\n".join(map(str, found)),
        """\
sm_75 is older than sm_80
float32 with bfloat16
k by columns
a mask
a kv_index
9 queries a row, at most 8
heads of 257, at most 256
positions that are no int64""",
    )
