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

__all__ = ["IGNORE", "cross_entropy"]

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
) -> tuple[Tensor, Tensor]:
    """x `... D` (after the final norm), head `Z D`, labels `...`, weights `...` -> loss sum and weight sum, scalars.

    labels: token ids, already shifted; -100 is left out. weights: 1 unless given; not differentiated. bias: `Z`.
    chunk: how many tokens have logits at a time, in forward and in backward, which computes them again.
    In fp32 at least. Raises `ShapeError`.
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
    flat = (x.reshape(-1, x.shape[-1]), head, bias, target.reshape(-1), weight.reshape(-1).detach())
    loss: Tensor = _ChunkedCrossEntropy.apply(*flat, logit_scale, softcap, chunk)
    return loss, weight.sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Saves its inputs alone. Its backward is made of plain operations, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        head: Tensor,
        bias: Tensor | None,
        target: Tensor,
        weight: Tensor,
        logit_scale: float | None,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        total = x.new_zeros((), dtype=weight.dtype)
        for at in range(0, x.shape[0], chunk):
            log_p = _logits(x[at : at + chunk], head, bias, logit_scale, softcap).log_softmax(-1)
            picked = log_p.gather(-1, target[at : at + chunk, None])[:, 0]
            total = total - (picked * weight[at : at + chunk]).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.logit_scale, ctx.softcap, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, head, bias, target, weight = ctx.saved_tensors
        d_x, d_head, d_bias = [], torch.zeros_like(head, dtype=weight.dtype), weight.new_zeros(head.shape[0])
        for at in range(0, x.shape[0], ctx.chunk):
            here = slice(at, at + ctx.chunk)
            logits = _logits(x[here], head, bias, ctx.logit_scale, ctx.softcap)
            p = logits.softmax(-1)
            one_hot = torch.arange(head.shape[0], device=x.device) == target[here, None]
            d_logits = (p - one_hot.to(p.dtype)) * (weight[here, None] * grads[0])
            if ctx.softcap is not None:
                d_logits = d_logits * (1 - (logits / ctx.softcap).square())
            if ctx.logit_scale is not None:
                d_logits = d_logits * ctx.logit_scale
            d_x.append((d_logits @ head.to(p.dtype)).to(x.dtype))
            d_head = d_head + d_logits.mT @ x[here].to(p.dtype)
            d_bias = d_bias + d_logits.sum(0)
        d_all = torch.cat(d_x) if d_x else torch.zeros_like(x)
        return d_all, d_head.to(head.dtype), None if bias is None else d_bias.to(bias.dtype), *[None] * 5


def _logits(x: Tensor, head: Tensor, bias: Tensor | None, logit_scale: float | None, softcap: float | None) -> Tensor:
    """In fp32 at least, the products in x's dtype."""
    logits = torch.nn.functional.linear(x, head, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if logit_scale is None else logits * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
