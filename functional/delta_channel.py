"""One chunk of the gated delta rule with a decay for each channel of the key (KDA), and its derivative by hand.

The equations are those of `delta_head`, but the decay stands inside the product of two tokens, j <= i:

    pair(a, b)_ij = sum_e a_ie b_je exp(L_ie - L_je)

Of a sub-block of tokens with itself the factors are taken one by one, `R R E` numbers. Against the tokens in front of
the sub-block it is a matrix product, (a_i exp(L_i - L_r)) . (b_j exp(L_r - L_j)) with r the last token in front, and
both exponents are at most 0. (Kimi Linear 2025, arXiv:2510.26692.)

Letters: B batch, H heads, C tokens, E key width, V value width, R tokens of a sub-block, r tokens in
front of it; a 2 for keys and queries, N = 2C of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .delta_head import Grads, apart, begun, inverse

__all__ = ["backward", "forward"]

SUB_BLOCK = 16


class _Chunk(NamedTuple):
    """What forward and backward both need."""

    sum: Tensor  # B H C E
    from_start: Tensor  # B H C E
    to_end: Tensor  # B H C E
    pairs: Tensor  # B H 2 C C
    inverse: Tensor  # B H C C
    read: Tensor  # B H 2 C V
    missing: Tensor  # B H C V
    write: Tensor  # B H C V


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
    """q, k, g `B H C E`, v `B H C V`, beta `B H C`, state `B H V E` -> o `B H C V` and the new state. documents: as in
    `delta_head`."""
    c = _chunk(torch.stack((k, q), 2), k, v, g, beta, state, documents)
    o = scale * (c.read[:, :, 1] + c.pairs[:, :, 1] @ c.write)
    return o, state * c.from_start[:, :, -1:] + c.write.mT @ (k * c.to_end)


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
    kq_BH2CE = torch.stack((k, q), 2)
    c, d_o = _chunk(kq_BH2CE, k, v, g, beta, state, documents), d_o * scale
    beta_BHC1 = beta[..., None]
    # From what is written and read, back to the tokens.
    d_write = c.pairs[:, :, 1].mT @ d_o + (k * c.to_end) @ d_state.mT
    d_y = c.inverse.mT @ d_write
    d_v = beta_BHC1 * d_y
    d_read_BH2CV = torch.stack((-d_v, d_o), 2)
    d_kq_BH2CE = (d_read_BH2CV @ state[:, :, None]) * c.from_start[:, :, None]
    reads_BHNE = (kq_BH2CE * c.from_start[:, :, None]).flatten(2, 3)
    d_before = d_state * c.from_start[:, :, -1:] + d_read_BH2CV.flatten(2, 3).mT @ reads_BHNE
    # From the products of tokens.
    d_a = -(d_y @ c.write.mT).tril(-1)
    d_pairs_BH2CC = torch.stack((d_a * beta_BHC1, (d_o @ c.write.mT).tril()), 2)
    if documents is not None:
        d_pairs_BH2CC = d_pairs_BH2CC.masked_fill(apart(documents)[:, None, None], 0)
    d_rows_BH2CE, d_columns = _pairs_backward(kq_BH2CE, k, c.sum, d_pairs_BH2CC)
    d_beta = (d_a * c.pairs[:, :, 0]).sum(-1) + (d_y * c.missing).sum(-1)
    d_kq_BH2CE = d_kq_BH2CE + d_rows_BH2CE
    d_end = (c.write @ d_state) * c.to_end
    d_columns = d_columns + d_end
    # From the decays: a token gains with those before it what those lose.
    d_sum = (kq_BH2CE * d_kq_BH2CE).sum(2) - k * d_columns
    d_last = (k * d_end).sum(2, keepdim=True) + c.from_start[:, :, -1:] * (d_state * state).sum(2, keepdim=True)
    d_g = d_sum.flip(2).cumsum(2).flip(2) + d_last
    return Grads(d_kq_BH2CE[:, :, 1], d_kq_BH2CE[:, :, 0] + d_columns, d_v, d_g, d_beta, d_before)


def _chunk(
    kq: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None
) -> _Chunk:
    sum_BHCE = g.double().cumsum(2)
    from_start_BHCE = sum_BHCE.to(g.dtype).exp()
    to_end_BHCE = _factor(sum_BHCE[:, :, -1:], sum_BHCE, g.dtype)
    pairs_BH2CC = _pairs(kq, k, sum_BHCE)
    if documents is not None:
        others_BCC = apart(documents)
        from_start_BHCE = from_start_BHCE.masked_fill(begun(documents)[:, None, :, None], 0)
        to_end_BHCE = to_end_BHCE.masked_fill(others_BCC[:, None, -1, :, None], 0)
        pairs_BH2CC = pairs_BH2CC.masked_fill(others_BCC[:, None, None], 0)
    inverse_BHCC = inverse(beta[..., None] * pairs_BH2CC[:, :, 0])
    read_BH2CV = (kq * from_start_BHCE[:, :, None]) @ state.mT[:, :, None]
    missing_BHCV = v - read_BH2CV[:, :, 0]
    write_BHCV = inverse_BHCC @ (beta[..., None] * missing_BHCV)
    return _Chunk(
        sum_BHCE, from_start_BHCE, to_end_BHCE, pairs_BH2CC, inverse_BHCC, read_BH2CV, missing_BHCV, write_BHCV
    )


def _factor(later: Tensor, earlier: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of a difference of sums, which are in fp64: a small decay after large ones would be lost in fp32."""
    return (later - earlier).to(dtype).exp()


def _pairs(rows: Tensor, columns: Tensor, total: Tensor) -> Tensor:
    """rows `B H 2 C E`, columns `B H C E`, total `B H C E` (sums of decays) -> pair(rows, columns) `B H 2 C C`."""
    tokens, found = columns.shape[2], []
    for at in range(0, tokens, SUB_BLOCK):
        here = slice(at, min(at + SUB_BLOCK, tokens))
        blocks = [torch.einsum("bhnie,bhije->bhnij", rows[:, :, :, here], _within(columns, total, here))]
        if at:
            row_factor, column_factor = _around(total, here, rows.dtype)
            blocks.insert(0, (rows[:, :, :, here] * row_factor) @ (columns[:, :, :at] * column_factor).mT[:, :, None])
        if here.stop < tokens:
            blocks.append(rows.new_zeros(()).expand(*rows.shape[:3], here.stop - at, tokens - here.stop))
        found.append(torch.cat(blocks, -1))
    return torch.cat(found, -2)


def _pairs_backward(rows: Tensor, columns: Tensor, total: Tensor, d_pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and columns for d_pairs `B H 2 C C`, zero above the diagonal. That of `total` is
    rows * d_rows - columns * d_columns."""
    tokens, d_rows, d_columns = columns.shape[2], [], torch.zeros_like(columns)
    for at in range(0, tokens, SUB_BLOCK):
        here = slice(at, min(at + SUB_BLOCK, tokens))
        d_own = d_pairs[:, :, :, here, here]
        d_row = torch.einsum("bhnij,bhije->bhnie", d_own, _within(columns, total, here))
        d_column = _within_backward(rows[:, :, :, here], total, here, d_own)
        if at:
            row_factor, column_factor = _around(total, here, rows.dtype)
            d_before = d_pairs[:, :, :, here, :at]
            d_row = d_row + row_factor * (d_before @ (columns[:, :, :at] * column_factor)[:, :, None])
            row = (rows[:, :, :, here] * row_factor).flatten(2, 3)
            d_column = torch.cat((column_factor * (d_before.flatten(2, 3).mT @ row), d_column), 2)
        d_rows.append(d_row)
        d_columns = d_columns + torch.nn.functional.pad(d_column, (0, 0, 0, tokens - here.stop))
    return torch.cat(d_rows, 3), d_columns


def _decays(total: Tensor, here: slice, dtype: torch.dtype) -> Tensor:
    """exp(L_i - L_j) `B H R R E` within a sub-block, 0 where j is after i, masked before the exponential."""
    own = total[:, :, here]
    pair = (own[:, :, :, None] - own[:, :, None]).to(dtype)
    later = torch.ones(pair.shape[2:4], dtype=torch.bool, device=pair.device).triu(1)
    return pair.masked_fill(later[..., None], -torch.inf).exp()


def _within(columns: Tensor, total: Tensor, here: slice) -> Tensor:
    return _decays(total, here, columns.dtype) * columns[:, :, None, here]


def _within_backward(rows: Tensor, total: Tensor, here: slice, d_own: Tensor) -> Tensor:
    """d_column_j = sum_i exp(L_i - L_j) sum_n d_own_nij rows_ni -> `B H R E`."""
    weighted = torch.einsum("bhnij,bhnie->bhije", d_own, rows)
    return (weighted * _decays(total, here, rows.dtype)).sum(2)


def _around(total: Tensor, here: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors of the rows of a sub-block and of all columns in front of it, `B H 1 R E` and `B H r E`."""
    last = total[:, :, here.start - 1 : here.start]
    return _factor(total[:, :, here], last, dtype)[:, :, None], _factor(last, total[:, :, : here.start], dtype)
