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
from .delta import gdn_gates
from .gdn_checks import check, check_cache
from .gdn_config import GDN, GDNConfig
from .gdn_parts import joined, part_of
from .norm import apply_norm, gated_rms_norm, linear, norm_in_front, norm_linear
from .recurrence import gated_delta_rule, short_conv
from .rows import check_together, tokens_of, zero_absent
from .tree import check_presence
from .wire import Wire, check_heads, edges, identity

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
    cache: state and convolution of the tokens before. A rule of one's own stands between `gdn_project` and
    `gdn_output`, as the README shows.
    Raises `ShapeError`, `TypeError` and `ValueError` naming the argument, `TreeError` where params and config ask for
    different parts, before any work.
    """
    check_presence("gdn", params, cfg, GDN)
    params = wire.gather(params, D=cfg.hidden_size)
    own = check(params, x, cfg, positions, segment_ids, cache)
    wire = wire.layer(H=cfg.num_value_heads, K=cfg.num_key_heads, W=cfg.conv_kernel_dim)
    check_heads("gdn", ("value", "key"), own, cfg.sizes, wire.heads(sent=True, of="v"))
    heads = wire.heads(of="v")
    if cache is not None:
        check_cache(params, x, cfg, cache, heads)
    every = wire.all_of(q_positions=positions)  # on other ranks too
    check_together("gdn", every)
    if positions is not None:
        positions = positions.expand(x.shape[:2])
    x_BSD = wire.pass_(x=zero_absent(x, tokens_of(x.shape[1], None, positions)))
    beside = _beside(params, positions, segment_ids, cache)
    if wire.stays("summary"):
        o_BSHV, z, project_out, cache = _by_heads(params, x_BSD, cfg, beside, heads.kv_index, wire)
    else:
        o_BSHV, z, project_out, cache = _by_tokens(params, x_BSD, cfg, beside, every, wire)
    return _out(params, project_out, o_BSHV, z, cfg, wire), cache


# o and z `B S H V`, the last projection, and the new cache.
_Ran = tuple[Tensor, Tensor, Callable[[Tensor], Tensor], GDNCache | None]


def _by_heads(
    params: GDN, x: Tensor, cfg: GDNConfig, beside: dict[str, Any], kv_index: Tensor | None, wire: Wire
) -> _Ran:
    """All tokens of a rank's heads. kv_index: of each value head the key head that it reads, where heads were dealt out
    whatever keys they share."""
    if wire.moves:
        h_BSD = apply_norm(x, params.norm, cfg.norm)
        q, k, v, z = _project_heads(params, h_BSD, cfg)
        b, a = _project_decays(params, h_BSD, cfg)
    else:
        q, k, v, z, b, a = gdn_project(params, x, cfg)
    sent = wire.send(q=q, k=k, v=v, b=b, a=a)
    z = _project_gate(params, h_BSD, cfg) if z is None else z  # while they fly
    a_log, dt_bias, *received, b, a = wire.receive(sent, a_log=params.a_log, dt_bias=params.dt_bias, **beside)
    met = _Met(*received)
    (q, k, v), ends = _convolved(met, 0, cfg.hidden_act, None)
    if kv_index is not None:
        q, k = (t.index_select(2, kv_index) for t in (q, k))
    g, beta_BSH = _gates(b, a, a_log, dt_bias, cfg)
    o_BSHV, state = gated_delta_rule(
        q, k, v, g, beta_BSH, met.cache_state, positions=met.positions, segment_ids=met.segment_ids
    )
    cache = None if met.cache is None else GDNCache(q=ends[0], k=ends[1], v=ends[2], state=state)
    o_sent, project_out = wire.send(o=o_BSHV), wire.projection(params.o)
    (o_BSHV,) = wire.receive(o_sent)
    return o_BSHV, z, project_out, cache


def _by_tokens(
    params: GDN, x: Tensor, cfg: GDNConfig, beside: dict[str, Any], every: Tensor | None, wire: Wire
) -> _Ran:
    """All heads of a rank's tokens, whose state comes from those before, on other ranks. every: positions of all."""
    h_BSD, tokens = apply_norm(x, params.norm, cfg.norm), x.shape[1]
    q, k, v, z = _project_heads(params, h_BSD, cfg)
    sent = wire.send(q=q, k=k, v=v)
    b, a = _project_decays(params, h_BSD, cfg)  # while tokens in front fly
    b, a, a_log, dt_bias = wire.receive(b=b, a=a, a_log=params.a_log, dt_bias=params.dt_bias)
    g, beta_BSH = _gates(b, a, a_log, dt_bias, cfg)
    met = _Met(*wire.receive(sent, **beside))
    front, ids, cache = met.v.shape[1] - tokens, met.t_segment_ids, met.cache
    (q, k, v), ends = _convolved(met, front, cfg.hidden_act, every)
    begins_B = None if ids is None or front == 0 else ids[:, front - 1] != ids[:, front]
    part = part_of(
        q, k, v, g, beta_BSH, begins=begins_B, positions=met.positions, segment_ids=met.segment_ids,
        ends=None if cache is None else ends,
    )  # fmt: skip
    # A chunk's outputs are made together with its state. What waits for no state is what the heads meet behind them.
    states, project_out = wire.send(summary=part.summary, tail=part.tail, rows=part.rows), wire.projection(params.o)
    z = _project_gate(params, h_BSD, cfg) if z is None else z  # while states fly
    summary, tail, rows = wire.receive(states)
    o_BSHV, cache = joined(
        part.o, summary, tail, rows, place=wire.place("summary"), cache=cache, heads=q.shape[2]
    )  # fmt: skip
    (o_BSHV,) = wire.receive(o=o_BSHV.to(v.dtype))
    return o_BSHV, z, project_out, cache


class _Met(NamedTuple):
    """What meets on a rank, by the names of edges. q, k and v are of the tokens T that it convolves, of which the first
    lie in front of its own S; so are t_positions and t_segment_ids."""

    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
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

    @property
    def cache(self) -> GDNCache | None:
        if self.cache_q is None or self.cache_k is None or self.cache_v is None or self.cache_state is None:
            return None
        return GDNCache(q=self.cache_q, k=self.cache_k, v=self.cache_v, state=self.cache_state)


def _beside(
    params: GDN, positions: Tensor | None, segment_ids: Tensor | None, cache: GDNCache | None
) -> dict[str, Any]:
    """What is received beside q, k and v, by the names of edges, in the order of `_Met`."""
    states: list[Any] = [None] * 4 if cache is None else [cache.q, cache.k, cache.v, cache.state]
    return {
        "q_conv": params.q_conv, "k_conv": params.k_conv, "v_conv": params.v_conv, "q_positions": positions,
        "k_positions": positions, "q_segment_ids": segment_ids, "k_segment_ids": segment_ids,
        **dict(zip(("cache_q", "cache_k", "cache_v", "cache_state"), states, strict=True)),
    }  # fmt: skip


def _convolved(met: _Met, front: int, activation: str, every: Tensor | None) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """q, k and v of a rank's own tokens, and what each convolution keeps behind them. front: how many tokens lie in
    front of them. every: positions of all tokens, where a rank has some of them."""
    told: dict[str, Any] = {
        "activation": activation, "positions": met.t_positions, "segment_ids": met.t_segment_ids
    }  # fmt: skip
    states = [met.cache_q, met.cache_k, met.cache_v]
    if met.cache_q is not None and (every is not None or front > 0):
        # No state is read behind tokens, nor in a row that begins anew, on whichever rank.
        unread_B = torch.full(met.v.shape[:1], front == met.cache_q.shape[-1], device=met.v.device)
        if met.t_positions is not None and every is not None:
            unread_B = (unread_B & (met.t_positions[:, :front] >= 0).all(1)) | (every == 0).any(1)
        states = [None if each is None else each.masked_fill(unread_B[:, None, None], 0) for each in states]
    q_BSKE, q_state = short_conv(met.q, met.q_conv, states[0], **told)
    k_BSKE, k_state = short_conv(met.k, met.k_conv, states[1], **told)
    v_BSHV, v_state = short_conv(met.v, met.v_conv, states[2], **told)
    found = [q_BSKE, k_BSKE, v_BSHV]
    return [t[:, front:] for t in found] if front > 0 else found, (q_state, k_state, v_state)


def _gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, cfg: GDNConfig) -> tuple[Tensor, Tensor]:
    """g `B S H`, or `B S H E` of channels, and beta `B S H`."""
    a_BSHY = a if cfg.channel_decay else a[..., 0]
    bias = dt_bias.view(a_BSHY.shape[2:])
    g, beta_BSH = gdn_gates(a_BSHY, b, a_log, bias)
    return g, 2 * beta_BSH if cfg.allow_neg_eigval else beta_BSH


def gdn_project(params: GDN, x: Tensor, cfg: GDNConfig) -> Projected:
    """x `B S D` -> what the heads are made of: the norm in front, and every projection; heads as the weights have."""
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    if params.qkvz is not None and params.ba is not None:
        qkvz, ba = norm_linear(x, norm_weight, [params.qkvz, params.ba], [None, None], **options)
        q, k, v, z = _apart(qkvz, cfg)
        return Projected(q, k, v, z, *_decays(ba, cfg))
    weights = _weights(params, "q", "k", "v", "b", "a", "z")
    projected = norm_linear(x, norm_weight, weights, [None] * len(weights), **options)
    q, k, v, b, a, z = projected
    a = a if params.a_up is None else linear(a, params.a_up)
    q, k, v, a = (t.unflatten(-1, (-1, width)) for t, width in zip((q, k, v, a), _widths(cfg), strict=True))
    return Projected(q, k, v, _raised(params, z, cfg), b, a)


def _project_heads(params: GDN, x: Tensor, cfg: GDNConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The q, k and v of `gdn_project`, and z where its rows lie with theirs. x: normalised."""
    if params.qkvz is not None:
        return _apart(linear(x, params.qkvz), cfg)
    q, k, v = norm_linear(x, None, _weights(params, "q", "k", "v"), [None] * 3)
    E, _, V, _ = _widths(cfg)
    return q.unflatten(-1, (-1, E)), k.unflatten(-1, (-1, E)), v.unflatten(-1, (-1, V)), None


def _project_decays(params: GDN, x: Tensor, cfg: GDNConfig) -> tuple[Tensor, Tensor]:
    """The b and a of `gdn_project`. x: normalised."""
    if params.ba is not None:
        return _decays(linear(x, params.ba), cfg)
    b, a = norm_linear(x, None, _weights(params, "b", "a"), [None] * 2)
    a = a if params.a_up is None else linear(a, params.a_up)
    return b, a.unflatten(-1, (-1, cfg.sizes["Y"]))


def _project_gate(params: GDN, x: Tensor, cfg: GDNConfig) -> Tensor:
    """The z of `gdn_project`. x: normalised."""
    return _raised(params, linear(x, *_weights(params, "z")), cfg)


def _weights(params: GDN, *names: str) -> list[Tensor]:
    """Of each projection the weight, or the first of two of which it is a product."""
    found = [getattr(params, name) for name in names]
    return [getattr(params, f"{name}_down") if w is None else w for name, w in zip(names, found, strict=True)]


def _widths(cfg: GDNConfig) -> tuple[int, int, int, int]:
    """Of a head of q, k, v and a."""
    return cfg.key_head_dim, cfg.key_head_dim, cfg.value_head_dim, cfg.sizes["Y"]


def _apart(qkvz: Tensor, cfg: GDNConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and z by heads, of rows that lie together by key head."""
    E, V, G = cfg.key_head_dim, cfg.value_head_dim, cfg.sizes["G"]
    q, k, v, z = qkvz.unflatten(-1, (-1, cfg.sizes["M"])).split((E, E, G * V, G * V), -1)
    v, z = (each.unflatten(-1, (G, V)).flatten(2, 3) for each in (v, z))
    return q, k, v, z


def _decays(ba: Tensor, cfg: GDNConfig) -> tuple[Tensor, Tensor]:
    """b and a of rows that lie together by key head."""
    G = cfg.sizes["G"]
    b, a = ba.unflatten(-1, (-1, cfg.sizes["J"])).split((G, G), -1)
    return b.flatten(2), a.flatten(2)[..., None]


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
