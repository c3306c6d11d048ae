"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values of all heads from one latent.

    c_q = norm(x Wqa);            q_h = c_q Wqb_h,    its last R channels turned            (or q_h = x Wq_h)
    c | k_r = x Wkva;             c = norm(c);        k_r turned, the same for all heads
    k_h | v_h = c Wkvb_h;         o_h = softmax(scale * (q_h,n . k_h + q_h,r . k_r)) v_h;   out = concat(o) Wo

Two ways to compute it agree. *Expanded*, as written: for many queries. *Absorbed*: Wkvb moves to the other side of both
products, so that queries meet the latents themselves, and keys and values of a head never exist:

    q'_h = q_h,n Wk_h;            o_h = (softmax(scale * (q'_h . c + q_h,r . k_r)) c) Wv_h

A cache holds c and k_r, L + R numbers a token, whatever the number of heads.

Letters: B batch, S query tokens, T key tokens, D model width, H heads, Q query latent, L latent, N non-rotary and R
rotary key width, E = N + R, V value width; NV = N + V and LR = L + R, one beside the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .absorbed import absorbed_attention
from .arguments import check_takes, lists_unknown
from .cache import LatentCache, latent_cache_update
from .core import decode_attention, dot_product_attention
from .dropout import refuse_dropout
from .mla_checks import check_call, check_latents, check_range
from .mla_config import MLA, MLAConfig
from .norm import apply_norm, linear, norm_in_front, norm_linear, normalize
from .rope import apply_rope, rope_tables
from .shapes import ShapeError, check_shapes
from .tree import check_presence
from .wire import Heads, Wire, edges, identity

__all__ = [
    "MLA",
    "MLAConfig",
    "is_absorbed",
    "mla",
    "mla_costs",
    "mla_expand",
    "mla_latents",
    "mla_output",
    "mla_queries",
    "mla_rotary",
]


def mla_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    head_offset: int | None = None,
    local_heads: int | None = None,
) -> Tensor:
    """x `B S H R`, cos and sin `B|1 S R/2` -> x turned: `apply_rope`, whatever the heads are.

    Any function of these arguments may take its place. head_offset, local_heads: which heads these are of all, None
    where all of them are here and for the rotary key, which no head owns.
    """
    return apply_rope(x, cos, sin, interleaved=interleaved)


@edges(
    None,
    None,
    ("cache_latent",),  # a layout that keeps no cache leaves it out
    x="B S D",
    kv_latent="B T L",
    key_rope="B T R",
    kv_b="(H NV) L",
    q="B S H E",
    kv="B T H NV",
    q_positions="B S",
    k_positions="B T",
    q_segment_ids="B S",
    k_segment_ids="B T",
    mask="B H S T",
    cache_latent="B T LR",
    o="B S H V",
    out="B S D",
)
@lists_unknown
def mla(
    params: MLA,
    x: Tensor,
    cfg: MLAConfig,
    *,
    positions: Tensor,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: LatentCache | None = None,
    read: Tensor | None = None,
    absorbed: bool | None = None,
    restore: bool = True,
    wire: Wire = identity,
    core: Callable[..., Tensor] = dot_product_attention,
    absorbed_core: Callable[..., Tensor] = absorbed_attention,
    rotary: Callable[..., Tensor] = mla_rotary,
) -> Any:
    """x `B S D`, positions `B|1 S` (-1: padding) -> out `B S D`, and the new cache (None without one).

    rope: cos and sin `B|1 S R/2`, computed from `positions` unless given. mask: boolean, `S T` or `B|1 H|1 S T`.
    segment_ids: `B S`, the packed document of each token; not with a cache, not with a mask.
    cache: latents of the tokens before; the new ones are written at `positions`. read: see `cache_update`.
    absorbed: which way to compute it, see the module. Unless given, expanded without a cache and where a core of one's
    own is; else what takes fewer multiplications, see `mla_costs`.
    core: computes the expanded way, with the arguments of `dot_product_attention`; absorbed_core the other, with those
    of `absorbed_attention`. rotary: turns queries and the rotary key, with the arguments of `mla_rotary`. All three may
    be called again under recomputation.
    restore: False returns, instead, what the core gave (`B S H V`, of this rank's heads where a layout splits them) and
    a function without arguments that ends the layer; what is computed in between hides the way back over ranks.
    With `simulate` this stands in a body, `layer(..., mesh=mesh, restore=False)`, which returns the end of the layer.
    Raises `ShapeError`, `TypeError` and `ValueError` naming the argument, `TreeError` where params and config ask for
    different parts, before any work.
    """
    check_presence("mla", params, cfg, MLA)
    refuse_dropout("mla", "attention_dropout", cfg.attention_dropout, x, params)
    params = wire.gather(params, D=cfg.hidden_size)
    check_call(params, x, cfg, positions=positions, rope=rope, mask=mask, segment_ids=segment_ids, cache=cache)
    if not (absorbed is None or isinstance(absorbed, bool)):
        raise TypeError(f"mla(absorbed={absorbed!r}): True, False, or None for what is cheaper")
    wire = wire.layer(H=cfg.num_attention_heads, K=cfg.num_attention_heads, causal=cfg.causal, window=cfg.window)
    if absorbed and not wire.stays("kv"):
        raise ValueError(
            "mla(absorbed=True): keys and values of heads move here, between ranks, and the absorbed way has none\n"
            "    fix: without it, or a layout that moves latents alone"
        )
    if cache is None and not torch.compiler.is_compiling():
        _check_core(core, absorbed_core, bool(absorbed), cfg, mask=mask, segment_ids=segment_ids)
    x_BSD = wire.pass_(x=x)
    latents, gate = _down(params, x_BSD, cfg, gated=not wire.moves)
    q_latent, kv_latent, key_rope = latents
    cos, sin = _tables(positions, rope, cfg, x.dtype)
    if cos is not None and sin is not None:
        key_rope = rotary(key_rope[:, :, None], cos, sin, interleaved=cfg.interleaved)
        key_rope = key_rope[:, :, 0]
    positions = positions.expand(x.shape[:2])

    # Latents first, so that they fly while queries are projected. Where they stay, keys and values of heads may travel:
    # those are projected at once, and fly meanwhile.
    sent = [wire.send(kv_latent=kv_latent, key_rope=key_rope, k_positions=positions, k_segment_ids=segment_ids)]
    kv_b, early = wire.pass_(kv_b=params.kv_b), wire.stays("kv_latent") and not wire.stays("kv")
    if early:
        sent.append(wire.send(kv=_by_head(wire.projection(kv_b)(kv_latent), cfg)))
    local = params.q_b if params.q is None else params.q
    assert local is not None  # check_presence has seen that one of them is there
    q_BSHE = linear(q_latent, local)
    q_BSHE = q_BSHE.unflatten(-1, (-1, cfg.qk_head_dim))
    if cos is not None and sin is not None:
        q_BSHE = _turned(q_BSHE, cos, sin, cfg, rotary, wire.heads(sent=True))
    # Queries fly while the gate is projected, and then keys and values.
    q_sent = wire.send(q=q_BSHE, q_positions=positions, q_segment_ids=segment_ids, mask=mask)
    if wire.moves:
        gate = _gate(params, x_BSD, cfg)
    if early:
        _, key_rope, k_positions, k_ids, kv_BTHNV, q_BSHE, q_positions, q_ids, mask = wire.receive(*sent, q_sent)
    else:
        expand = wire.projection(kv_b)
        kv_latent, key_rope, k_positions, k_ids = wire.receive(*sent)
    if cache is not None:
        if wire.moves:  # one row of positions may stand for all
            k_positions = k_positions.expand(kv_latent.shape[:2])
        cache = LatentCache(latent=wire.pass_(cache_latent=cache.latent))
        new = torch.cat((kv_latent, key_rope), -1)
        cache, latent, k_positions = latent_cache_update(cache, new, k_positions, read, window=cfg.window)
        kv_latent, key_rope = latent.split((cfg.kv_lora_rank, cfg.qk_rope_head_dim), -1)
    if absorbed is None:
        plain = core in (dot_product_attention, decode_attention) or absorbed_core is not absorbed_attention
        absorbed = cache is not None and plain and is_absorbed(cfg, x.shape[1], cache.latent.shape[1])

    if absorbed:
        q_BSHE, q_positions, q_ids, mask = wire.receive(q_sent)
    elif not early:
        if cache is not None:  # what lies in an empty slot may have no part in the gradient of kv_b either
            kv_latent = kv_latent.masked_fill((k_positions < 0)[..., None], 0)
        kv = expand(kv_latent)
        kv_BTHNV = _by_head(kv, cfg)
        kv_BTHNV, q_BSHE, q_positions, q_ids, mask = wire.receive(q_sent, kv=kv_BTHNV)
    heads = wire.heads()
    told: dict[str, Any] = {
        "window": cfg.window,
        "mask": mask,
        "segment_ids": None if q_ids is None else (q_ids, k_ids),
        "kv_index": heads.kv_index,
        "head_offset": heads.offset,
        "local_heads": heads.local,
    }
    told = {name: value for name, value in told.items() if value is not None}
    told |= {"causal": cfg.causal, "q_positions": q_positions, "k_positions": k_positions, "softmax_scale": cfg.scale}
    if absorbed:
        latent = latent if cache is not None else torch.cat((kv_latent, key_rope), -1)
        o_BSHV = absorbed_core(q_BSHE, latent, kv_b, nope_dim=cfg.qk_nope_head_dim, **told)
    else:
        o_BSHV = core(q_BSHE, *_keys_and_values(kv_BTHNV, key_rope, cfg), **told)
    wanted = (*q_BSHE.shape[:3], cfg.v_head_dim)
    if o_BSHV.shape != wanted:
        which = "absorbed_core" if absorbed else "core"
        raise ShapeError(
            f"mla({which}=...): B S H V = {tuple(wanted)} is needed, but it returned {tuple(o_BSHV.shape)}"
        )
    o_sent, project_out = wire.send(o=o_BSHV), wire.projection(params.o)
    opened = None if gate is None else gate.sigmoid()

    def finish() -> tuple[Tensor, LatentCache | None]:
        (whole,) = wire.receive(o_sent)
        return _out(params, project_out, whole, opened, cfg, wire), cache

    return finish() if restore else (o_BSHV, finish)


def mla_latents(params: MLA, x: Tensor, cfg: MLAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x `B S D` -> q_latent `B S Q`, kv_latent `B S L`, key_rope `B S R`: normalised, before the up-projections and
    before any turn. Without a query rank q_latent is x, normalised by the norm in front."""
    return _down(params, x, cfg, gated=False)[0]


def mla_queries(
    params: MLA, q_latent: Tensor, cfg: MLAConfig, *, heads: tuple[int, int] | range | None = None
) -> Tensor:
    """q_latent `B S Q` -> q `B S H E`, of a range of heads (`(first, end)` as the weight counts them, all unless
    given), before any turn. Raises `ValueError` for a range outside the projection."""
    weight = params.q_b if params.q is None else params.q
    assert weight is not None
    check_shapes("mla_queries", cfg.sizes, q_latent=(q_latent, "B S D" if cfg.direct_q else "B S Q"))
    rows = check_range("mla_queries", heads, weight, cfg.qk_head_dim)
    q: Tensor = linear(q_latent, weight[rows]).unflatten(-1, (-1, cfg.qk_head_dim))
    return q


def mla_expand(
    params: MLA,
    kv_latent: Tensor,
    key_rope: Tensor,
    cfg: MLAConfig,
    *,
    heads: tuple[int, int] | range | None = None,
) -> tuple[Tensor, Tensor]:
    """kv_latent `B T L`, key_rope `B T R` (turned) -> keys `B T H E` and values `B T H V`, of a range of heads as in
    `mla_queries`."""
    check_latents("mla_expand", cfg.sizes, kv_latent=(kv_latent, "B T L"), key_rope=(key_rope, "B T R"))
    rows = check_range("mla_expand", heads, params.kv_b, cfg.qk_nope_head_dim + cfg.v_head_dim)
    return _keys_and_values(_by_head(linear(kv_latent, params.kv_b[rows]), cfg), key_rope, cfg)


def mla_output(params: MLA, o: Tensor, x: Tensor, cfg: MLAConfig, *, wire: Wire = identity) -> Tensor:
    """o `B S H V`, x `B S D` (the layer's input, which the gate reads) -> out `B S D`."""
    gate = _gate(params, x, cfg)
    return _out(params, wire.projection(params.o), o, None if gate is None else gate.sigmoid(), cfg, wire)


class Cost(NamedTuple):
    """Of attention in one row of a batch. multiplications: those of its products. elements: numbers of the cache, and
    of keys and values, that are read or written."""

    multiplications: int
    elements: int


def mla_costs(cfg: MLAConfig, queries: int, keys: int) -> dict[str, Cost]:
    """What S queries against T keys cost "absorbed" and "expanded", up- and down-projection of heads included.

    absorbed H (S L (N + V) + S T (2 L + R)), which reads T (L + R) numbers; expanded H (T L (N + V) + S T (N + R + V)),
    which reads the same, writes T H (N + R + V) numbers of keys and values and reads them again.
    """
    N, R, V, L = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
    heads, cached = cfg.num_attention_heads, keys * (L + R)
    absorbed = heads * (queries * L * (N + V) + queries * keys * (2 * L + R))
    expanded = heads * (keys * L * (N + V) + queries * keys * (N + R + V))
    return {
        "absorbed": Cost(absorbed, cached),
        "expanded": Cost(expanded, cached + 2 * keys * heads * (N + R + V)),
    }


def is_absorbed(cfg: MLAConfig, queries: int, keys: int) -> bool:
    """Whether S queries against T cached keys take fewer multiplications absorbed; it also reads less, always."""
    costs = mla_costs(cfg, queries, keys)
    return costs["absorbed"].multiplications <= costs["expanded"].multiplications


def _gate(params: MLA, x: Tensor, cfg: MLAConfig) -> Tensor | None:
    """What the gate is the sigmoid of; None where there is none."""
    return None if params.gate is None else linear(apply_norm(x, params.norm, cfg.norm), params.gate)


def _down(
    params: MLA, x: Tensor, cfg: MLAConfig, *, gated: bool = True
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """The latents as `mla_latents` gives them, and what the gate is the sigmoid of, if it is wanted now."""
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    if params.q_a is None:
        x = apply_norm(x, params.norm, cfg.norm)  # queries are projected from it, later
        norm_weight, options = None, {}
    gate_weight = params.gate if gated else None
    parts = [(params.kv_a, params.kv_a_bias), (params.q_a, params.q_a_bias), (gate_weight, None)]
    here = [(weight, bias) for weight, bias in parts if weight is not None]
    found = norm_linear(x, norm_weight, [w for w, _ in here], [b for _, b in here], **options)
    kv_down = found[0]
    kv_latent, key_rope = kv_down.split((cfg.kv_lora_rank, cfg.qk_rope_head_dim), -1)
    kv_latent = normalize(kv_latent, params.kv_norm, **cfg.latent_norm.options)
    q_latent = x
    if params.q_norm is not None:
        q_down = found[1]
        q_latent = normalize(q_down, params.q_norm, **cfg.latent_norm.options)
    gate = None if gate_weight is None else found[-1]
    return (q_latent, kv_latent, key_rope), gate


def _check_core(
    core: Callable[..., Tensor], absorbed_core: Callable[..., Tensor], absorbed: bool, cfg: MLAConfig, **rules: Any
) -> None:
    """Raise `TypeError` where the core that will be called does not take what it will be told."""
    name, fn = ("absorbed_core", absorbed_core) if absorbed else ("core", core)
    if fn not in (dot_product_attention, absorbed_attention):
        told = ["causal", "q_positions", "k_positions", "softmax_scale"] + ["nope_dim"] * absorbed
        rules = {"window": cfg.window, **rules}
        check_takes("mla", name, fn, [*told, *(rule for rule, x in rules.items() if x is not None)])


def _tables(
    positions: Tensor, rope: tuple[Tensor, Tensor] | None, cfg: MLAConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if cfg.rope is None:
        return None, None
    return rope_tables(positions, cfg.rope, cfg.qk_rope_head_dim, dtype) if rope is None else rope


def _turned(q: Tensor, cos: Tensor, sin: Tensor, cfg: MLAConfig, rotary: Callable[..., Tensor], heads: Heads) -> Tensor:
    """q `B S H E` with its last R channels turned."""
    q_nope, q_rope = q.split((cfg.qk_nope_head_dim, cfg.qk_rope_head_dim), -1)
    told = {"head_offset": heads.offset, "local_heads": heads.local}
    told = {name: value for name, value in told.items() if value is not None}
    shape = q_rope.shape
    q_rope = rotary(q_rope, cos, sin, interleaved=cfg.interleaved, **told)
    if q_rope.shape != shape:
        raise ShapeError(f"mla(rotary=...): it made {tuple(q_rope.shape)} of B S H R = {tuple(shape)}")
    return torch.cat((q_nope, q_rope), -1)


def _by_head(kv: Tensor, cfg: MLAConfig) -> Tensor:
    """kv `B T (H NV)` -> `B T H NV`."""
    by_head: Tensor = kv.unflatten(-1, (-1, cfg.qk_nope_head_dim + cfg.v_head_dim))
    return by_head


def _keys_and_values(kv: Tensor, key_rope: Tensor, cfg: MLAConfig) -> tuple[Tensor, Tensor]:
    """kv `B T H NV`, key_rope `B T R` -> k `B T H E`, v `B T H V`; here at last each head has the rotary key."""
    k_nope, v = kv.split((cfg.qk_nope_head_dim, cfg.v_head_dim), -1)
    return torch.cat((k_nope, key_rope[:, :, None].expand(-1, -1, kv.shape[2], -1)), -1), v


def _out(
    params: MLA, project: Callable[[Tensor], Tensor], o: Tensor, gate: Tensor | None, cfg: MLAConfig, wire: Wire
) -> Tensor:
    o = o.flatten(2)
    if gate is not None:
        o = o * gate
    out_BSD = wire.pass_(out=project(o))
    # Bias and norm come after the edge, which may be a sum over ranks.
    if params.o_bias is not None:
        out_BSD = out_BSD + params.o_bias
    return apply_norm(out_BSD, params.post_norm, cfg.post_norm)
