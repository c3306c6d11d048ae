"""The kernels of a CPU: primitives written for its compiler, where their plain form is slow. No C++ of our own.

`gemv`, as plans call it, multiplies a few tokens with a weight. A decode step is bound by reading weights and cache,
and a library's matrix product reads them at a third of what the memory gives when x has a token or a few. Here it is
one sum of products for each token. The compiler makes one loop of these sums, which reads a weight once, at the speed
of a plain sum; and with no call in the way, all loops of a layer become one function.

`one_pass` is the attention of a decode step in the same way: it reads keys and values once, whatever queries they have.

`onednn` is a library's product of many tokens in fp32, faster here than the one that torch takes.

`flash` is torch's attention, for prefill: it keeps a block of scores in the processor's cache.

`latent` is latent attention absorbed: see `programs/cpu_latent.py`. `chosen` reads the experts that a few tokens chose,
in loops as those of `gemv`.

`taps` is a step of the convolution in front of a gated delta net. `two_passes` is a step of its rule: a loop over the
state for what it says of key and query, and one that writes it where it lies. A library's product of a state with two
columns took nine times as long, and wants the state in memory of its own.

Letters: N tokens of x, D width, B batch, S query tokens, T key tokens, H query heads (of a gated delta net value
heads), K key/value heads, G query heads per key/value head, E key width, V value width, Y decays of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .. import functional as F
from ..functional.absorbed import split_heads
from ..functional.core import grouped, masked_softmax, present, visible, wide
from ..functional.delta import l2norm
from ..functional.experts import gated
from ..functional.primitive import PRIMITIVES
from .cpu_latent import latent_attention
from .dynamo import largest
from .kernel import Call, Kernel
from .onednn import available, onednn_linear

__all__ = ["CPU_KERNELS", "MOST_TOKENS"]

P = ParamSpec("P")
R = TypeVar("R")

# With more, computing takes longer than reading, and a matrix product is faster (measured from 1 to 16).
MOST_TOKENS = 8
_NAMESPACE = "meshfn_cpu"
_library = torch.library.Library(_NAMESPACE, "DEF")


def _op(fn: Callable[P, R], prefix: str = "") -> Callable[P, R]:
    """Register as `torch.ops.meshfn_cpu.<prefix><name>`, with the arguments of the primitive of that name."""
    name = fn.__name__
    _library.define(prefix + name + torch.library.infer_schema(PRIMITIVES[name], mutates_args=()))
    _library.impl(prefix + name, fn, "CompositeImplicitAutograd")
    return fn


def _products_by(product: Callable[[Tensor, list[Tensor]], list[Tensor]], prefix: str) -> None:
    """Register norm_linear, gated_mlp and plain_mlp, as in `functional`, over another product: tokens `N D`, weights
    `F_i D` -> `N F_i` each."""

    def norm_linear(
        x: Tensor,
        norm_weight: Tensor | None,
        weights: list[Tensor],
        biases: list[Tensor | None],
        *,
        norm_bias: Tensor | None = None,
        **norm: Any,
    ) -> list[Tensor]:
        if norm_weight is not None:
            x = F.normalize(x, norm_weight, norm_bias, **norm)
        found = product(x.reshape(-1, x.shape[-1]), weights)
        outs = [out.to(x.dtype).reshape(*x.shape[:-1], -1) for out in found]
        return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]

    def gated_mlp(
        x: Tensor,
        norm_weight: Tensor | None,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        *,
        activation: str = "silu",
        **norm: Any,
    ) -> Tensor:
        g, u = norm_linear(x, norm_weight, [gate, up], [gate_bias, up_bias], **norm)
        return F.ACTIVATIONS[activation](g) * u

    def plain_mlp(
        x: Tensor,
        norm_weight: Tensor | None,
        up: Tensor,
        up_bias: Tensor | None = None,
        *,
        activation: str = "gelu",
        **norm: Any,
    ) -> Tensor:
        (u,) = norm_linear(x, norm_weight, [up], [up_bias], **norm)
        return F.ACTIVATIONS[activation](u)

    for fn in (norm_linear, gated_mlp, plain_mlp):
        _op(fn, prefix)


def _by_sums(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    x_ND = _once(wide(x))
    return [torch.stack([(x_D * w.to(x_D.dtype)).sum(-1) for x_D in x_ND.unbind()]) for w in weights]


def _by_onednn(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [onednn_linear(x, w) for w in weights]


_products_by(_by_sums, "")
_products_by(_by_onednn, "onednn_")


@_op
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Tensor,
    k_positions: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    kv_index: Tensor | None = None,
    head_offset: int | None = None,
    local_heads: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """As `functional.decode_attention`: a sum over E and one over T for each of the S G queries of a key, which the
    compiler joins into one loop over the keys and one over the values."""
    see = visible(causal=causal, mask=mask, window=window, q_positions=q_positions, k_positions=k_positions)
    assert see is not None
    dtype = v.dtype
    k, v, groups = grouped(q, wide(present(k, k_positions)), wide(present(v, k_positions)), kv_index)
    q_BSKGE = _once(wide(present(q, q_positions))).unflatten(2, (k.shape[2], groups))

    def scores_of(q: Tensor) -> Tensor:
        # Keys innermost in what is stored, for the softmax that follows.
        return (q[:, None] * k).sum(-1).transpose(1, 2)  # B K E -> B K T

    def values_of(weights: Tensor) -> Tensor:
        return (weights.transpose(1, 2)[..., None] * v).sum(1)  # B K T -> B K V

    scores = [torch.stack([scores_of(q_BKE) for q_BKE in q_BKGE.unbind(2)], 2) for q_BKGE in q_BSKGE.unbind(1)]
    scores_BKGST = torch.stack(scores, 3)
    weights_BKGST = _once(masked_softmax(scores_BKGST, q.shape[-1], softmax_scale, see, softcap, sinks))
    o = [torch.stack([values_of(w_BKT) for w_BKT in w_BKGT.unbind(2)], 2) for w_BKGT in weights_BKGST.unbind(3)]
    o_BSHV = torch.stack(o, 1).flatten(2, 3).masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0).to(dtype)
    return o_BSHV if gate is None else o_BSHV * gate.sigmoid()


@_op
def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kv_index: Tensor | None = None,
    **rules: Any,
) -> Tensor:
    """As `functional.core.core_attention`, in fp32 for half precision too."""
    see = visible(q_positions=q_positions, k_positions=k_positions, **rules)
    q, k, v = present(q, q_positions), present(k, k_positions), present(v, k_positions)
    k, v, _ = grouped(q, k, v, kv_index)
    # torch keeps scores out of memory only where keys and values are equally wide; zeros change no score and no value.
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    width = max(k.shape[-1], v.shape[-1])
    q_BHSE, k_BKTE, v_BKTE = (tnf.pad(wide(x), (0, width - x.shape[-1])).transpose(1, 2) for x in (q, k, v))
    o_BHSE = tnf.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, attn_mask=see, scale=scale, enable_gqa=True)
    o_BSHV = o_BHSE.transpose(1, 2)[..., : v.shape[-1]].to(v.dtype)
    return o_BSHV if see is None else o_BSHV.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0)


@_op
def absorbed_core(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    **rules: Any,
) -> Tensor:
    """As `functional.absorbed.absorbed_core`; of a few tokens the products with `kv_b` are sums too."""
    see = visible(q_positions=q_positions, k_positions=k_positions, **rules)
    wk_HNL, wv_HVL = split_heads(kv_b, q.shape[2], nope_dim)
    q_BSHE = wide(present(q, q_positions))
    if q.shape[0] * q.shape[1] <= MOST_TOKENS:
        q_BSHL = (_once(q_BSHE)[..., :nope_dim, None] * wide(wk_HNL)).sum(-2)
    else:
        q_BSHL = torch.einsum("bshn,hnl->bshl", q_BSHE[..., :nope_dim], wide(wk_HNL))
    q_BSHE = torch.cat((q_BSHL, q_BSHE[..., nope_dim:]), -1)
    absent = None if k_positions is None else (k_positions < 0).expand(latent.shape[:2])
    o_BSHL: Tensor = latent_attention(q_BSHE, latent, see, absent, kv_b.shape[1], softmax_scale)
    if q.shape[0] * q.shape[1] <= MOST_TOKENS:
        o_BSHV = (o_BSHL[..., None, :] * wide(wv_HVL)).sum(-1).to(latent.dtype)
    else:
        o_BSHV = torch.einsum("bshl,hvl->bshv", o_BSHL, wide(wv_HVL)).to(latent.dtype)
    return o_BSHV if see is None else o_BSHV.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0)


@_op
def expert_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.702,
) -> Tensor:
    """As `functional.expert_mlp`: a sum of products for each token and each expert that it chose."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = []
    for x_D, e_J, w_J in zip(
        _once(wide(x.reshape(-1, x.shape[-1]))), indices.flatten(0, -2), weights.flatten(0, -2), strict=True
    ):
        g_JF, u_JF = ((x_D * w[e_J].to(dtype)).sum(-1) for w in (gate, up))
        g_JF = g_JF if gate_bias is None else g_JF + gate_bias[e_J]
        u_JF = u_JF if up_bias is None else u_JF + up_bias[e_J]
        h_JF = _once(gated(g_JF, u_JF, activation, swiglu_limit, swiglu_alpha))
        y_JD = (h_JF[:, None] * down[e_J].to(dtype)).sum(-1)
        out.append((y_JD * w_J[:, None]).sum(0))
    return torch.stack(out).to(x.dtype).view(x.shape)


@_op
def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    activation: str,
    positions: Tensor,
    segment_ids: None = None,
) -> tuple[Tensor, Tensor]:
    """As `functional.short_conv`, of one token a row. The taps are summed apart from the activation: they read a weight
    by steps, which the compiler does number by number, and an exponential so is slow."""
    position_B11 = positions[..., None]
    old_BUC = state.masked_fill(position_B11 <= 0, 0).mT  # a row that begins has none, nor one without a token
    x_B1C = x.flatten(2).to(state.dtype)
    taps = wide(weight[:, 0]).unbind(1)
    y_BC = wide(x_B1C[:, 0]) * taps[-1]
    for seen_BC, tap_C in zip(wide(old_BUC).unbind(1), taps[:-1], strict=True):
        y_BC = torch.addcmul(y_BC, seen_BC, tap_C)
    y = F.ACTIVATIONS[activation](_once(y_BC)).to(x.dtype).view(x.shape)
    return y, torch.where(position_B11 < 0, state, torch.cat((old_BUC[:, 1:], x_B1C), 1).mT)


@_op
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    positions: Tensor,
    segment_ids: None = None,
) -> tuple[Tensor, Tensor]:
    """As `functional.gated_delta_rule`, of one token a row. Sums over E, which is innermost in a state."""
    groups, scale = v.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    given = l2norm(q), l2norm(k), v, g.view(*v.shape[:3], -1), beta[..., None]
    q_BHE, k_BHE, v_BHV, g_BHY, beta_BH1 = (wide(present(x, positions))[:, 0] for x in given)
    q_BHE, k_BHE = (_once(x.repeat_interleave(groups, 1)) for x in (q_BHE, k_BHE))
    position_B111 = positions[..., None, None]
    old_BHVE = state.masked_fill(position_B111 == 0, 0)  # of a row that begins
    decayed_BHVE = old_BHVE * _once(g_BHY.exp())[:, :, None]
    said_BHV, seen_BHV = ((decayed_BHVE * x[:, :, None]).sum(-1) for x in (k_BHE, q_BHE))
    delta_BHV = _once(beta_BH1 * (v_BHV - said_BHV))
    o_BHV = scale * (seen_BHV + (q_BHE * k_BHE).sum(-1, keepdim=True) * delta_BHV)
    new_BHVE = torch.addcmul(decayed_BHVE, delta_BHV[..., None], k_BHE[:, :, None])
    return o_BHV[:, None].to(v.dtype), torch.where(position_B111 < 0, old_BHVE, new_BHVE)


def _once(x: Tensor) -> Tensor:
    """x, computed once: as a part of the loop over a weight it would be computed again for each of its rows. The
    compiler does not look through a view of explicit strides; it takes them for those of the memory of x, so x is
    given memory of its own first, by negating it twice: torch 2.11 takes a mere copy out again."""
    x = -(-x).contiguous()
    return x.as_strided(x.shape, x.stride())


def _weights(call: Call) -> list[Tensor]:
    return call.arguments.get("weights") or [call.arguments[n] for n in ("gate", "up") if n in call.arguments]


def _tokens(x: Tensor) -> int:
    """How many there are, where that changes from call to call at most: to compare the size itself would fix it."""
    return math.prod(map(largest, x.shape[:-1]))


def _gemv(call: Call) -> str | None:
    if (tokens := _tokens(call.arguments["x"])) > MOST_TOKENS:
        return f"{tokens} tokens, at most {MOST_TOKENS}"
    return None if all(w.stride(-1) == 1 for w in _weights(call)) else "a weight that lies by columns"


def _onednn(call: Call) -> str | None:
    if not available():
        return "this torch has none"
    if call.arguments["x"].dtype != torch.float32:
        return "float32 alone"  # half precision goes to oneDNN as it is
    return None if all(w.stride(-1) == 1 for w in _weights(call)) else "a weight that lies by columns"


def _one_pass(call: Call) -> str | None:
    q, k = call.arguments["q"], call.arguments["k"]
    queries = q.shape[1] * (1 if call.arguments["kv_index"] is not None else q.shape[2] // k.shape[2])
    return f"{queries} queries a key, at most {MOST_TOKENS}" if queries > MOST_TOKENS else None


def _flash(call: Call) -> str | None:
    given = [name for name in ("softcap", "sinks") if call.arguments[name] is not None]
    return f"{given[0]} is not supported" if given else None


def _chosen(call: Call) -> str | None:
    if (tokens := _tokens(call.arguments["x"])) > MOST_TOKENS:
        return f"{tokens} tokens, at most {MOST_TOKENS}"
    experts, choices = call.arguments["gate"].shape[0], call.arguments["indices"].numel()
    return f"{choices} choices among {experts} experts" if choices > experts else None


def _one_token(call: Call) -> str | None:
    x = call.arguments["x" if call.primitive == "short_conv" else "q"]
    if (tokens := x.shape[1]) != 1:
        return f"{tokens} tokens a row, 1 alone"
    missing = [name for name in ("state", "positions") if call.arguments[name] is None]
    if missing:
        return f"no {missing[0]}"
    return None if call.arguments["segment_ids"] is None else "documents"


_ops = getattr(torch.ops, _NAMESPACE)
CPU_KERNELS = (
    Kernel("gemv", "norm_linear", _ops.norm_linear.default, _gemv),
    Kernel("gemv", "gated_mlp", _ops.gated_mlp.default, _gemv),
    Kernel("gemv", "plain_mlp", _ops.plain_mlp.default, _gemv),
    Kernel("onednn", "norm_linear", _ops.onednn_norm_linear.default, _onednn),
    Kernel("onednn", "gated_mlp", _ops.onednn_gated_mlp.default, _onednn),
    Kernel("onednn", "plain_mlp", _ops.onednn_plain_mlp.default, _onednn),
    Kernel("one_pass", "decode_attention", _ops.decode_attention.default, _one_pass),
    Kernel("flash", "core_attention", _ops.core_attention.default, _flash),
    Kernel("latent", "absorbed_core", _ops.absorbed_core.default),
    Kernel("chosen", "expert_mlp", _ops.expert_mlp.default, _chosen),
    Kernel("taps", "short_conv", _ops.short_conv.default, _one_token),
    Kernel("two_passes", "gated_delta_rule", _ops.gated_delta_rule.default, _one_token),
)
