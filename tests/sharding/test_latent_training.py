"""Training under layouts of latent attention beside training on one rank, from the same weights.

    pytest -m verify -s tests/sharding/test_latent_training.py    # prints the table

After torchtitan #4760, which compares losses and norms of gradients at steps 10 and 100. Two layers, 2 simulated ranks,
one batch, AdamW. In fp64 layouts and one rank agree but for rounding, so that what differs in fp32 is rounding too, and
is held to what one rank in fp32 differs from itself in fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

pytestmark = pytest.mark.verify
B, S, D = 2, 32, 48
STEPS, SHOWN = 100, (1, 10, 100)
COMMON: dict[str, Any] = {
    "hidden_size": D,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "norm": F.NormConfig(eps=1e-6),
    "initializer_range": 0.2,
}
MODELS = {
    "DeepSeek V3": F.MLAConfig(**COMMON, rope=F.RopeConfig(interleaved=True)),
    "Kimi K3": F.MLAConfig(**COMMON, output_gate=True),  # no positions, and a gate of heads
}
LAYOUTS = {
    "mla_latent": (sh.mla_latent("u"), sh.Mesh(u=2)),
    "mla_packed": (sh.mla_packed("u"), sh.Mesh(u=2)),
    "mla_gather": (sh.mla_gather("g"), sh.Mesh(g=2)),
}


class Run(NamedTuple):
    """Of each step its loss and the norm of its gradient before clipping; of the first its output and gradient."""

    losses: list[float]
    norms: list[float]
    output: Tensor
    gradient: Tensor


def train(cfg: F.MLAConfig, dtype: torch.dtype, where: tuple[sh.Layout, sh.Mesh] | None = None) -> Run:
    """where: a layout on a mesh, one rank unless given."""
    made = torch.Generator().manual_seed(0)
    x, target = (torch.randn(B, S, D, dtype=torch.float64, generator=made).to(dtype) for _ in "xt")
    weights = [F.MLA.init(cfg, seed, dtype=torch.float64) for seed in (0, 1)]
    layers = [F.tree.map(lambda p: p.to(dtype).requires_grad_(), each) for each in weights]
    leaves = [p for each in layers for p in F.tree.leaves(each)]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3)
    layer = F.mla if where is None else sh.simulate(sh.shard(F.mla, *where, S=S), where[1])
    losses, norms, first = [], [], None
    for _ in range(STEPS):
        y = x
        for params in layers:
            y = y + layer(params, y, cfg, positions=torch.arange(S)[None])[0]
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        first = first or (y.detach(), torch.cat([p.grad.flatten() for p in leaves]).double())
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(leaves, 1.0).item())
        optimizer.step()
    return Run(losses, norms, *first)


class Apart(NamedTuple):
    """Relative differences of two runs: of losses and norms at the steps shown, of the first gradient in L2."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradient: float


def apart(a: Run, b: Run) -> Apart:
    each = [[abs(x[i - 1] - y[i - 1]) / abs(y[i - 1]) for i in SHOWN] for x, y in zip(a[:2], b[:2], strict=True)]
    return Apart(*map(tuple, each), ((a.gradient - b.gradient).norm() / b.gradient.norm()).item())


def line(name: str, found: Apart, output: str) -> None:
    shown = [
        *(f"{x:.1e}" for pair in zip(found.losses, found.norms, strict=True) for x in pair),
        f"{found.gradient:.1e}",
    ]
    print(f"{name:28}" + "".join(f"{cell:>10}" for cell in shown) + f"   {output}")


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_rank(name):
    cfg = MODELS[name]
    single, double = torch.float32, torch.float64
    dense = {dtype: train(cfg, dtype) for dtype in (single, double)}
    assert dense[double].losses[-1] < dense[double].losses[0] / 3
    rounding = apart(dense[single], dense[double])
    steps = "".join(f"{f'{what} {i}':>10}" for i in SHOWN for what in ("loss", "norm"))
    print(f"\n{name + ', relative':28}{steps}{'gradient 1':>12}   output 1")
    line("one rank, fp32 and fp64", rounding, "")
    for label, where in LAYOUTS.items():
        for dtype, own in dense.items():
            run = train(cfg, dtype, where)
            same = torch.equal(run.output, own.output)
            found = apart(run, own)
            line(f"{label}, {str(dtype)[6:]}", found, "bitwise" if same else "rounded")
            # Tokens or heads are fewer, and every sum has its terms. Of mla_latent's kv_b there are fewer rows too,
            # which a product may then sum in another order.
            assert same or label == "mla_latent"
            torch.testing.assert_close(run.output, own.output, rtol=1e-13 if dtype == double else 1e-6, atol=1e-13)
            if dtype == double:
                assert max(*found.losses, *found.norms, found.gradient) < 1e-12
                continue
            eps = torch.finfo(dtype).eps
            for mine, usual in zip((*found.losses, *found.norms), (*rounding.losses, *rounding.norms), strict=True):
                assert mine <= 2 * max(usual, eps)
            assert found.gradient <= 2 * rounding.gradient
