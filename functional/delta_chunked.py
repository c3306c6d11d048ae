"""The gated delta rule in chunks: the products of a chunk's tokens by matrix products, one state passed from chunk to
chunk.

A chunk is computed as a whole before the next one, so that all of it stays in the processor's cache, and its backward
computes it again: what is held for the backward are the inputs and the state that each chunk began with.

Packed documents are laid out so that no chunk has tokens of two: each document begins a chunk, and takes there the
state that it begins with.

Letters as in `delta`; C tokens of a chunk, M chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import delta_channel, delta_head
from .core import as_dtype, full_precision
from .delta import prepare
from .rows import document_of
from .shapes import check_positive

__all__ = ["gated_delta_rule_chunked"]


@full_precision
def gated_delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule_scan` in chunks of `chunk_size` tokens, with the same arguments and results.

    chunk_size: any; a backward holds `H V E` numbers a chunk.
    """
    check_positive("gated_delta_rule_chunked", chunk_size=chunk_size)
    rule = prepare(
        "gated_delta_rule_chunked", q, k, v, g, beta, scale, initial_state, cu_seqlens, lengths, positions, segment_ids
    )
    tokens = rule.sizes["S"]
    inputs: list[Tensor] = [rule.q, rule.k, rule.v, rule.g, rule.beta]
    if tokens == 0:
        return torch.zeros_like(v), rule.state if output_final_state else None
    chunk_size = min(chunk_size, tokens)
    begins = last = slot = None
    if cu_seqlens is not None:
        begins, last, slot = _documents(cu_seqlens, tokens, chunk_size)
        room = begins.shape[0] * chunk_size
        inputs = [x.new_zeros(1, room, *x.shape[2:]).index_copy(1, slot, x) for x in inputs]
    if rule.g.dim() == 4 and rule.sizes["K"] != rule.sizes["H"]:
        groups = rule.sizes["H"] // rule.sizes["K"]
        inputs[:2] = [x.repeat_interleave(groups, 2) for x in inputs[:2]]
    inputs.append(rule.state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        o, *states = _Chunked.apply(*inputs, begins, rule.documents, rule.scale, chunk_size)
    else:
        o, *states = _forward(inputs, begins, rule.documents, rule.scale, chunk_size, keep=begins is not None)
    final = states[-1]
    if last is not None:
        o = o[:, slot]
        final = torch.where((last >= 0)[:, None, None, None], torch.cat(states)[last], rule.state)
    return as_dtype(o, v.dtype), final if output_final_state else None


def _documents(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`M`: the document that begins with each chunk, -1 where one goes on or none is. `N`: the last chunk of each
    document, -1 where it has no tokens. `S`: the slot of each token in M chunks."""
    lengths = cu_seqlens.diff()
    number = lengths.shape[0]
    # As many as any documents could need: how many they do need is not known in a graph.
    chunks = (tokens + number * (chunk_size - 1)) // chunk_size
    each = (lengths + chunk_size - 1) // chunk_size
    end = each.cumsum(0)
    first = end - each
    order = torch.arange(number, device=first.device, dtype=first.dtype)
    begins = first.new_full((chunks + 1,), -1).scatter(0, torch.where(each > 0, first, chunks).long(), order)
    document = document_of(cu_seqlens, tokens)
    at = torch.arange(tokens, device=first.device) - cu_seqlens[document]
    return begins[:chunks], torch.where(each > 0, end - 1, -1), first[document] * chunk_size + at


def _chunks(tokens: int, chunk_size: int) -> list[slice]:
    return [slice(at, min(at + chunk_size, tokens)) for at in range(0, tokens, chunk_size)]


def _begin(state: Tensor, initial: Tensor, begins: Tensor | None, chunk: int) -> Tensor:
    """The state that a chunk begins with: the one before it, or that of the document that begins there."""
    if begins is None:
        return state
    document = begins[chunk : chunk + 1]
    return torch.where(document < 0, state, initial[document.clamp_min(0)])


def _of(documents: Tensor | None, here: slice) -> Tensor | None:
    """Of the token before a chunk and of each in it."""
    return None if documents is None else documents[:, here.start : here.stop + 1]


def _rule(tokens: Sequence[Tensor]) -> ModuleType:
    return delta_channel if tokens[3].dim() == 4 else delta_head


def _forward(
    inputs: Sequence[Tensor],
    begins: Tensor | None,
    documents: Tensor | None,
    scale: float,
    chunk_size: int,
    keep: bool = True,
) -> tuple[Tensor, ...]:
    """o `B S H V`, then the state after each chunk, or without `keep` the last alone."""
    *tokens, initial = inputs
    rule, state = _rule(tokens), initial if begins is None else initial[:1]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for chunk, here in enumerate(_chunks(tokens[0].shape[1], chunk_size)):
        state = _begin(state, initial, begins, chunk)
        own = _of(documents, here)
        o_BHCV, state = rule.forward(*(x[:, here].transpose(1, 2) for x in tokens), state, scale, own)
        outputs.append(o_BHCV.transpose(1, 2))
        states = [*states, state] if keep else [state]
    return torch.cat(outputs, 1), *states


class _Chunked(torch.autograd.Function):
    """Its backward is made of plain operations on inputs and outputs, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, begins, documents, scale, chunk_size = args
        return _forward(inputs, begins, documents, scale, chunk_size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.set_materialize_grads(False)  # of most states there is none

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # which may be read but once where activations are computed again
        *inputs, initial, begins, documents = saved[:8]
        after = saved[8:]
        d_o, *d_states = grads
        d_o = torch.zeros_like(inputs[2]) if d_o is None else d_o
        d_state, found, d_begun = torch.zeros_like(after[-1]), [], []
        for chunk, here in reversed(list(enumerate(_chunks(d_o.shape[1], ctx.chunk_size)))):
            before = after[chunk - 1] if chunk else initial if begins is None else initial[:1]
            state = _begin(before, initial, begins, chunk)
            tensors = [x[:, here].transpose(1, 2) for x in inputs]
            d_here = d_o[:, here].transpose(1, 2)
            d_after, own = d_states[chunk], _of(documents, here)
            d_state = d_state if d_after is None else d_state + d_after
            *d_tokens, d_state = _rule(inputs).backward(*tensors, state, ctx.scale, d_here, d_state, own)
            found.append([x.transpose(1, 2) for x in d_tokens])
            if begins is not None:
                d_begun.append(d_state)
                d_state = torch.where(begins[chunk] < 0, d_state, 0)
        if begins is not None:
            # A chunk that goes on with a document adds nothing to what documents begin with.
            d_all = torch.cat(d_begun[::-1]).masked_fill((begins < 0)[:, None, None, None], 0)
            d_state = torch.zeros_like(initial).index_add(0, begins.clamp_min(0), d_all)
        d_inputs = [torch.cat(parts[::-1], 1) for parts in zip(*found, strict=True)]
        return *d_inputs, d_state, None, None, None, None
