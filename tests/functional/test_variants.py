"""Parts of layers that no whole family here has: rotary scalings, axes of positions, the output gate, sinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.rope import frequencies
from transformers import LlamaConfig, Phi3Config, Qwen3NextConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from ..families import LONG
from ..tiny import LLAMA3

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 4.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
    },
}


@pytest.mark.parametrize("length", [5, 32, 33, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_transformers_within_and_beyond_the_context(name, length):
    given = SCALINGS[name] | {"rope_theta": 500.0}
    config = LlamaConfig(
        head_dim=16, hidden_size=32, num_attention_heads=2, max_position_embeddings=32, rope_parameters=given
    )
    more = {"max_position_embeddings": 32} if name == "dynamic" else {}
    cfg = F.RopeConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in (given | more).items()})
    positions = torch.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), positions)
    for got, want in zip(F.rope_tables(positions, cfg, 16), (cos[..., :8], sin[..., :8]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [*SCALINGS, "llama3", "default"])
def test_frequencies_are_transformers_to_the_bit(name):
    """At position 100,000 the last bit of a frequency is an angle of 0.01."""
    given = ({"llama3": LLAMA3, "default": {"rope_type": "default"}} | SCALINGS)[name] | {"rope_theta": 5e5}
    config = LlamaConfig(head_dim=16, hidden_size=32, num_attention_heads=2, max_position_embeddings=32, rope_parameters=given)  # fmt: skip
    module = LlamaRotaryEmbedding(config)
    more = {"max_position_embeddings": 32} if name == "dynamic" else {}
    cfg = F.RopeConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in (given | more).items()})
    for length in (5, 32, 33, 100):
        module(torch.ones(1), torch.arange(length)[None])
        found = frequencies(cfg, 16, length=torch.tensor([length]) if cfg.by_length else None).flatten()
        assert torch.equal(found, module.inv_freq), length
    assert cfg.scaling == module.attention_scaling


def test_a_row_has_its_own_length():
    """transformers takes the longest row of a batch for all; a row here is what it is alone."""
    config = Phi3Config(head_dim=8, max_position_embeddings=64, rope_parameters=LONG, num_attention_heads=6, hidden_size=48, original_max_position_embeddings=16)  # fmt: skip
    cfg = F.RopeConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in LONG.items()}, factor=4.0)
    positions = torch.tensor([[*range(20)], [*range(9), *[-1] * 11]])
    cos, _ = F.rope_tables(positions, cfg, 8)
    for i, n in enumerate((20, 9)):
        alone = Phi3RotaryEmbedding(config)(torch.ones(1), positions[i : i + 1, :n])[0]
        torch.testing.assert_close(cos[i : i + 1, :n], alone[..., :3], rtol=0, atol=2e-6)
    chunk, _ = F.rope_tables(positions[:, :4], cfg, 8, length=torch.tensor([20, 9]))
    assert torch.equal(chunk, cos[:, :4])


@pytest.mark.parametrize("interleaved", [False, True])
def test_axes_of_positions_are_transformers(interleaved):
    section, positions = [3, 3, 2], torch.randint(0, 50, (3, 2, 5))
    given = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": section}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    if interleaved:
        config = Qwen3_5TextConfig(**sizes, rope_parameters=given | {"partial_rotary_factor": 1.0})
        module = Qwen3_5TextRotaryEmbedding(config)
    else:
        module = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes, rope_parameters=given))
    cos, sin = module(torch.ones(1), positions)
    cfg = F.RopeConfig(rope_theta=500.0, mrope_section=tuple(section), mrope_interleaved=interleaved)
    for got, want in zip(F.rope_tables(positions, cfg, 16), (cos[..., :8], sin[..., :8]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    text = positions[:1].expand(3, -1, -1)
    plain = F.rope_tables(positions[0], F.RopeConfig(rope_theta=500.0), 16)
    assert all(torch.equal(a, b) for a, b in zip(F.rope_tables(text, cfg, 16), plain, strict=True))


def test_a_decoder_takes_axes():
    rope = F.RopeConfig(mrope_section=(1, 1, 2))
    block = F.AttentionConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, rope=rope)
    layer = F.LayerConfig(attention=block, mlp=F.MLPConfig(hidden_size=16, intermediate_size=8))
    cfg = F.DecoderConfig(vocab_size=9, hidden_size=16, layers=(layer,))
    params, tokens = F.tree.map(lambda t: 20 * t, F.Decoder.init(cfg, 0)), torch.randint(0, 9, (2, 5))
    text, _ = F.decoder(params, tokens, cfg)
    same, _ = F.decoder(params, tokens, cfg, rope_positions=torch.arange(5).expand(3, 2, 5))
    assert torch.equal(text, same)
    moved, _ = F.decoder(params, tokens, cfg, rope_positions=torch.arange(5).expand(3, 2, 5) * torch.tensor([1, 2, 3])[:, None, None])  # fmt: skip
    assert (moved - text).abs().max() > 0.1


def test_output_gate_is_qwen3_next():
    config = Qwen3NextConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-6, attn_implementation="eager")  # fmt: skip
    module = Qwen3NextAttention(config, 3).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    norm = F.NormConfig(eps=1e-6, zero_centered=True, scale_in_fp32=True)
    cfg = F.AttentionConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=4, output_gate=True, qk_norm=norm, rope=F.RopeConfig())  # fmt: skip
    params = F.Attention(
        q_gate=module.q_proj.weight,
        k=module.k_proj.weight,
        v=module.v_proj.weight,
        o=module.o_proj.weight,
        q_norm=F.HeadNorm(weight=module.q_norm.weight),
        k_norm=F.HeadNorm(weight=module.k_norm.weight),
    )
    F.tree.check(params, F.Attention.abstract(cfg))
    x, positions = torch.randn(2, 5, 24, dtype=torch.float64), torch.arange(5)[None]
    cos, sin = (table.repeat(1, 1, 2) for table in F.rope_tables(positions, cfg.rope, 4, torch.float64))
    causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = module(x, (cos, sin), causal)
    got, _ = F.attention(params, x, cfg, positions=positions)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    weights = [*module.parameters()]
    wanted = torch.autograd.grad(want.square().sum(), weights)
    for found, expected in zip(torch.autograd.grad(got.square().sum(), weights), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms(dtype):
    x = (torch.randn(3, 33, 5) * 3 + 1).to(dtype).transpose(1, 2)
    near = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    for module, options in (
        (torch.nn.LayerNorm(33), {}),
        (NemotronLayerNorm1P(33), {"zero_centered": True}),
        (CohereLayerNorm(33), {}),
    ):
        module = module.to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(33))
        got = F.layer_norm(x, module.weight, getattr(module, "bias", None), eps=1e-5, **options)
        torch.testing.assert_close(got, module(x), **near)


def test_dropout_is_ignored_in_inference_and_refused_by_name_in_training():
    block = F.AttentionConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    feed = F.MLPConfig(hidden_size=8, intermediate_size=4)
    cfg = F.DecoderConfig(vocab_size=9, hidden_size=8, layers=(F.LayerConfig(attention=block, mlp=feed),))
    params, tokens = F.Decoder.init(cfg, 0), torch.tensor([[1, 2, 3]])
    plain, _ = F.decoder(params, tokens, cfg)
    attention = dataclasses.replace(block, attention_dropout=0.1)
    layer = F.LayerConfig(attention=block, mlp=feed, resid_pdrop=0.2)
    texts = []
    for dropped in (
        dataclasses.replace(cfg, layers=(F.LayerConfig(attention=attention, mlp=feed),)),
        dataclasses.replace(cfg, layers=(layer,)),
        dataclasses.replace(cfg, embd_pdrop=0.3),
    ):
        assert torch.equal(F.decoder(params, tokens, dropped)[0], plain)
        frozen = F.tree.map(lambda t: t.clone().requires_grad_(), params)
        frozen.embed.requires_grad_(False)
        calls = {
            "frozen": lambda c=dropped, p=frozen: F.decoder(p, tokens, c),
            "grad": lambda c=dropped: torch.func.grad(lambda p: F.decoder(p, tokens, c)[0].sum())(params),
            "autograd": lambda c=dropped: F.decoder(
                F.tree.map(lambda t: t.clone().requires_grad_(), params), tokens, c
            ),
            "jvp": lambda c=dropped: torch.func.jvp(lambda p: F.decoder(p, tokens, c)[0], (params,), (params,)),
        }
        found = []
        for call in calls.values():
            with pytest.raises(ValueError, match="which is not computed") as error:
                call()
            found.append(str(error.value))
        assert len(set(found)) == 1
        texts.append(found[0])
    with pytest.raises(ValueError, match="AttentionConfig") as error:
        dataclasses.replace(block, attention_dropout=1.5)
    assert_expected_inline(
        "\n\n".join([*texts, str(error.value)]),
        """\
attention: the config has attention_dropout=0.1, which is not computed
    fix: dataclasses.replace(cfg, attention_dropout=0.0) to train without it, torch.no_grad() for inference

layer: the config has resid_pdrop=0.2, which is not computed
    fix: dataclasses.replace(cfg, resid_pdrop=0.0) to train without it, torch.no_grad() for inference

decoder: the config has embd_pdrop=0.3, which is not computed
    fix: dataclasses.replace(cfg, embd_pdrop=0.0) to train without it, torch.no_grad() for inference

AttentionConfig(attention_dropout=1.5): a rate is at least 0 and below 1""",
    )
