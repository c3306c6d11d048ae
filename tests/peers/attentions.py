"""The attention of other authors, on one rank's tokens: what `peers.py` runs. It never imports meshfn.

deepspeed and ring-flash-attn are imported where they are called, in the processes of `peers.py` alone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

RESULTS = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    name: str
    peer: str
    ranks: int
    causal: bool
    cu_seqlens: list[int] | None
    mesh: tuple[int, int]  # of jax: how many gather keys, times how many exchange heads
    tensors: dict[str, Tensor]

    @property
    def processes(self) -> int:
        return 1 if self.peer == "jax" else self.ranks


# Local attention: ours, and dull on purpose. What is compared is how a peer moves heads and tokens.


def seen(tokens: int, causal: bool, cu_seqlens: Sequence[int] | None) -> Tensor:
    """`S S`, true where a query sees a key."""
    at = torch.arange(tokens)
    document = torch.bucketize(at, torch.tensor(cu_seqlens or [0, tokens]), right=True)
    same = document[:, None] == document
    return same & (at[:, None] >= at) if causal else same


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q `B S H E`, k `B S K E`, v `B S K V` -> `B S H V`; query head h reads key head `h // (H // K)`."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshe,bthe->bhst", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhst,bthv->bshv", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


# Peers on torch.distributed: each takes one rank's tokens, `B S/P heads width`, and gives that rank's output.


@functools.cache
def _deepspeed() -> None:
    """DeepSpeed on the group that there is: its own communication object, and a `groups.mpu` that knows the rank."""
    import deepspeed.comm
    from deepspeed.utils import groups

    # Or it compiles an all-reduce in shared memory, for half a minute, which nothing here calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    # The uneven exchange asks groups for its rank alone; without an mpu that answers, it looks for a device mesh.
    groups.mpu = types.SimpleNamespace(get_sequence_parallel_rank=dist.get_rank)


def deepspeed_attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    _deepspeed()
    from deepspeed.sequence.layer import DistributedAttention

    mask = seen(q.shape[1] * case.ranks, case.causal, case.cu_seqlens)
    # 2, 1: heads are scattered and tokens gathered, of `B S H E`; the last 0 says that the batch comes first.
    return DistributedAttention(functools.partial(attend, mask=mask), dist.group.WORLD, 2, 1)(q, k, v, 0)


def ulysses_hf(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    _deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    batch, local, heads, width = q.shape
    # Positions restart in each document, as a transformers collator packs them; the peer gathers them over the ranks.
    at, starts = torch.arange(local * case.ranks), torch.tensor(case.cu_seqlens or [0])
    positions = at - starts[torch.bucketize(at, starts, right=True) - 1]

    def local_attention(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, position_ids: Tensor
    ) -> tuple[Tensor, None]:
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        visible = seen(q.shape[2], case.causal, [*starts, q.shape[2]])
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), visible), None

    layer = UlyssesSPAttentionHF(
        local_attention,
        batch_size=batch,
        attn_head_count=heads,
        attn_head_size=width,
        kv_head_count=k.shape[2],
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        local_seq_length=local,
        global_seq_length=local * case.ranks,
    )
    mine = positions.chunk(case.ranks)[dist.get_rank()].expand(batch, -1).contiguous()
    module = torch.nn.Module()  # stands for the model's layer, of which it only sets num_key_value_groups
    out, _ = layer(module, *(x.transpose(1, 2) for x in (q, k, v)), None, position_ids=mine)
    return out.reshape(batch, local, heads, v.shape[3])


@functools.cache
def _ring_flash_attn() -> Any:
    """ring-flash-attn on a flash_attn of fp64 torch, since the real one needs a GPU."""
    flash, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    ours = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    interface.__dict__.update({function.__name__: function for function in ours})
    # Its adapter for transformers imports a name that transformers 5 has no more, and we want none of it.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules.update(
        {"flash_attn": flash, "flash_attn.flash_attn_interface": interface, "ring_flash_attn.adapters": adapters}
    )
    import ring_flash_attn

    return ring_flash_attn


def llama3(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ring = _ring_flash_attn()
    cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32)
    cu_q, cu_k, max_q, max_k, keys = ring.llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, case.causal, dist.get_rank(), case.ranks
    )
    # heads_k_stride 1: each key head is gathered by itself, while the one before is worked on.
    out = ring.llama3_flash_attn_varlen_func(
        *(x[0] for x in (q, k, v)), cu_q, cu_k, max_q, max_k, 1, keys, causal=case.causal, group=dist.group.WORLD
    )
    return out[None]


def zigzag(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert case.cu_seqlens is None, "zigzag has no documents"
    return _ring_flash_attn().zigzag_ring_flash_attn_func(q, k, v, causal=case.causal, group=dist.group.WORLD)


# The private functions of flash_attn that ring-flash-attn calls, by keyword, with more arguments than matter here.


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Scores `B K G S T`; causal as flash_attn means it: the last query sees the last key."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bskge,btke->bkgst", grouped, k) * scale
    rows, columns = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    hidden = columns > rows[:, None] + (k.shape[1] - q.shape[1])
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _flash_attn_forward(
    *, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **unused: object
) -> tuple[Tensor, Tensor, None, None]:
    scores = _scores(q, k, softmax_scale, causal)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bkgst,btkv->bskgv", (scores - lse[..., None]).exp(), v)
    return out.flatten(2, 3), lse.flatten(1, 2), None, None


def _flash_attn_backward(
    *, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **rest: Any
) -> None:
    """Write dq, dk and dv; out and softmax_lse may be those of more keys than k has."""
    softmax_scale, causal, dq, dk, dv = (rest[key] for key in ("softmax_scale", "causal", "dq", "dk", "dv"))
    heads = (k.shape[2], -1)
    weights = (_scores(q, k, softmax_scale, causal) - softmax_lse.unflatten(1, heads)[..., None]).exp()
    dout, out = dout.unflatten(2, heads), out.unflatten(2, heads)
    dweights = torch.einsum("bskgv,btkv->bkgst", dout, v)
    dscores = weights * (dweights - torch.einsum("bskgv,bskgv->bkgs", dout, out)[..., None]) * softmax_scale
    dv.copy_(torch.einsum("bkgst,bskgv->btkv", weights, dout))
    dq.copy_(torch.einsum("bkgst,btke->bskge", dscores, k).flatten(2, 3))
    dk.copy_(torch.einsum("bkgst,bskge->btke", dscores, q.unflatten(2, heads)))


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def _flash_attn_varlen_forward(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any
) -> tuple[Tensor, Tensor, None, None]:
    parts = [
        _flash_attn_forward(q=q[None, mine], k=k[None, keys], v=v[None, keys], **rest)
        for mine, keys in _documents(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], dim=1), None, None


def _flash_attn_varlen_backward(*, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> None:
    softmax_lse = rest.pop("softmax_lse")
    for mine, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        of_queries = {key: rest[key][None, mine] for key in ("dout", "q", "out", "dq")}
        of_keys = {key: rest[key][None, keys] for key in ("k", "v", "dk", "dv")}
        _flash_attn_backward(softmax_lse=softmax_lse[None, :, mine], **(rest | of_queries | of_keys))


def jax_results(case: Case) -> dict[str, np.ndarray]:
    """Global results: tokens are split over g and, within, over u; u exchanges heads for tokens, g gathers keys."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    gather, ulysses = case.mesh
    assert case.ranks == gather * ulysses == jax.device_count()
    mesh = jax.make_mesh(case.mesh, ("g", "u"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mask = jnp.asarray(seen(case.tensors["q"].shape[1], case.causal, case.cu_seqlens).numpy())

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jax.lax.all_to_all(x, "u", split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
        k, v = (jax.lax.all_gather(x, "g", axis=1, tiled=True) for x in (k, v))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        rows = jax.lax.dynamic_slice_in_dim(mask, jax.lax.axis_index("g") * q.shape[1], q.shape[1])
        scores = jnp.einsum("bshe,bthe->bhst", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(rows, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhst,bthv->bshv", weights, v)
        return jax.lax.all_to_all(out, "u", split_axis=1, concat_axis=2, tiled=True)

    tokens = PartitionSpec(None, ("g", "u"))
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))
    q, k, v, do = (jnp.asarray(case.tensors[key].numpy()) for key in ("q", "k", "v", "do"))
    out, back = jax.vjp(sharded, q, k, v)
    return {key: np.asarray(x) for key, x in zip(RESULTS, (out, *back(do)), strict=True)}


PEERS: dict[str, Callable[[Case, Tensor, Tensor, Tensor], Tensor]] = {
    "deepspeed": deepspeed_attention,
    "ulysses_hf": ulysses_hf,
    "llama3": llama3,
    "zigzag": zigzag,
}
