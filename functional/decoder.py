"""A decoder-only language model: embed, a stack of layers, a final norm, logits.

    x = embed[tokens];   x += attention(x);  x += mlp(x)  (each layer);   logits = norm(x) head

or, with a parallel residual, `h = norm(x);  x += attention(h) + mlp(h)` (Wang and Komatsuzaki 2021, GPT-J). The stack
is described by one frozen config with one entry a layer. Layers may differ.

Letters: B batch, S tokens, D model width, Z vocabulary, R rotary width, M axes of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .arguments import lists_unknown
from .attention import Attention, AttentionConfig, attention
from .cache import Cache
from .core import dot_product_attention
from .dropout import check_rate, refuse_dropout
from .gdn import GDN, GDNConfig, gdn
from .loss import cross_entropy, local_index
from .mla import MLA, MLAConfig, mla
from .mlp import MLP, MLPConfig, mlp
from .moe import MoE, MoEConfig, Routing, moe
from .norm import Norm, NormConfig, apply_norm, norm_in_front, norm_linear
from .rope import RopeConfig, rope_tables
from .shapes import check_positions, check_positive, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, asking, edges, identity

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Layer",
    "LayerConfig",
    "backbone",
    "decoder",
    "final_norm",
    "layer",
    "logits",
    "next_token_loss",
]


CACHES = "\n    fix: empty_caches([layer.attention for layer in cfg.layers], ...), and then what decoder returns"


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """parallel_residual: attention and mlp read the same x, normalised once by `norm`. resid_pdrop: dropout, never
    computed, see `dropout`."""

    attention: AttentionConfig | MLAConfig | GDNConfig
    mlp: MLPConfig | MoEConfig
    norm: NormConfig | None = None
    parallel_residual: bool = False
    resid_pdrop: float = 0.0

    def __post_init__(self) -> None:
        check_rate("LayerConfig", resid_pdrop=self.resid_pdrop)
        kinds = {"attention": (AttentionConfig, MLAConfig, GDNConfig), "mlp": (MLPConfig, MoEConfig)}
        for name, classes in kinds.items():
            if not isinstance(getattr(self, name), classes):
                known = " or ".join(each.__name__ for each in classes)
                given = type(getattr(self, name)).__name__
                raise TypeError(f"LayerConfig({name}=...): {known} is needed, not {given}")
        if self.norm is not None and not self.parallel_residual:
            raise ValueError(
                "LayerConfig(norm=...): without parallel_residual each block has a norm of its own\n"
                "    fix: AttentionConfig(norm=...) and MLPConfig(norm=...)"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return {"D": self.attention.hidden_size}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """tie_word_embeddings: the logits read the embedding; there is no head of its own. head_bias: of the logits.

    embedding_multiplier: of the embedded tokens, rounded to their dtype as Gemma does. logit_scale: of the logits.
    final_logit_softcapping: logits become `softcap * tanh(logits / softcap)`. embd_pdrop: dropout, never computed.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = field(default_factory=NormConfig)
    tie_word_embeddings: bool = False
    head_bias: bool = False
    embedding_multiplier: float | None = None
    logit_scale: float | None = None
    final_logit_softcapping: float | None = None
    embd_pdrop: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_rate("DecoderConfig", embd_pdrop=self.embd_pdrop)
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise ValueError(f"DecoderConfig(final_logit_softcapping={self.final_logit_softcapping}): must be above 0")
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
    norm: Norm | None = None
    attention: Attention | MLA | GDN
    mlp: MLP | MoE


@pytree
class Decoder(Tree):
    embed: Tensor = dim("Z/tp D/dp")
    layers: tuple[Layer, ...]
    norm: Norm
    head: Tensor | None = dim("Z/tp D/dp", when="has_head")
    head_bias: Tensor | None = dim("Z/tp", when="head_bias", initial=0.0)


@edges(
    {"attention": attention, "mla": mla, "gdn": gdn, "mlp": mlp, "moe": moe},
    {"attention": Attention, "mla": MLA, "gdn": GDN},
)
def layer(
    params: Layer,
    x: Tensor,
    cfg: LayerConfig,
    *,
    positions: Tensor | None,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: Cache | None = None,
    read: Tensor | None = None,
    return_routing: bool = False,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
) -> Any:
    """x `B S D` -> x `B S D`, cache; with return_routing also the layer's `Routing`, None where it has no experts.
    Arguments as those of `attention`, `mla` and `gdn`, which has no mask."""
    check_presence("layer", params, cfg)
    refuse_dropout("layer", "resid_pdrop", cfg.resid_pdrop, x, params)
    _check_mask("layer", mask, cfg)
    h = apply_norm(x, params.norm, cfg.norm)
    told: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids, "cache": cache}
    if isinstance(cfg.attention, GDNConfig):
        attend: Callable[..., Any] = gdn
    else:
        attend = mla if isinstance(cfg.attention, MLAConfig) else attention
        told |= {"rope": rope, "mask": mask, "read": read, "core": core}
    a, cache = attend(params.attention, h, cfg.attention, wire=wire.scope(attend.__name__), **told)
    if cfg.parallel_residual:
        m, routing = feed(params.mlp, h, cfg.mlp, wire)
        x_BSD = x + (a + m)
    else:
        x_BSD = x + a
        m, routing = feed(params.mlp, x_BSD, cfg.mlp, wire)
        x_BSD = x_BSD + m
    return (x_BSD, cache, routing) if return_routing else (x_BSD, cache)


def feed(params: MLP | MoE, x: Tensor, cfg: MLPConfig | MoEConfig, wire: Wire) -> tuple[Tensor, Routing | None]:
    """x `B S D` -> `B S D` through the block that the layer has, and its routing if that has experts."""
    if isinstance(cfg, MoEConfig):
        experts: Any = params
        out, routing = moe(experts, x, cfg, return_routing=True, wire=wire.scope("moe"))
        return out, routing
    block: Any = params
    return mlp(block, x, cfg, wire=wire.scope("mlp")), None


@edges({"layers": layer}, tokens="B S", embedded="B S D", logits="B S Z")
@lists_unknown
def decoder(
    params: Decoder,
    tokens: Tensor,
    cfg: DecoderConfig,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: tuple[Cache, ...] | None = None,
    read: Tensor | Sequence[Tensor] | None = None,
    rope_positions: Tensor | None = None,
    rope_length: Tensor | None = None,
    return_routing: bool = False,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
    layer: Callable[..., Any] = layer,
) -> Any:
    """tokens `B S` -> logits `B S Z`, and the new cache (None without one). Arguments as those of `backbone`."""
    x, *rest = backbone(
        params,
        tokens,
        cfg,
        positions=positions,
        mask=mask,
        segment_ids=segment_ids,
        cache=cache,
        read=read,
        rope_positions=rope_positions,
        rope_length=rope_length,
        return_routing=return_routing,
        wire=wire,
        core=core,
        layer=layer,
    )
    return logits(params, x, cfg, wire=wire), *rest


@edges({"layers": layer}, tokens="B S", embedded="B S D")
@lists_unknown
def backbone(
    params: Decoder,
    tokens: Tensor,
    cfg: DecoderConfig,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: tuple[Cache, ...] | None = None,
    read: Tensor | Sequence[Tensor] | None = None,
    rope_positions: Tensor | None = None,
    rope_length: Tensor | None = None,
    return_routing: bool = False,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
    layer: Callable[..., Any] = layer,
) -> Any:
    """tokens `B S` -> the last layer's output `B S D`, before the final norm, and the new cache.

    positions: `B|1 S`, -1 for padding; `0 .. S-1` unless given, and needed with a cache. mask, segment_ids, read: as
    in `attention`, read for all layers or one a layer (a ring is shorter). cache: one entry a layer.
    rope_positions: `M B S`, for mrope, `positions` unless given. rope_length: `B`, see `rope_tables`.
    return_routing: a third result, the `Routing` of each layer, None of one without experts; for `balance_loss`.
    layer: computes one layer; a program puts its compiled region here, a notebook anything of the same signature. Under
    a layout it must pass its edges through `wire`, as `layer` does: eagerly one that asks nothing of it is refused.
    Raises `ShapeError`, and `ValueError` where a cache comes without positions or with other than one entry a layer, or
    a mask with a gated delta net among the layers, before anything moves.
    """
    check_shapes(
        "decoder",
        tokens=(tokens, "B S"),
        positions=(positions, "B? S"),
        segment_ids=(segment_ids, "B S"),
        rope_positions=(rope_positions, "M B? S"),
        rope_length=(rope_length, "B?"),
    )
    check_positions("decoder", positions)
    check_presence("decoder", params, cfg)
    refuse_dropout("decoder", "embd_pdrop", cfg.embd_pdrop, params)
    if len(params.layers) != len(cfg.layers):
        raise ValueError(f"decoder(params=...): {len(params.layers)} layers, the config has {len(cfg.layers)}")
    if cache is not None and len(cache) != len(cfg.layers):
        raise ValueError(f"decoder(cache=...): {len(cache)} entries for {len(cfg.layers)} layers{CACHES}")
    _check_mask("decoder", mask, *cfg.layers)
    unpadded = positions is None  # so that a gated delta net has no padding to look for
    if positions is None:
        if cache is not None:
            raise ValueError(
                "decoder(positions=...): needed with a cache, which does not say how full it is\n"
                "    fix: torch.arange(n, n + S)[None], with n tokens in the cache"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]

    rows = wire.gather(params, "embed", D=cfg.hidden_size)
    x = wire.pass_(embedded=embed(rows, wire.pass_(tokens=tokens), cfg, wire=wire.layer(Z=cfg.vocab_size)))
    tables: dict[tuple[RopeConfig | None, int], tuple[Tensor, Tensor]] = {}
    for each in cfg.layers:
        rope, width = each.attention.rope, each.attention.rope_dim
        if rope is not None and (rope, width) not in tables:
            turned_by = positions if rope.mrope_section is None or rope_positions is None else rope_positions
            tables[rope, width] = rope_tables(turned_by, rope, width, x.dtype, length=rope_length)
    reads = [read] * len(cfg.layers) if read is None or isinstance(read, Tensor) else read
    caches: list[Any] = list(cache) if cache is not None else [None] * len(cfg.layers)
    routings: list[Routing | None] = []
    asked, layer = {"return_routing": True} if return_routing else {}, asking(layer)
    for i, (layer_params, layer_cfg) in enumerate(zip(params.layers, cfg.layers, strict=True)):
        x, caches[i], *routing = layer(
            layer_params,
            x,
            layer_cfg,
            positions=None if unpadded and isinstance(layer_cfg.attention, GDNConfig) else positions,
            rope=tables.get((layer_cfg.attention.rope, layer_cfg.attention.rope_dim)),
            mask=mask,
            segment_ids=segment_ids,
            cache=caches[i],
            read=reads[i],
            wire=wire.scope("layers"),
            core=core,
            **asked,
        )
        routings += routing
    new = None if cache is None else tuple(caches)
    return (x, new, tuple(routings)) if return_routing else (x, new)


def _check_mask(function: str, mask: Tensor | None, *cfgs: LayerConfig) -> None:
    if mask is not None and any(isinstance(cfg.attention, GDNConfig) for cfg in cfgs):
        raise ValueError(
            f"{function}(mask=...): a gated delta net reads a state and no tokens, so there is nothing to mask\n"
            "    fix: positions of -1 for padding, segment_ids for documents"
        )


def embed(params: Decoder, tokens: Tensor, cfg: DecoderConfig, *, wire: Wire = identity) -> Tensor:
    """tokens `B S` -> `B S D`; of rows that other ranks have zeros, which the edge behind it sums."""
    rows, away = wire.own("Z"), None
    if rows is not None:
        tokens, away = local_index(tokens, rows)
    x = torch.nn.functional.embedding(tokens, params.embed)
    x = x if away is None else x.masked_fill(away[..., None], 0)
    if cfg.embedding_multiplier is None:
        return x
    return x * torch.full((), cfg.embedding_multiplier, dtype=x.dtype, device=x.device)


def final_norm(params: Decoder, x: Tensor, cfg: DecoderConfig) -> Tensor:
    """x `... D`, as `backbone` returns it -> `... D`, as `cross_entropy` takes it."""
    return apply_norm(x, params.norm, cfg.norm)


def logits(params: Decoder, x: Tensor, cfg: DecoderConfig, *, wire: Wire = identity) -> Tensor:
    """x `... D`, as `backbone` returns it -> logits `... Z`: the final norm and the head."""
    head = _head(params, cfg, wire)
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    (logits_Z,) = norm_linear(x, norm_weight, [head], [params.head_bias], **options)
    logits_Z = wire.pass_(logits=logits_Z)
    if cfg.logit_scale is not None:
        logits_Z = logits_Z * cfg.logit_scale
    if cfg.final_logit_softcapping is not None:
        logits_Z = cfg.final_logit_softcapping * torch.tanh(logits_Z / cfg.final_logit_softcapping)
    return logits_Z


def _head(params: Decoder, cfg: DecoderConfig, wire: Wire) -> Tensor:
    """`Z D`, its own or the embedding."""
    name = "embed" if params.head is None else "head"
    head: Tensor = getattr(wire.gather(params, name, D=cfg.hidden_size), name)
    return head


@edges(
    {"layers": layer}, None, ("shares",),
    tokens="B S", embedded="B S D", targets="B S", weights="B S", shares="P B S N", loss="",
)  # fmt: skip
def next_token_loss(
    params: Decoder,
    tokens: Tensor,
    cfg: DecoderConfig,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    chunk: int = 1024,
    wire: Wire = identity,
    **given: Any,
) -> Any:
    """tokens `B S`, targets `B S`, the token after each (`ids[:, :-1]` and `ids[:, 1:]`; -100 is left out), weights
    `B S`, 1 unless given -> the sum of the weighted losses and of the weights, scalars; their ratio is the mean.

    `cross_entropy` of `decoder`'s logits, of `chunk` tokens at a time. given: the other arguments of `backbone`; with
    return_routing there is a third result, as there.
    """
    check_shapes("next_token_loss", tokens=(tokens, "B S"), targets=(targets, "B S"), weights=(weights, "B S"))
    x, _, *routings = backbone(params, tokens, cfg, wire=wire, **given)
    targets, weights = wire.receive(targets=targets, weights=weights)
    total, count = cross_entropy(
        final_norm(params, x, cfg),
        _head(params, cfg, wire),
        targets,
        weights,
        bias=params.head_bias,
        logit_scale=cfg.logit_scale,
        softcap=cfg.final_logit_softcapping,
        chunk=chunk,
        wire=wire.layer(Z=cfg.vocab_size),
    )
    return wire.pass_(loss=total), count, *routings
