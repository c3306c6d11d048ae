"""The mathematics: pure functions of tensors, pytrees and frozen configs."""

from . import shapes, tree, wire
from .attention import Attention, AttentionConfig, attention
from .cache import KVCache, cache_update, empty_caches
from .core import decode_attention, dot_product_attention
from .decoder import Decoder, DecoderConfig, Layer, LayerConfig, backbone, decoder, final_norm, layer, logits
from .loss import cross_entropy
from .mlp import ACTIVATIONS, MLP, MLPConfig, gated_mlp, mlp
from .norm import Norm, NormConfig, linear, norm_linear, rms_norm
from .rope import RopeConfig, apply_rope, rope_tables
from .sampling import greedy, sample_advance
from .shapes import ShapeError
from .tree import TreeError

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Decoder",
    "DecoderConfig",
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
    "empty_caches",
    "final_norm",
    "gated_mlp",
    "greedy",
    "layer",
    "linear",
    "logits",
    "mlp",
    "norm_linear",
    "rms_norm",
    "rope_tables",
    "sample_advance",
    "shapes",
    "tree",
    "wire",
]
