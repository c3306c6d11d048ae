"""Attention of a decoder layer: project, turn, attend, project out.

    q, k, v = norm(x) Wq, norm(x) Wk, norm(x) Wv;   q, k = rope(norm(q)), rope(norm(k))
    out = norm((core(q, k, v) * sigmoid(gate)) Wo)

MHA, GQA (Ainslie et al. 2023, arXiv:2305.13245) and MQA by the number of key/value heads. Every norm is optional: in
front, of queries and keys (Dehghani et al. 2023, arXiv:2302.05442), behind; so is the gate (Qiu et al. 2025,
arXiv:2505.06708).

Letters: B batch, S query tokens, T key tokens, D model width, H query heads, K key/value heads, G query heads per
key/value head (H = K G), E key width, V value width, R rotary width, A=2 (query, gate). A query head follows its
key/value head in every weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .arguments import lists_unknown
from .cache import KVCache, cache_update
from .core import dot_product_attention
from .dropout import check_rate, refuse_dropout
from .norm import HeadNorm, Norm, NormConfig, apply_norm, linear, norm_in_front, norm_linear, normalize
from .rope import RopeConfig, apply_rope, rope_tables
from .shapes import ShapeError, check_positions, check_positive, check_scale, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, check_heads, edges, identity

__all__ = ["Attention", "AttentionConfig", "attention"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Names as in transformers' configs. v_head_dim: head_dim unless given.

    norm: in front, None where x comes normalised. post_norm: behind. qk_norm: of each head of queries and keys, or with
    qk_norm_wide of all heads at once (OLMo 2). rope: None for a layer without positions (NoPE). window: how many tokens
    a query sees, its own included. sinks: a learnt score a head, see the core. output_gate: heads are multiplied by the
    sigmoid of a gate, whose rows follow the query's within each head of `q_gate` (Qwen3-Next).
    attention_dropout: never computed, see `dropout`.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    qk_norm: NormConfig | None = None
    qk_norm_wide: bool = False
    output_gate: bool = False
    rope: RopeConfig | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    softmax_scale: float | None = None
    attention_dropout: float = 0.0
    initializer_range: float = 0.02

    cache_class: ClassVar[type[KVCache]] = KVCache

    def __post_init__(self) -> None:
        counts = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        optional = [name for name in ("v_head_dim", "window") if getattr(self, name) is not None]
        check_positive("AttentionConfig", **{name: getattr(self, name) for name in (*counts, *optional)})
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(
                f"AttentionConfig: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        check_rate("AttentionConfig", attention_dropout=self.attention_dropout)
        check_scale("AttentionConfig", self.softmax_scale)
        if self.rope is not None:
            self.rope.rotary_width(self.head_dim)
        if self.output_gate and self.qkv_bias:
            raise ValueError("AttentionConfig: qkv_bias with output_gate; no family has both")
        if self.output_gate and self.v_head_dim not in (None, self.head_dim):
            raise ValueError(f"AttentionConfig: output_gate with v_head_dim={self.v_head_dim} other than head_dim")
        if self.qk_norm_wide and (self.qk_norm is None or self.qk_norm.norm_type != "rms_norm"):
            raise ValueError(f"AttentionConfig(qk_norm_wide=True): qk_norm must be an RMSNorm, not {self.qk_norm}")

    # Which leaves and parts there are, by their names in `Attention`.
    @property
    def plain_q(self) -> bool:
        return not self.output_gate

    @property
    def q_norm(self) -> NormConfig | None:
        return None if self.qk_norm_wide else self.qk_norm

    k_norm = q_norm

    @property
    def rope_dim(self) -> int:
        """How wide a head is where it turns."""
        return self.head_dim

    @property
    def sizes(self) -> dict[str, int]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        widths = {"E": self.head_dim, "V": self.v_head_dim or self.head_dim, **({"A": 2} if self.output_gate else {})}
        return {"D": self.hidden_size, "H": heads, "K": kv_heads, "G": heads // kv_heads, **widths}


def _one(cfg: AttentionConfig) -> float:
    """The weight of a wide norm that changes no scale."""
    return 0.0 if cfg.qk_norm is not None and cfg.qk_norm.zero_centered else 1.0


@pytree
class Attention(Tree):
    config: ClassVar[type] = AttentionConfig

    norm: Norm | None = None
    q: Tensor | None = dim("((K/tp G) E) D/dp", when="plain_q")
    q_gate: Tensor | None = dim("((K/tp G) A E) D/dp", when="output_gate")
    k: Tensor = dim("(K/tp E) D/dp")
    v: Tensor = dim("(K/tp V) D/dp")
    o: Tensor = dim("D/dp ((K/tp G) V)")
    q_bias: Tensor | None = dim("((K/tp G) E)", when="qkv_bias", initial=0.0)
    k_bias: Tensor | None = dim("(K/tp E)", when="qkv_bias", initial=0.0)
    v_bias: Tensor | None = dim("(K/tp V)", when="qkv_bias", initial=0.0)
    o_bias: Tensor | None = dim("D", when="o_bias", initial=0.0)
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    q_norm_wide: Tensor | None = dim("((K/tp G) E)", when="qk_norm_wide", initial=_one)
    k_norm_wide: Tensor | None = dim("(K/tp E)", when="qk_norm_wide", initial=_one)
    sinks: Tensor | None = dim("(K/tp G)", when="sinks", initial=0.0)
    post_norm: Norm | None = None


@edges(
    None,
    None,
    ("cache_k", "cache_v"),  # a layout that keeps no cache leaves them out
    x="B S D",
    q="B S (K G) E",
    k="B T K E",
    v="B T K V",
    q_positions="B S",
    k_positions="B T",
    q_segment_ids="B S",
    k_segment_ids="B T",
    mask="B (K G) S T",
    sinks="(K G)",
    cache_k="B T K E",
    cache_v="B T K V",
    o="B S (K G) V",
    out="B S D",
)
@lists_unknown
def attention(
    params: Attention,
    x: Tensor,
    cfg: AttentionConfig,
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
    """x `B S D`, positions `B|1 S` (-1: padding) -> out `B S D`, and the new cache (None without one).

    rope: cos and sin `B|1 S R/2`, computed from `positions` unless given.
    mask: boolean, `S T` or `B|1 H|1 S T`. segment_ids: `B S`, the packed document of each token; not with a cache.
    cache: keys and values of the tokens before; the new ones are written at `positions`. read: see `cache_update`.
    wire: carries the edges `attention.edges` between the stages. core: see `dot_product_attention`.
    Raises `ShapeError` and `TypeError` naming the argument, `TreeError` where params and config ask for different
    parts, `ValueError` for segment_ids with a cache, and where dropout is differentiated.
    """
    check_presence("attention", params, cfg, Attention)
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(
            f"attention(cache=...): a KVCache is needed, not {type(cache).__name__}, of another kind of layer\n"
            "    fix: empty_caches(configs, ...) makes one a layer"
        )
    refuse_dropout("attention", "attention_dropout", cfg.attention_dropout, x, params)
    params = wire.gather(params, D=cfg.hidden_size)
    # H, K and G are the rank's own, as its weights have them.
    widths = {letter: n for letter, n in cfg.sizes.items() if letter not in "HKG"}
    sizes = check_shapes(
        "attention",
        widths,
        x=(x, "B S D"),
        positions=(positions, "B? S"),
        q=(params.q, "(H E) D"),
        q_gate=(params.q_gate, "(H A E) D"),
        k=(params.k, "(K E) D"),
        v=(params.v, "(K V) D"),
        o=(params.o, "D (H V)"),
    )
    check_positions("attention", positions)
    if cache is not None and cache.k.dtype != x.dtype:
        raise TypeError(f"attention(cache=...): its dtype is {cache.k.dtype}, that of x {x.dtype}")
    if cache is not None and segment_ids is not None:
        raise ValueError("attention: segment_ids with a cache\n    fix: give each document a row of the cache")
    if cfg.qk_norm_wide and sizes["H"] != cfg.num_attention_heads:
        raise ShapeError(
            f"attention: qk_norm_wide takes its mean over all {cfg.num_attention_heads} query heads, but the weights "
            f"have {sizes['H']} of them\n    fix: replicate the query and key projections over the ranks"
        )
    wire = wire.layer(H=cfg.num_attention_heads, K=cfg.num_key_value_heads, causal=cfg.causal, window=cfg.window)
    check_heads("attention", ("query", "key/value"), sizes, cfg.sizes, wire.heads(sent=True))
    heads = wire.heads()
    if cache is not None:
        local = {"K": sizes["K"] if heads.groups is None else heads.groups}
        check_shapes("attention", {**widths, "B": sizes["B"], **local}, cache=(cache.k, "B T K E"))
    x_BSD = wire.pass_(x=x)
    if wire.moves:  # keys and values first, so that they fly while queries are projected
        x_BSD = apply_norm(x_BSD, params.norm, cfg.norm)
        k_BSKE, v_BSKV = project_kv(params, x_BSD, cfg)
    else:
        q_BSHE, k_BSKE, v_BSKV, gate = project_qkv(params, x_BSD, cfg)
    if cfg.rope is not None:
        cos, sin = rope_tables(positions, cfg.rope, cfg.head_dim, x.dtype) if rope is None else rope
        if 2 * cos.shape[-1] != cfg.rope.rotary_width(cfg.head_dim):
            raise ShapeError(
                f"attention(rope=...): tables of R={2 * cos.shape[-1]}, the config has "
                f"R={cfg.rope.rotary_width(cfg.head_dim)}"
            )
        k_BSKE = apply_rope(k_BSKE, cos, sin, interleaved=cfg.rope.interleaved)
    positions = positions.expand(x.shape[:2])

    sent = wire.send(k=k_BSKE, v=v_BSKV, k_positions=positions, k_segment_ids=segment_ids)
    if wire.moves:
        q_BSHE, gate = project_q(params, x_BSD, cfg)
    if cfg.rope is not None:
        q_BSHE = apply_rope(q_BSHE, cos, sin, interleaved=cfg.rope.interleaved)
    q_BSHE, q_positions, q_ids, mask, sinks, k_BTKE, v_BTKV, k_positions, k_ids = wire.receive(
        sent, q=q_BSHE, q_positions=positions, q_segment_ids=segment_ids, mask=mask, sinks=params.sinks
    )
    if cache is not None:
        if wire.moves:  # one row of positions may stand for all
            k_positions = k_positions.expand(k_BTKE.shape[:2])
        k_kept, v_kept = wire.receive(cache_k=cache.k, cache_v=cache.v)
        cache = KVCache(k=k_kept, v=v_kept)
        cache, k_BTKE, v_BTKV, k_positions = cache_update(cache, k_BTKE, v_BTKV, k_positions, read, window=cfg.window)
    # A core is told what there is to tell, so that a plain one (SDPA in a lambda) can serve a plain layer.
    told: dict[str, Any] = {
        "window": cfg.window,
        "softcap": cfg.softcap,
        "softmax_scale": cfg.softmax_scale,
        "mask": mask,
        "sinks": sinks,
        "segment_ids": None if q_ids is None else (q_ids, k_ids),
        "kv_index": heads.kv_index,
        "head_offset": heads.offset,
        "local_heads": heads.local,
    }
    told = {name: value for name, value in told.items() if value is not None}
    o_BSHV = core(q_BSHE, k_BTKE, v_BTKV, causal=cfg.causal, q_positions=q_positions, k_positions=k_positions, **told)
    o_sent, project_out = wire.send(o=o_BSHV), wire.projection(params.o)
    opened = None if gate is None else gate.sigmoid()  # while the output returns
    (o_BSHV,) = wire.receive(o_sent)
    if opened is not None:
        o_BSHV = o_BSHV * opened
    out_BSD = wire.pass_(out=project_out(o_BSHV.flatten(2)))
    # Bias and norm come after the edge, which may be a sum over ranks.
    if params.o_bias is not None:
        out_BSD = out_BSD + params.o_bias
    out_BSD = apply_norm(out_BSD, params.post_norm, cfg.post_norm)
    return out_BSD, cache


def project_qkv(params: Attention, x: Tensor, cfg: AttentionConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x `B S D` -> q `B S H E`, k `B S K E`, v `B S K V`, gate `B S H E` or None: the norm in front, projections, norms
    of queries and keys; heads as many as the weights have."""
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    weights, biases = [_query(params), params.k, params.v], [params.q_bias, params.k_bias, params.v_bias]
    q, k, v = norm_linear(x, norm_weight, weights, biases, **options)
    q, gate = _queries(q, params, cfg)
    return q, *_keys(k, v, params, cfg), gate


def project_kv(params: Attention, x: Tensor, cfg: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The keys and values of `project_qkv` alone. x: normalised."""
    k, v = norm_linear(x, None, [params.k, params.v], [params.k_bias, params.v_bias])
    return _keys(k, v, params, cfg)


def project_q(params: Attention, x: Tensor, cfg: AttentionConfig) -> tuple[Tensor, Tensor | None]:
    """The queries and the gate of `project_qkv` alone. x: normalised."""
    return _queries(linear(x, _query(params), params.q_bias), params, cfg)


def _query(params: Attention) -> Tensor:
    query = params.q if params.q_gate is None else params.q_gate
    assert query is not None  # check_presence has seen that one of them is there
    return query


def _queries(q: Tensor, params: Attention, cfg: AttentionConfig) -> tuple[Tensor, Tensor | None]:
    if params.q_norm_wide is not None and cfg.qk_norm is not None:
        q = normalize(q, params.q_norm_wide, **cfg.qk_norm.options)
    gate = None
    if params.q_gate is None:
        q = q.unflatten(-1, (-1, cfg.head_dim))
    else:
        q, gate = q.unflatten(-1, (-1, 2, cfg.head_dim)).unbind(-2)
    return apply_norm(q, params.q_norm, cfg.q_norm), gate


def _keys(k: Tensor, v: Tensor, params: Attention, cfg: AttentionConfig) -> tuple[Tensor, Tensor]:
    if params.k_norm_wide is not None and cfg.qk_norm is not None:
        k = normalize(k, params.k_norm_wide, **cfg.qk_norm.options)
    k = apply_norm(k.unflatten(-1, (-1, cfg.head_dim)), params.k_norm, cfg.k_norm)
    return k, v.unflatten(-1, (-1, cfg.v_head_dim or cfg.head_dim))
