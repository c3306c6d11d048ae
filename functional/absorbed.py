"""Attention in the latent: queries of all heads against one latent a token, which is key and value at once.

    q'_h = q_h,n Wk_h;    o_h = (softmax(scale * (q'_h . c + q_h,r . k_r)) c) Wv_h           (arXiv:2405.04434, 2.1)

Letters: B batch, S query tokens, T key tokens, H heads, L latent, N non-rotary and R rotary key width, E = N + R, V
value width; NV = N + V and LR = L + R, one beside the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import check_rules, masked_softmax, present, visible, wide
from .primitive import primitive
from .shapes import ShapeError, check_shapes

__all__ = ["absorbed_attention", "absorbed_core", "split_heads"]


def absorbed_attention(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kv_index: Tensor | None = None,
    head_offset: int | None = None,
    local_heads: int | None = None,
) -> Tensor:
    """q `B S H E` (turned), latent `B T LR` (the rotary key last, turned), kv_b `(H NV) L` -> `B S H V`.

    nope_dim: N. Masks, windows, documents and positions as in `dot_product_attention`. kv_index, head_offset,
    local_heads: for cores that treat heads differently; this one does not, and every head reads the one latent.
    Computed in fp32 at least, returned in the latent's dtype. Raises `ShapeError` before any work.
    """
    q_ids, k_ids = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    sizes = check_shapes("absorbed_attention", q=(q, "B S H E"), latent=(latent, "B T LR"), kv_b=(kv_b, "HNV L"))
    heads, width = sizes["H"], sizes["E"] - nope_dim
    rows = sizes["HNV"] // max(heads, 1)
    if rows * heads != sizes["HNV"] or not 0 < nope_dim < min(sizes["E"], rows) or sizes["L"] + width != sizes["LR"]:
        raise ShapeError(
            f"absorbed_attention: H={heads} heads of E={sizes['E']} with nope_dim={nope_dim} need latents of "
            f"L+R={sizes['L'] + width} and more than nope_dim rows a head in kv_b, not {sizes['LR']} and "
            f"{sizes['HNV']} rows in all"
        )
    if q.dtype != latent.dtype:
        raise TypeError(f"absorbed_attention(latent=...): its dtype is {latent.dtype}, that of q {q.dtype}")
    check_rules("absorbed_attention", q, latent, mask, window, q_ids, k_ids, q_positions, k_positions)
    if (causal or window is not None) and q_positions is None:
        raise ShapeError("absorbed_attention: causal or window needs q_positions (B S) and k_positions (B T)")
    return absorbed_core(
        q,
        latent,
        kv_b,
        nope_dim=nope_dim,
        softmax_scale=softmax_scale,
        causal=causal,
        mask=mask,
        window=window,
        q_segment_ids=q_ids,
        k_segment_ids=k_ids,
        q_positions=q_positions,
        k_positions=k_positions,
    )


@primitive
def absorbed_core(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    nope_dim: int,
    softmax_scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Tensor:
    """`absorbed_attention` after its checks."""
    see = visible(
        causal=causal,
        mask=mask,
        window=window,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    wk_HNL, wv_HVL = split_heads(wide(kv_b), q.shape[2], nope_dim)
    q_BSHE, c_BTE = wide(present(q, q_positions)), wide(present(latent[:, :, None], k_positions))[:, :, 0]
    q_BSHL = torch.einsum("bshn,hnl->bshl", q_BSHE[..., :nope_dim], wk_HNL)
    q_BSHE = torch.cat((q_BSHL, q_BSHE[..., nope_dim:]), -1)
    scores = torch.einsum("bshe,bte->bhst", q_BSHE, c_BTE)[:, None]  # one latent for all: B K=1 G=H S T
    weights = masked_softmax(scores, q.shape[-1], softmax_scale, see, None, None)[:, 0]
    o_BSHL = torch.einsum("bhst,btl->bshl", weights, c_BTE[..., : kv_b.shape[1]])
    o = torch.einsum("bshl,hvl->bshv", o_BSHL, wv_HVL).to(latent.dtype)
    return o if see is None else o.masked_fill(~see.any(-1).transpose(1, 2)[..., None], 0)


def split_heads(kv_b: Tensor, heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    """kv_b `(H NV) L` -> the rows of keys `H N L` and of values `H V L`, as views."""
    by_head = kv_b.unflatten(0, (heads, -1))
    return by_head[:, :nope_dim], by_head[:, nope_dim:]
