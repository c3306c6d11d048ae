"""A decoder-only language model: embed, a stack of layers, a final norm, logits.

    x = embed[tokens];   x += attention(x);  x += mlp(x)  (each layer);   logits = norm(x) head

The stack is described by one frozen config with one entry a layer. Layers may differ.

Letters: B batch, S tokens, D model width, Z vocabulary, R rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .attention import Attention, AttentionConfig, attention
from .cache import KVCache
from .core import dot_product_attention
from .mlp import MLP, MLPConfig, mlp
from .norm import Norm, NormConfig, norm_linear, rms_norm
from .rope import RopeConfig, rope_tables
from .shapes import check_positive, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, edges, identity

__all__ = ["Decoder", "DecoderConfig", "Layer", "LayerConfig", "backbone", "decoder", "final_norm", "layer", "logits"]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    attention: AttentionConfig
    mlp: MLPConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """tie_word_embeddings: the logits read the embedding; there is no head of its own."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = field(default_factory=NormConfig)
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_positive("DecoderConfig", vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        for i, each in enumerate(self.layers):
            for part in (each.attention, each.mlp):
                if part.hidden_size != self.hidden_size:
                    raise ValueError(
                        f"DecoderConfig(layers=...): layers[{i}] has {type(part).__name__}(hidden_size="
                        f"{part.hidden_size}), the decoder has hidden_size={self.hidden_size}"
                    )

    @property
    def has_head(self) -> bool:
        return not self.tie_word_embeddings

    @property
    def sizes(self) -> dict[str, int]:
        return {"Z": self.vocab_size, "D": self.hidden_size}


@pytree
class Layer(Tree):
    attention: Attention
    mlp: MLP


@pytree
class Decoder(Tree):
    embed: Tensor = dim("Z/tp D")
    layers: tuple[Layer, ...]
    norm: Norm
    head: Tensor | None = dim("Z/tp D", when="has_head")


@edges({"attention": attention, "mlp": mlp})
def layer(
    params: Layer,
    x: Tensor,
    cfg: LayerConfig,
    *,
    positions: Tensor,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: KVCache | None = None,
    read: Tensor | None = None,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
) -> tuple[Tensor, KVCache | None]:
    """x `B S D` -> x `B S D`, cache. Arguments as those of `attention`."""
    a, cache = attention(
        params.attention,
        x,
        cfg.attention,
        positions=positions,
        rope=rope,
        mask=mask,
        segment_ids=segment_ids,
        cache=cache,
        read=read,
        wire=wire.scope("attention"),
        core=core,
    )
    x_BSD = x + a
    x_BSD = x_BSD + mlp(params.mlp, x_BSD, cfg.mlp, wire=wire.scope("mlp"))
    return x_BSD, cache


@edges({"layers": layer}, tokens="B S", embedded="B S D", logits="B S Z")
def decoder(
    params: Decoder,
    tokens: Tensor,
    cfg: DecoderConfig,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: tuple[KVCache, ...] | None = None,
    read: Tensor | None = None,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
    layer: Callable[..., tuple[Tensor, KVCache | None]] = layer,
) -> tuple[Tensor, tuple[KVCache, ...] | None]:
    """tokens `B S` -> logits `B S Z`, and the new cache (None without one). Arguments as those of `backbone`."""
    x, cache = backbone(
        params,
        tokens,
        cfg,
        positions=positions,
        mask=mask,
        segment_ids=segment_ids,
        cache=cache,
        read=read,
        wire=wire,
        core=core,
        layer=layer,
    )
    return logits(params, x, cfg, wire=wire), cache


@edges({"layers": layer}, tokens="B S", embedded="B S D")
def backbone(
    params: Decoder,
    tokens: Tensor,
    cfg: DecoderConfig,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: tuple[KVCache, ...] | None = None,
    read: Tensor | None = None,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
    layer: Callable[..., tuple[Tensor, KVCache | None]] = layer,
) -> tuple[Tensor, tuple[KVCache, ...] | None]:
    """tokens `B S` -> the last layer's output `B S D`, before the final norm, and the new cache.

    positions: `B|1 S`, -1 for padding; `0 .. S-1` unless given, and needed with a cache. mask, segment_ids, read: as
    in `attention`. cache: one entry a layer.
    layer: computes one layer; a program puts its compiled region here, a notebook anything of the same signature.
    Raises `ShapeError`, and `ValueError` where a cache comes without positions or with other than one entry a layer.
    """
    check_shapes("decoder", tokens=(tokens, "B S"), positions=(positions, "B? S"), segment_ids=(segment_ids, "B S"))
    check_presence("decoder", params, cfg)
    if len(params.layers) != len(cfg.layers):
        raise ValueError(f"decoder(params=...): {len(params.layers)} layers, the config has {len(cfg.layers)}")
    if cache is not None and len(cache) != len(cfg.layers):
        raise ValueError(f"decoder(cache=...): {len(cache)} entries for {len(cfg.layers)} layers")
    if positions is None:
        if cache is not None:
            raise ValueError("decoder(positions=...): needed with a cache, which does not say how full it is")
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]

    x = wire.pass_(embedded=embed(params, wire.pass_(tokens=tokens)))
    tables: dict[tuple[RopeConfig | None, int], tuple[Tensor, Tensor]] = {}
    for each in cfg.layers:
        rope, width = each.attention.rope, each.attention.head_dim
        if rope is not None and (rope, width) not in tables:
            tables[rope, width] = rope_tables(positions, rope, width, x.dtype)
    caches: list[Any] = list(cache) if cache is not None else [None] * len(cfg.layers)
    for i, (layer_params, layer_cfg) in enumerate(zip(params.layers, cfg.layers, strict=True)):
        x, caches[i] = layer(
            layer_params,
            x,
            layer_cfg,
            positions=positions,
            rope=tables.get((layer_cfg.attention.rope, layer_cfg.attention.head_dim)),
            mask=mask,
            segment_ids=segment_ids,
            cache=caches[i],
            read=read,
            wire=wire.scope("layers"),
            core=core,
        )
    return x, None if cache is None else tuple(caches)


def embed(params: Decoder, tokens: Tensor) -> Tensor:
    """tokens `B S` -> `B S D`."""
    return torch.nn.functional.embedding(tokens, params.embed)


def final_norm(params: Decoder, x: Tensor, cfg: DecoderConfig) -> Tensor:
    """x `... D`, as `backbone` returns it -> `... D`, as `cross_entropy` takes it."""
    return rms_norm(x, params.norm.weight, **cfg.norm.options)


def logits(params: Decoder, x: Tensor, cfg: DecoderConfig, *, wire: Wire = identity) -> Tensor:
    """x `... D`, as `backbone` returns it -> logits `... Z`: the final norm and the head."""
    head = params.embed if params.head is None else params.head
    (logits_Z,) = norm_linear(x, params.norm.weight, [head], [None], **cfg.norm.options)
    return wire.pass_(logits=logits_Z)
