"""One chunk of the gated delta rule with a decay for each head, and its derivative by hand.

Within a chunk of C tokens every token reads the state S that the chunk begins with, and what the tokens before it
wrote. With L the running sum of g, and D_ij = exp(L_i - L_j) for j <= i, taken pair by pair so that nothing overflows:

    A = beta_i D_ij (k_i.k_j) below the diagonal,    P = D_ij (q_i.k_j) up to it
    y = beta (v - exp(L) k S^T),    w = (1 + A)^-1 y          what each token writes
    o = scale * (exp(L) q S^T + P w),    S' = exp(L_C) S + (exp(L_C - L) w)^T k

(Yang et al. 2024, arXiv:2406.06484, the UT transform.) A key head is multiplied with the states of all its value heads
at once, and is never repeated.

Letters: B batch, K key heads, G value heads a key head, H = K G, C tokens, E key width, V value width; kq has keys and
queries one after another, 2C tokens. Of gradients N = 2C tokens, M = G V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Grads", "apart", "backward", "begun", "forward", "inverse"]


class Grads(NamedTuple):
    """With respect to the arguments of `forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


class _Chunk(NamedTuple):
    """What forward and backward both need."""

    decay: Tensor  # B K G C C
    from_start: Tensor  # B K G C 1
    to_end: Tensor  # B K G C 1
    kk: Tensor  # B K C C
    qk: Tensor  # B K C C
    inverse: Tensor  # B K G C C
    read_k: Tensor  # B K G C V
    read_q: Tensor  # B K G C V
    missing: Tensor  # B K G C V
    write: Tensor  # B K G C V


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k `B K C E`, v `B H C V`, g, beta `B H C`, state `B H V E` -> o `B H C V` and the new state.

    documents: `B C+1`, of what the state has seen last, then of each token: a token sees those of its own alone.
    """
    heads = k.shape[1]
    v, g, beta, by_group = (_grouped(x, heads) for x in (v, g, beta, state))
    c = _chunk(torch.cat((k, q), 2), k, v, g, beta, by_group, documents)
    o_BKGCV = scale * (c.read_q + (c.decay * c.qk[:, :, None]) @ c.write)
    learnt_BHVE = (_flat(c.write * c.to_end).mT @ k).view(state.shape)
    return o_BKGCV.flatten(1, 2), torch.addcmul(learnt_BHVE, state, c.from_start[..., -1:, :].flatten(1, 2))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    d_o: Tensor,
    d_state: Tensor,
    documents: Tensor | None = None,
) -> Grads:
    """The gradients of the arguments, for d_o `B H C V` and d_state `B H V E` of the results."""
    heads, tokens = k.shape[1], k.shape[2]
    kq_BKCE = torch.cat((k, q), 2)
    v, g, beta, state, d_state = (_grouped(x, heads) for x in (v, g, beta, state, d_state))
    c, d_o_BKGCV = _chunk(kq_BKCE, k, v, g, beta, state, documents), _grouped(d_o, heads) * scale
    beta_BKGC1 = beta[..., None]
    # From what is written and read, back to the tokens.
    d_end_BKGCV = c.to_end * _by_group(k @ d_state.flatten(2, 3).mT, d_state)
    scores_BKGCC = c.decay * c.qk[:, :, None]
    d_write_BKGCV = scores_BKGCC.mT @ d_o_BKGCV + d_end_BKGCV
    d_y_BKGCV = c.inverse.mT @ d_write_BKGCV
    d_v_BKGCV = beta_BKGC1 * d_y_BKGCV
    d_read_BKNM = _flat(torch.cat((-d_v_BKGCV, d_o_BKGCV), 3) * c.from_start.repeat(1, 1, 1, 2, 1))
    d_kq_BKCE = d_read_BKNM @ state.flatten(2, 3)
    d_before = d_state * c.from_start[..., -1:, :] + (d_read_BKNM.mT @ kq_BKCE).view(state.shape)
    # From the products of tokens; a pair's gradient times its decay is that of their product.
    d_scores_BKGCC = (d_o_BKGCV @ c.write.mT) * c.decay
    d_a_BKGCC = (d_y_BKGCV @ c.write.mT).neg().tril(-1) * c.decay
    pairs_BKGCC = d_a_BKGCC * c.kk[:, :, None]
    d_beta = pairs_BKGCC.sum(-1) + (d_y_BKGCV * c.missing).sum(-1)
    d_kk_BKCC, d_qk_BKCC = (d_a_BKGCC * beta_BKGC1).sum(2), d_scores_BKGCC.sum(2)
    d_kq_BKCE = d_kq_BKCE + torch.cat((d_kk_BKCC + d_kk_BKCC.mT, d_qk_BKCC), 2) @ k
    d_k = d_kq_BKCE[:, :, :tokens] + d_qk_BKCC.mT @ q
    d_k = d_k + _flat(c.write * c.to_end) @ d_state.flatten(2, 3)
    # From the decays: token i with those before it gains what token j with those after it loses.
    pairs_BKGCC = pairs_BKGCC * beta_BKGC1 + d_scores_BKGCC * c.qk[:, :, None]
    d_end_BKGC = (d_end_BKGCV * c.write).sum(-1)
    d_sum = pairs_BKGCC.sum(-1) - pairs_BKGCC.sum(-2) - d_end_BKGC
    d_sum = d_sum + (c.read_q * d_o_BKGCV - c.read_k * d_v_BKGCV).sum(-1)
    d_last = d_end_BKGC.sum(-1, keepdim=True) + c.from_start[..., -1, :] * (d_state * state).sum((-1, -2))[..., None]
    d_g = d_sum.flip(-1).cumsum(-1).flip(-1) + d_last
    return Grads(d_kq_BKCE[:, :, tokens:], d_k, *(x.flatten(1, 2) for x in (d_v_BKGCV, d_g, d_beta, d_before)))


def _chunk(
    kq: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None
) -> _Chunk:
    tokens = k.shape[2]
    # Sums in fp64: a small decay after large ones would be lost in their difference.
    sum_BKGC = g.double().cumsum(-1)
    pair_BKGCC = (sum_BKGC[..., None] - sum_BKGC[..., None, :]).to(g.dtype)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).triu(1)
    from_start_BKGC1 = sum_BKGC.to(g.dtype).exp()[..., None]
    if documents is not None:
        later = later | apart(documents)[:, None, None]
        from_start_BKGC1 = from_start_BKGC1.masked_fill(begun(documents)[:, None, None, :, None], 0)
    decay_BKGCC = pair_BKGCC.masked_fill(later, -torch.inf).exp()
    kk_BKCC, qk_BKCC = (kq @ k.mT).split(tokens, 2)
    inverse_BKGCC = inverse(beta[..., None] * decay_BKGCC * kk_BKCC[:, :, None])
    read_BKGCV = _by_group(kq @ state.flatten(2, 3).mT, state)
    read_k_BKGCV, read_q_BKGCV = (x * from_start_BKGC1 for x in read_BKGCV.split(tokens, 3))
    missing_BKGCV = v - read_k_BKGCV
    write_BKGCV = inverse_BKGCC @ (beta[..., None] * missing_BKGCV)
    to_end_BKGC1 = decay_BKGCC[..., -1, :, None]
    return _Chunk(
        decay_BKGCC, from_start_BKGC1, to_end_BKGC1, kk_BKCC, qk_BKCC, inverse_BKGCC,
        read_k_BKGCV, read_q_BKGCV, missing_BKGCV, write_BKGCV,
    )  # fmt: skip


def apart(documents: Tensor) -> Tensor:
    """documents `B C+1` -> `B C C`, which tokens are of different ones."""
    own = documents[:, 1:]
    return own[:, :, None] != own[:, None]


def begun(documents: Tensor) -> Tensor:
    """documents `B C+1` -> `B C`, which tokens are of another than the state."""
    return documents[:, 1:] != documents[:, :1]


def inverse(a: Tensor) -> Tensor:
    """(1 + a)^-1 for a `... C C`, of which only what lies below the diagonal is read."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    found: Tensor = torch.linalg.solve_triangular(a, one, upper=False, unitriangular=True)
    return found


def _grouped(x: Tensor, heads: int) -> Tensor:
    found: Tensor = x.unflatten(1, (heads, -1))
    return found


def _by_group(x: Tensor, like: Tensor) -> Tensor:
    """x `B K C (G V)`, like `B K G V E` -> `B K G C V`."""
    found: Tensor = x.unflatten(-1, like.shape[2:4])
    return found.transpose(2, 3)


def _flat(x: Tensor) -> Tensor:
    """x `B K G C V` -> `B K C (G V)`."""
    return x.transpose(2, 3).flatten(3)
