"""Cross-entropy as a token-weighted sum, without the logits of a whole sequence at once.

    logits_iz = x_i . W_z + b_z        scaled by logit_scale, then softcap * tanh(logits / softcap), where given
    loss = sum_i w_i * (logsumexp_z(logits_iz) - logits_i,label(i))

The sum and not a mean: sums of shards, packed documents and accumulation steps add up to the dense loss as they are.
Whoever wants a mean divides by the sum of the weights.

Letters: D model width, Z vocabulary; `...` any leading dimensions, the same in all arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shapes import ShapeError, check_shapes
from .wire import Own, Wire, identity

__all__ = ["IGNORE", "cross_entropy", "local_index"]

IGNORE = -100


def cross_entropy(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    chunk: int = 1024,
    wire: Wire = identity,
) -> tuple[Tensor, Tensor]:
    """x `... D` (after the final norm), head `Z D`, labels `...`, weights `...` -> loss sum and weight sum, scalars.

    labels: token ids, already shifted; -100 is left out. weights: 1 unless given; not differentiated. bias: `Z`.
    chunk: how many tokens have logits at a time, in forward and in backward, which computes them again.
    In fp32 at least. wire: where head has some rows of the vocabulary, as `own("Z")` says, what other ranks have of a
    token comes by the edge `shares`: three numbers a rank, and no logits. Raises `ShapeError`.
    """
    check_shapes("cross_entropy", x=(x, "... D"), head=(head, "Z D"), bias=(bias, "Z"))
    if x.shape[:-1] != labels.shape or (weights is not None and weights.shape != labels.shape):
        given = f"x {tuple(x.shape)}, labels {tuple(labels.shape)}"
        given += "" if weights is None else f", weights {tuple(weights.shape)}"
        raise ShapeError(f"cross_entropy: labels and weights must have x's shape without D\n    {given}")
    if chunk < 1:
        raise ValueError(f"cross_entropy(chunk={chunk}): at least 1")
    wide = torch.promote_types(x.dtype, torch.float32)
    kept = labels != IGNORE
    weight = kept.to(wide) if weights is None else torch.where(kept, weights.to(wide), 0)
    target = torch.where(kept, labels, 0)
    x = x.masked_fill(~kept[..., None], 0)  # whatever stands there, NaN too, has no part in the sum
    rows, away = wire.own("Z"), None
    if rows is not None:
        target, away = local_index(target, rows)
    flat = (x.reshape(-1, x.shape[-1]), head, bias, target.reshape(-1), None if away is None else away.reshape(-1))
    shares = _Shares.apply(*flat, logit_scale, softcap, chunk).unflatten(0, labels.shape)
    if rows is None:
        largest, total, picked = shares.unbind(-1)
    else:
        largest, total, picked = wire.pass_(shares=shares[None]).unbind(-1)
        own, largest = largest, largest.detach().amax(0)
        total, picked = (total * (own.detach() - largest).exp()).sum(0), picked.sum(0)
    loss = (total.log() + (largest.detach() - picked)) * weight.detach()
    return loss.sum(), weight.sum()


def local_index(ids: Tensor, rows: Own) -> tuple[Tensor, Tensor]:
    """ids `...`, of all of a vocabulary -> where they stand among these rows of it, and which are in others (there 0).
    One that is in no row stays outside, for whoever looks it up to refuse."""
    away = (ids >= 0) & (ids < rows.size) & ((ids < rows.start) | (ids >= rows.stop))
    return torch.where(away, 0, ids - rows.start), away


class _Shares(torch.autograd.Function):
    """x `N D`, target and away `N` -> `N 3`: the largest logit of a token, which counts as a constant, the sum of
    exponentials of the others minus it, and the target's logit, 0 where that is away.

    Saves its inputs alone. Its backward is made of plain operations, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        head: Tensor,
        bias: Tensor | None,
        target: Tensor,
        away: Tensor | None,
        logit_scale: float | None,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        found = [x.new_zeros(0, 3, dtype=torch.promote_types(x.dtype, torch.float32))]
        for at in range(0, x.shape[0], chunk):
            here = slice(at, at + chunk)
            logits = _logits(x[here], head, bias, logit_scale, softcap)
            largest = _largest(logits)
            picked = logits.gather(-1, target[here, None])[:, 0]
            picked = picked if away is None else picked.masked_fill(away[here], 0)
            found.append(torch.stack([largest[:, 0], (logits - largest).exp().sum(-1), picked], -1))
        return torch.cat(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.logit_scale, ctx.softcap, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, head, bias, target, away = ctx.saved_tensors
        wide = grads[0].dtype
        d_x, d_head, d_bias = [], torch.zeros_like(head, dtype=wide), grads[0].new_zeros(head.shape[0])
        for at in range(0, x.shape[0], ctx.chunk):
            here = slice(at, at + ctx.chunk)
            logits = _logits(x[here], head, bias, ctx.logit_scale, ctx.softcap)
            chosen = torch.arange(head.shape[0], device=x.device) == target[here, None]
            chosen = chosen if away is None else chosen & ~away[here, None]
            _, of_total, of_picked = grads[0][here, None].unbind(-1)
            d_logits = (logits - _largest(logits)).exp() * of_total + chosen.to(wide) * of_picked
            if ctx.softcap is not None:
                d_logits = d_logits * (1 - (logits / ctx.softcap).square())
            if ctx.logit_scale is not None:
                d_logits = d_logits * ctx.logit_scale
            d_x.append((d_logits @ head.to(wide)).to(x.dtype))
            d_head = d_head + d_logits.mT @ x[here].to(wide)
            d_bias = d_bias + d_logits.sum(0)
        d_all = torch.cat(d_x) if d_x else torch.zeros_like(x)
        return d_all, d_head.to(head.dtype), None if bias is None else d_bias.to(bias.dtype), *[None] * 5


def _largest(logits: Tensor) -> Tensor:
    """`N Z` -> `N I`; finite, so that a token with no logit here has a sum of 0."""
    return logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)


def _logits(x: Tensor, head: Tensor, bias: Tensor | None, logit_scale: float | None, softcap: float | None) -> Tensor:
    """In fp32 at least, the products in x's dtype."""
    logits = torch.nn.functional.linear(x, head, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if logit_scale is None else logits * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
