"""From logits to the next token.

Letters: B batch, Z vocabulary, N end-of-sequence tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .primitive import primitive

__all__ = ["greedy", "sample_advance"]


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits `... Z` -> the most likely token `...` and its log-probability `...` in fp32 at least.

    Among equals the lowest token wins, on every device; a row with a NaN in it gives token 0 and a NaN.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # argmax leaves ties open, so: the lowest index at which the maximum stands.
    top = wide.amax(-1, keepdim=True)
    index = torch.arange(logits.shape[-1], device=logits.device)
    token = torch.where(wide == top, index, logits.shape[-1]).amin(-1)
    token = torch.where(top[..., 0].isnan(), 0, token)
    return token, top[..., 0] - wide.logsumexp(-1)


@primitive
def sample_advance(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a step: choose, move on, notice the end.

    logits `B Z`, positions `B` of the tokens to come (-1: the row has ended), eos_token_id `N`
    -> token `B`, its log-probability `B`, positions `B`, -1 where the row ends with this token.
    """
    token, logprob = greedy(logits)
    ends = (token[:, None] == eos_token_id).any(-1)
    return token, logprob, torch.where(ends, -1, positions)
