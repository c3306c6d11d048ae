"""The next token where ranks have parts of a vocabulary: what each says of its own part, and what that comes to.

No logits are gathered. By the edge `shares` a rank sends a few numbers a token: of its most likely token the logit and
the index, and the logarithm of its sum of exponentials; or as much of its `k` best, where one is drawn. An index is
sent as a number of the logits' dtype, fp32 at least, which has them exact up to 2^24.

Letters: B batch, S tokens, Z vocabulary, P ranks, J candidates, N numbers that a rank sends of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import wide
from .loss import local_index
from .sampling import Controls, draw, greedy, lowest_of_the_largest, penalize, warp
from .shapes import check_shapes
from .wire import Own, Wire, identity

__all__ = ["best_token", "drawn_token", "token_logprob"]


def best_token(logits: Tensor, *, wire: Wire = identity) -> tuple[Tensor, Tensor]:
    """`greedy` of logits `B S Z`, of which a rank has the rows of the vocabulary that `wire.own("Z")` says -> token
    `B S`, logprob `B S`, in fp32 at least, the same on every rank. Three numbers a rank."""
    check_shapes("best_token", logits=(logits, "B S Z"))
    rows = wire.own("Z")
    if rows is None:
        return greedy(logits)
    full, token = wide(logits), lowest_of_the_largest(logits)
    own = (full.gather(-1, token[..., None])[..., 0], token + rows.start, full.logsumexp(-1))
    best_PBS, token_PBS, total_PBS = _shared(own, wire).unbind(-1)
    best = best_PBS.amax(0)
    logprob = best - total_PBS.logsumexp(0)
    # Ranks ascend with their rows, so the lowest index is the lowest of all that are equal.
    token = torch.where(best_PBS == best, token_PBS, rows.size).amin(0).long()
    return torch.where(logprob.isnan(), 0, token), logprob


def token_logprob(logits: Tensor, targets: Tensor, *, wire: Wire = identity) -> Tensor:
    """logits `B S Z`, as `best_token` takes them, targets `B S` -> the log-probability of each, `B S`, in fp32 at
    least. Two numbers a rank."""
    check_shapes("token_logprob", logits=(logits, "B S Z"), targets=(targets, "B S"))
    full, rows = wide(logits), wire.own("Z")
    if rows is None:
        return full.gather(-1, targets[..., None])[..., 0] - full.logsumexp(-1)
    index, away = local_index(targets, rows)
    picked = full.gather(-1, index[..., None])[..., 0].masked_fill(away, 0)
    picked_PBS, total_PBS = _shared((picked, full.logsumexp(-1)), wire).unbind(-1)
    return picked_PBS.sum(0) - total_PBS.logsumexp(0)


def drawn_token(
    logits: Tensor,
    counts: Tensor,
    controls: Controls,
    u: Tensor,
    *,
    rows: Own,
    k: int,
    penalizes: bool = True,
    nucleus: bool = True,
    wire: Wire = identity,
) -> tuple[Tensor, Tensor]:
    """The choice of `sample` where a rank has `rows` of the vocabulary: logits `B Z`, counts `B Z`, u `B` -> token `B`,
    logprob `B`, the model's own, the same on every rank.

    k: no top_k of a row that draws is above it, or no rank has more tokens; so the best k of each rank may be drawn. It
    sends their scores, indices and logits, 3 k + 1 numbers. Of more than k tokens of a rank that are equal, the k
    lowest stay. penalizes, nucleus: see `sample`, `warp`.
    """
    check_shapes("drawn_token", logits=(logits, "B Z"), counts=(counts, "B Z"), u=(u, "B"))
    full = wide(logits)
    scores = penalize(logits, counts, controls) if penalizes else full
    order_BJ = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    parts = (scores.gather(-1, order_BJ), order_BJ + rows.start, full.gather(-1, order_BJ))
    # Every rank sends as much; of one that has fewer tokens than k, what is left is never drawn.
    room = (0, k - order_BJ.shape[1])
    fill = (-torch.inf, rows.size, -torch.inf)
    columns = [torch.nn.functional.pad(x.to(full.dtype), room, value=v) for x, v in zip(parts, fill, strict=True)]
    sent = torch.cat((*columns, full.logsumexp(-1, keepdim=True)), -1)
    (found_PBN,) = wire.pass_(shares=sent[None, :, None]).unbind(2)
    scores_BJ, index_BJ, logits_BJ = (x.movedim(0, 1).flatten(1) for x in found_PBN[..., :-1].split(k, -1))
    index_BJ, order = index_BJ.sort(dim=-1)  # in the order of the vocabulary, in which one is drawn
    scores_BJ, logits_BJ = scores_BJ.gather(-1, order), logits_BJ.gather(-1, order)
    total = found_PBN[..., -1].logsumexp(0)
    place = lowest_of_the_largest(scores_BJ)
    warped = warp(scores_BJ, controls, nucleus=nucleus)
    place = torch.where(controls.do_sample, draw(warped, u), place)[:, None]
    token, picked = index_BJ.gather(-1, place)[:, 0].long(), logits_BJ.gather(-1, place)[:, 0]
    there = total.isfinite()
    return torch.where(there, token, 0), torch.where(there, picked - total, torch.nan)


def _shared(own: tuple[Tensor, ...], wire: Wire) -> Tensor:
    """What every rank says of each token: `B S` each -> `P B S N`."""
    return wire.pass_(shares=torch.stack([x.to(own[0].dtype) for x in own], -1)[None])
