"""What the gated delta net refuses, before any work, and what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F

from .gdn_cases import config, given, weights, zeros

CFG = config()
MLP = F.MLPConfig(hidden_size=11, intermediate_size=7)


def refused(params=None, x=None, cfg=CFG, **options):
    with pytest.raises((ValueError, TypeError)) as error:
        F.gdn(weights(CFG) if params is None else params, given() if x is None else x, cfg, **options)
    return str(error.value)


def test_caches_that_do_not_fit():
    latent = F.LatentCache(latent=torch.zeros(2, 3, 4))
    keys = F.KVCache(k=torch.zeros(2, 3, 1, 4), v=torch.zeros(2, 3, 1, 4))
    assert_expected_inline(
        refused(cache=latent),
        """\
gdn(cache=...): a GDNCache is needed, not LatentCache, of another kind of layer
    fix: empty_caches(configs, ...) makes one a layer""",
    )
    assert_expected_inline(
        refused(cache=keys),
        """\
gdn(cache=...): a GDNCache is needed, not KVCache, of another kind of layer
    fix: empty_caches(configs, ...) makes one a layer""",
    )
    assert_expected_inline(
        refused(cache=zeros(config(conv_kernel_dim=5))),
        """\
gdn(cache_q=...): U is 3 in the config but 4 in cache_q
    cache_q: B (K E) U = 2 12 4
                              ^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )
    assert_expected_inline(
        refused(cache=zeros(config(E=7))),
        """\
gdn(cache_q=...): (K E) is 12 in q_conv but 14 in cache_q
    q_conv : (K E) I W = 12 1 4
    cache_q: B (K E) U = 2 14 3
                           ^^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )
    assert_expected_inline(
        refused(cache=zeros(config(G=3))),
        """\
gdn(cache_v=...): (H V) is 20 in v_conv but 30 in cache_v
    v_conv : (H V) I W = 20 1 4
    cache_v: B (H V) U = 2 30 3
                           ^^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )
    assert_expected_inline(
        refused(cache=zeros(CFG, 3)),
        """\
gdn(cache_q=...): B is 2 in x but 3 in cache_q
    x      : B S D = 2 9 11
    cache_q: B (K E) U = 3 12 3
                         ^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )
    assert_expected_inline(
        refused(cache=zeros(CFG, dtype=torch.float32)),
        """\
gdn(cache=...): its q is in torch.float32, and for x in torch.float64 it is in torch.float64
    fix: empty_caches(..., dtype=torch.float64)""",
    )
    half = dataclasses.replace(zeros(CFG), state=zeros(CFG).state.float())
    assert_expected_inline(
        refused(cache=half),
        """\
gdn(cache=...): its state is in torch.float32, and for x in torch.float64 it is in torch.float64
    fix: empty_caches(..., dtype=torch.float64)""",
    )
    turned = dataclasses.replace(zeros(CFG), state=zeros(CFG).state.mT)
    assert_expected_inline(
        refused(cache=turned),
        """\
gdn(cache=...): its state is key-major, H E V = 4 6 5, and value-major is needed, H V E = 4 5 6
    fix: dataclasses.replace(cache, state=cache.state.mT)""",
    )
    rows = dataclasses.replace(zeros(CFG), v=zeros(CFG).v.mT)
    assert_expected_inline(
        refused(cache=rows),
        """\
gdn(cache_v=...): (H V) is 20 in v_conv but 3 in cache_v
    v_conv : (H V) I W = 20 1 4
    cache_v: B (H V) U = 2 3 20
                           ^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )


def test_a_cache_of_another_dtype_in_each_of_its_parts():
    for part in ("q", "k", "v"):
        found = refused(cache=dataclasses.replace(zeros(CFG), **{part: getattr(zeros(CFG), part).bfloat16()}))
        assert f"its {part} is in torch.bfloat16" in found


def test_configs_that_mean_nothing():
    calls = [
        {"num_value_heads": 5},
        {"conv_kernel_dim": 1},
        {"key_head_dim": 0},
        {"hidden_act": "tanh"},
        {"gate_act": "tanh"},
        {"gated_norm": F.NormConfig(norm_type="layer_norm")},
        {"gated_norm": F.NormConfig(zero_centered=True)},
        {"interleaved": True, "decay_rank": 3},
        {"gate_rank": -1},
    ]
    texts = []
    for each in calls:
        with pytest.raises(ValueError, match="GDNConfig") as error:
            dataclasses.replace(CFG, **each)
        texts.append(str(error.value))
    assert_expected_inline(
        "\n\n".join(texts),
        """\
GDNConfig: num_value_heads=5 is no multiple of num_key_heads=2
    fix: value head h reads key head h // G, so H = K G

GDNConfig(conv_kernel_dim=1): at least 2, this token and one before

GDNConfig(key_head_dim=...): a positive integer is needed, not 0

GDNConfig(hidden_act="tanh") is unknown
    known: gelu, gelu_pytorch_tanh, relu2, silu

GDNConfig(gate_act="tanh") is unknown
    known: silu, sigmoid

GDNConfig(gated_norm=...): a plain RMSNorm is needed, not NormConfig(norm_type='layer_norm', eps=1e-05, zero_centered=False, scale_in_fp32=False, bias=False)

GDNConfig(gated_norm=...): a plain RMSNorm is needed, not NormConfig(norm_type='rms_norm', eps=1e-05, zero_centered=True, scale_in_fp32=False, bias=False)

GDNConfig(interleaved=True, decay_rank=3): no family has both

GDNConfig(gate_rank=...): a positive integer is needed, not -1""",
    )


def test_params_that_do_not_fit_the_config():
    assert_expected_inline(
        refused(cfg=config("qwen3_next")),
        """\
gdn: the config says interleaved=True, but GDN lacks .qkvz
    fix: GDN.init(cfg, seed) makes what the config asks for""",
    )
    assert_expected_inline(
        refused(cfg=config("kimi_linear")),
        """\
gdn: the config says gate_rank=5, but GDN lacks .z_down
    fix: GDN.init(cfg, seed) makes what the config asks for""",
    )
    assert_expected_inline(
        refused(cfg=config(norm=F.NormConfig())),
        """\
gdn: the config says norm=NormConfig(norm_type='rms_norm', eps=1e-05, zero_centered=False, scale_in_fp32=False, bias=False), but GDN lacks .norm
    fix: GDN.init(cfg, seed) makes what the config asks for""",
    )
    assert_expected_inline(
        refused(cfg=config(E=8)),
        """\
gdn(q=...): (K E) is 12, which 8 does not divide
    q: (K E) D = 12 11
    so far: D=11 G=2 E=8 V=5 W=4 U=3 Y=1 M=36 J=4 I=1 B=2 S=9""",
    )
    assert_expected_inline(
        refused(cfg=config(G=3)),
        """gdn: the weights have 4 value and 2 key heads, the config 6 and 2""",
    )
    assert_expected_inline(
        refused(cfg=config(conv_kernel_dim=3)),
        """\
gdn(q_conv=...): W is 3 in the config but 4 in q_conv
    q_conv: (K E) I W = 12 1 4
                             ^
    so far: D=11 G=2 E=6 V=5 W=3 U=2 Y=1 M=32 J=4 I=1 B=2 S=9 K=2 H=4""",
    )
    of_attention = F.AttentionConfig(hidden_size=11, num_attention_heads=2, num_key_value_heads=2, head_dim=4)
    assert_expected_inline(
        refused(F.Attention.init(of_attention, 0)), """gdn: GDN and GDNConfig are needed, not Attention and GDNConfig"""
    )
    assert_expected_inline(
        refused(cfg=of_attention), """gdn: GDN and GDNConfig are needed, not GDN and AttentionConfig"""
    )


def test_inputs_that_do_not_fit():
    assert_expected_inline(
        refused(x=given()[..., :10]),
        """\
gdn(x=...): D is 11 in the config but 10 in x
    x: B S D = 2 9 10
                   ^^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9""",
    )
    assert_expected_inline(
        refused(x=given()[0]),
        """\
gdn(x=...): 3 dimensions are needed, but it has 2
    x: B S D = 9 11
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1""",
    )
    assert_expected_inline(
        refused(positions=torch.zeros(2, 8, dtype=torch.int64)),
        """\
gdn(positions=...): S is 9 in x but 8 in positions
    x        : B S D = 2 9 11
    positions: B S = 2 8
                       ^
    so far: D=11 G=2 E=6 V=5 W=4 U=3 Y=1 M=32 J=4 I=1 B=2 S=9""",
    )
    assert_expected_inline(
        refused(positions=torch.tensor([[0, 1, -1, 2, 3, 4, 5, 6, 7]])),
        """\
gdn(positions=...): padding lies between the tokens of row 0, at token 2, and the convolution reads it
    fix: bring the tokens of each row together, padding in front or behind""",
    )
    ids = torch.zeros(2, 9, dtype=torch.int64)
    assert_expected_inline(
        refused(segment_ids=ids, cache=zeros(CFG)),
        """\
gdn: segment_ids with a cache
    fix: give each document a row of the cache""",
    )
    assert_expected_inline(
        refused(mask=ids),
        """\
gdn: unknown arguments
    mask
    known: params, x, cfg, positions, segment_ids, cache, wire""",
    )


def test_a_decoder_has_no_mask_for_gated_delta_nets():
    cfg = F.DecoderConfig(vocab_size=7, hidden_size=11, layers=(F.LayerConfig(attention=CFG, mlp=MLP),))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="mask") as error:
        F.decoder(F.Decoder.init(cfg, 0), tokens, cfg, mask=torch.ones(2, 1, 3, 3, dtype=torch.bool))
    assert_expected_inline(
        str(error.value),
        """\
decoder(mask=...): a gated delta net reads a state and no tokens, so there is nothing to mask
    fix: positions of -1 for padding, segment_ids for documents""",
    )
    with pytest.raises(TypeError) as error:
        F.LayerConfig(attention=MLP, mlp=MLP)
    assert_expected_inline(
        str(error.value),
        """LayerConfig(attention=...): AttentionConfig or MLAConfig or GDNConfig is needed, not MLPConfig""",
    )
