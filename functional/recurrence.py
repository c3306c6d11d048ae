"""The primitives of a gated delta net, over a batch with a cache: its convolution, its rule, and both in one step.

Rows of a batch go on from their states, begin anew where they hold position 0, and keep every byte where they hold no
token.

Letters: B batch, S tokens, K key heads, H value heads, E key width, V value width, W convolution width, I = 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .conv import causal_conv
from .core import as_dtype
from .delta import gated_delta_rule_step, gdn_gates, l2norm
from .delta_chunked import gated_delta_rule_chunked
from .norm import gated_rms_norm
from .primitive import primitive
from .rows import zero_absent

__all__ = ["gated_delta_rule", "gdn_step", "short_conv"]


@partial(primitive, differentiable=False)
def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    *,
    activation: str,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`causal_conv` by heads: x `B S H E`, weight `(H E) I W`, state `B (H E) W-1` -> y as x, and the new state."""
    old, one = _begun(state, positions), x.shape[1] == 1  # whose padding is all of a row or nothing
    # A cache keeps its dtype under autocast, whose projections have another.
    tokens = as_dtype(x.flatten(2), x.dtype if old is None else old.dtype)
    y, new = causal_conv(
        tokens,
        weight[:, 0],
        activation=activation,
        initial_state=old,
        output_final_state=True,
        positions=None if one else positions,
        segment_ids=None if one else segment_ids,
    )
    assert new is not None
    return as_dtype(y, x.dtype).view(x.shape), _kept(new, state, positions)


@partial(primitive, differentiable=False)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule of `delta` with q and k `B S K E` brought to length 1, v `B S H V`, g `B S H` or `B S H E`, beta
    `B S H`, state `B H V E` in fp32 at least -> o `B S H V` in v's dtype, and the new state."""
    old, q, k = _begun(state, positions), l2norm(q), l2norm(k)
    told: dict[str, Any] = {"initial_state": old, "output_final_state": True, "positions": positions}
    if q.shape[1] == 1:
        o, new = gated_delta_rule_step(q, k, v, g, beta, **told)
    else:
        o, new = gated_delta_rule_chunked(q, k, v, g, beta, **told, segment_ids=segment_ids)
    assert new is not None
    return o, _kept(new, state, positions)


@partial(primitive, differentiable=False)
def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    q_conv: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    cache_q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_state: Tensor,
    positions: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_act: str = "silu",
    eps: float = 1e-6,
    scale_in_fp32: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A gated delta net between its projections, for one token a row: `short_conv`, `gdn_gates`, `gated_delta_rule` and
    `gated_rms_norm` -> o `B 1 H V`, zeros in rows without a token, and the cache's four states.

    q, k `B 1 K E` and v `B 1 H V` before the convolution, z `B 1 H V`, b `B 1 H`, a `B 1 H` or `B 1 H E`, *_conv
    `(H E) I W`, a_log `H`, dt_bias as a without B and 1, flat or not, o_norm `V`, states as `GDNCache` has them.
    As one node: a program's graph has it where nothing stands between the four (`programs/join_gdn`).
    """
    told: dict[str, Any] = {"activation": activation, "positions": positions}
    q, q_state = short_conv(q, q_conv, cache_q, **told)
    k, k_state = short_conv(k, k_conv, cache_k, **told)
    v, v_state = short_conv(v, v_conv, cache_v, **told)
    g, beta = gdn_gates(a, b, a_log, dt_bias.view(a.shape[2:]))
    beta = 2 * beta if allow_neg_eigval else beta
    o, state = gated_delta_rule(q, k, v, g, beta, cache_state, positions=positions)
    o = gated_rms_norm(o, o_norm, z, eps=eps, activation=gate_act, scale_in_fp32=scale_in_fp32)
    there = None if positions is None else positions >= 0
    return zero_absent(o, there), q_state, k_state, v_state, state


def _begun(state: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """The state, zeros in rows that begin or have no token, whatever it holds of them."""
    if state is None or positions is None:
        return state
    return state.masked_fill(_rows((positions == 0).any(1) | (positions < 0).all(1), state), 0)


def _kept(new: Tensor, old: Tensor | None, positions: Tensor | None) -> Tensor:
    """The new state, and the old one, to the bit, in rows without a token."""
    return new if old is None or positions is None else torch.where(_rows((positions >= 0).any(1), new), new, old)


def _rows(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (like.dim() - 1))
