"""The short causal convolution in front of a gated delta net, each channel by itself.

    y[s] = act(bias + sum_w weight[w] x[s - (W-1) + w])

What lies before a row's first token is its state: the last W-1 tokens of the call before, zeros at the start. So a
sequence may be cut anywhere, and a prompt may be shorter than the convolution.

Letters: B batch, S tokens, D channels, W width, N documents, U = W-1 tokens of a state, L tokens with a state
in front of each row or document.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .core import wide
from .mlp import check_activation
from .rows import check_rows, check_state, document_of, documents_before, readable, tokens_of, zero_absent
from .shapes import ShapeError, check_shapes

__all__ = ["causal_conv"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x `B S D`, weight `D W`, bias `D` -> y `B S D` in x's dtype, and the final state where it is asked for.

    activation: a name of `ACTIVATIONS`, or None.
    initial_state, final state: `B D W-1` in x's dtype, `N D W-1` with cu_seqlens: the last tokens before the
    activation, the latest last, zeros for those that never were.
    cu_seqlens: `N+1` (B = 1), where each packed document begins, and the end of the last.
    lengths: `B`, the tokens of each row, which is padded behind them. positions: `B|1 S` instead, below 0 where there
    is no token: padding in front or behind, not between tokens of a row. A padded token gives zeros.
    segment_ids: `B S`, the packed document of each token, of any batch; the initial state is that of a row's first
    document, the final state that of its last.
    Computed in fp32 at least. Raises `ShapeError`, `TypeError`, `ValueError` before any work.
    """
    sizes = check_shapes("causal_conv", x=(x, "B S D"), weight=(weight, "D W"), bias=(bias, "D"))
    batch, tokens, width = sizes["B"], sizes["S"], sizes["W"]
    states = check_rows("causal_conv", batch, tokens, cu_seqlens, lengths, positions, segment_ids)
    act = None if activation is None else check_activation("causal_conv", "activation", activation)
    if initial_state is None:
        initial_state = x.new_zeros(states, sizes["D"], width - 1)
    if initial_state.shape[-1] != width - 1:
        turned = initial_state.shape[1:] == (width - 1, sizes["D"])
        raise ShapeError(
            f"causal_conv(initial_state=...): a convolution of W={width} carries W-1={width - 1} tokens, the last "
            f"dimension of B D W-1, not {initial_state.shape[-1]}" + ("\n    fix: initial_state.mT" if turned else "")
        )
    check_state("causal_conv", initial_state, "N D U", states, x.dtype, {"x": (x, "B S D")})
    there = tokens_of(tokens, lengths, positions)
    there = None if there is None else there.expand(batch, tokens)
    x, state_BND = zero_absent(x, there), initial_state.mT
    # With the state of a row, which is of its first document.
    documents = None if segment_ids is None else documents_before(segment_ids, there)[:, 1:]
    documents_BL = None if documents is None else tnf.pad(documents, (width - 1, 0))
    if there is None and cu_seqlens is None:
        x_BLD = torch.cat((state_BND, x), 1)
        y, final_BND = _taps(x_BLD, weight, documents_BL), x_BLD[:, tokens:]
        others = None if documents_BL is None else documents_BL[:, tokens:]
    else:
        x_BLD, row, begin, where = _with_room(x, states, width, cu_seqlens)
        first, count = _spans(there, states, tokens, cu_seqlens)
        slots = (begin + first)[:, None] + torch.arange(width - 1, device=x.device)
        x_BLD = x_BLD.index_put((row, slots), state_BND)
        last = slots + count[:, None]
        y, final_BND = _taps(x_BLD, weight, documents_BL), x_BLD[row, last]
        others = None if documents_BL is None else documents_BL[row, last]
        y = y if where is None else y[:, where]
    if others is not None and documents is not None and tokens:
        final_BND = final_BND.masked_fill((others != documents[:, -1:])[..., None], 0)
    y = y if bias is None else y + wide(bias)
    y = zero_absent((y if act is None else act(y)).to(x.dtype), there)
    return y, final_BND.mT.contiguous() if output_final_state else None


def _taps(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """x `B L D`, weight `D W`, documents `B L` -> `B L-(W-1) D`."""
    if documents is None:
        y: Tensor = _Taps.apply(wide(x), wide(weight))
        return y
    x_BLD, w_DW, width = wide(x), wide(weight), weight.shape[1]
    own_BS = documents[:, width - 1 :]
    y = x_BLD[:, width - 1 :] * w_DW[:, -1]
    for tap in range(width - 1):
        here = slice(tap, tap + own_BS.shape[1])
        own = x_BLD[:, here].masked_fill((documents[:, here] != own_BS)[..., None], 0)
        y = torch.addcmul(y, own, w_DW[:, tap])
    return y


class _Taps(torch.autograd.Function):
    """One tap after another over a block of tokens, which stays in the processor's cache. Its backward is a convolution
    from behind, and sums of blocks; it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        w_WD, parts = weight.mT.contiguous(), []
        for here in _blocks(x.shape[1] - width + 1):
            y = x[:, here] * w_WD[0]
            for tap in range(1, width):
                y = torch.addcmul(y, x[:, here.start + tap : here.stop + tap], w_WD[tap])
            parts.append(y)
        return torch.cat(parts, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), d_y = ctx.saved_tensors, grads[0]
        width = weight.shape[1]
        d_x = _Taps.apply(tnf.pad(d_y, (0, 0, width - 1, width - 1)), weight.flip(1))
        d_weight = torch.zeros_like(weight.mT)
        for here in _blocks(d_y.shape[1]):
            taps = [x[:, here.start + tap : here.stop + tap] * d_y[:, here] for tap in range(width)]
            d_weight = d_weight + torch.stack([each.sum((0, 1)) for each in taps])
        return d_x, d_weight.mT


def _blocks(tokens: int) -> list[slice]:
    """A graph has one block: its compiler makes the loop."""
    size = max(tokens, 1) if torch.compiler.is_compiling() else 32
    return [slice(at, min(at + size, tokens)) for at in range(0, max(tokens, 1), size)]


def _with_room(
    x: Tensor, states: int, width: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x `B L D` with W-1 empty tokens in front of each row or document; the row that each state lies in and where its
    room begins; where the result of each token of a packed row is found."""
    batch, tokens, room = x.shape[0], x.shape[1], width - 1
    each = torch.arange(states, device=x.device)
    if cu_seqlens is None:
        return torch.cat((x.new_zeros(batch, room, x.shape[2]), x), 1), each[:, None], torch.zeros_like(each), None
    where = torch.arange(tokens, device=x.device) + document_of(cu_seqlens, tokens) * room
    x_BLD = x.new_zeros(batch, tokens + states * room, x.shape[2]).index_copy(1, where + room, x)
    return x_BLD, torch.zeros_like(each)[:, None], cu_seqlens[:-1] + each * room, where


def _spans(there: Tensor | None, states: int, tokens: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many absent tokens stand in front of each row or document, and how many tokens it has."""
    if there is None:
        assert cu_seqlens is not None
        count = cu_seqlens.diff()
        return torch.zeros_like(count), count
    if cu_seqlens is None:
        cu_seqlens = torch.arange(states + 1, device=there.device) * tokens
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    flat = there.reshape(-1)
    ordinal = flat.long().cumsum(0)
    up_to = torch.cat((ordinal.new_zeros(1), ordinal))
    count = up_to[end] - up_to[begin]
    first = torch.where(count > 0, torch.searchsorted(ordinal, up_to[begin] + 1) - begin, 0)
    last = torch.searchsorted(ordinal, up_to[end]) - begin
    if any(readable((count > 0) & (last - first + 1 != count)) or []):
        raise ValueError(
            "causal_conv(positions=...): padding lies between the tokens of a row, and the convolution reads it\n"
            "    fix: bring the tokens of each row together, padding in front or behind"
        )
    return first, count
