"""Latent attention: configs and arguments that cannot be are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F

from .latent_cases import tiny


def refused(fn, *args, **given):
    with pytest.raises((ValueError, TypeError)) as error:
        fn(*args, **given)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_config_that_cannot_be_is_refused():
    bad = [
        {"qk_rope_head_dim": 3},
        {"kv_lora_rank": 0},
        {"num_attention_heads": True},
        {"v_head_dim": 7.0},
        {"q_lora_rank": -1},
        {"softmax_scale": math.inf},
        {"softmax_scale": 0.0},
        {"rope": F.RopeConfig(partial_rotary_factor=0.5)},
        {"latent_norm": F.NormConfig(norm_type="layer_norm")},
    ]
    assert_expected_inline(
        "\n".join(refused(tiny, **each) for each in bad),
        """\
ShapeError: MLAConfig(qk_rope_head_dim=3): channels turn in pairs, so an even width is needed
    fix: rope=None for a layer without positions
ValueError: MLAConfig(kv_lora_rank=...): a positive integer is needed, not 0
ValueError: MLAConfig(num_attention_heads=...): a positive integer is needed, not True
ValueError: MLAConfig(v_head_dim=...): a positive integer is needed, not 7.0
ValueError: MLAConfig(q_lora_rank=...): a positive integer is needed, not -1
ValueError: MLAConfig(softmax_scale=inf): a finite number above 0 is needed
ValueError: MLAConfig(softmax_scale=0.0): a finite number above 0 is needed
ValueError: MLAConfig(rope=...): partial_rotary_factor=0.5, but all qk_rope_head_dim=4 channels turn
    fix: a smaller qk_rope_head_dim
ValueError: MLAConfig(latent_norm=...): an RMSNorm is needed, not "layer_norm\"""",
    )


def test_arguments_that_cannot_be_are_refused():
    cfg = tiny()
    params = F.MLA.init(cfg, 0)
    x, positions = torch.randn(2, 5, 20), torch.arange(5)[None]
    cos, sin = F.rope_tables(positions, cfg.rope, 4)
    ids = torch.zeros(2, 5, dtype=torch.long)
    other = F.AttentionConfig(hidden_size=20, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    (kv,) = F.empty_caches([other], 2, 8, dtype=torch.float32)
    (half,) = F.empty_caches([cfg], 2, 8, dtype=torch.bfloat16)
    (mine,) = F.empty_caches([cfg], 2, 8, dtype=torch.float32)
    bad = [
        {"rope": (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))},
        {"rope": (cos, sin[0])},
        {"rope": (cos.clone().requires_grad_(), sin)},
        {"mask": torch.zeros(5, 5)},
        {"mask": torch.ones(2, 1, 5, 6, dtype=torch.bool)},
        {"mask": torch.ones(5, 5, dtype=torch.bool, device="meta")},
        {"mask": torch.ones(5, 5, dtype=torch.bool), "segment_ids": ids},
        {"segment_ids": ids[:, :3]},
        {"cache": kv},
        {"cache": half},
        {"cache": mine, "segment_ids": ids},
        {"sinks": 1, "casual": True, "windows": 3},
        {"positions": torch.arange(4)[None]},
    ]
    lines = [refused(F.mla, params, x, cfg, **{"positions": positions, **each}) for each in bad]
    latent, key = torch.randn(2, 5, 13), torch.randn(2, 5, 4)
    lines += [
        refused(F.mla_expand, params, latent, key.double(), cfg),
        refused(F.mla_expand, params, latent, key.to("meta"), cfg),
        refused(F.mla_expand, params, latent, key, cfg, heads=(1, 4)),
        refused(F.mla_queries, params, torch.randn(2, 5, 8), cfg, heads=range(2, 2)),
        refused(F.mla_queries, params, torch.randn(2, 5, 8), cfg, heads=[0, 2]),
        refused(F.mla_queries, params, x, cfg),
        refused(F.mla_expand, params, key, latent, cfg),
        refused(F.attention, params, x, cfg, positions=positions),
        refused(F.mla, params, x, cfg, positions=positions, absorbed="expanded"),
        refused(F.mla, dataclasses.replace(params, gate=torch.randn(21, 20)), x, cfg, positions=positions),
        refused(F.attention, F.Attention.init(other, 0), x, other, positions=positions, cache=mine),
        refused(F.mla, params, x, dataclasses.replace(cfg, rope=None), positions=positions, rope=(cos, sin)),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
ShapeError: mla(rope=...): cos must be B|1 S R/2 = 2|1 5 2, not 1 5 4
    fix: cos[..., :2], each pair of channels once
ShapeError: mla(rope=...): sin must be B|1 S R/2 = 2|1 5 2, not 5 2
    fix: rope_tables(positions, cfg.rope, R)
ValueError: mla(rope=...): cos requires a gradient, and tables are not trained
    fix: cos.detach()
TypeError: mla(mask=...): a boolean mask is needed, true where a query may see a key, not torch.float32
    fix: pass mask == 0 if it is additive
ShapeError: mla(mask=...): S is 5 in x but 6 in mask
    x   : B S D = 2 5 20
    mask: B H S S = 2 1 5 6
                          ^
    so far: H=3 B=2 S=5 D=20
ValueError: mla(mask=...): it is on meta, x on cpu
    fix: mask.to(x.device)
ValueError: mla: a mask together with segment_ids, which both say what a token sees
    fix: mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
ShapeError: mla(segment_ids=...): S is 5 in x but 3 in segment_ids
    x          : B S D = 2 5 20
    segment_ids: B S = 2 3
                         ^
    so far: D=20 Q=8 N=5 R=4 E=9 V=7 L=13 NV=12 LR=17 B=2 S=5 H=3
TypeError: mla(cache=...): a LatentCache is needed, not KVCache, of another kind of layer
    fix: empty_caches(configs, ...) makes one a layer
TypeError: mla(cache=...): its dtype is torch.bfloat16, that of x torch.float32
ValueError: mla: segment_ids with a cache
    fix: give each document a row of the cache
TypeError: mla: unknown arguments
    sinks
    casual
    windows
    known: params, x, cfg, positions, rope, mask, segment_ids, cache, read, absorbed, restore, wire, core, absorbed_core, rotary
ShapeError: mla(positions=...): S is 5 in x but 4 in positions
    x        : B S D = 2 5 20
    positions: B S = 1 4
                       ^
    so far: D=20 Q=8 N=5 R=4 E=9 V=7 L=13 NV=12 LR=17 B=2 S=5
TypeError: mla_expand(key_rope=...): its dtype is torch.float64, that of kv_latent torch.float32
ValueError: mla_expand(key_rope=...): it is on meta, kv_latent on cpu
ValueError: mla_expand(heads=(1, 4)): outside the projection, which has 3 heads
    fix: 0 <= first < end <= 3
ValueError: mla_queries(heads=(2, 2)): outside the projection, which has 3 heads
    fix: 0 <= first < end <= 3
TypeError: mla_queries(heads=[0, 2]): a pair (first, end) or a range of neighbours is needed
    fix: heads=(0, 2) for the first two
ShapeError: mla_queries(q_latent=...): Q is 8 in the config but 20 in q_latent
    q_latent: B S Q = 2 5 20
                          ^^
    so far: D=20 H=3 Q=8 N=5 R=4 E=9 V=7 L=13 NV=12 LR=17 B=2 S=5
ShapeError: mla_expand(kv_latent=...): L is 13 in the config but 4 in kv_latent
    kv_latent: B T L = 2 5 4
                           ^
    so far: D=20 H=3 Q=8 N=5 R=4 E=9 V=7 L=13 NV=12 LR=17 B=2 T=5
TreeError: attention: Attention and AttentionConfig are needed, not MLA and MLAConfig
TypeError: mla(absorbed='expanded'): True, False, or None for what is cheaper
TreeError: mla: the config says output_gate=False, but MLA has .gate
    fix: MLA.init(cfg, seed) makes what the config asks for
TypeError: attention(cache=...): a KVCache is needed, not LatentCache, of another kind of layer
    fix: empty_caches(configs, ...) makes one a layer
ValueError: mla(rope=...): the config has rope=None, a layer without positions
    fix: leave rope out""",
    )
