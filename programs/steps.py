"""The three functions that a program compiles: prefill of one chunk, one decode step, scores of one chunk.

Plain functions of pytrees. A cache that goes in is written in place before they return: the only place where that
happens, so that the functions below stay pure and a program still owns one buffer a layer.

Each takes `read`, one tensor for each different window of the layers (see `windows`): `0 .. n-1`, the slots that hold
all that its queries may see.

Letters: B batch, C tokens of a chunk, D model width, Z vocabulary, T cache slots, N end-of-sequence tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..functional.cache import Cache
from ..functional.tree import Tree, dim, pytree, static
from .dynamo import region

__all__ = ["Leaves", "Seam", "State", "last_token", "make_steps", "packed", "windows"]

Leaves = tuple[Tensor, ...]


def windows(cfg: F.DecoderConfig) -> tuple[int | None, ...]:
    """The different windows of the layers, in the order in which they come; None for a layer without one."""
    return tuple(dict.fromkeys(each.attention.window for each in cfg.layers))


def packed(params: F.Decoder, caches: Sequence[Cache]) -> tuple[F.Decoder, tuple[Leaves, ...]]:
    """Parameters and caches as the steps take them: in place of each layer, and of each cache, the tuple of its leaves.

    Dynamo traces a region once only where it is given tensors, and taking a tree apart is slow to trace; so it is
    done here, outside, and undone in the region.
    """
    layers: Any = tuple(tuple(tree.leaves(each)) for each in params.layers)
    return dataclasses.replace(params, layers=layers), tuple(tuple(tree.leaves(each)) for each in caches)


@pytree
class State(Tree):
    """Where each row stands: the token that comes next, and its position, -1 once the row has ended.

    session: which prefill, with rings or gated delta nets which step, the cache must still hold for it; 0 within a
    step."""

    token: Tensor = dim("B")
    logprob: Tensor = dim("B")
    position: Tensor = dim("B")
    logits: Tensor = dim("B Z")
    session: int = static(default=0)

    @classmethod
    def empty(cls, batch: int, vocab: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """No row is active."""
        integers = torch.full((2, batch), -1, device=device)
        return cls(
            token=integers[0].clamp_min(0),
            logprob=torch.zeros(batch, dtype=torch.promote_types(dtype, torch.float32), device=device),
            position=integers[1].clone(),
            logits=torch.zeros(batch, vocab, dtype=dtype, device=device),
        )


def donating_layer(
    cfg: F.DecoderConfig, core: Callable[..., Tensor], compute: Callable[..., Any] = F.layer
) -> Callable[..., tuple[Tensor, Cache | None]]:
    """`F.layer`, compiled once for each kind of layer, which writes the new cache into the buffers of the old. compute:
    the same, by a wire of its own.

    The copy back belongs in the region: returned from it instead, whole caches would be cloned, a layer and a step.
    """
    regions: list[tuple[F.LayerConfig, Callable[..., Tensor]]] = []
    for i, kind in enumerate(dict.fromkeys(cfg.layers)):
        regions.append((kind, region(_layer_of_tensors(kind, core, compute), f"layer_{i}", _strides_key)))

    def layer(params: Leaves, x: Tensor, cfg: F.LayerConfig, **given: Any) -> tuple[Tensor, Cache | None]:
        (run,) = [run for kind, run in regions if kind is cfg]
        cache = given["cache"]
        return run(*params, x, *cache, given["positions"], *(given["rope"] or ()), given["read"]), cache

    return layer


def _layer_of_tensors(
    kind: F.LayerConfig, core: Callable[..., Tensor], compute: Callable[..., Any]
) -> Callable[..., Tensor]:
    """A layer of a kind, as a function of the leaves of its arguments."""
    leaf = torch.empty(0)
    rope = () if kind.attention.rope is None else (leaf, leaf)
    cache = kind.attention.cache_class.abstract(kind.attention, B=1, T=1)
    like = (F.Layer.abstract(kind), leaf, cache, leaf, rope, leaf)
    definition = tree.structure(like)

    def run(*tensors: Tensor) -> Tensor:
        params, x, cache, positions, rope, read = tree.unflatten(definition, tensors)
        x, new = compute(params, x, kind, positions=positions, rope=rope or None, cache=cache, read=read, core=core)
        for old, value in zip(tree.leaves(cache), tree.leaves(new), strict=True):
            old.copy_(value)
        out: Tensor = x
        return out

    return run


def _strides_key(*tensors: Tensor) -> int:
    """Layers of a kind have equal shapes and a program one dtype, so their graphs differ by strides alone."""
    key = 0
    # `read` comes last and is left out: its size is dynamic, and it is the same for all layers of a kind.
    # By index, since a tensor stored under a name would take that name in the graph.
    for i in range(len(tensors) - 1):
        for stride in tensors[i].stride():
            key = (31 * key + stride) % 1_000_003
    return key


class Seam(NamedTuple):
    """How the steps of a rank among several reach the others; without one, a rank is alone.

    layer: from a config and a core to what computes a layer and writes its cache. backbone: `F.backbone`, of packed
    parameters and caches, behind a layout. last: of `B C D`, of which a rank may have some tokens, that of one token of
    each row. choose: `F.sample_advance` of the logits that a rank has. logprob: of targets `B C`, by logits `B C Z`."""

    layer: Callable[..., Any]
    backbone: Callable[..., Any]
    last: Callable[[Tensor, Tensor, int], Tensor]
    choose: Callable[..., tuple[Tensor, Tensor, Tensor]]
    logprob: Callable[..., Tensor]


def make_steps(cfg: F.DecoderConfig, seam: Seam | None = None) -> dict[str, Callable[..., Any]]:
    """The functions `prefill`, `decode` and `score` of a config, by name; they take `packed` parameters and caches."""
    kinds = {kind: kind for kind in cfg.layers}
    # Equal layer configs become one object, so that a layer finds its region by identity while it is traced.
    cfg = dataclasses.replace(cfg, layers=tuple(kinds[each] for each in cfg.layers))
    many, few = F.dot_product_attention, F.decode_attention
    if seam is None:
        seam = Seam(donating_layer, F.backbone, last_token, F.sample_advance, F.token_logprob)
    layers = {core: seam.layer(cfg, core) for core in (many, few)}
    which = [windows(cfg).index(each.attention.window) for each in cfg.layers]
    by_length = any(each.attention.rope is not None and each.attention.rope.by_length for each in cfg.layers)

    def run(
        params: F.Decoder,
        cache: Any,
        tokens: Tensor,
        positions: Tensor,
        length: Tensor | None,
        read: Leaves,
        core: Callable[..., Tensor],
    ) -> Tensor:
        x, _ = seam.backbone(
            params,
            tokens,
            cfg,
            positions=positions,
            cache=cache,
            read=[read[i] for i in which],
            rope_length=length if by_length else None,
            core=core,
            layer=layers[core],
        )
        out: Tensor = x
        return out

    def prefill(
        params: F.Decoder,
        cache: Any,
        state: State,
        tokens: Tensor,
        positions: Tensor,
        last: Tensor,
        length: Tensor,
        eos_token_id: Tensor,
        read: Leaves,
    ) -> State:
        """tokens, positions `B C` (-1: padding); last `B`, where in the chunk a row's prompt ends, -1 where it does
        not: only those rows get a token. length: `B`, the tokens of the whole prompt."""
        x = run(params, cache, tokens, positions, length, read, many)
        logits = F.logits(params, seam.last(x, last, tokens.shape[1]), cfg)
        token, logprob, position = seam.choose(logits, positions.amax(-1) + 1, eos_token_id)
        return _where(last >= 0, State(token=token, logprob=logprob, position=position, logits=logits), state)

    def decode(params: F.Decoder, cache: Any, state: State, eos_token_id: Tensor, read: Leaves) -> State:
        """Feed each active row its token; a row that has ended changes nothing."""
        tokens, positions = state.token[:, None], state.position[:, None]
        x = run(params, cache, tokens, positions, None, read, few)
        logits = F.logits(params, x[:, 0], cfg)
        after = torch.where(state.position >= 0, state.position + 1, -1)
        token, logprob, position = seam.choose(logits, after, eos_token_id)
        return State(token=token, logprob=logprob, position=position, logits=logits)

    def score(
        params: F.Decoder,
        cache: Any,
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        length: Tensor,
        read: Leaves,
    ) -> Tensor:
        """-> the log-probability of `targets` `B C`, each the token after the one at its place."""
        x = run(params, cache, tokens, positions, length, read, many)
        return seam.logprob(F.logits(params, x, cfg), targets)

    return {"prefill": prefill, "decode": decode, "score": score}


def last_token(x: Tensor, last: Tensor, tokens: int) -> Tensor:
    """x `B C D`, last `B`, where in the chunk a row ends, or -1 -> `B D`. tokens: C."""
    at = last.clamp_min(0)[:, None, None].expand(-1, 1, x.shape[2])
    return x.gather(1, at)[:, 0]


def _where(rows: Tensor, new: State, old: State) -> State:
    return F.tree.map(lambda a, b: torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b), new, old)
