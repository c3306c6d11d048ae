"""A few tokens through weights, norm in front and end behind: against fp64, transformers, and itself in other orders."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional import primitive
from meshfn.kernels_cuda.device import counters
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from .ops import host_ops

OPS = torch.ops.meshfn_cuda
NORMS = {
    "none": None,
    "rms": {"eps": 1e-6},
    "gemma": {"eps": 1e-6, "zero_centered": True, "scale_in_fp32": True},
    "olmo2": {"eps": 1e-5, "scale_in_fp32": True},
    "1+w": {"eps": 1e-5, "zero_centered": True},
}


def case(
    end: str, dtype: torch.dtype, tokens: tuple[int, ...], width: int, rows: tuple[int, ...], *, norm: str = "none",
    activation: str = "silu", bias: bool = False, lie: str = "contiguous", seed: int = 0,
) -> tuple[str, list[Any], dict[str, Any]]:  # fmt: skip
    """A primitive with arguments. lie: of weights and tokens, "contiguous", "sliced" (of wider ones), "shifted" (they
    begin at odd addresses)."""
    made = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=made, dtype=torch.float64).mul(scale).to(dtype)
        if lie == "sliced" and len(shape) > 1:
            wider = torch.full((*shape[:-1], shape[-1] + 8 + -shape[-1] % 8), float("nan"), dtype=dtype)
            wider[..., : shape[-1]] = x
            return wider[..., : shape[-1]]
        if lie == "shifted":
            return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(shape)
        return x

    x, weights = randn(*tokens, width), [randn(f, width, scale=width**-0.5) for f in rows]
    biases = [randn(f) if bias else None for f in rows]
    options = NORMS[norm]
    weight = None if options is None else randn(width)
    if end == "norm_linear":
        return end, [x, weight, weights, biases], dict(options or {})
    if end in ("gated_mlp", "plain_mlp"):
        return end, [x, weight, *weights, *biases], {"activation": activation, **(options or {})}
    return end, [x, weights[0], randn(*tokens, rows[0]), biases[0]], {}


def wide(value: Any) -> Any:
    if isinstance(value, list):
        return [wide(v) for v in value]
    return value.double() if isinstance(value, torch.Tensor) else value


def as_list(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run(name: str, args: list[Any], options: dict[str, Any], **host: Any) -> list[torch.Tensor]:
    with host_ops(**host) as launches:
        out = as_list(getattr(OPS, name)(*args, **options))
    assert [launch.source for launch in launches] == ["gemv.cu"]
    return out


def check(name: str, args: list[Any], options: dict[str, Any], **host: Any) -> list[torch.Tensor]:
    """The op's error against fp64 is at most 1.5 times the plain function's, in the same dtype."""
    plain = primitive.PRIMITIVES[name]
    with torch.no_grad():
        right = as_list(plain(*wide(args), **options))
        usual = as_list(plain(*args, **options))
        found = run(name, args, options, **host)
    for r, u, f in zip(right, usual, found, strict=True):
        assert (f.shape, f.dtype) == (u.shape, u.dtype)
        floor = 8 * torch.finfo(f.dtype).eps * 0.25
        assert (f - r).abs().max() <= 1.5 * (u - r).abs().max() + floor * r.abs().max()
    return found


CASES = {
    "three weights, biases": case("norm_linear", torch.bfloat16, (1, 1), 64, (8, 3, 5), norm="rms", bias=True),
    "gated, odd": case("gated_mlp", torch.bfloat16, (5, 1), 37, (7, 7), norm="gemma", activation="gelu_pytorch_tanh"),
    "residual": case("linear_add", torch.float16, (3, 1), 100, (6,), bias=True),
    "columns shared by blocks": case("plain_mlp", torch.float32, (2,), 4096, (6,), norm="1+w", activation="relu2"),
    "sliced, a rest of columns": case("norm_linear", torch.float32, (1, 1, 1), 43, (5, 4, 3, 2), lie="sliced"),
    "several rounds": case("norm_linear", torch.bfloat16, (3,), 5000, (7,), lie="shifted"),
    "odd addresses": case("gated_mlp", torch.bfloat16, (1, 8), 64, (9, 9), bias=True, activation="gelu", lie="shifted"),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64_and_in_other_orders(name):
    found = check(*CASES[name])
    for order in ("reversed", "shuffled:3"):
        assert all(map(torch.equal, found, run(*CASES[name], order=order)))


def test_a_token_is_the_same_whatever_is_beside_it():
    """Rows of a batch of 8, of 3 and alone, to the bit; columns shared by blocks."""
    name, (x, *args), options = case("gated_mlp", torch.bfloat16, (8, 1), 2048, (5, 5), norm="rms")
    (all_of_them,) = run(name, [x, *args], options)
    (three,) = run(name, [x[2:5], *args], options)
    (alone,) = run(name, [x[4:5], *args], options)
    assert torch.equal(all_of_them[2:5], three)
    assert torch.equal(three[2:], alone)


def test_the_first_launch_of_a_stream_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="is being captured\n    fix: run what is captured once before"):
        counters(torch.device("cuda", 0))


def test_no_tokens():
    _, (x, *args), options = CASES["gated, odd"]
    with host_ops() as launches:
        out = OPS.gated_mlp(x[:0], *args, **options)
    assert out.shape == (0, 1, 7)
    assert launches == []


def test_the_feed_forward_of_llama():
    """Beside transformers' own module in bf16, both against fp64."""
    torch.manual_seed(0)
    cfg = LlamaConfig(hidden_size=48, intermediate_size=72, num_attention_heads=4)
    module = LlamaMLP(cfg)
    x = torch.randn(2, 1, 48, dtype=torch.float64)
    with torch.no_grad():
        right = module.double()(x)
        module, x = module.bfloat16(), x.bfloat16()
        usual = module(x)
        with host_ops() as launches:
            h = OPS.gated_mlp(x, None, module.gate_proj.weight, module.up_proj.weight, activation="silu")
            found = OPS.linear_add(h, module.down_proj.weight, torch.zeros_like(x))
    assert len(launches) == 2
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max()


@pytest.mark.parametrize("name", ["gated, odd", "residual"])
def test_opcheck(name):
    with host_ops():
        end, args, _ = CASES[name]
        rows = [a.reshape(-1, a.shape[-1]) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args]
        leaf = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in rows]
        x = leaf[0]
        norm = {"eps": 1e-6, "zero_centered": True, "scale_in_fp32": True}
        if end == "linear_add":
            given = (x, None, leaf[1], *[None] * 5, leaf[3], *[None] * 5, leaf[2])
            torch.library.opcheck(OPS.gemv.default, given, {"end": "residual", "activation": None, **norm})
        else:
            given = (x, leaf[1], leaf[2], leaf[3], *[None] * 11)
            torch.library.opcheck(OPS.gemv.default, given, {"end": "gated", "activation": "gelu", **norm})


@pytest.mark.parametrize("tokens", [(), (2,), (2, 1, 2)])
def test_gradients_reach_every_parameter(tokens):
    """Of inputs of any rank, by autograd and by torch.func, equal to the plain function's; a second derivative."""
    _, args, options = case("gated_mlp", torch.float32, tokens, 12, (5, 5), norm="rms", bias=True)
    leaves = [a.requires_grad_() for a in args]

    def loss(op, *given):
        return op(*given, **options).square().sum()

    with host_ops():
        found = torch.autograd.grad(loss(OPS.gated_mlp, *leaves), leaves, create_graph=True)
        again = torch.autograd.grad(found[2].square().sum(), leaves[0])[0]
        by_func = torch.func.grad(lambda *given: loss(OPS.gated_mlp, *given), argnums=tuple(range(6)))(*args)
    right = torch.autograd.grad(loss(F.gated_mlp, *leaves), leaves, create_graph=True)
    right_again = torch.autograd.grad(right[2].square().sum(), leaves[0])[0]
    for f, g, r in zip(found, by_func, right, strict=True):
        torch.testing.assert_close(f, r)
        torch.testing.assert_close(g, r)
    torch.testing.assert_close(again, right_again)


def test_vmap_is_the_plain_function():
    _, (x, *args), options = CASES["gated, odd"]
    with host_ops() as launches:
        found = torch.func.vmap(lambda x: OPS.gated_mlp(x, *args, **options))(x[None].expand(3, *x.shape))
    assert torch.equal(found, torch.func.vmap(lambda x: F.gated_mlp(x, *args, **options))(x[None].expand(3, *x.shape)))
    assert launches == []


def random_case(seed: int) -> tuple[str, list[Any], dict[str, Any]]:
    r = random.Random(seed)
    end = r.choice(["norm_linear", "gated_mlp", "plain_mlp", "linear_add"])
    rows = [r.choice([1, 2, 3, 5, 8, 17]) for _ in range(r.randint(1, 4))]
    rows = {"norm_linear": rows, "gated_mlp": [rows[0]] * 2}.get(end, rows[:1])
    return case(
        end,
        r.choice([torch.float32, torch.bfloat16, torch.float16]),
        r.choice([(n,) for n in range(1, 9)] + [(), (2, 1), (2, 2, 2)]),
        r.choice([1, 2, 7, 8, 31, 64, 100, 129, 512, 1056, 3000]),
        tuple(rows),
        norm="none" if end == "linear_add" else r.choice(list(NORMS)),
        activation=r.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu2"]),
        bias=r.random() < 0.5,
        lie=r.choice(["contiguous", "sliced", "shifted"]),
        seed=seed,
    )


@pytest.mark.verify
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_shapes(first):
    for seed in range(first, first + 50):
        found = check(*random_case(seed))
        assert all(map(torch.equal, found, run(*random_case(seed), order=f"shuffled:{seed}")))


@pytest.mark.verify
@pytest.mark.parametrize(("name", "sanitizer"), itertools.product(CASES, ["address", "undefined", "thread"]))
def test_sanitizers_are_silent(name, sanitizer):
    check(*CASES[name], sanitizer=sanitizer)


def test_bad_input_is_refused_before_a_launch():
    _, (x, norm, gate, up, b, c), options = case("gated_mlp", torch.bfloat16, (2, 1), 16, (8, 8), norm="rms", bias=True)
    wrong = [
        (x[..., :-1], norm, gate, up, b, c),
        (x, norm[:-1], gate, up, b, c),
        (x, norm, gate, up[:-1], b, c),
        (x, norm, gate, up, b[:-1], c),
        (x, norm, gate.float(), up, b, c),
    ]
    messages = []
    for args in wrong:
        with host_ops() as launches, pytest.raises((F.ShapeError, TypeError)) as error:
            OPS.gated_mlp(*args, **options)
        assert launches == []
        messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
gemv(norm_weight=...): D is 15 in x but 16 in norm_weight
    x          : N D = 2 15
    norm_weight: D = 16
                     ^^
    so far: N=2 D=15
gemv(norm_weight=...): D is 16 in x but 15 in norm_weight
    x          : N D = 2 16
    norm_weight: D = 15
                     ^^
    so far: N=2 D=16
gemv(b1=...): F is 7 in w1 but 8 in b1
    w1: F D = 7 16
    b1: F = 8
            ^
    so far: D=16 F=7
gemv(b0=...): F is 8 in w0 but 7 in b0
    w0: F D = 8 16
    b0: F = 7
            ^
    so far: D=16 F=8
gemv(w0=...): it is torch.float32, and x torch.bfloat16
    fix: w0.to(x.dtype)""",
    )
