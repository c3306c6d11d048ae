"""How the steps of a program over ranks reach the others: eagerly, each exchange where the layout has it; or compiled,
one graph a step, with exchanges in it.

To be compiled, ranks must be processes: Dynamo is not safe among threads. What an exchange does is no part of the
graph, it is one node (`sharding.opaque`).

Letters: B batch, S tokens, C tokens of a chunk, Z vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import sharding as sh
from ..functional import tree
from ..sharding import Layout, Mesh, ProcessGroup
from ..sharding.layouts import WHOLE
from ..sharding.wires import LayoutWire
from .ranks import Ranks
from .steps import Seam, donating_layer, last_token

__all__ = ["compiled_seam", "eager_seam", "why_calls", "why_eager"]


def why_eager(ranks: Ranks, prefill_layout: Layout | None = None) -> str | None:
    """Why the steps of these ranks cannot be compiled, or None. prefill_layout: by which prompts are read, if it is
    another."""
    transport = ranks.mesh.transport
    if transport is None or not transport.traces:
        return "ranks are threads, among which the compiler is not safe"
    if prefill_layout is not None:
        return "prompts are read by a layout of their own, and caches handed over"
    if ranks.deals:
        return "experts are dealt out, and only the router says how many rows go where"
    return None


def why_calls(mesh: Mesh, device: torch.device) -> str | None:
    """Why a step of decode cannot be part of a device's graph, or None."""
    transport = mesh.transport
    return transport.why_not_captured(device.type) if isinstance(transport, ProcessGroup) else None


def eager_seam(ranks: Ranks, params: Any, caches: Any) -> Seam:
    """params, caches: the structures of trees that steps take packed."""

    def layer(cfg: F.DecoderConfig, core: Any) -> Any:
        def run(params: Any, x: Tensor, cfg: F.LayerConfig, *, cache: Any, **given: Any) -> Any:
            x, new = F.layer(params, x, cfg, cache=cache, **given)
            for old, value in zip(tree.leaves(cache), tree.leaves(new), strict=True):
                old.copy_(value)
            return x, cache

        return run

    def backbone(packed: F.Decoder, tokens: Tensor, cfg: F.DecoderConfig, *, cache: Any, **given: Any) -> Any:
        whole = tree.unflatten(params, tree.leaves(packed))
        kept = tree.unflatten(caches, tree.leaves(cache))
        model = sh.shard(F.backbone, ranks.layout, ranks.mesh, S=tokens.shape[1])
        return model(whole, ranks.mine(tokens), cfg, cache=kept, **given)

    def last(x: Tensor, last: Tensor, tokens: int) -> Tensor:
        if not ranks.tokens:
            return last_token(x, last, tokens)
        here = ranks.mine(torch.arange(tokens, device=x.device)[None]) == last.clamp_min(0)[:, None]
        x_BD = torch.where(here[..., None], x, 0).sum(1)
        return sh.reshard(x_BD, f"B D +{'+'.join(ranks.tokens)} -> B D", ranks.mesh)

    def logprob(logits: Tensor, targets: Tensor) -> Tensor:
        tokens = targets.shape[1]
        found = F.token_logprob(logits, ranks.mine(targets), wire=ranks.wire(tokens))
        return sh.reshard(found, f"B {ranks.split} -> B S", ranks.mesh, S=tokens) if ranks.tokens else found

    return Seam(layer, backbone, last, _choosing(ranks.choice), logprob)


def compiled_seam(ranks: Ranks, mesh: Mesh, chunk: int) -> Seam:
    """mesh: of a `Port`. chunk: tokens a row of a prefill call."""
    fixed: Any = {"ordered": False, "moves": False, "device": ranks.device}
    wires = {n: LayoutWire.of(ranks.layout, mesh, {"S": n}, **fixed) for n in {1, chunk}}
    choices = {n: wire.layer(Z=ranks.config.vocab_size) for n, wire in wires.items()}

    def wire_of(positions: Tensor) -> LayoutWire:
        whole = {name: positions if name.endswith("positions") else None for name in WHOLE}
        return replace(wires[positions.shape[1]], whole=whole)

    def compute(params: F.Layer, x: Tensor, cfg: F.LayerConfig, *, positions: Tensor, **given: Any) -> Any:
        return F.layer(params, x, cfg, positions=positions, wire=wire_of(positions).scope("layers"), **given)

    def layer(cfg: F.DecoderConfig, core: Any) -> Any:
        return donating_layer(cfg, core, compute)

    def backbone(params: F.Decoder, tokens: Tensor, cfg: F.DecoderConfig, **given: Any) -> Any:
        return F.backbone(params, tokens, cfg, wire=wires[tokens.shape[1]], **given)

    def logprob(logits: Tensor, targets: Tensor) -> Tensor:
        return F.token_logprob(logits, targets, wire=choices[targets.shape[1]])

    return Seam(layer, backbone, last_token, _choosing(choices[1]), logprob)


def _choosing(wire: LayoutWire) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`F.sample_advance` of logits whose vocabulary lies as a wire says."""

    def choose(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits `B Z` of this rank, positions `B` -> token, log-probability and position, `B` each."""
        token, logprob = (x[:, 0] for x in F.best_token(logits[:, None], wire=wire))
        return token, logprob, F.advance(token, logprob, positions, eos_token_id)

    return choose
