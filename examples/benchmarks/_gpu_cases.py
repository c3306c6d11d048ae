"""What `gpu.py` measures: each kernel at the sizes of published models, with the bytes that it must move.

A case is one call of an op over tensors of its own, so that a run can go through many copies of them, and none is read
from a cache. For another kernel, write a function that yields its cases and name it in `KERNELS`.

Letters: B batch, T slots, W convolution width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from meshfn import functional as F
from meshfn.functional import absorbed, recurrence
from meshfn.functional.sampling import Controls
from meshfn.kernels_cuda import OPS
from meshfn.kernels_cuda import qkv_rope_cache as written_by
from torch import Tensor

__all__ = ["KERNELS", "Case"]


@dataclass(frozen=True)
class Case:
    """make: fresh arguments. op: what is timed. plain: the function it stands for, of the same arguments.
    moved: bytes that it reads and writes at least. An op that writes in place is one that returns what it wrote too, so
    that it is compared."""

    label: str
    make: Callable[[], tuple[Any, ...]]
    op: Callable[..., Any]
    plain: Callable[..., Any]
    moved: int


@dataclass(frozen=True)
class Sizes:
    """width: of the hidden state. features: of the feed-forward block. head: width of one. turned: how much of it is
    rotary. gated: queries and keys are normalised, and a gate multiplies what attention returns. delta: of a gated
    delta net its key heads, value heads, width of both and W; None without one."""

    width: int
    features: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    turned: int
    gated: bool = False
    delta: tuple[int, int, int, int] | None = None


MODELS = {
    "Llama-3.2-1B": Sizes(2048, 8192, 32, 8, 64, 128256, turned=64),
    "Qwen3.5-4B": Sizes(2560, 9216, 16, 4, 256, 248320, turned=64, gated=True, delta=(16, 32, 128, 4)),
}
# Of latent attention: heads, N, R, V and L.
LATENT = {"DeepSeek-V3": (128, 128, 64, 128, 512)}
# Of gated delta nets with a decay for each channel, as `Sizes.delta`.
DELTA = {"Kimi-Linear": (32, 32, 128, 4)}
DEVICE = "cuda"
BATCHES = (1, 8)
# Slots of a cache, all of them written.
CONTEXTS = (1024, 8192)


def size_of(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def gemv() -> Iterator[Case]:
    ops = torch.ops.meshfn_cuda
    norm = {"eps": 1e-6}
    for model, m in MODELS.items():
        width, features, heads, kv_heads, head, vocab = m.width, m.features, m.heads, m.kv_heads, m.head, m.vocab
        for batch in BATCHES:

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
    for model, m in MODELS.items():
        for batch in (1, 64, 2048):

            def make(width=m.width, batch=batch):
                return randn(batch, 1, width), randn(batch, 1, width), randn(width)

            yield Case(
                f"{model} B={batch}",
                make,
                lambda *a: ops.add_norm(*a, eps=1e-6),
                lambda *a: F.add_norm(*a, eps=1e-6),
                size_of(*make()) + 2 * size_of(make()[0]),
            )


def decode_attention() -> Iterator[Case]:
    def called(fn):
        return lambda q, k, v, at, slots, gate: fn(q, k, v, q_positions=at, k_positions=slots, gate=gate)

    for model, m in MODELS.items():
        for batch, slots in itertools.product(BATCHES, CONTEXTS):

            def make(m=m, batch=batch, slots=slots):
                q, *kv = (randn(batch, n, h, m.head) for n, h in ((1, m.heads), *[(slots, m.kv_heads)] * 2))
                at = torch.full((batch, 1), slots - 1, device=q.device)
                held = torch.arange(slots, device=q.device).repeat(batch, 1)
                return q, *kv, at, held, randn(batch, 1, m.heads, m.head) if m.gated else None

            given = make()
            yield Case(
                f"{model} B={batch} T={slots}",
                make,
                called(torch.ops.meshfn_cuda.decode_attention),
                called(F.decode_attention),
                size_of(*given) + size_of(given[0]),  # the result is as large as the queries
            )


def qkv_rope_cache() -> Iterator[Case]:
    """A token's keys and values go to the last slot; all slots' positions are asked for."""
    for model, m in MODELS.items():
        options = {"eps": 1e-6, "zero_centered": m.gated}

        def op(*args, options=options):
            return *torch.ops.meshfn_cuda.qkv_rope_cache(*args, **options), *args[7:9]

        def plain(*args, options=options):
            return *written_by.qkv_rope_cache(*args, **options), *args[7:9]

        for batch, slots in itertools.product(BATCHES, CONTEXTS):

            def make(m=m, batch=batch, slots=slots):
                q, k, v = (randn(batch, 1, h, m.head) for h in (m.heads, m.kv_heads, m.kv_heads))
                angles = torch.rand(batch, 1, m.turned // 2, device=q.device)
                tables = [x.to(q.dtype) for x in (angles.cos(), angles.sin())]
                norms = [randn(m.head) for _ in "qk"] if m.gated else [None, None]
                caches = [randn(batch, slots, m.kv_heads, m.head) for _ in "kv"]
                at = torch.full((batch, 1), slots - 1, device=q.device)
                return q, k, v, *tables, *norms, *caches, at, torch.arange(slots, device=q.device)

            q, k, v, *beside, _, _, at, asked = make()
            yield Case(
                f"{model} B={batch} T={slots}",
                make,
                op,
                plain,
                # Read, and then written: queries, a slot of each cache, and a position of each slot and row.
                size_of(q, k, v, *beside, at, asked) + size_of(q, k, v) + batch * size_of(asked),
            )


def gdn_decode() -> Iterator[Case]:
    """What a step reads does not grow with the context. The plain function returns the states that the op writes."""

    def op(*args):
        return torch.ops.meshfn_cuda.gdn_step(*args), *args[12:16]

    by_head = {model: (m.delta, False) for model, m in MODELS.items() if m.delta is not None}
    for model, (delta, by_channel) in (by_head | {model: (delta, True) for model, delta in DELTA.items()}).items():
        for batch in BATCHES:

            def make(sizes=delta, by_channel=by_channel, batch=batch):
                key_heads, heads, head, taps = sizes
                by_heads = [randn(batch, 1, h, head) for h in (key_heads, key_heads, heads, heads)]
                decays = [randn(batch, 1, heads), randn(batch, 1, heads, *[head] * by_channel)]
                channels = [h * head for h in (key_heads, key_heads, heads)]
                convs = [randn(n, 1, taps, scale=taps**-0.5) for n in channels]
                rates = [randn(n, dtype=torch.float32) for n in (heads, decays[1][0].numel())]
                states = [randn(batch, n, taps - 1) for n in channels]
                state = randn(batch, heads, head, head, scale=head**-0.5, dtype=torch.float32)
                at = torch.full((batch, 1), 7, device=state.device)
                return *by_heads, *decays, *convs, *rates, randn(head), *states, state, at

            given = make()
            yield Case(
                f"{model} B={batch}",
                make,
                op,
                recurrence.gdn_step,
                size_of(*given) + size_of(given[2], *given[12:16]),  # the result is as large as the values
            )


def mla_decode() -> Iterator[Case]:
    """All three launches of it. kv_b is read once, whatever the batch."""

    def called(fn, nope, width):
        told = {"nope_dim": nope, "softmax_scale": width**-0.5, "causal": True}
        return lambda q, latent, kv_b, at, held: fn(q, latent, kv_b, q_positions=at, k_positions=held, **told)

    for model, (heads, nope, rotary, v, latent) in LATENT.items():
        for batch, slots in itertools.product(BATCHES, CONTEXTS):

            def make(sizes=(heads, nope, rotary, v, latent), batch=batch, slots=slots):
                heads, nope, rotary, v, latent = sizes
                q, cache = randn(batch, 1, heads, nope + rotary), randn(batch, slots, latent + rotary)
                at = torch.full((batch, 1), slots - 1, device=q.device)
                held = torch.arange(slots, device=q.device).repeat(batch, 1)
                return q, cache, randn(heads * (nope + v), latent, scale=latent**-0.5), at, held

            yield Case(
                f"{model} B={batch} T={slots}",
                make,
                called(torch.ops.meshfn_cuda.absorbed_core, nope, nope + rotary),
                called(absorbed.absorbed_core, nope, nope + rotary),
                size_of(*make()) + 2 * batch * heads * v,
            )


def ending(vocab: int, batch: int) -> tuple[Tensor, ...]:
    """Logits, positions and end tokens."""
    logits = randn(batch, vocab, scale=3.0)
    return logits, torch.arange(batch, device=logits.device), torch.tensor([2, 7], device=logits.device)


def sample_advance() -> Iterator[Case]:
    for model, m in MODELS.items():
        for batch in BATCHES:

            def make(vocab=m.vocab, batch=batch):
                return ending(vocab, batch)

            # Written: a token, its log-probability and a position of each row.
            moved = size_of(*make()) + batch * (8 + 4 + 8)
            yield Case(f"{model} B={batch}", make, torch.ops.meshfn_cuda.sample_advance, F.sample_advance, moved)


def sample_options() -> Iterator[Case]:
    """With every option. Scores that a block writes and reads again are no part of the bytes."""
    op = OPS["sample_options"]
    for model, m in MODELS.items():
        for batch in BATCHES:

            def make(vocab=m.vocab, batch=batch):
                logits, positions, ends = ending(vocab, batch)
                counts = torch.randint(0, 2, (batch, vocab), dtype=torch.int32, device=logits.device)
                off = Controls.off(batch, vocab, logits.device)
                asked = {"do_sample": True, "temperature": 0.8, "top_k": min(50, vocab), "top_p": 0.9, "min_p": 0.01}
                asked |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3}
                return logits, positions, counts, ends, *(getattr(off, k).fill_(v) for k, v in asked.items())

            moved = size_of(*make()) + batch * (8 + 4 + 8)
            yield Case(f"{model} B={batch}", make, torch.ops.meshfn_cuda.sample_options, op.reference, moved)


# kernel -> its cases
KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "gemv": gemv,
    "add_rms_norm": add_rms_norm,
    "decode_attention": decode_attention,
    "qkv_rope_cache": qkv_rope_cache,
    "gdn_decode": gdn_decode,
    "mla_decode": mla_decode,
    "sample_advance": sample_advance,
    "sample_options": sample_options,
}
