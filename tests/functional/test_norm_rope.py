from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ..tiny import LLAMA3

ROUNDING = {
    "llama": (LlamaRMSNorm, {}),
    "olmo2": (Olmo2RMSNorm, {"scale_in_fp32": True}),
    "gemma": (Gemma2RMSNorm, {"scale_in_fp32": True, "zero_centered": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ROUNDING)
def test_rms_norm_rounds_as_its_family_to_the_bit(family, dtype):
    make, options = ROUNDING[family]
    module = make(33, eps=1e-6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(33))
    x = (torch.randn(3, 33, 5) * 3).to(dtype).transpose(1, 2)
    assert torch.equal(F.rms_norm(x, module.weight, eps=1e-6, **options), module(x))


def test_rms_norm_keeps_double():
    x, w = torch.randn(4, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(F.rms_norm(x, w), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_norm_linear_is_norm_then_linear(bias):
    x, weight = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    weights = [torch.randn(n, 8, dtype=torch.float64) for n in (5, 1)]
    biases = [torch.randn(n, dtype=torch.float64) if bias else None for n in (5, 1)]
    normed = F.rms_norm(x, weight)
    for got, w, b in zip(F.norm_linear(x, weight, weights, biases), weights, biases, strict=True):
        torch.testing.assert_close(got, torch.nn.functional.linear(normed, w, b))


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "default", "rope_theta": 500.0}, LLAMA3], ids=["default", "llama3"]
)
def test_rope_is_transformers(parameters):
    config = LlamaConfig(head_dim=16, hidden_size=32, num_attention_heads=2, rope_parameters=parameters)
    positions = torch.tensor([[0, 1, 2, 500], [7, 3, 31, 4096]])
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 1, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    q_hf, k_hf = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    tables = F.rope_tables(positions, F.RopeConfig(**parameters), 16)
    torch.testing.assert_close(F.apply_rope(q, *tables), q_hf, rtol=0, atol=2e-6)
    torch.testing.assert_close(F.apply_rope(k, *tables), k_hf, rtol=0, atol=2e-6)


def test_interleaved_is_half_split_on_reordered_channels():
    x, tables = torch.randn(2, 5, 3, 8), F.rope_tables(torch.arange(5)[None], F.RopeConfig(), 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    turned = F.apply_rope(x[..., order], *tables)
    assert torch.equal(F.apply_rope(x, *tables, interleaved=True)[..., order], turned)


def test_rope_keeps_products_of_equal_distance():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(at: int, to: int) -> torch.Tensor:
        turned = [
            F.apply_rope(x, *F.rope_tables(torch.tensor([[p]]), F.RopeConfig(), 8, torch.float64))
            for x, p in ((q, at), (k, to))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-5, atol=1e-5)


def test_bad_rope_is_refused():
    with pytest.raises(ValueError, match='rope_type="spiral" is unknown'):
        F.RopeConfig(rope_type="spiral")
    with pytest.raises(ValueError, match="needs factor, original_max"):
        F.RopeConfig(rope_type="yarn")
    with pytest.raises(ValueError, match="factor=-1\\.0: must be above 0"):
        F.RopeConfig(rope_type="linear", factor=-1.0)
    with pytest.raises(ValueError, match="has no factor"):
        F.RopeConfig(factor=2.0)
    with pytest.raises(ValueError, match="partial_rotary_factor=0 must be"):
        F.RopeConfig(partial_rotary_factor=0)
    factors = {"short_factor": (1.0, 2.0), "long_factor": (1.0, 2.0), "factor": 2.0}
    long = F.RopeConfig(rope_type="longrope", original_max_position_embeddings=8, **factors)
    with pytest.raises(F.ShapeError, match="short_factor has 2 numbers, R/2=4 are needed"):
        long.rotary_width(8)
    with pytest.raises(F.ShapeError, match="must sum to R/2=4"):
        F.RopeConfig(mrope_section=(1, 1, 1)).rotary_width(8)
    with pytest.raises(F.ShapeError, match="needs mrope_section and M=3"):
        F.rope_tables(torch.zeros(3, 1, 2), F.RopeConfig(), 8)
    with pytest.raises(ValueError, match="needs factor, low_freq_factor"):
        F.RopeConfig(rope_type="llama3")
    with pytest.raises(ValueError, match="has no factor"):
        F.RopeConfig(factor=2.0)
    with pytest.raises(F.ShapeError, match="R=7 must be even"):
        F.rope_tables(torch.arange(3)[None], F.RopeConfig(), 7)
    with pytest.raises(F.ShapeError, match="R is 8 in cos and sin, more than E=4 in x"):
        F.apply_rope(torch.ones(1, 3, 2, 4), *F.rope_tables(torch.arange(3)[None], F.RopeConfig(), 8))
