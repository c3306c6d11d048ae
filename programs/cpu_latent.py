"""Latent attention on a CPU: one pass over the cache, in blocks that stay in the processor's own cache.

A block of latents is multiplied with the queries of all heads, and its scores with the same block, while it is there;
sums are corrected as the highest score grows (Milakov and Gimelshein 2018, arXiv:1805.02867). An operator, since a
compiler would make one pass for scores and another for values.

Letters: B batch, S query tokens, T key tokens, H heads, L latent, LR latent and rotary key.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["latent_attention"]

# Tokens of a block: 512 of V3's 576 numbers are 1.2 MB in fp32.
BLOCK = 512


@torch.library.custom_op("meshfn_cpu::latent_attention", mutates_args=(), device_types="cpu")
def latent_attention(
    q: Tensor, latent: Tensor, see: Tensor | None, absent: Tensor | None, width: int, scale: float
) -> Tensor:
    """q `B S H LR` in fp32 at least, latent `B T LR`, see boolean `B|1 H|1 S T`, absent boolean `B T` (slots that hold
    no token, whatever is in them), width L -> `B S H L` in q's dtype."""
    B, S, H, E = q.shape
    q_BNE = (q * scale).reshape(B, S * H, E)
    most = q_BNE.new_full((B, S * H, 1), torch.finfo(q.dtype).min)
    total, o_BNL = torch.zeros_like(most), q_BNE.new_zeros(B, S * H, width)
    for first in range(0, latent.shape[1], BLOCK):
        c_BTE = latent[:, first : first + BLOCK]
        if absent is not None and (here := absent[:, first : first + BLOCK]).any():
            c_BTE = c_BTE.masked_fill(here[..., None], 0)
        c_BTE = c_BTE.to(q.dtype)
        scores = torch.bmm(q_BNE, c_BTE.mT)
        if see is not None:
            hidden = ~see[..., first : first + BLOCK].transpose(1, 2)  # B S H T
            scores.view(B, S, H, c_BTE.shape[1]).masked_fill_(hidden, torch.finfo(q.dtype).min)
        before, most = most, torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, shrink = scores.sub_(most).exp_(), (before - most).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        o_BNL = torch.baddbmm(o_BNL * shrink, weights, c_BTE[..., :width])
    return (o_BNL / total).view(B, S, H, width)


@latent_attention.register_fake
def _(q: Tensor, latent: Tensor, see: Tensor | None, absent: Tensor | None, width: int, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:-1], width)
