"""The mathematics: pure functions of tensors, pytrees and frozen configs."""

from . import shapes, tree, wire
from .absorbed import absorbed_attention
from .attention import Attention, AttentionConfig, attention
from .cache import GDNCache, KVCache, LatentCache, cache_update, empty_caches, latent_cache_update
from .choice import best_token, drawn_token, token_logprob
from .conv import causal_conv
from .core import decode_attention, dot_product_attention
from .decoder import (
    Decoder,
    DecoderConfig,
    Layer,
    LayerConfig,
    backbone,
    decoder,
    final_norm,
    layer,
    logits,
    next_token_loss,
)
from .delta import gated_delta_rule_scan, gated_delta_rule_step, gdn_gates, l2norm
from .delta_chunked import gated_delta_rule_chunked
from .experts import expert_mlp
from .gdn import GDN, GDNConfig, gdn, gdn_output, gdn_project
from .loss import cross_entropy
from .mla import MLA, MLAConfig, mla, mla_costs, mla_expand, mla_latents, mla_output, mla_queries, mla_rotary
from .mlp import ACTIVATIONS, MLP, MLPConfig, gated_mlp, mlp, plain_mlp
from .moe import MoE, MoEConfig, Routing, balance_loss, expert_counts, moe, route
from .norm import (
    HeadNorm,
    Norm,
    NormConfig,
    add_norm,
    gated_rms_norm,
    layer_norm,
    linear,
    linear_add,
    norm_linear,
    normalize,
    rms_norm,
)
from .rope import RopeConfig, apply_rope, rope_tables
from .sampling import Controls, advance, draw, greedy, penalize, sample, sample_advance, uniform, warp
from .shapes import ShapeError
from .tree import TreeError

__all__ = [
    "ACTIVATIONS",
    "GDN",
    "MLA",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Controls",
    "Decoder",
    "DecoderConfig",
    "GDNCache",
    "GDNConfig",
    "HeadNorm",
    "KVCache",
    "LatentCache",
    "Layer",
    "LayerConfig",
    "MLAConfig",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "Norm",
    "NormConfig",
    "RopeConfig",
    "Routing",
    "ShapeError",
    "TreeError",
    "absorbed_attention",
    "add_norm",
    "advance",
    "apply_rope",
    "attention",
    "backbone",
    "balance_loss",
    "best_token",
    "cache_update",
    "causal_conv",
    "cross_entropy",
    "decode_attention",
    "decoder",
    "dot_product_attention",
    "draw",
    "drawn_token",
    "empty_caches",
    "expert_counts",
    "expert_mlp",
    "final_norm",
    "gated_delta_rule_chunked",
    "gated_delta_rule_scan",
    "gated_delta_rule_step",
    "gated_mlp",
    "gated_rms_norm",
    "gdn",
    "gdn_gates",
    "gdn_output",
    "gdn_project",
    "greedy",
    "l2norm",
    "latent_cache_update",
    "layer",
    "layer_norm",
    "linear",
    "linear_add",
    "logits",
    "mla",
    "mla_costs",
    "mla_expand",
    "mla_latents",
    "mla_output",
    "mla_queries",
    "mla_rotary",
    "mlp",
    "moe",
    "next_token_loss",
    "norm_linear",
    "normalize",
    "penalize",
    "plain_mlp",
    "rms_norm",
    "rope_tables",
    "route",
    "sample",
    "sample_advance",
    "shapes",
    "token_logprob",
    "tree",
    "uniform",
    "warp",
    "wire",
]
