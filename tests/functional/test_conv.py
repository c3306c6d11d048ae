"""The short causal convolution: against torch's, cut anywhere, padded, packed."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as tnf
from expecttest import assert_expected_inline
from meshfn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

WIDTHS = [1, 2, 4, 7]
DOUBLE = {"rtol": 1e-12, "atol": 1e-12}


def made(B=2, S=9, D=5, W=4, dtype=torch.float64):
    return torch.randn(B, S, D, dtype=dtype), torch.randn(D, W, dtype=dtype), torch.randn(D, dtype=dtype)


def torchs(x, weight, bias, state):
    """conv1d over the state and the tokens, SiLU behind it."""
    return tnf.silu(tnf.conv1d(torch.cat((state, x.mT), 2), weight[:, None], bias, groups=x.shape[2])).mT


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_it_is_a_convolution_behind_its_state(tokens, width):
    x, weight, bias = made(S=tokens, W=width)
    state = torch.randn(2, 5, width - 1, dtype=torch.float64)
    y, final = F.causal_conv(x, weight, bias, activation="silu", initial_state=state, output_final_state=True)
    if tokens:
        torch.testing.assert_close(y, torchs(x, weight, bias, state), **DOUBLE)
    assert torch.equal(final, torch.cat((state, x.mT), 2)[..., tokens:])
    assert F.causal_conv(x, weight, bias)[1] is None


def test_it_is_that_of_transformers():
    config = qwen.Qwen3_5TextConfig(
        hidden_size=8, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=2, linear_value_head_dim=3
    )
    conv = qwen.Qwen3_5GatedDeltaNet(config, 0).conv1d
    x = torch.randn(2, 9, conv.weight.shape[0])
    y, _ = F.causal_conv(x, conv.weight[:, 0], conv.bias, activation="silu")
    torch.testing.assert_close(y, tnf.silu(conv(x.mT)[..., :9]).mT, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_any_split_is_one_call(width):
    x, weight, bias = made(S=12, W=width)
    whole, end = F.causal_conv(x, weight, bias, activation="silu", output_final_state=True)
    state, parts, at = None, [], 0
    for tokens in (1, 2, 3, 1, 5):
        y, state = F.causal_conv(
            x[:, at : at + tokens], weight, bias, activation="silu", initial_state=state, output_final_state=True
        )
        parts.append(y)
        at += tokens
    torch.testing.assert_close(torch.cat(parts, 1), whole, **DOUBLE)
    assert torch.equal(state, end)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("left", [False, True])
def test_padding_has_no_effect(left, width):
    """Rows of 2, 0, 1 and 9 tokens and NaN where none is; a row without tokens keeps its state."""
    counts = [2, 0, 1, 9]
    x, weight, bias = made(B=4, W=width)
    state = torch.randn(4, 5, width - 1, dtype=torch.float64)
    positions = torch.full((4, 9), -1)
    for row, n in enumerate(counts):
        positions[row, 9 - n if left else 0 :][:n] = torch.arange(n)
    told = {"positions": positions} if left else {"lengths": torch.tensor(counts)}
    leaves = [t.requires_grad_() for t in (x.masked_fill((positions < 0)[..., None], torch.nan), weight, bias, state)]
    y, final = F.causal_conv(*leaves[:3], activation="silu", initial_state=leaves[3], output_final_state=True, **told)
    mine = torch.autograd.grad(y.square().sum() + final.sin().sum(), leaves)
    total = 0
    clean = [t.requires_grad_() for t in (x.detach(), weight, bias, state)]
    for row, n in enumerate(counts):
        here = slice(9 - n, 9) if left else slice(0, n)
        one = clean[0][row : row + 1, here]
        alone, end = F.causal_conv(
            one, *clean[1:3], activation="silu", initial_state=clean[3][row : row + 1], output_final_state=True
        )
        torch.testing.assert_close(y[row : row + 1, here], alone, **DOUBLE)
        assert torch.equal(final[row : row + 1], end)
        assert y[row].any(-1).sum() == n
        total = total + alone.square().sum() + end.sin().sum()
    for a, b in zip(mine, torch.autograd.grad(total, clean), strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


@pytest.mark.parametrize("width", WIDTHS)
def test_packed_documents_are_rows_by_themselves(width):
    """Of 0, 1, 3, 0 and 5 tokens; padding in front of one and behind another."""
    bounds = [0, 0, 1, 4, 4, 9]
    x, weight, bias = made(B=1, W=width)
    leaves = [t.requires_grad_() for t in (x, weight, bias, torch.randn(5, 5, width - 1, dtype=torch.float64))]
    told = {"cu_seqlens": torch.tensor(bounds), "output_final_state": True}
    y, final = F.causal_conv(*leaves[:3], initial_state=leaves[3], **told)
    mine = torch.autograd.grad(y.square().sum() + final.sin().sum(), leaves)
    total = 0
    for n, (at, end) in enumerate(itertools.pairwise(bounds)):
        alone, state = F.causal_conv(
            x[:, at:end], weight, bias, initial_state=leaves[3][n : n + 1], output_final_state=True
        )
        torch.testing.assert_close(y[:, at:end], alone, **DOUBLE)
        assert torch.equal(final[n : n + 1], state)
        total = total + alone.square().sum() + state.sin().sum()
    for a, b in zip(mine, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)
    positions = torch.tensor([[0, -1, 0, 1, 0, 1, 2, -1, -1]])
    padded, after = F.causal_conv(x, weight, bias, positions=positions, **told)
    for n, here in ((2, slice(2, 4)), (4, slice(4, 7))):
        alone, state = F.causal_conv(x[:, here], weight, bias, output_final_state=True)
        torch.testing.assert_close(padded[:, here], alone, **DOUBLE)
        assert torch.equal(after[n : n + 1], state)


@pytest.mark.parametrize("told", ["nothing", "lengths", "cu_seqlens"])
def test_transforms(told):
    x, weight, bias = (t.requires_grad_() for t in made(B=1 if told == "cu_seqlens" else 2))
    options = {
        "nothing": {},
        "lengths": {"lengths": torch.tensor([3, 9])},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 2, 9])},
    }[told]

    def total(x, weight, bias, options):
        y, state = F.causal_conv(x, weight, bias, activation="silu", output_final_state=True, **options)
        return y.square().sum() + state.sin().sum()

    wanted = torch.autograd.grad(total(x, weight, bias, options), (x, weight, bias))
    args = [t.detach() for t in (x, weight, bias)]
    gradient = torch.func.grad(total, argnums=(0, 1, 2))
    for found in (
        gradient(*args, options),
        [t[0] for t in torch.vmap(gradient, in_dims=(0, None, None, None))(args[0][None], *args[1:], options)],
        torch.autograd.grad(
            torch.compile(total, fullgraph=True, backend="aot_eager")(x, weight, bias, options), (x, weight, bias)
        ),
    ):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **DOUBLE)
    assert torch.autograd.gradcheck(lambda *args: total(*args, options), (x, weight, bias))


def test_half_precision_is_rounded_once():
    x, weight, bias = (t.bfloat16() for t in made(S=50))
    y, state = F.causal_conv(x, weight, bias, activation="silu", output_final_state=True)
    exact = torchs(x.double(), weight.double(), bias.double(), torch.zeros(2, 5, 3, dtype=torch.float64))
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-8, atol=1e-6)
    assert y.dtype == state.dtype == torch.bfloat16


def refused(**options):
    x, weight, bias = made(B=options.pop("B", 2))
    with pytest.raises((ValueError, TypeError)) as error:
        F.causal_conv(x, weight, bias, **options)
    return str(error.value)


def test_bad_input_is_refused():
    assert_expected_inline(
        refused(initial_state=torch.zeros(2, 5, 4, dtype=torch.float64)),
        """causal_conv(initial_state=...): a convolution of W=4 carries W-1=3 tokens, the last dimension of B D W-1, not 4""",
    )
    assert_expected_inline(
        refused(initial_state=torch.zeros(2, 3, 5, dtype=torch.float64)),
        """\
causal_conv(initial_state=...): a convolution of W=4 carries W-1=3 tokens, the last dimension of B D W-1, not 5
    fix: initial_state.mT""",
    )
    assert_expected_inline(
        refused(initial_state=torch.zeros(2, 5, 3)),
        """\
causal_conv(initial_state=...): its dtype is torch.float32, where torch.float64 is carried
    fix: initial_state.to(torch.float64)""",
    )
    assert_expected_inline(
        refused(positions=torch.tensor([[0, -1, 1, 2, 3, 4, 5, 6, 7]])),
        """\
causal_conv(positions=...): padding lies between the tokens of a row, and the convolution reads it
    fix: bring the tokens of each row together, padding in front or behind""",
    )
    assert_expected_inline(
        refused(lengths=torch.tensor([10, 3])),
        """\
causal_conv(lengths=[10, 3]): a row has S=9 tokens
    fix: lengths.clamp(0, 9)""",
    )
    assert_expected_inline(
        refused(activation="tanh"),
        """\
causal_conv(activation="tanh") is unknown
    known: gelu, gelu_pytorch_tanh, relu2, silu""",
    )
    assert_expected_inline(
        refused(cu_seqlens=torch.tensor([0, 9])),
        """\
causal_conv(cu_seqlens=...): packed documents lie in one row, but there are B=2
    fix: x.flatten(0, 1)[None], and cu_seqlens of all rows""",
    )
    assert_expected_inline(
        refused(B=1, cu_seqlens=torch.tensor([0, 5, 3, 9])),
        """\
causal_conv(cu_seqlens=[0, 5, 3, 9]): it must begin with 0, never fall, and end with the S=9 tokens
    fix: torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), and a last document for padding""",
    )
    assert_expected_inline(
        refused(B=1, cu_seqlens=torch.tensor([0, 9]), lengths=torch.tensor([9])),
        """\
causal_conv(lengths=...): cu_seqlens says already which tokens there are
    fix: pass cu_seqlens alone""",
    )
