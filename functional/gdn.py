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
from .gdn_config import GDN, GDNConfig
from .norm import apply_norm, gated_rms_norm, linear, norm_in_front, norm_linear
from .recurrence import gated_delta_rule, short_conv
from .rows import check_together, tokens_of, zero_absent
from .shapes import ShapeError, check_positions, check_shapes
from .tree import check_presence
from .wire import Heads, Wire, edges, identity

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
    _check(params, x, cfg, positions, segment_ids, cache)
    wire = wire.layer(H=cfg.num_value_heads, K=cfg.num_key_heads, W=cfg.conv_kernel_dim)
    heads = wire.heads(of="v")
    if cache is not None:
        _check_cache(params, x, cfg, cache, heads)
    states: list[Any] = [None] * 4 if cache is None else [cache.q, cache.k, cache.v, cache.state]
    every = wire.all_of(q_positions=positions)  # on other ranks too
    check_together("gdn", every)
    if positions is not None:
        positions = positions.expand(x.shape[:2])
    x_BSD = wire.pass_(x=zero_absent(x, tokens_of(x.shape[1], None, positions)))
    q, k, v, z, b, a = _project(params, x_BSD, cfg, gated=not wire.moves)
    sent = wire.send(q=q, k=k, v=v, b=b, a=a)
    z = _gate(params, x_BSD, cfg) if z is None else z  # while they fly
    q_conv, k_conv, v_conv, a_log, dt_bias, positions, t_positions, ids, t_ids, *received = wire.receive(
        sent, q_conv=params.q_conv, k_conv=params.k_conv, v_conv=params.v_conv, a_log=params.a_log,
        dt_bias=params.dt_bias, q_positions=positions, k_positions=positions, q_segment_ids=segment_ids,
        k_segment_ids=segment_ids, cache_q=states[0], cache_k=states[1], cache_v=states[2], cache_state=states[3],
    )  # fmt: skip
    states, (q_BTKE, k_BTKE, v_BTHV, b_BSH, a_BSHY) = received[:4], received[4:]
    before = None if cache is None else GDNCache(q=states[0], k=states[1], v=states[2], state=states[3])
    told: dict[str, Any] = {"activation": cfg.hidden_act, "positions": t_positions, "segment_ids": t_ids}
    front = v_BTHV.shape[1] - b_BSH.shape[1]  # tokens in front of this rank's own
    convs = states[:3]
    if before is not None and not wire.stays("summary"):
        # No state is read behind tokens, nor in a row that begins anew, on whichever rank.
        unread_B = torch.full(x.shape[:1], front == before.q.shape[-1], device=x.device)
        if t_positions is not None and every is not None:
            unread_B = (unread_B & (t_positions[:, :front] >= 0).all(1)) | (every == 0).any(1)
        convs = [each.masked_fill(unread_B[:, None, None], 0) for each in convs]
    q_BSKE, q_state = short_conv(q_BTKE, q_conv, convs[0], **told)
    k_BSKE, k_state = short_conv(k_BTKE, k_conv, convs[1], **told)
    v_BSHV, v_state = short_conv(v_BTHV, v_conv, convs[2], **told)
    if heads.kv_index is not None:  # heads were dealt out, whatever keys they share
        q_BSKE, k_BSKE = (t.index_select(2, heads.kv_index) for t in (q_BSKE, k_BSKE))
    if front > 0:  # they were for those behind to see
        q_BSKE, k_BSKE, v_BSHV = (t[:, front:] for t in (q_BSKE, k_BSKE, v_BSHV))
    if not cfg.channel_decay:
        a_BSHY = a_BSHY[..., 0]
    bias = dt_bias.view(a_BSHY.shape[2:])
    g, beta_BSH = gdn_gates(a_BSHY, b_BSH, a_log, bias)
    if cfg.allow_neg_eigval:
        beta_BSH = 2 * beta_BSH
    if wire.stays("summary"):
        told = {"positions": positions, "segment_ids": ids}
        o_BSHV, state = gated_delta_rule(q_BSKE, k_BSKE, v_BSHV, g, beta_BSH, states[3], **told)
        cache = None if cache is None else GDNCache(q=q_state, k=k_state, v=v_state, state=state)
    else:
        begins = None if t_ids is None or front <= 0 else t_ids[:, front - 1] != t_ids[:, front]
        ends = (q_state, k_state, v_state)
        o_BSHV, cache = _across(q_BSKE, k_BSKE, v_BSHV, g, beta_BSH, positions, ids, begins, before, ends, wire)
    o_sent, project_out = wire.send(o=o_BSHV), wire.projection(params.o)
    (o_BSHV,) = wire.receive(o_sent)
    return _out(params, project_out, o_BSHV, z, cfg, wire), cache


def _across(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, positions: Tensor | None, segment_ids: Tensor | None,
    begins: Tensor | None, cache: GDNCache | None, ends: tuple[Tensor, ...], wire: Wire,
) -> tuple[Tensor, GDNCache | None]:  # fmt: skip
    """The rule on some of the tokens, whose state comes from those before, on other ranks: o `B S H V`, and the cache
    behind all tokens.

    A token changes the state by a product and a sum, so that what all of them do is S -> S A + B. Both are found at
    once, as what becomes of E more values a head that begin with one, of which no token has any. begins: `B`, rows
    whose first token here begins a document. cache: in front of all tokens. ends: of q, k and v, what the convolution
    keeps behind these tokens; that of the last rank with a token of a row goes into the cache.
    """
    (batch, tokens, heads, V), E, dtype = v.shape, q.shape[-1], wide(v).dtype
    one_BHEE = torch.eye(E, dtype=dtype, device=v.device).expand(batch, heads, E, E)
    if begins is not None:
        one_BHEE = one_BHEE.masked_fill(begins[:, None, None, None], 0)
    state_BHNE = torch.cat((one_BHEE.new_zeros(batch, heads, V, E), one_BHEE), 2)
    v_BSHN = torch.nn.functional.pad(v.to(dtype), (0, E))
    # Positions say what is padding, and not which rows begin.
    there = None if positions is None else torch.where(positions < 0, -1, 1)
    o_BSHN, state_BHNE = gated_delta_rule(q, k, v_BSHN, g, beta, state_BHNE, positions=there, segment_ids=segment_ids)
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
    check_positions("gdn", positions)
    if cache is not None and segment_ids is not None:
        raise ValueError("gdn: segment_ids with a cache\n    fix: give each document a row of the cache")


def _check_cache(params: GDN, x: Tensor, cfg: GDNConfig, cache: GDNCache, local: Heads) -> None:
    """local: the heads that a cache has under a layout."""
    widths = {letter: n for letter, n in cfg.sizes.items() if letter not in "HK"}
    if local.local is None or local.groups is None:
        heads, q_conv, v_conv = params.a_log.shape[0], params.q_conv, params.v_conv
    else:
        heads, q_conv, v_conv = local.local, None, None
        widths |= {"K": local.groups, "H": heads}
    turned, wanted = cache.state.mT.shape[1:], (heads, cfg.value_head_dim, cfg.key_head_dim)
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
        q_conv=(q_conv, "(K E) I W"),
        v_conv=(v_conv, "(H V) I W"),
        cache_q=(cache.q, "B (K E) U"),
        cache_k=(cache.k, "B (K E) U"),
        cache_v=(cache.v, "B (H V) U"),
        cache_state=(cache.state, "B H V E"),
    )
    for name in ("q", "k", "v", "state"):
        leaf, dtype = getattr(cache, name), wide(x).dtype if name == "state" else x.dtype
        if leaf.dtype != dtype:
            raise TypeError(
                f"gdn(cache=...): its {name} is in {leaf.dtype}, and for x in {x.dtype} it is in {dtype}\n"
                f"    fix: empty_caches(..., dtype={x.dtype})"
            )


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
    q, k, v, b, a, *gate = norm_linear(x, norm_weight, weights, [None] * len(weights), **options)
    a = a if params.a_up is None else linear(a, params.a_up)
    q, k, v, a = (t.unflatten(-1, (-1, width)) for t, width in ((q, E), (k, E), (v, V), (a, Y)))
    return q, k, v, _raised(params, gate[0], cfg) if gate else None, b, a


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
