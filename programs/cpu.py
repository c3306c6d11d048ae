"""The kernels of a CPU: primitives written for its compiler, where their plain form is slow. No C++ of our own.

rows, for a decode step, which is bound by reading weights and cache. A library's matrix product reads them at a third
of what the memory gives when x has a row or a few. Here it is one sum of products for each row of x. The compiler
makes one loop of these sums, which reads a weight once, at the speed of a plain sum; and with no call in the way, all
loops of a layer become one function with one parallel region.

flash, for prefill: torch's attention, which keeps a block of scores in the processor's cache.

Letters: R rows of x, D width, F output width, B batch, S query tokens, T key tokens, H query heads, K key/value heads,
G query heads per key/value head, E key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .. import functional as F
from ..functional.core import grouped, masked_softmax, present, visible
from ..functional.primitive import PRIMITIVES

if TYPE_CHECKING:
    from .lower import Call

__all__ = ["CPU_OPS", "MOST_ROWS", "few_queries", "few_rows", "flash"]

P = ParamSpec("P")
R = TypeVar("R")

# With more, computing takes longer than reading, and a matrix product is faster (measured from 1 to 16).
MOST_ROWS = 8
# primitive -> an op of the same arguments and results
CPU_OPS: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("meshfn_cpu", "DEF")


def few_rows(call: Call) -> str | None:
    """Whether `rows` computes a product, else the reason why not."""
    x = call.arguments["x"]
    weights = call.arguments.get("weights") or [call.arguments[n] for n in ("gate", "up") if n in call.arguments]
    if (rows := x.shape[:-1].numel()) > MOST_ROWS:
        return f"{rows} rows, at most {MOST_ROWS}"
    return None if all(w.stride(-1) == 1 for w in weights) else "a weight whose rows are not contiguous"


def few_queries(call: Call) -> str | None:
    """Whether `rows` computes an attention, else the reason why not."""
    q, k = call.arguments["q"], call.arguments["k"]
    queries = q.shape[1] * (1 if call.arguments["kv_index"] is not None else q.shape[2] // k.shape[2])
    return f"{queries} queries for each key, at most {MOST_ROWS}" if queries > MOST_ROWS else None


def flash(call: Call) -> str | None:
    """Whether torch's attention computes a call, else the reason why not."""
    given = [name for name in ("softcap", "sinks") if call.arguments[name] is not None]
    return f"no {given[0]}" if given else None


def _op(fn: Callable[P, R]) -> Callable[P, R]:
    """Register as the op that stands in for the primitive of the same name."""
    name = fn.__name__
    _library.define(name + torch.library.infer_schema(PRIMITIVES[name], mutates_args=()))
    _library.impl(name, fn, "CompositeImplicitAutograd")
    CPU_OPS[name] = getattr(torch.ops.meshfn_cpu, name).default
    return fn


@_op
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    *,
    norm_bias: Tensor | None = None,
    **norm: Any,
) -> list[Tensor]:
    """As `functional.norm_linear`."""
    if norm_weight is not None:
        x = F.normalize(x, norm_weight, norm_bias, **norm)
    x_RD = _once(_wide(x.reshape(-1, x.shape[-1])))
    found = []
    for weight, bias in zip(weights, biases, strict=True):
        sums = [(x_D * weight.to(x_D.dtype)).sum(-1) for x_D in x_RD.unbind()]
        out = torch.stack(sums).to(x.dtype).reshape(*x.shape[:-1], -1)
        found.append(out if bias is None else out + bias)
    return found


@_op
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
    """As `functional.gated_mlp`."""
    g, u = norm_linear(x, norm_weight, [gate, up], [gate_bias, up_bias], **norm)
    return F.ACTIVATIONS[activation](g) * u


@_op
def plain_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    **norm: Any,
) -> Tensor:
    """As `functional.plain_mlp`."""
    (u,) = norm_linear(x, norm_weight, [up], [up_bias], **norm)
    return F.ACTIVATIONS[activation](u)


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
) -> Tensor:
    """As `functional.decode_attention`, with a sum for each query of a key, so that keys and values are read once."""
    see = visible(causal=causal, mask=mask, window=window, q_positions=q_positions, k_positions=k_positions)
    assert see is not None
    q, k, v = present(q, q_positions), present(k, k_positions), present(v, k_positions)
    k, v, groups = grouped(q, k, v, kv_index)
    q_BSKGE = _once(_wide(q)).unflatten(2, (k.shape[2], groups))
    k_BTKE, v_BTKV = _wide(k), _wide(v)
    # Keys innermost in what is stored, for the softmax that follows.
    scores = [[(x[:, None] * k_BTKE).sum(-1).transpose(1, 2) for x in s.unbind(2)] for s in q_BSKGE.unbind(1)]
    scores_BKGST = torch.stack([torch.stack(each, 2) for each in scores], 3)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    weights_BKGST = _once(masked_softmax(scores_BKGST, scale, see, softcap, sinks))
    outs = [
        [(w_BKT.transpose(1, 2)[..., None] * v_BTKV).sum(1) for w_BKT in weights_BKGT.unbind(2)]
        for weights_BKGT in weights_BKGST.unbind(3)
    ]
    o_BSHV = torch.stack([torch.stack(each, 2) for each in outs], 1).flatten(2, 3)
    return o_BSHV.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0).to(v.dtype)


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
    if kv_index is not None:
        k, v = k.index_select(2, kv_index), v.index_select(2, kv_index)
    q_BHSE, k_BKTE, v_BKTV = (_wide(x).transpose(1, 2) for x in (q, k, v))
    o_BHSV = tnf.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTV, attn_mask=see, scale=softmax_scale, enable_gqa=True
    )
    o_BSHV = o_BHSV.transpose(1, 2).to(v.dtype)
    return o_BSHV if see is None else o_BSHV.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _once(x: Tensor) -> Tensor:
    """x, computed once: as a part of the loop over a weight it would be computed again for each of its rows. The
    compiler does not look through a view of explicit strides."""
    return x.as_strided(x.shape, x.stride())
