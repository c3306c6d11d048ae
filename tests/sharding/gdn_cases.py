"""Random gated delta nets under random layouts: global tensors, the dense result, and what ranks have of it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

from .attention_cases import ids_of
from .latent_cases import weights

__all__ = ["Case", "config", "dense", "make", "sharded", "weights"]


@dataclass
class Case:
    """One layout on one mesh with one gated delta net. options: what the layer is told; cu_seqlens among them. grad: of
    the output, 0 where there is no token."""

    seed: int
    layout: sh.Layout
    axes: dict[str, int]
    cfg: F.GDNConfig
    params: F.GDN
    x: Tensor
    options: dict[str, Any]
    grad: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        B, S, _ = self.x.shape
        return {**self.cfg.sizes, "B": B, "S": S}

    @property
    def leaves(self) -> list[Tensor]:
        """x, then every parameter."""
        return [self.x, *F.tree.leaves(self.params)]

    @property
    def over(self) -> int:
        """How many ranks split the tokens."""
        return math.prod(n for axis, n in self.axes.items() if axis not in ("tp", "dp"))

    def __repr__(self) -> str:
        options = {k: v if not isinstance(v, Tensor) else v.tolist() for k, v in self.options.items()}
        B, S, _ = self.x.shape
        return f"seed {self.seed}: {self.layout.name} on {self.axes}, B={B} S={S}, {options}, {self.cfg}"


def config(**more: Any) -> F.GDNConfig:
    """Odd sizes, every one of its own."""
    given: dict[str, Any] = {
        "hidden_size": 10, "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5,
        "norm": F.NormConfig(), "initializer_range": 0.4,
    }  # fmt: skip
    return F.GDNConfig(**given | more)


def make(seed: int, ranks: int | None = None, kind: str | None = None, **told: Any) -> Case:
    """ranks: how many there must be, 2 to 8 if None. kind: "ulysses" or "scan". told: options of the layout."""
    rng = random.Random(seed)
    kind = rng.choice(["ulysses", "scan"]) if kind is None else kind
    while True:
        split = ["u"] if kind == "ulysses" else rng.choice([["cp"], ["cp"], ["g", "u"], ["u", "cp", "g"]])
        names = [*split, *(name for name in ("tp", "dp") if rng.random() < 0.35)]
        axes = {name: rng.randint(1, 2 if name in ("dp", "tp") else 5) for name in rng.sample(names, len(names))}
        tp, u = axes.get("tp", 1), axes["u"] if kind == "ulysses" else 1
        heads = [(K, G) for K in range(1, 6) for G in range(1, 6) if _fit(K, G, tp, u)]
        count = math.prod(axes.values())
        if heads and (count == ranks if ranks else 2 <= count <= 8):
            break
    options: dict[str, Any] = {name: name for name in ("tp", "dp") if name in axes}
    options |= {"overlap": rng.random() < 0.5} | told
    layout = sh.gdn_ulysses("u", **options) if kind == "ulysses" else sh.gdn_scan(*split, **options)
    S, B = rng.choice([*range(1, 7), *range(24)]), rng.randint(1, 4)
    cfg = _config(rng, *rng.choice(heads))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, cfg.hidden_size, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    given = _told(rng, B, S)
    if "positions" in given:
        grad = grad.masked_fill(given["positions"][..., None] < 0, 0)
    return Case(seed, layout, axes, cfg, weights(F.GDN.init(cfg, seed), seed), x, given, grad)


def _fit(K: int, G: int, tp: int, u: int) -> bool:
    """Whether K key heads, G value heads each, can be dealt out: whole groups, or value heads where those are few."""
    return tp <= K and (K // tp >= u or (K % tp == 0 and K // tp * G >= u))


def _config(rng: random.Random, K: int, G: int) -> F.GDNConfig:
    E = rng.randint(1, 4)
    found: dict[str, Any] = {"num_key_heads": K, "num_value_heads": K * G, "key_head_dim": E}
    found |= {"value_head_dim": rng.choice([n for n in range(1, 6) if n != E]), "conv_kernel_dim": rng.randint(2, 5)}
    kind = rng.choice(["plain", "interleaved", "channels", "ranks"])
    if kind == "interleaved":
        found["interleaved"] = True
    elif kind != "plain":
        found |= {"channel_decay": kind == "channels" or rng.random() < 0.5}
        found |= {name: rng.choice([None, 3]) for name in ("decay_rank", "gate_rank")} if kind == "ranks" else {}
    found |= {"allow_neg_eigval": rng.random() < 0.4, "norm": rng.choice([None, F.NormConfig()])}
    return config(**found, hidden_act=rng.choice(["silu", "gelu"]), gate_act=rng.choice(["silu", "sigmoid"]))


def _told(rng: random.Random, B: int, S: int) -> dict[str, Any]:
    what = rng.choice(["nothing", "documents", "segments", "padding", "padded segments"])
    found: dict[str, Any] = {}
    if what == "documents":
        found["cu_seqlens"] = [0, *sorted(rng.choices(range(S + 1), k=rng.randint(0, 4))), S]
    if what.endswith("segments"):  # of each row its own; a number may come again, for another document
        rows = [[rng.randint(0, 2) for _ in range(rng.randint(1, 5))] for _ in range(B)]
        lengths = [sorted(rng.choices(range(len(row)), k=S)) for row in rows]
        found["segment_ids"] = torch.tensor([[row[i] for i in at] for row, at in zip(rows, lengths, strict=True)])
    if what.startswith("padd"):
        counts, behind = [rng.randint(0, S) for _ in range(B)], [rng.random() < 0.7 for _ in range(B)]
        empty = [[-1] * (S - n) for n in counts]
        rows = [[*range(n), *e] if b else [*e, *range(n)] for n, e, b in zip(counts, empty, behind, strict=True)]
        found["positions"] = torch.tensor(rows, dtype=torch.int64).view(B, S)
    if "segment_ids" in found:
        found["segment_ids"] = found["segment_ids"].to(torch.int64).view(B, S)
    return found


def dense(case: Case) -> tuple[Tensor, list[Tensor]]:
    """The result, 0 where there is no token, and the gradient of x and of every parameter, on one rank."""
    options = dict(case.options)
    if "cu_seqlens" in options:
        options["segment_ids"] = ids_of(options.pop("cu_seqlens"), case.x.shape[0])
    y, _ = F.gdn(case.params, case.x, case.cfg, **options)
    return _tokens(y, case), gradients(y, case)


def sharded(case: Case, mesh: sh.Mesh | None = None) -> tuple[Tensor, list[Tensor]]:
    """The same through simulated ranks."""
    mesh = sh.Mesh(**case.axes) if mesh is None else mesh
    layer = sh.simulate(sh.shard(F.gdn, case.layout, mesh, S=case.x.shape[1]), mesh)
    y, _ = layer(case.params, case.x, case.cfg, **case.options)
    return _tokens(y, case), gradients(y, case)


def gradients(y: Tensor, case: Case) -> list[Tensor]:
    found = torch.autograd.grad(y, case.leaves, case.grad, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, case.leaves, strict=True)]


def _tokens(y: Tensor, case: Case) -> Tensor:
    """Without what stands where no token is, which means nothing."""
    positions = case.options.get("positions")
    return y.detach() if positions is None else y.detach().masked_fill(positions[..., None] < 0, 0)
