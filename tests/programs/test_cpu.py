"""The kernels of a CPU compute what the primitives compute; programs use them where the plan says so."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.core import core_attention
from meshfn.programs.cpu import CPU_OPS, MOST_ROWS

from ..families import family
from ..tiny import llama, ours


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
        CPU_OPS["norm_linear"](x, weight, weights, biases, **options),
        F.norm_linear(x, weight, weights, biases, **options),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    gate, up = torch.randn(2, 9, width, dtype=torch.float64)
    bias = torch.randn(9, dtype=torch.float64)
    for activation, biased in itertools.product(F.ACTIVATIONS, (None, bias)):
        given = {"activation": activation, **options}
        torch.testing.assert_close(
            CPU_OPS["gated_mlp"](x, weight, gate, up, biased, biased, **given),
            F.gated_mlp(x, weight, gate, up, biased, biased, **given),
        )
        torch.testing.assert_close(
            CPU_OPS["plain_mlp"](x, weight, up, biased, **given), F.plain_mlp(x, weight, up, biased, **given)
        )


@pytest.mark.parametrize("sizes", [(1, 1, 32, 9, 3), (3, 2, 7, 4, 1), (2, 1, 1, 5, 5), (2, 3, 40, 6, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 2.0}, {"sinks": True}, {"mask": True}, {"kv_index": True}, {"softmax_scale": 0.2}],
    ids=str,
)
def test_attentions(sizes, options):
    """Rows at different places, one that has ended, slots out of order and never written."""
    B, S, T, H, K = sizes
    q, k, v = strided(B, S, H, 5), strided(B, T, K, 5), strided(B, T, K, 4)
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
    torch.testing.assert_close(CPU_OPS["decode_attention"](q, k, v, **given), wanted, rtol=1e-12, atol=1e-12)
    if not {"softcap", "sinks"} & set(options):
        torch.testing.assert_close(CPU_OPS["core_attention"](q, k, v, **given), wanted, rtol=1e-12, atol=1e-12)
        documents = {"q_segment_ids": torch.randint(0, 2, (B, S)), "k_segment_ids": torch.randint(0, 2, (B, T))}
        torch.testing.assert_close(
            CPU_OPS["core_attention"](q, k, v, **given, **documents), core_attention(q, k, v, **given, **documents)
        )


def test_attention_without_positions():
    q, k, v = strided(2, 3, 6, 5), strided(2, 4, 2, 5), strided(2, 4, 2, 4)
    torch.testing.assert_close(CPU_OPS["core_attention"](q, k, v), core_attention(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_primitives(dtype):
    x, weight = torch.randn(3, 1, 96), torch.randn(64, 96)
    exact = torch.nn.functional.linear(x.to(dtype).double(), weight.to(dtype).double())
    x, weight = x.to(dtype), weight.to(dtype)
    rows = CPU_OPS["norm_linear"](x, None, [weight], [None])[0]
    plain = F.linear(x, weight)
    assert (rows - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()
    q, k, v = (torch.randn(2, n, heads, 16).to(dtype) for n, heads in ((1, 6), (50, 2), (50, 2)))
    given = {"q_positions": torch.tensor([[49], [20]]), "k_positions": torch.arange(50).expand(2, -1)}
    exact = F.decode_attention(q.double(), k.double(), v.double(), **given)
    plain = (F.decode_attention(q, k, v, **given) - exact).abs().mean()
    assert (CPU_OPS["decode_attention"](q, k, v, **given) - exact).abs().mean() <= 1.1 * plain
    assert (CPU_OPS["core_attention"](q, k, v, causal=True, **given) - exact).abs().mean() <= 1.1 * plain


def kernels(plan, phase):
    return "\n".join(f"{row.op:16} {row.kernel}" for block in plan.phases[phase].blocks for row in block.rows)


def test_the_plan_says_where_they_are_used():
    model = ours(llama())
    assert_expected_inline(
        kernels(programs.plan(model, chunk=16), "prefill"),
        """\
embedding        compiler
norm_linear      compiler (rows: 16 rows, at most 8)
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
core_attention   flash
norm_linear      compiler (rows: 16 rows, at most 8)
gated_mlp        compiler (rows: 16 rows, at most 8)
norm_linear      compiler (rows: 16 rows, at most 8)
write            compiler
write            compiler
norm_linear      rows
sample_advance   compiler (no cpu kernel)""",
    )
    assert_expected_inline(
        kernels(programs.plan(model, batch=MOST_ROWS), "decode"),
        """\
embedding        compiler
norm_linear      rows
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
decode_attention rows
norm_linear      rows
gated_mlp        rows
norm_linear      rows
write            compiler
write            compiler
norm_linear      rows
sample_advance   compiler (no cpu kernel)""",
    )
    assert_expected_inline(
        kernels(programs.plan(model, batch=MOST_ROWS + 1), "decode"),
        """\
embedding        compiler
norm_linear      compiler (rows: 9 rows, at most 8)
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
decode_attention rows
norm_linear      compiler (rows: 9 rows, at most 8)
gated_mlp        compiler (rows: 9 rows, at most 8)
norm_linear      compiler (rows: 9 rows, at most 8)
write            compiler
write            compiler
norm_linear      compiler (rows: 9 rows, at most 8)
sample_advance   compiler (no cpu kernel)""",
    )
    capped = programs.load(family("gemma2"))
    assert_expected_inline(
        kernels(programs.plan(capped, chunk=16), "prefill"),
        """\
embedding        compiler
norm_linear      compiler (rows: 16 rows, at most 8)
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
core_attention   compiler (flash: no softcap)
norm_linear      compiler (rows: 16 rows, at most 8)
normalize        compiler (no cpu kernel)
gated_mlp        compiler (rows: 16 rows, at most 8)
norm_linear      compiler (rows: 16 rows, at most 8)
normalize        compiler (no cpu kernel)
write            compiler
write            compiler
norm_linear      compiler (rows: 16 rows, at most 8)
apply_rope       compiler (no cpu kernel)
apply_rope       compiler (no cpu kernel)
core_attention   compiler (flash: no softcap)
norm_linear      compiler (rows: 16 rows, at most 8)
normalize        compiler (no cpu kernel)
gated_mlp        compiler (rows: 16 rows, at most 8)
norm_linear      compiler (rows: 16 rows, at most 8)
normalize        compiler (no cpu kernel)
write            compiler
write            compiler
norm_linear      rows
sample_advance   compiler (no cpu kernel)""",
    )
    assert "rows" not in kernels(programs.plan(model, device="cuda", arch="sm_90"), "decode")
    assert "rows" not in str(programs.build(model, max_len=16, compile=False))


def test_weights_that_lie_by_columns_are_left_to_the_compiler():
    module = llama(tied=False)
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().T.contiguous().T)
    text = kernels(programs.plan(ours(module)), "decode")
    assert "compiler (rows: a weight whose rows are not contiguous)" in text
    assert text.count("rows:") == 1


def test_more_tokens_than_one_sum_takes(tiny):
    """The compiler sums up to 4096 numbers otherwise than more; one graph serves both."""
    slots = tiny.program.sizes.max_len
    prompt = torch.randint(1, 97, (1, min(slots, 4097) - 6), generator=torch.Generator().manual_seed(3))
    state = tiny.program.prefill(prompt.tolist())
    tokens = prompt[0].tolist()
    for _ in range(6):
        tokens.append(int(state.token[0]))
        state = tiny.program.decode(state)
    with torch.no_grad():
        wanted = tiny.module(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(state.logits[0], wanted, rtol=1e-3, atol=1e-3)
    assert tiny.program.decode.compiles == tiny.program.prefill.compiles == 1


def test_the_token_is_the_largest_of_the_logits_as_stored():
    """Half precision: a compiler compares what it did not round with what it did, unless it is told. Only Inductor
    does that."""
    program = programs.build(ours(llama()), max_len=64, chunk=16, dtype=torch.bfloat16)
    state = program.prefill([[5, 7, 11]])
    for _ in range(20):
        assert state.token[0] == state.logits[0].argmax()
        state = program.decode(state)
