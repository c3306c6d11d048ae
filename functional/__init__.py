"""The mathematics: pure functions of tensors, pytrees and frozen configs."""

from . import shapes, tree, wire
from .attention import Attention, AttentionConfig, attention
from .cache import KVCache, cache_update, empty_caches
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
from .loss import cross_entropy
from .mlp import ACTIVATIONS, MLP, MLPConfig, gated_mlp, mlp, plain_mlp
from .norm import HeadNorm, Norm, NormConfig, layer_norm, linear, norm_linear, normalize, rms_norm
from .rope import RopeConfig, apply_rope, rope_tables
from .sampling import Controls, draw, greedy, penalize, sample, sample_advance, uniform, warp
from .shapes import ShapeError
from .tree import TreeError

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Controls",
    "Decoder",
    "DecoderConfig",
    "HeadNorm",
    "KVCache",
    "Layer",
    "LayerConfig",
    "MLPConfig",
    "Norm",
    "NormConfig",
    "RopeConfig",
    "ShapeError",
    "TreeError",
    "apply_rope",
    "attention",
    "backbone",
    "cache_update",
    "cross_entropy",
    "decode_attention",
    "decoder",
    "dot_product_attention",
    "draw",
    "empty_caches",
    "final_norm",
    "gated_mlp",
    "greedy",
    "layer",
    "layer_norm",
    "linear",
    "logits",
    "mlp",
    "next_token_loss",
    "norm_linear",
    "normalize",
    "penalize",
    "plain_mlp",
    "rms_norm",
    "rope_tables",
    "sample",
    "sample_advance",
    "shapes",
    "tree",
    "uniform",
    "warp",
    "wire",
]
