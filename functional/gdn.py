"""Gated delta net (Yang et al. 2025, arXiv:2412.06464), as Qwen3-Next, Qwen3.5, Olmo Hybrid and Kimi Linear have it.

    q, k, v = act(conv(h Wq)), act(conv(h Wk)), act(conv(h Wv));      h = norm(x)
    beta = sigmoid(h Wb);      g = -exp(a_log) softplus(h Wa + dt_bias)
    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q / sqrt(E)            (k and q of length 1)
    out = concat(rms_norm(o) act(h Wz)) Wo

Instead of keys and values of all tokens a layer keeps S, `V E` numbers a head, and the last W-1 tokens of the
convolution: what a step reads and writes does not grow with context. Kimi's delta attention (KDA, arXiv:2510.26692)
has a decay for each channel of the key, and is the same otherwise.

Letters: B batch, S tokens, D model width, K key heads, H = K G value heads (value head h reads key head h // G), E key
width, V value width, W convolution width, U = W-1 tokens that it goes on from, Y decays of a head (1, or E in KDA), Q
and L ranks of `a` and `z`, M and J rows of `qkvz` and `ba` for a key head, I = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import lists_unknown
from .cache import GDNCache
from .core import wide
from .delta import gdn_gates
from .gdn_checks import check, check_cache
from .gdn_config import GDN, GDNConfig
from .norm import apply_norm, gated_rms_norm, linear, norm_in_front, norm_linear
from .recurrence import gated_delta_rule, short_conv
from .rows import check_together, tokens_of, zero_absent
from .tree import check_presence
from .wire import Wire, edges, identity

__all__ = ["GDN", "GDNConfig", "Projected", "gdn", "gdn_output", "gdn_project"]


class Projected(NamedTuple):
    """Of each token: q, k `B S K E` and v `B S H V` before the convolution, z `B S H V`, b `B S H`, a `B S H Y`."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


# Of several ranks, each with some of the tokens, and of a cache; a layout that knows neither leaves them out.
OPTIONAL = ("summary", "tail", "rows", "cache_q", "cache_k", "cache_v", "cache_state")


@edges(
    None,
    None,
    OPTIONAL,
    x="B S D",
    q="B S K E",
    k="B S K E",
    v="B S (K G) V",
    b="B S (K G)",
    a="B S (K G) Y",
    q_conv="(K E) I W",
    k_conv="(K E) I W",
    v_conv="((K G) V) I W",
    a_log="(K G)",
    dt_bias="((K G) Y)",
    q_positions="B S",
    k_positions="B T",
    q_segment_ids="B S",
    k_segment_ids="B T",
    cache_q="B (K E) U",
    cache_k="B (K E) U",
    cache_v="B (K G V) U",
    cache_state="B (K G) V E",
    summary="P B (K G) N E",
    tail="P B (K C) U",
    rows="P B",
    o="B S (K G) V",
    out="B S D",
)
@lists_unknown
def gdn(
    params: GDN,
    x: Tensor,
    cfg: GDNConfig,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: GDNCache | None = None,
    wire: Wire = identity,
) -> tuple[Tensor, GDNCache | None]:
    """x `B S D` -> out `B S D`, and the new cache (None without one).

    positions: `B|1 S`, -1 for padding, in front of a row's tokens or behind them: it has no effect on anything, and its
    output means nothing. A row that holds position 0 starts anew, whatever the cache has of it. Unless given, all are
    tokens, and a cache goes on. segment_ids: `B S`, the packed document of each token; each starts anew; not with a
    cache.
    cache: state and convolution of the tokens before.
    Raises `ShapeError`, `TypeError` and `ValueError` naming the argument, `TreeError` where params and config ask for
    different parts, before any work.
    """
    check_presence("gdn", params, cfg, GDN)
    params = wire.gather(params, D=cfg.hidden_size)
    check(params, x, cfg, positions, segment_ids, cache)
    wire = wire.layer(H=cfg.num_value_heads, K=cfg.num_key_heads, W=cfg.conv_kernel_dim)
    heads = wire.heads(of="v")
    if cache is not None:
        check_cache(params, x, cfg, cache, heads)
    every = wire.all_of(q_positions=positions)  # on other ranks too
    check_together("gdn", every)
    if positions is not None:
        positions = positions.expand(x.shape[:2])
    x_BSD = wire.pass_(x=zero_absent(x, tokens_of(x.shape[1], None, positions)))
    q, k, v, z, b, a = _project(params, x_BSD, cfg, gated=not wire.moves)
    sent = wire.send(q=q, k=k, v=v, b=b, a=a)
    z = _gate(params, x_BSD, cfg) if z is None else z  # while they fly
    met = _receive(params, sent, positions, segment_ids, cache, wire)
    in_parts = not wire.stays("summary")
    (q, k, v), ends = _convolved(met, heads.kv_index, cfg.hidden_act, every if in_parts else None)
    g, beta_BSH = _gates(met, cfg)
    if in_parts:
        o_BSHV, cache = _across(q, k, v, g, beta_BSH, met, ends, wire)
    else:
        o_BSHV, cache = _rule(q, k, v, g, beta_BSH, met, ends)
    o_sent, project_out = wire.send(o=o_BSHV), wire.projection(params.o)
    (o_BSHV,) = wire.receive(o_sent)
    return _out(params, project_out, o_BSHV, z, cfg, wire), cache


class _Met(NamedTuple):
    """What meets on a rank, by the names of edges. q, k and v are of the tokens T that it convolves, of which the first
    lie in front of its own S; so are t_positions and t_segment_ids."""

    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    positions: Tensor | None
    t_positions: Tensor | None
    segment_ids: Tensor | None
    t_segment_ids: Tensor | None
    cache_q: Tensor | None
    cache_k: Tensor | None
    cache_v: Tensor | None
    cache_state: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    a: Tensor


def _receive(
    params: GDN, sent: Any, positions: Tensor | None, segment_ids: Tensor | None, cache: GDNCache | None, wire: Wire
) -> _Met:
    states: list[Any] = [None] * 4 if cache is None else [cache.q, cache.k, cache.v, cache.state]
    received = wire.receive(
        sent, q_conv=params.q_conv, k_conv=params.k_conv, v_conv=params.v_conv, a_log=params.a_log,
        dt_bias=params.dt_bias, q_positions=positions, k_positions=positions, q_segment_ids=segment_ids,
        k_segment_ids=segment_ids, cache_q=states[0], cache_k=states[1], cache_v=states[2], cache_state=states[3],
    )  # fmt: skip
    return _Met(*received)


def _front(met: _Met) -> int:
    """How many tokens lie in front of a rank's own."""
    return met.v.shape[1] - met.b.shape[1]


def _cache_of(met: _Met) -> GDNCache | None:
    if met.cache_q is None or met.cache_k is None or met.cache_v is None or met.cache_state is None:
        return None
    return GDNCache(q=met.cache_q, k=met.cache_k, v=met.cache_v, state=met.cache_state)


def _convolved(
    met: _Met, kv_index: Tensor | None, activation: str, every: Tensor | None
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """q, k and v of a rank's own tokens, and what each convolution keeps behind them. kv_index: of each value head the
    key head that it reads, where heads were dealt out whatever keys they share. every: positions of all tokens, where
    a rank has some of them."""
    told: dict[str, Any] = {
        "activation": activation, "positions": met.t_positions, "segment_ids": met.t_segment_ids
    }  # fmt: skip
    front, states = _front(met), [met.cache_q, met.cache_k, met.cache_v]
    some = every is not None or front > 0
    if met.cache_q is not None and some:
        # No state is read behind tokens, nor in a row that begins anew, on whichever rank.
        unread_B = torch.full(met.v.shape[:1], front == met.cache_q.shape[-1], device=met.v.device)
        if met.t_positions is not None and every is not None:
            unread_B = (unread_B & (met.t_positions[:, :front] >= 0).all(1)) | (every == 0).any(1)
        states = [None if each is None else each.masked_fill(unread_B[:, None, None], 0) for each in states]
    q_BSKE, q_state = short_conv(met.q, met.q_conv, states[0], **told)
    k_BSKE, k_state = short_conv(met.k, met.k_conv, states[1], **told)
    v_BSHV, v_state = short_conv(met.v, met.v_conv, states[2], **told)
    if kv_index is not None:
        q_BSKE, k_BSKE = (t.index_select(2, kv_index) for t in (q_BSKE, k_BSKE))
    found = [q_BSKE, k_BSKE, v_BSHV]
    return [t[:, front:] for t in found] if front > 0 else found, (q_state, k_state, v_state)


def _gates(met: _Met, cfg: GDNConfig) -> tuple[Tensor, Tensor]:
    """g `B S H`, or `B S H E` of channels, and beta `B S H`."""
    a_BSHY = met.a if cfg.channel_decay else met.a[..., 0]
    bias = met.dt_bias.view(a_BSHY.shape[2:])
    g, beta_BSH = gdn_gates(a_BSHY, met.b, met.a_log, bias)
    return g, 2 * beta_BSH if cfg.allow_neg_eigval else beta_BSH


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, met: _Met, ends: tuple[Tensor, ...]
) -> tuple[Tensor, GDNCache | None]:
    """The rule on all tokens: o `B S H V`, and the cache. ends: of q, k and v, what the convolutions keep."""
    o_BSHV, state = gated_delta_rule(
        q, k, v, g, beta, met.cache_state, positions=met.positions, segment_ids=met.segment_ids
    )
    kept = None if met.cache_state is None else GDNCache(q=ends[0], k=ends[1], v=ends[2], state=state)
    return o_BSHV, kept


def _across(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, met: _Met, ends: tuple[Tensor, ...], wire: Wire
) -> tuple[Tensor, GDNCache | None]:
    """The rule on some of the tokens, whose state comes from those before, on other ranks: o `B S H V`, and the cache
    behind all tokens.

    A token changes the state by a product and a sum, so that what all of them do is S -> S A + B. Both are found at
    once, as what becomes of E more values a head that begin with one, of which no token has any. ends: of q, k and v,
    what the convolution keeps behind these tokens; that of the last rank with a token of a row goes into the cache.
    """
    cache, front, positions, ids = _cache_of(met), _front(met), met.positions, met.t_segment_ids
    (batch, tokens, heads, V), E, dtype = v.shape, q.shape[-1], wide(v).dtype
    one_BHEE = torch.eye(E, dtype=dtype, device=v.device).expand(batch, heads, E, E)
    if ids is not None and front > 0:  # a document that begins here has nothing of the state before
        begins_B = ids[:, front - 1] != ids[:, front]
        one_BHEE = one_BHEE.masked_fill(begins_B[:, None, None, None], 0)
    state_BHNE = torch.cat((one_BHEE.new_zeros(batch, heads, V, E), one_BHEE), 2)
    v_BSHN = torch.nn.functional.pad(v.to(dtype), (0, E))
    # Positions say what is padding, and not which rows begin.
    there = None if positions is None else torch.where(positions < 0, -1, 1)
    o_BSHN, state_BHNE = gated_delta_rule(
        q, k, v_BSHN, g, beta, state_BHNE, positions=there, segment_ids=met.segment_ids
    )
    if not tokens:  # a rank without tokens takes part in backward too
        state_BHNE = state_BHNE + v_BSHN.sum()
    told: dict[str, Tensor | None] = {"tail": None, "rows": None}
    if cache is not None:
        # Of each row: 0 without a token here, 1 with some, 2 where one of them begins it.
        rows_B = state_BHNE.new_full((batch,), min(tokens, 1))
        if positions is not None:
            rows_B = ((positions >= 0).any(1).long() + (positions == 0).any(1)).to(dtype)
        told = {"tail": _by_key_head(ends, q.shape[2]).to(dtype)[None], "rows": rows_B[None]}
    summary_PBHNE, tail_PBCU, rows_PB = wire.receive(summary=state_BHNE[None], **told)
    # Nothing is before the first rank, whose backward must send what others wait for all the same.
    before_BHVE = state_BHNE.new_zeros(batch, heads, V, E) + summary_PBHNE[:, :, :, :0].sum()
    if cache is not None:
        unread_B = (rows_PB == 2).any(0) | (rows_PB == 0).all(0)
        before_BHVE = before_BHVE + cache.state.masked_fill(unread_B[:, None, None, None], 0)
    place = wire.place("summary")
    before_BHVE = _behind(before_BHVE, summary_PBHNE[:place])
    o_BSHV = o_BSHN[..., :V] + torch.einsum("bhve,bshe->bshv", before_BHVE, o_BSHN[..., V:])
    if cache is not None:
        cache = _kept(cache, _behind(before_BHVE, summary_PBHNE[place:]), tail_PBCU, rows_PB, q.shape[2])
    return o_BSHV.to(v.dtype), cache


def _behind(state: Tensor, parts: Tensor) -> Tensor:
    """The state `B H V E` behind parts `P B H V+E E`, each a sum and a product."""
    for part_BHNE in parts:
        V = state.shape[2]
        state = state @ part_BHNE[:, :, V:] + part_BHNE[:, :, :V]
    return state


def _kept(cache: GDNCache, state: Tensor, tails: Tensor, rows: Tensor, heads: int) -> GDNCache:
    """The cache behind all tokens: state `B H V E`, and of tails `P B (K C) U` that of the last part with a token of
    the row; what it was in rows without any. rows: `P B`, above 0 where there are some. heads: K."""
    tail_BCU = _by_key_head((cache.q, cache.k, cache.v), heads)
    for part_BCU, some_B in zip(tails.to(tail_BCU.dtype), rows > 0, strict=True):
        tail_BCU = torch.where(some_B[:, None, None], part_BCU, tail_BCU)
    widths = [each.shape[1] // heads for each in (cache.q, cache.k, cache.v)]
    q, k, v = (each.flatten(1, 2) for each in tail_BCU.unflatten(1, (heads, -1)).split(widths, 2))
    new = (rows > 0).any(0)[:, None, None, None]
    return GDNCache(q=q, k=k, v=v, state=torch.where(new, state, cache.state))


def _by_key_head(states: tuple[Tensor, ...], heads: int) -> Tensor:
    """The states of q, k and v, `B (K ...) U` each, side by side within each key head: `B (K C) U`."""
    return torch.cat([each.unflatten(1, (heads, -1)) for each in states], 2).flatten(1, 2)


def gdn_project(params: GDN, x: Tensor, cfg: GDNConfig) -> Projected:
    """x `B S D` -> what the heads are made of: the norm in front, and every projection; heads as the weights have."""
    q, k, v, z, b, a = _project(params, x, cfg)
    assert z is not None
    return Projected(q, k, v, z, b, a)


def _project(
    params: GDN, x: Tensor, cfg: GDNConfig, *, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """As `gdn_project`; z only if it is wanted now, or comes with the others."""
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    E, V, Y = cfg.key_head_dim, cfg.value_head_dim, cfg.sizes["Y"]
    if params.qkvz is not None and params.ba is not None:
        G = cfg.sizes["G"]
        qkvz, ba = norm_linear(x, norm_weight, [params.qkvz, params.ba], [None, None], **options)
        q, k, v, z = qkvz.unflatten(-1, (-1, cfg.sizes["M"])).split((E, E, G * V, G * V), -1)
        b, a = ba.unflatten(-1, (-1, cfg.sizes["J"])).split((G, G), -1)
        v, z = (each.unflatten(-1, (G, V)).flatten(2, 3) for each in (v, z))
        return q, k, v, z, b.flatten(2), a.flatten(2)[..., None]
    names = ["q", "k", "v", "b", "a" if params.a_down is None else "a_down"]
    names += ["z" if params.z_down is None else "z_down"] * gated
    weights = [getattr(params, name) for name in names]
    projected = norm_linear(x, norm_weight, weights, [None] * len(weights), **options)
    z = None
    if gated:
        q, k, v, b, a, z = projected
    else:
        q, k, v, b, a = projected
    a = a if params.a_up is None else linear(a, params.a_up)
    q, k, v, a = (t.unflatten(-1, (-1, width)) for t, width in ((q, E), (k, E), (v, V), (a, Y)))
    return q, k, v, None if z is None else _raised(params, z, cfg), b, a


def _gate(params: GDN, x: Tensor, cfg: GDNConfig) -> Tensor:
    """z alone, `B S H V`."""
    weight = params.z if params.z_down is None else params.z_down
    assert weight is not None  # check_presence has seen that one of them is there
    return _raised(params, linear(apply_norm(x, params.norm, cfg.norm), weight), cfg)


def _raised(params: GDN, z: Tensor, cfg: GDNConfig) -> Tensor:
    z = z if params.z_up is None else linear(z, params.z_up)
    by_head: Tensor = z.unflatten(-1, (-1, cfg.value_head_dim))
    return by_head


def gdn_output(params: GDN, o: Tensor, z: Tensor, cfg: GDNConfig, *, wire: Wire = identity) -> Tensor:
    """o and z `B S H V` -> out `B S D`: the gated norm of each head, and the last projection."""
    return _out(params, wire.projection(params.o), o, z, cfg, wire)


def _out(params: GDN, project: Callable[[Tensor], Tensor], o: Tensor, z: Tensor, cfg: GDNConfig, wire: Wire) -> Tensor:
    norm = cfg.gated_norm
    o_BSHV = gated_rms_norm(
        o, params.o_norm, z, eps=norm.eps, activation=cfg.gate_act, scale_in_fp32=norm.scale_in_fp32
    )
    out_BSD = project(o_BSHV.flatten(2))
    return wire.pass_(out=out_BSD)
