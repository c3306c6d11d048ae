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

from typing import NamedTuple

from torch import Tensor

from .arguments import lists_unknown
from .cache import GDNCache
from .core import wide
from .delta import gdn_gates
from .gdn_config import GDN, GDNConfig
from .norm import gated_rms_norm, linear, norm_in_front, norm_linear
from .recurrence import gated_delta_rule, short_conv
from .rows import tokens_of, zero_absent
from .shapes import ShapeError, check_shapes
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


@edges(
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
    q_segment_ids="B S",
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
    _check(params, x, cfg, positions, segment_ids, cache)
    wire = wire.layer(H=cfg.num_value_heads, K=cfg.num_key_heads, causal=True)
    if positions is not None:
        positions = positions.expand(x.shape[:2])
    q, k, v, z, b, a = gdn_project(params, zero_absent(wire.pass_(x=x), tokens_of(x.shape[1], None, positions)), cfg)
    q_BSKE, k_BSKE, v_BSHV, b_BSH, a_BSHY, q_conv, k_conv, v_conv, a_log, dt_bias, positions, ids = wire.receive(
        q=q, k=k, v=v, b=b, a=a, q_conv=params.q_conv, k_conv=params.k_conv, v_conv=params.v_conv,
        a_log=params.a_log, dt_bias=params.dt_bias, q_positions=positions, q_segment_ids=segment_ids,
    )  # fmt: skip
    states = (None, None, None, None) if cache is None else (cache.q, cache.k, cache.v, cache.state)
    told = {"positions": positions, "segment_ids": ids}
    q_BSKE, q_state = short_conv(q_BSKE, q_conv, states[0], activation=cfg.hidden_act, **told)
    k_BSKE, k_state = short_conv(k_BSKE, k_conv, states[1], activation=cfg.hidden_act, **told)
    v_BSHV, v_state = short_conv(v_BSHV, v_conv, states[2], activation=cfg.hidden_act, **told)
    if not cfg.channel_decay:
        a_BSHY = a_BSHY[..., 0]
    bias = dt_bias.view(a_BSHY.shape[2:])
    g, beta_BSH = gdn_gates(a_BSHY, b_BSH, a_log, bias)
    if cfg.allow_neg_eigval:
        beta_BSH = 2 * beta_BSH
    o_BSHV, state = gated_delta_rule(q_BSKE, k_BSKE, v_BSHV, g, beta_BSH, states[3], **told)
    o_BSHV = wire.pass_(o=o_BSHV)
    if cache is not None:
        cache = GDNCache(q=q_state, k=k_state, v=v_state, state=state)
    return gdn_output(params, o_BSHV, z, cfg, wire=wire), cache


def _check(
    params: GDN, x: Tensor, cfg: GDNConfig, positions: Tensor | None, segment_ids: Tensor | None, cache: GDNCache | None
) -> None:
    if cache is not None and not isinstance(cache, GDNCache):
        raise TypeError(
            f"gdn(cache=...): a GDNCache is needed, not {type(cache).__name__}, of another kind of layer\n"
            "    fix: empty_caches(configs, ...) makes one a layer"
        )
    # Heads are the rank's own, as its weights have them.
    widths = {letter: n for letter, n in cfg.sizes.items() if letter not in "HK"}
    check_shapes(
        "gdn",
        widths,
        x=(x, "B S D"),
        positions=(positions, "B? S"),
        segment_ids=(segment_ids, "B S"),
        qkvz=(params.qkvz, "(K M) D"),
        ba=(params.ba, "(K J) D"),
        q=(params.q, "(K E) D"),
        k=(params.k, "(K E) D"),
        v=(params.v, "(K G V) D"),
        z=(params.z, "(K G V) D"),
        z_down=(params.z_down, "L D"),
        z_up=(params.z_up, "(K G V) L"),
        b=(params.b, "(K G) D"),
        a=(params.a, "(K G Y) D"),
        a_down=(params.a_down, "Q D"),
        a_up=(params.a_up, "(K G Y) Q"),
        a_log=(params.a_log, "(K G)"),
        dt_bias=(params.dt_bias, "(K G Y)"),
        q_conv=(params.q_conv, "(K E) I W"),
        k_conv=(params.k_conv, "(K E) I W"),
        v_conv=(params.v_conv, "(K G V) I W"),
        o_norm=(params.o_norm, "V"),
        o=(params.o, "D (K G V)"),
    )
    if cache is None:
        return
    turned, wanted = cache.state.mT.shape[1:], (params.a_log.shape[0], cfg.value_head_dim, cfg.key_head_dim)
    if turned == wanted != cache.state.shape[1:]:
        raise ShapeError(
            f"gdn(cache=...): its state is key-major, H E V = {' '.join(map(str, cache.state.shape[1:]))}, and "
            f"value-major is needed, H V E = {' '.join(map(str, wanted))}\n"
            "    fix: dataclasses.replace(cache, state=cache.state.mT)"
        )
    check_shapes(
        "gdn",
        widths,
        x=(x, "B S D"),
        q_conv=(params.q_conv, "(K E) I W"),
        cache_q=(cache.q, "B (K E) U"),
        cache_k=(cache.k, "B (K E) U"),
        cache_v=(cache.v, "B (K G V) U"),
        cache_state=(cache.state, "B (K G) V E"),
    )
    for name in ("q", "k", "v", "state"):
        leaf, dtype = getattr(cache, name), wide(x).dtype if name == "state" else x.dtype
        if leaf.dtype != dtype:
            raise TypeError(
                f"gdn(cache=...): its {name} is in {leaf.dtype}, and for x in {x.dtype} it is in {dtype}\n"
                f"    fix: empty_caches(..., dtype={x.dtype})"
            )
    if segment_ids is not None:
        raise ValueError("gdn: segment_ids with a cache\n    fix: give each document a row of the cache")


def gdn_project(params: GDN, x: Tensor, cfg: GDNConfig) -> Projected:
    """x `B S D` -> what the heads are made of: the norm in front, and every projection; heads as the weights have."""
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    E, V, Y = cfg.key_head_dim, cfg.value_head_dim, cfg.sizes["Y"]
    if params.qkvz is not None and params.ba is not None:
        G = cfg.sizes["G"]
        qkvz, ba = norm_linear(x, norm_weight, [params.qkvz, params.ba], [None, None], **options)
        q, k, v, z = qkvz.unflatten(-1, (-1, cfg.sizes["M"])).split((E, E, G * V, G * V), -1)
        b, a = ba.unflatten(-1, (-1, cfg.sizes["J"])).split((G, G), -1)
        v, z = (each.unflatten(-1, (G, V)).flatten(2, 3) for each in (v, z))
        return Projected(q, k, v, z, b.flatten(2), a.flatten(2)[..., None])
    names = ("q", "k", "v", "b", "z" if params.z_down is None else "z_down", "a" if params.a_down is None else "a_down")
    weights = [getattr(params, name) for name in names]
    q, k, v, b, z, a = norm_linear(x, norm_weight, weights, [None] * len(weights), **options)
    z = z if params.z_up is None else linear(z, params.z_up)
    a = a if params.a_up is None else linear(a, params.a_up)
    q, k, v, z, a = (t.unflatten(-1, (-1, width)) for t, width in ((q, E), (k, E), (v, V), (z, V), (a, Y)))
    return Projected(q, k, v, z, b, a)


def gdn_output(params: GDN, o: Tensor, z: Tensor, cfg: GDNConfig, *, wire: Wire = identity) -> Tensor:
    """o and z `B S H V` -> out `B S D`: the gated norm of each head, and the last projection."""
    norm = cfg.gated_norm
    o_BSHV = gated_rms_norm(
        o, params.o_norm, z, eps=norm.eps, activation=cfg.gate_act, scale_in_fp32=norm.scale_in_fp32
    )
    out_BSD = linear(o_BSHV.flatten(2), params.o)
    return wire.pass_(out=out_BSD)
