"""What `gpu.py` measures: each kernel at the sizes of published models, with the bytes that it must move.

A case is one call of an op over tensors of its own, so that a run can go through many copies of them, and none is read
from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from meshfn import functional as F
from torch import Tensor

__all__ = ["KERNELS", "Case"]


@dataclass(frozen=True)
class Case:
    """make: fresh arguments. op: what is timed. plain: the function it stands for, of the same arguments.
    moved: bytes that it reads and writes at least."""

    label: str
    make: Callable[[], tuple[Any, ...]]
    op: Callable[..., Any]
    plain: Callable[..., Any]
    moved: int


# hidden size, features of the feed-forward block, heads, key/value heads, width of a head, vocabulary
MODELS = {
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 128256),
    "Qwen3.5-4B": (2560, 9216, 16, 4, 256, 248320),
}


def size_of(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def gemv() -> Iterator[Case]:
    ops = torch.ops.meshfn_cuda
    norm = {"eps": 1e-6}
    for model, (width, features, heads, kv_heads, head, vocab) in MODELS.items():
        for batch in (1, 8):

            def qkv(width=width, heads=heads, kv_heads=kv_heads, head=head, batch=batch):
                rows = (heads * head, kv_heads * head, kv_heads * head)
                weights = [randn(f, width, scale=width**-0.5) for f in rows]
                return randn(batch, 1, width), randn(width), weights, [None] * 3

            x, weight, weights, _ = qkv()
            yield Case(
                f"{model} B={batch} q, k, v with their norm",
                qkv,
                lambda *a: ops.norm_linear(*a, **norm),
                lambda *a: F.norm_linear(*a, **norm),
                size_of(x, weight, *weights) + 2 * batch * sum(w.shape[0] for w in weights),
            )

            def gate_up(width=width, features=features, batch=batch):
                return (
                    randn(batch, 1, width),
                    randn(width),
                    *(randn(features, width, scale=width**-0.5) for _ in range(2)),
                )

            yield Case(
                f"{model} B={batch} gate and up with their norm",
                gate_up,
                lambda *a: ops.gated_mlp(*a, activation="silu", **norm),
                lambda *a: F.gated_mlp(*a, activation="silu", **norm),
                size_of(*gate_up()) + 2 * batch * features,
            )

            def down(width=width, features=features, batch=batch):
                return (
                    randn(batch, 1, features),
                    randn(width, features, scale=features**-0.5),
                    randn(batch, 1, width),
                )

            yield Case(
                f"{model} B={batch} down and residual",
                down,
                ops.linear_add,
                F.linear_add,
                size_of(*down()) + 2 * batch * width,
            )

        def head_of(width=width, vocab=vocab):
            return randn(1, width), randn(width), [randn(vocab, width, scale=width**-0.5)], [None]

        x, weight, weights, _ = head_of()
        yield Case(
            f"{model} B=1 head",
            head_of,
            lambda *a: ops.norm_linear(*a, **norm),
            lambda *a: F.norm_linear(*a, **norm),
            size_of(x, weight, *weights) + 2 * vocab,
        )


def add_rms_norm() -> Iterator[Case]:
    ops = torch.ops.meshfn_cuda
    for model, (width, *_) in MODELS.items():
        for batch in (1, 64, 2048):

            def make(width=width, batch=batch):
                return randn(batch, 1, width), randn(batch, 1, width), randn(width)

            yield Case(
                f"{model} B={batch}",
                make,
                lambda *a: ops.add_norm(*a, eps=1e-6),
                lambda *a: F.add_norm(*a, eps=1e-6),
                size_of(*make()) + 2 * size_of(make()[0]),
            )


# kernel -> its cases
KERNELS: dict[str, Callable[[], Iterator[Case]]] = {"gemv": gemv, "add_rms_norm": add_rms_norm}
