"""Random latent attention under random layouts: global tensors, the dense result, and what ranks have of it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

from .attention_cases import ids_of

__all__ = ["Case", "config", "dense", "make", "sharded", "weights"]


@dataclass
class Case:
    """One layout on one mesh with one latent attention. options: what the layer is told; cu_seqlens among them.
    grad: of the output."""

    seed: int
    layout: sh.Layout
    axes: dict[str, int]
    cfg: F.MLAConfig
    params: F.MLA
    x: Tensor
    options: dict[str, Any]
    grad: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        B, S, _ = self.x.shape
        return {**self.cfg.sizes, "B": B, "S": S, "K": self.cfg.num_attention_heads}

    @property
    def leaves(self) -> list[Tensor]:
        """x, then every parameter."""
        return [self.x, *F.tree.leaves(self.params)]

    def __repr__(self) -> str:
        options = {k: v if not isinstance(v, Tensor) else tuple(v.shape) for k, v in self.options.items()}
        B, S, _ = self.x.shape
        return f"seed {self.seed}: {self.layout.name} on {self.axes}, B={B} S={S}, {options}, {self.cfg}"


def config(**more: Any) -> F.MLAConfig:
    """Odd sizes, every one of its own."""
    given: dict[str, Any] = {
        "hidden_size": 10, "num_attention_heads": 4, "kv_lora_rank": 7, "q_lora_rank": 6, "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2, "v_head_dim": 4, "rope": F.RopeConfig(), "initializer_range": 0.4,
    }  # fmt: skip
    return F.MLAConfig(**given | more)


def weights(made: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Parameters of which none is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)

    def moved(p: Tensor) -> Tensor:
        return (p + 0.3 * torch.randn(p.shape, generator=generator)).to(dtype).requires_grad_()

    return F.tree.map(moved, made)


def make(seed: int, ranks: int | None = None) -> Case:
    """ranks: how many there must be, 2 to 8 if None."""
    rng = random.Random(seed)
    kind = rng.choice(["latent", "latent g", "packed", "packed g", "gather"])
    while True:
        names = {"gather": ["g"]}.get(kind, ["u", "g"] if kind.endswith("g") else ["u"])
        names = [*names, *(name for name in ("tp", "dp") if rng.random() < 0.35)]
        axes = {name: rng.randint(1, 2 if name == "dp" else 4) for name in rng.sample(names, len(names))}
        tp, u = axes.get("tp", 1), axes.get("u", 1)
        heads = [n for n in range(1, 8) if n // tp >= u]
        count = math.prod(axes.values())
        if heads and (count == ranks if ranks else 2 <= count <= 8):
            break
    options: dict[str, Any] = {name: name for name in ("tp", "dp") if name in axes}
    options |= {"overlap": rng.random() < 0.5, "exchange": rng.choice(["all", "needed"] if "g" in axes else ["all"])}
    S, B = rng.randint(1, 19), rng.randint(1, 4)
    if rng.random() < 0.4:
        outermost = axes.get("g", u)
        S, options["zigzag"] = 2 * outermost * rng.randint(1, max(1, 8 // outermost)), True
    if kind == "gather":
        layout = sh.mla_gather("g", **options)
    else:
        made = sh.mla_latent if kind.startswith("latent") else sh.mla_packed
        layout = made(*(("u", "g") if kind.endswith("g") else ("u",)), **options)
    cfg = _config(rng)(num_attention_heads=rng.choice(heads))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, cfg.hidden_size, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    told = _told(rng, generator, B, S, cfg.num_attention_heads)
    return Case(seed, layout, axes, cfg, weights(F.MLA.init(cfg, seed), seed), x, told, grad)


def _config(rng: random.Random) -> Any:
    N, R = rng.randint(1, 4), rng.choice([2, 4])
    V = rng.choice([n for n in range(1, 8) if n != N + R])
    found: dict[str, Any] = {"qk_nope_head_dim": N, "qk_rope_head_dim": R, "v_head_dim": V}
    found |= {"q_lora_rank": rng.choice([None, 6]), "kv_lora_rank": rng.randint(1, 7)}
    found |= {"rope": rng.choice([None, F.RopeConfig(), F.RopeConfig(interleaved=True)])}
    found |= {"causal": rng.random() < 0.6, "window": rng.choice([None, None, rng.randint(1, 6)])}
    for name in ("output_gate", "attention_bias", "o_bias"):
        found[name] = rng.random() < 0.4
    found |= {name: F.NormConfig() for name in ("norm", "post_norm") if rng.random() < 0.4}
    return lambda **more: config(**found, **more)


def _told(rng: random.Random, made: torch.Generator, B: int, S: int, H: int) -> dict[str, Any]:
    what = rng.choice(["nothing", "mask", "documents", "segments"])
    if what == "mask":
        shape = rng.choice([(S, S), (B, 1, S, S), (1, 1, S, S), (1, H, S, S), (B, H, S, S)])
        mask = torch.rand(*shape, generator=made) > 0.3
        mask[..., torch.rand(S, generator=made) > 0.8, :] = False  # queries that see nothing
        return {"mask": mask}
    if what == "documents":
        return {"cu_seqlens": [0, *sorted(rng.choices(range(S + 1), k=rng.randint(0, 4))), S]}
    return {"segment_ids": torch.randint(0, 3, (B, S), generator=made)} if what == "segments" else {}


def dense(case: Case) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradient of x and of every parameter, on one rank."""
    options, (B, S, _) = dict(case.options), case.x.shape
    positions = torch.arange(S)[None]
    if "cu_seqlens" in options:
        cu = options.pop("cu_seqlens")
        options["segment_ids"] = ids_of(cu, B)
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])[None]
    y, _ = F.mla(case.params, case.x, case.cfg, positions=positions, **options)
    return y.detach(), gradients(y, case)


def sharded(case: Case, mesh: sh.Mesh | None = None) -> tuple[Tensor, list[Tensor]]:
    """The same through simulated ranks."""
    mesh = sh.Mesh(**case.axes) if mesh is None else mesh
    layer = sh.simulate(sh.shard(F.mla, case.layout, mesh, S=case.x.shape[1]), mesh)
    y, _ = layer(case.params, case.x, case.cfg, **case.options)
    return y.detach(), gradients(y, case)


def gradients(y: Tensor, case: Case) -> list[Tensor]:
    found = torch.autograd.grad(y, case.leaves, case.grad, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, case.leaves, strict=True)]
