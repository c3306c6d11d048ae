"""The experts of a mixture, once it is known which of them compute which token.

    out = sum_j w_j (act(x Wgate[e_j]) * (x Wup[e_j])) Wdown[e_j]

Letters: D model width, F feed-forward width, X experts, J experts a token, N tokens, M = N J rows; `...` leading
dimensions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .core import as_dtype, wide
from .grouped import grouped_linear
from .mlp import ACTIVATIONS, check_activation
from .primitive import primitive
from .shapes import check_shapes
from .wire import Wire

__all__ = ["dealt_mlp", "expert_mlp", "gated"]


@partial(primitive, differentiable=False)
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
    """x `... D`, indices and weights `... J`, gate and up `X F D`, down `X D F`, biases `X F` -> `... D` in x's dtype.

    Rows are sorted by expert and multiplied group by group: an expert that nobody chose is not read.
    swiglu_limit: gpt_oss's gate, with g and u clamped (g from above alone): `(u + 1) g sigmoid(swiglu_alpha g)`.
    """
    check_shapes(
        "expert_mlp",
        x=(x, "... D"),
        indices=(indices, "... J"),
        weights=(weights, "... J"),
        gate=(gate, "X F D"),
        up=(up, "X F D"),
        down=(down, "X D F"),
        gate_bias=(gate_bias, "X F"),
        up_bias=(up_bias, "X F"),
    )
    check_activation("expert_mlp", "activation", activation)
    chosen = indices.shape[-1]
    expert = indices.reshape(-1).long()
    order = expert.argsort(stable=True)
    counts = torch.zeros(gate.shape[0], dtype=torch.int64, device=gate.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))
    rows = as_dtype(x.reshape(-1, x.shape[-1])[order // chosen], gate.dtype)  # other than x's under autocast
    g, u = grouped_linear(rows, gate, counts), grouped_linear(rows, up, counts)
    g = g if gate_bias is None else g + gate_bias[expert[order]]
    u = u if up_bias is None else u + up_bias[expert[order]]
    y = grouped_linear(gated(g, u, activation, swiglu_limit, swiglu_alpha), down, counts)
    y_NJD = wide(y[order.argsort()]).unflatten(0, (-1, chosen))
    out_ND: Tensor = (y_NJD * weights.reshape(-1, chosen, 1)).sum(1)
    return out_ND.to(x.dtype).view(x.shape)


def dealt_mlp(
    wire: Wire, experts: int, x: Tensor, indices: Tensor, weights: Tensor, *blocks: Any, **options: Any
) -> Tensor:
    """`expert_mlp` where a rank has some of the experts: each row goes to the rank of its expert and comes back, so
    that a token's results are weighed and summed where it is. blocks, options: as there, `X` of this rank alone."""
    chosen = indices.shape[-1]
    expert = indices.reshape(-1).long()
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add(0, expert, torch.ones_like(expert))
    rows_MD, counts_PX, back = wire.deal(x.reshape(-1, x.shape[-1])[order // chosen], counts)
    own = torch.arange(counts_PX.shape[1], device=x.device).expand_as(counts_PX)
    index_MJ = own.reshape(-1).repeat_interleave(counts_PX.reshape(-1), output_size=rows_MD.shape[0])[:, None]
    y_MD = expert_mlp(rows_MD, index_MJ, weights.new_ones(index_MJ.shape), *blocks, **options)
    y_NJD = wide(back(y_MD)[order.argsort()]).unflatten(0, (-1, chosen))
    out_ND: Tensor = (y_NJD * weights.reshape(-1, chosen, 1)).sum(1)
    return out_ND.to(x.dtype).view(x.shape)


def gated(g: Tensor, u: Tensor, activation: str, swiglu_limit: float | None, swiglu_alpha: float) -> Tensor:
    """g and u `... F` -> `... F`."""
    if swiglu_limit is None:
        return ACTIVATIONS[activation](g) * u
    g, u = g.clamp(max=swiglu_limit), u.clamp(-swiglu_limit, swiglu_limit)
    return (u + 1) * (g * torch.sigmoid(swiglu_alpha * g))
