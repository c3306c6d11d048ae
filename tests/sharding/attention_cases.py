"""Random attention under random layouts: global tensors, the dense result, and what every rank has of it."""

from __future__ import annotations

import importlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor

__all__ = ["HIDDEN", "Case", "dense", "ids_of", "make", "sharded", "slow_projection"]

# Seconds that overlap can hide in one pass, where a tensor is 20 ms on its way and queries take 40 to project.
HIDDEN = {"ulysses": 0.04, "all_gather": 0.04, "hybrid": 0.06}


@dataclass
class Case:
    """One layout on one mesh with one attention. tensors: q, k, v and perhaps sinks, each `B S ...`. options: what the
    core is told; cu_seqlens among them. grad: of the output."""

    seed: int
    layout: sh.Layout
    axes: dict[str, int]
    sizes: dict[str, int]
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    grad: Tensor
    dims: str = "B S H E"
    seen: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        sizes = " ".join(f"{letter}={n}" for letter, n in self.sizes.items())
        options = {k: v if not isinstance(v, Tensor) else tuple(v.shape) for k, v in self.options.items()}
        return f"seed {self.seed}: {self.layout.name} on {self.axes}, {sizes}, {options}, {list(self.tensors)}"


def make(seed: int, ranks: int | None = None, *, tp: bool = True) -> Case:
    """ranks: how many there must be, any if None. tp: whether heads may be split around the layout."""
    rng = random.Random(seed)
    while True:
        axes = _axes(rng, tp)
        count = axes.get("u", 1) * axes.get("g", 1) * axes.get("tp", 1)
        K, G = rng.randint(1, 5), rng.randint(1, 4)
        K = rng.choice([2, 4]) if "tp" in axes else K
        local = K * G // axes.get("tp", 1)
        if (ranks is None or count == ranks) and local >= axes.get("u", 1):
            break
    token_axis = "g" if "g" in axes else "u"
    options: dict[str, Any] = {"zigzag": rng.random() < 0.3, "overlap": rng.random() < 0.5}
    options |= {"tp": "tp"} if "tp" in axes else {}
    options |= {"exchange": rng.choice(["all", "needed"])} if "g" in axes else {}
    dims = options["dims"] = rng.choice(["B S H E", "B S H E", "B S H E", "S B H E"])
    kind = {("u",): sh.ulysses, ("g",): sh.all_gather}.get(tuple(a for a in axes if a != "tp"), sh.hybrid)
    S, chunks = rng.choice([0, 1, 3, 5, 8, 11, 13, 16]), 2 * axes[token_axis]
    if options["zigzag"] and axes[token_axis] > 1:
        S = chunks * rng.randint(0, 3)
    sizes = {"B": rng.randint(1, 3), "S": S, "H": K * G, "K": K, "E": rng.randint(1, 5), "V": rng.randint(1, 5)}
    made = torch.Generator().manual_seed(seed)
    # Not contiguous, as a transposed projection would be.
    q, k, v = (
        torch.randn(S, sizes[h], sizes["B"], sizes[e], generator=made, dtype=torch.float64).permute(2, 0, 1, 3)
        for h, e in ("HE", "KE", "KV")
    )
    tensors = {"q": q, "k": k, "v": v}
    if rng.random() < 0.4:
        tensors["sinks"] = torch.randn(K * G, generator=made, dtype=torch.float64) * 5
    grad = torch.randn(sizes["B"], S, K * G, sizes["V"], generator=made, dtype=torch.float64)
    told = _told(rng, made, sizes)
    return Case(seed, kind(**options), axes, sizes, told, tensors, grad, dims)


def _axes(rng: random.Random, tp: bool) -> dict[str, int]:
    """In any order: that of a mesh is its own."""
    names = rng.choice(
        [["u"], ["g"], ["g", "u"], ["u", "g"], *([["tp", "u"], ["g", "tp"], ["tp", "g", "u"]] if tp else [])]
    )
    return {name: 2 if name == "tp" else rng.randint(1, 4 if len(names) == 1 else 3) for name in names}


def _told(rng: random.Random, made: torch.Generator, sizes: dict[str, int]) -> dict[str, Any]:
    B, S, H = sizes["B"], sizes["S"], sizes["H"]
    found: dict[str, Any] = {"causal": True} if rng.random() < 0.6 else {}
    found |= {"window": rng.randint(1, 6)} if rng.random() < 0.3 else {}
    found |= {"softcap": 2.5} if rng.random() < 0.2 else {}
    if rng.random() < 0.3 and S:
        found["cu_seqlens"] = [0, *sorted(rng.choices(range(S + 1), k=rng.randint(0, 4))), S]
    elif rng.random() < 0.2:
        found["segment_ids"] = torch.randint(0, 3, (B, S), generator=made)
    if rng.random() < 0.3:
        shape = rng.choice([(S, S), (B, 1, S, S), (1, 1, S, S), (1, H, S, S)])
        found["mask"] = torch.rand(*shape, generator=made) > 0.3
    return found


def ids_of(cu: list[int], rows: int) -> Tensor:
    """Which document each token belongs to, `B S`."""
    lengths = [b - a for a, b in itertools.pairwise(cu)]
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).expand(rows, -1)


def dense(case: Case) -> tuple[Tensor, list[Tensor]]:
    """The result and the gradient of each tensor, on one rank."""
    options = dict(case.options)
    if "cu_seqlens" in options:
        options["segment_ids"] = ids_of(options.pop("cu_seqlens"), case.sizes["B"])
    return _with_gradients(case, lambda q, k, v, **rest: F.dot_product_attention(q, k, v, **options, **rest))


def sharded(case: Case, mesh: sh.Mesh | None = None) -> tuple[Tensor, list[Tensor]]:
    """The same through simulated ranks."""
    mesh = sh.Mesh(**case.axes) if mesh is None else mesh
    run = sh.simulate(core_of(case, mesh), mesh)

    def whole(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Tensor:
        return turned(case, run(*(turned(case, x) for x in (q, k, v)), **case.options, **rest))

    return _with_gradients(case, whole)


def core_of(case: Case, mesh: sh.Mesh) -> sh.Sharded:
    """The core under the case's layout. One with tokens first is a function around ours."""
    fn: Callable[..., Tensor] = F.dot_product_attention
    if case.dims != "B S H E":

        def fn(
            q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, **told: Any
        ) -> Tensor:
            swapped = (x.transpose(0, 1) for x in (q, k, v))
            return F.dot_product_attention(*swapped, causal=causal, window=window, **told).transpose(0, 1)

    return sh.shard(fn, case.layout, mesh, S=case.sizes["S"], H=case.sizes["H"], K=case.sizes["K"])


def turned(case: Case, x: Tensor) -> Tensor:
    """From `B S` to the case's order, or back."""
    return x if case.dims == "B S H E" else x.transpose(0, 1)


def _with_gradients(case: Case, fn: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
    xs = {name: x.detach().requires_grad_() for name, x in case.tensors.items()}
    y = fn(**xs)
    found = torch.autograd.grad(y, list(xs.values()), case.grad, allow_unused=True)
    return y.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs.values(), strict=True)]


class Slow(torch.autograd.Function):
    """Nothing, that takes 40 ms each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.04)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.04)
        return grad


def slow_projection(patch: pytest.MonkeyPatch) -> None:
    """Queries of `functional.attention` take 40 ms to project, and their gradient too."""
    module = importlib.import_module("meshfn.functional.attention")  # which its function of that name hides
    project = module.project_q

    def slowly(*args: Any) -> Any:
        q, gate = project(*args)
        return Slow.apply(q), gate

    patch.setattr(module, "project_q", slowly)
