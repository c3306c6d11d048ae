"""The kernels of a CPU compute what the primitives compute; programs use them where the plan says so."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.core import core_attention
from meshfn.programs import dynamo, onednn
from meshfn.programs.cpu import CPU_KERNELS, MOST_TOKENS
from meshfn.programs.kernel import Call
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend

from ..families import family
from ..tiny import llama, ours

CPU = torch.ops.meshfn_cpu


def strided(*shape, dtype=torch.float64):
    """Random, and cut from a wider tensor."""
    return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


NORMS = {
    "none": None,
    "rms_norm": {"eps": 1e-3},
    "gemma": {"zero_centered": True, "scale_in_fp32": True},
    "layer_norm": {"norm_type": "layer_norm", "norm_bias": True},
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1, 1, 7), (5, 1, 3), (2, 3, 16), (1, 8, 33), (4,)], ids=str)
def test_products_of_rows(norm, shape):
    width = shape[-1]
    options = dict(NORMS[norm] or {})
    if options.pop("norm_bias", False):
        options["norm_bias"] = torch.randn(width, dtype=torch.float64)
    weight = None if norm == "none" else torch.randn(width, dtype=torch.float64)
    x = strided(*shape)
    weights = [torch.randn(rows, width + 1, dtype=torch.float64)[:, 1:] for rows in (1, 5, 6)]
    biases = [None, torch.randn(5, dtype=torch.float64), None]
    for got, wanted in zip(
        CPU.norm_linear(x, weight, weights, biases, **options),
        F.norm_linear(x, weight, weights, biases, **options),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    gate, up = torch.randn(2, 9, width, dtype=torch.float64)
    bias = torch.randn(9, dtype=torch.float64)
    for activation, biased in itertools.product(F.ACTIVATIONS, (None, bias)):
        given = {"activation": activation, **options}
        torch.testing.assert_close(
            CPU.gated_mlp(x, weight, gate, up, biased, biased, **given),
            F.gated_mlp(x, weight, gate, up, biased, biased, **given),
        )
        torch.testing.assert_close(
            CPU.plain_mlp(x, weight, up, biased, **given), F.plain_mlp(x, weight, up, biased, **given)
        )


def test_products_by_onednn():
    """Held to what programs/onednn.py says of torch's private op, and through the primitives."""
    assert onednn.available()
    for tokens, width, rows in ((9, 3, 5), (64, 33, 1), (1, 1, 7)):
        x, weight = torch.randn(tokens, width), torch.randn(rows, width + 2)[:, 1:-1]
        exact = torch.nn.functional.linear(x.double(), weight.double())
        torch.testing.assert_close(onednn.onednn_linear(x, weight).double(), exact, rtol=1e-5, atol=1e-5)
    x, weight, bias, scale = torch.randn(2, 7, 12), torch.randn(9, 12), torch.randn(9), torch.randn(12)
    for got, wanted in (
        (CPU.onednn_norm_linear(x, scale, [weight], [bias])[0], F.norm_linear(x, scale, [weight], [bias])[0]),
        (CPU.onednn_gated_mlp(x, scale, weight, weight, bias, None), F.gated_mlp(x, scale, weight, weight, bias, None)),
        (CPU.onednn_plain_mlp(x, None, weight, bias), F.plain_mlp(x, None, weight, bias)),
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 9, 3), (3, 2, 7, 4, 1), (2, 1, 1, 5, 5), (2, 3, 40, 6, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 2.0}, {"sinks": True}, {"mask": True}, {"kv_index": True}, {"softmax_scale": 0.2}],
    ids=str,
)
def test_attentions(sizes, options, width):
    """Rows at different places, one that has ended, slots out of order and never written."""
    B, S, T, H, K = sizes
    q, k, v = strided(B, S, H, 5), strided(B, T, K, 5), strided(B, T, K, width)
    if width == 5:  # what torch's flash attention takes
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        mask = torch.ones(1, 1, S, T, dtype=torch.bool)
        assert torch._fused_sdp_choice(*heads, attn_mask=mask, enable_gqa=True) == SDPBackend.FLASH_ATTENTION.value
    q_positions = torch.randint(0, T, (B, 1)) + torch.arange(S)
    q_positions[0, -1] = -1
    k_positions = torch.stack([torch.randperm(T) for _ in range(B)])
    k_positions[:, T // 2] = -1
    k[:, T // 2], v[:, T // 2] = torch.nan, torch.nan
    made = {
        "sinks": torch.randn(H, dtype=torch.float64),
        "mask": torch.rand(B, H, S, T) < 0.7,
        "kv_index": torch.randint(0, K, (H,)),
    }
    given = {name: made.get(name, value) for name, value in options.items()}
    given |= {"q_positions": q_positions, "k_positions": k_positions, "causal": True}
    wanted = core_attention(q, k, v, **given)
    torch.testing.assert_close(CPU.decode_attention(q, k, v, **given), wanted, rtol=1e-12, atol=1e-12)
    if not {"softcap", "sinks"} & set(options):
        torch.testing.assert_close(CPU.core_attention(q, k, v, **given), wanted, rtol=1e-12, atol=1e-12)
        documents = {"q_segment_ids": torch.randint(0, 2, (B, S)), "k_segment_ids": torch.randint(0, 2, (B, T))}
        torch.testing.assert_close(
            CPU.core_attention(q, k, v, **given, **documents), core_attention(q, k, v, **given, **documents)
        )


def test_attention_without_positions():
    q, k, v = strided(2, 3, 6, 5), strided(2, 4, 2, 5), strided(2, 4, 2, 4)
    torch.testing.assert_close(CPU.core_attention(q, k, v), core_attention(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_primitives(dtype):
    x, weight = torch.randn(3, 1, 96), torch.randn(64, 96)
    exact = torch.nn.functional.linear(x.to(dtype).double(), weight.to(dtype).double())
    x, weight = x.to(dtype), weight.to(dtype)
    rows = CPU.norm_linear(x, None, [weight], [None])[0]
    plain = F.linear(x, weight)
    assert (rows - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()
    q, k, v = (torch.randn(2, n, heads, 16).to(dtype) for n, heads in ((1, 6), (50, 2), (50, 2)))
    given = {"q_positions": torch.tensor([[49], [20]]), "k_positions": torch.arange(50).expand(2, -1)}
    exact = F.decode_attention(q.double(), k.double(), v.double(), **given)
    plain = (F.decode_attention(q, k, v, **given) - exact).abs().mean()
    assert (CPU.decode_attention(q, k, v, **given) - exact).abs().mean() <= 1.1 * plain
    assert (CPU.core_attention(q, k, v, causal=True, **given) - exact).abs().mean() <= 1.1 * plain


def kernels(plan, phase):
    return "\n".join(f"{row.op:16} {row.kernel}" for block in plan.phases[phase].blocks for row in block.rows)


def test_the_plan_says_where_they_are_used():
    model = ours(llama())
    plan = programs.plan(model, batch=MOST_TOKENS, chunk=2)
    assert_expected_inline(
        kernels(plan, "prefill"),
        """\
embedding        compiler
norm_linear      onednn
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
core_attention   flash
norm_linear      onednn
gated_mlp        onednn
norm_linear      onednn
write            compiler
write            compiler
norm_linear      gemv
sample_advance   compiler (no cpu kernel)""",
    )
    assert_expected_inline(
        kernels(plan, "decode"),
        """\
embedding        compiler
norm_linear      gemv
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
decode_attention one_pass
norm_linear      gemv
gated_mlp        gemv
norm_linear      gemv
write            compiler
write            compiler
norm_linear      gemv
sample_advance   compiler (no cpu kernel)""",
    )
    many = kernels(programs.plan(model, batch=MOST_TOKENS + 1), "decode")
    assert many.count("onednn") == 5
    half = kernels(programs.plan(model, batch=MOST_TOKENS + 1, dtype=torch.bfloat16), "decode")
    assert half.count("compiler (gemv: 9 tokens, at most 8; onednn: float32 alone)") == 5
    assert "core_attention   compiler (flash: softcap is not supported)" in kernels(
        programs.plan(programs.load(family("gemma2", num_hidden_layers=1)), chunk=16), "prefill"
    )
    on_cuda = kernels(programs.plan(model, device="cuda", arch="sm_90"), "decode")
    assert set(re.findall(r"(?<=compiler).*", on_cuda)) == {""}  # what is no primitive
    rows = str(programs.build(model, max_len=16, compile=False)).splitlines()
    assert {line.split()[-1] for line in rows if "norm_linear" in line or "attention" in line} == {"eager"}


def test_attentions_that_are_left_to_the_compiler():
    """Nine query heads a key."""
    assert "decode_attention compiler (one_pass: 9 queries a key, at most 8)" in kernels(
        programs.plan(ours(llama(heads=9, kv_heads=1)), chunk=16), "decode"
    )


@pytest.mark.parametrize("widths", [(6, 4), (4, 6)])
def test_flash_takes_values_of_another_width_than_keys(widths):
    """By zeros, which change nothing, the scale least of all."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 6, widths[0]), torch.randn(2, 7, 3, widths[0])
    v, positions = torch.randn(2, 7, 3, widths[1]), torch.arange(2, 7)[None]
    given = {"causal": True, "q_positions": positions, "k_positions": torch.arange(7)[None]}
    for scale in (None, 0.7):
        found = CPU.core_attention.default(q, k, v, softmax_scale=scale, **given)
        torch.testing.assert_close(found, F.dot_product_attention(q, k, v, softmax_scale=scale, **given))


def test_three_products_are_one_function_without_a_call():
    """Weights are read in loops of the compiler's, and a norm in front is no part of them; and in half precision the
    loops are as exact as transformers' products."""
    weights = [torch.randn(n, 64) for n in (48, 16, 16)]
    x, scale = torch.randn(1, 1, 64), torch.randn(64)

    def fn(x, scale, a, b, c):
        return CPU.norm_linear.default(x, scale, [a, b, c], [None, None, None])

    with torch.no_grad():
        found, (code,) = run_and_get_code(dynamo.compile_with(fn, dynamo.inductor), x, scale, *weights)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert "extern_kernels." not in code.partition("def call")[2]
    assert code.count("std::sqrt") == 1, "the norm is computed again for each row of a weight"
    assert code.count("#pragma omp for") <= 4
    for got, wanted in zip(found, F.norm_linear(x, scale, weights, [None] * 3), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)

    half = [t.bfloat16() for t in (x, scale, *weights)]
    exact = F.norm_linear(half[0].double(), half[1].double(), [w.double() for w in half[2:]], [None] * 3)
    plain = F.norm_linear(half[0], half[1], half[2:], [None] * 3)
    with torch.no_grad():
        found = dynamo.compile_with(fn, dynamo.inductor)(*half)
    for got, rounded, wanted in zip(found, plain, exact, strict=True):
        assert (got - wanted).abs().mean() <= 1.1 * (rounded - wanted).abs().mean()


def test_weights_that_lie_by_columns_are_left_to_the_compiler():
    module = llama(tied=False)
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().T.contiguous().T)
    text = kernels(programs.plan(ours(module)), "decode")
    assert "compiler (gemv: a weight that lies by columns; onednn: a weight that lies by columns)" in text
    assert text.count("gemv:") == 1


def test_compiled_as_eager():
    """What the compiler makes of views, of which it knows less than eager code: sinks cut from a softmax, parts of an
    activation, keys read from a longer cache."""
    q, k, v = torch.randn(2, 1, 6, 5), torch.randn(2, 40, 2, 5), torch.randn(2, 40, 2, 5)
    q_positions, k_positions = torch.tensor([[17], [5]]), torch.arange(19).expand(2, 19).contiguous()
    sinks, x, weight = torch.randn(6), torch.randn(2, 1, 2, 16), torch.randn(7, 16)
    rules = ({}, {"sinks": True}, {"sinks": True, "softcap": 2.0, "window": 4}, {"window": 3})

    def attentions(attention, q, k, v, sinks):
        k, v = k.narrow(1, 0, 19), v.narrow(1, 0, 19)
        positions = {"q_positions": q_positions, "k_positions": k_positions}
        given = [{**rule, **({"sinks": sinks} if "sinks" in rule else {})} for rule in rules]
        return [attention(q * 2, k, v, **positions, **each) for each in given]

    def products(linear, x, weight):
        parts = ((x * 2).unbind(2)[1], (x + 1).transpose(0, 2)[1], (x.transpose(0, 2) * 2)[1:], x[:, :, 1], x[1])
        return [linear(part, None, [weight], [None])[0] for part in parts]

    def kernels(q, k, v, sinks, x, weight):
        found = attentions(CPU.decode_attention.default, q, k, v, sinks)
        return [*found, *products(CPU.norm_linear.default, x, weight)]

    wanted = [*attentions(F.decode_attention, q, k, v, sinks), *products(F.norm_linear, x, weight)]
    with torch.no_grad():
        found = dynamo.compile_with(kernels, dynamo.inductor)(q, k, v, sinks, x, weight)
    for got, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)


def test_the_token_is_the_largest_of_the_logits_as_stored():
    """Half precision: a compiler compares what it did not round with what it did, unless it is told. Only Inductor
    does that."""
    program = programs.build(ours(llama()), max_len=64, chunk=16, dtype=torch.bfloat16)
    state = program.prefill([[5, 7, 11]])
    for _ in range(20):
        assert state.token[0] == state.logits[0].argmax()
        state = program.decode(state)


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_of_the_delta_rule(channels, heads, dtype):
    """The definition, token by token, at odd sizes; a row that begins, one that goes on, one without a token."""
    K, G = heads
    q, k = (strided(3, 1, K, 7, dtype=dtype) for _ in range(2))
    v = strided(3, 1, K * G, 5, dtype=dtype)
    g = -torch.rand(3, 1, K * G, *([7] if channels else []), dtype=torch.promote_types(dtype, torch.float32))
    beta = torch.rand(3, 1, K * G, dtype=g.dtype)
    state = torch.randn(3, K * G, 5, 7, dtype=g.dtype)
    positions = torch.tensor([[0], [4], [-1]])
    state[0], v[2], k[2] = torch.nan, torch.nan, torch.nan
    o, new = CPU.gated_delta_rule(q, k, v, g, beta, state, positions=positions)
    begun = torch.cat((torch.zeros_like(state[:1]), state[1:]))
    given = (F.l2norm(q[:2].double()), F.l2norm(k[:2].double()), v[:2].double(), g[:2].double(), beta[:2].double())
    wanted, after = F.gated_delta_rule_scan(*given, initial_state=begun[:2].double(), output_final_state=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(o[:2].double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(new[:2].double(), after, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5))
    assert torch.equal(new[2], state[2])
    assert (o.dtype, new.dtype) == (dtype, g.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (3, 7, 4), (2, 5, 3), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("innermost", ["channels", "tokens"])
def test_a_step_of_a_convolution(innermost, sizes, dtype):
    """torch's own convolution; a row that begins, one that goes on, one without a token, which keeps every byte."""
    heads, head_dim, width = sizes
    channels = heads * head_dim
    x, weight = strided(3, 1, heads, head_dim, dtype=dtype), torch.randn(channels, 1, width, dtype=dtype)
    state = torch.randn(3, channels, width - 1, dtype=dtype)
    state = state if innermost == "tokens" else state.mT.contiguous().mT
    state[0], state[2], x[2] = torch.nan, torch.nan, torch.nan
    y, new = CPU.short_conv(x, weight, state, activation="silu", positions=torch.tensor([[0], [4], [-1]]))
    begun = torch.cat((torch.zeros_like(state[:1]), state[1:2]))
    tokens_BCW = torch.cat((begun, x[:2].flatten(2).mT), -1)
    conv = torch.nn.functional.conv1d(tokens_BCW.double(), weight.double(), groups=channels)[..., 0]
    wanted = torch.nn.functional.silu(conv).view(2, 1, heads, head_dim)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y[:2].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(new[:2], tokens_BCW[..., 1:])
    assert torch.equal(*(each[2].contiguous().view(torch.uint8) for each in (new, state)))
    assert (y.dtype, new.dtype, new.shape) == (dtype, dtype, state.shape)


@pytest.mark.parametrize(("primitive", "first"), [("gated_delta_rule", "q"), ("short_conv", "x")])
def test_a_step_alone_goes_by_loops(primitive, first):
    x = torch.zeros(1, 2, 1, 4)
    arguments = {first: x, "state": torch.zeros(1, 1, 4, 4), "positions": torch.zeros(1, 2), "segment_ids": None}
    (kernel,) = (each for each in CPU_KERNELS if each.primitive == primitive)
    reason = lambda **more: kernel.supports(Call(primitive, arguments | more, None))  # noqa: E731
    assert reason() == "2 tokens a row, 1 alone"
    arguments[first] = x[:, :1]
    assert reason(state=None) == "no state"
    assert reason(positions=None) == "no positions"
    assert reason(segment_ids=x) == "documents"
    assert reason() is None
