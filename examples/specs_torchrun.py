# %% [markdown]
# One body, any number of processes: `torchrun --nproc-per-node 2 examples/specs_torchrun.py` (or 4, or plain `python`).
# Attention over tokens that lie on several ranks, as Ulysses does it: each rank trades its tokens of all heads for all
# tokens of some heads, attends, and trades back. 9 query heads, 3 key/value heads and 97 tokens divide by nothing.

# %%
from __future__ import annotations

import os

import torch
import torch.distributed as dist
from meshfn import sharding as sh
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

SIZES = {"S": 97, "K": 3, "G": 3}  # tokens, key/value heads, query heads for each of them


# %%
# B batch, S tokens, K key/value heads, G query heads for each, E width of a head.
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the heads it is given, none included. q: B S (K G) E. k, v: B S K E."""
    q = q.unflatten(2, (k.shape[2], SIZES["G"])) / q.shape[3] ** 0.5
    scores = torch.einsum("bskge, btke -> bkgst", q, k)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bkgst, btke -> bskge", weights, v).flatten(2, 3)


def body(q: Tensor, k: Tensor, v: Tensor, mesh: sh.Mesh) -> Tensor:
    """The same on one rank's tokens. q: B S/u (K G) E. k, v: B S/u K E."""
    q = sh.reshard(q, "B S/u (K G) E -> B S (K/u G) E", mesh, **SIZES)
    k = sh.reshard(k, "B S/u K E -> B S K/u E", mesh, **SIZES)
    v = sh.reshard(v, "B S/u K E -> B S K/u E", mesh, **SIZES)
    o = attention(q, k, v)  # a fourth rank holds none of three heads, and takes part all the same
    return sh.reshard(o, "B S (K/u G) E -> B S/u (K G) E", mesh, **SIZES)


def inputs() -> list[Tensor]:
    """Whole tensors, the same on every rank."""
    made = torch.Generator().manual_seed(0)
    S, K, G = SIZES.values()
    return [torch.randn(2, S, heads, 16, dtype=torch.float64, generator=made) for heads in (K * G, K, K)]


# %%
def main() -> None:
    """Run the body on this process's rank, and compare it and its gradients with the whole."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = sh.Mesh(u=1)
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        mesh = sh.ProcessGroup(init_device_mesh(device, (ranks,), mesh_dim_names=("u",))).mesh
    trace = sh.trace(mesh)

    whole = [x.to(device).requires_grad_() for x in inputs()]
    wanted = attention(*whole)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), whole)

    tokens = sh.Spec.parse("B S/u").slices({"B": 2, **SIZES}, mesh, mesh.rank)
    mine = [x[tokens].detach().requires_grad_() for x in whole]
    found = body(*mine, mesh=trace.mesh)
    grads = torch.autograd.grad(found.square().sum(), mine)

    torch.testing.assert_close(found, wanted[tokens])
    torch.testing.assert_close(grads, tuple(g[tokens] for g in wanted_grads))
    if mesh.rank == 0:
        print(f"{mesh}: rank 0 holds {found.shape[1]} of 97 tokens; output and gradients as dense")
        print(trace)
        print("bytes sent and received by rank 0:", *trace.bytes())
    if ranks > 1:
        dist.barrier()  # no process leaves while another still talks to it
        dist.destroy_process_group()


# %%
if __name__ == "__main__":
    main()
