# %% [markdown]
# A layer of latent attention over ranks, on gloo: `mla_latent`, `mla_packed` and `mla_gather` beside what knows nothing
# of latents, keys and values of every head made first and moved by `sh.ulysses`.
#
#     python examples/benchmarks/mla_layouts.py [--tokens 1024] [--ranks 2 4] [--light]
#
# Forward and backward, fp32, one thread a process. All run in the same processes, in an order that turns with each
# round; a figure is the median of the rounds, each as long as the slowest rank took, with its quartiles, and a ratio
# the median of each round's own. Above 1 it is faster than materialised. Before that all must be what one rank
# computes: outputs and gradients.
#
# Two shapes: a small one, whose latent is a quarter as wide as keys and values of all heads, and one with more heads
# and a narrower latent, a 32nd; DeepSeek-V3's is a 64th. Once with attention, causal; else with a core of next to
# nothing, which reads every key, so that exchanges and projections are all there is. With attention `mla_gather` has
# less to do in all, which has nothing to do with bytes: `F.dot_product_attention` also multiplies what a causal mask
# hides, and early ranks never get later keys. Processes of one machine move bytes through its memory, where they cost
# little beside what each exchange does, and more ranks than cores wait for each other: this is no network. Most of an
# exchange is waiting for the slowest rank and for gloo's threads; packing and unpacking are about a fifth of it with 2
# ranks and the wide shape, a twentieth with 4 and the small one. Six exchanges wait six times, four wait four times.

# %%
from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Read by each process that is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshfn import functional as F
from meshfn import sharding as sh
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

Layer = Callable[[F.MLA, Tensor], Tensor]
ROUNDS, CALLS = 11, 1
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "norm": F.NormConfig(eps=1e-6),
    "rope": F.RopeConfig(interleaved=True),
}
SMALL = F.MLAConfig(num_attention_heads=8, kv_lora_rank=128, **SIZES)
WIDE = F.MLAConfig(num_attention_heads=32, kv_lora_rank=64, **SIZES)


# %%
def light(q: Tensor, k: Tensor, v: Tensor, *, q_positions: Tensor | None = None, **_: Any) -> Tensor:
    """Of every input, head by head, in one pass over each: no attention."""
    return q.mean(-1, keepdim=True) * k.mean((1, 3), keepdim=True) + v.mean(1, keepdim=True)


CASES = [
    ("attention", F.dot_product_attention, SMALL),
    ("light core", light, dataclasses.replace(SMALL, causal=False)),
    ("light core", light, dataclasses.replace(WIDE, causal=False)),
]


# %%
def materialised(core: Callable[..., Tensor], cfg: F.MLAConfig, mesh: sh.Mesh, tokens: int) -> Layer:
    """Keys and values of every head first, each key with its copy of the rotary part; then all of them move."""
    heads = cfg.num_attention_heads
    moved = sh.shard(core, sh.ulysses("u"), mesh, S=tokens, H=heads, K=heads)

    def layer(params: F.MLA, x: Tensor) -> Tensor:
        positions = sh.positions_of("B S/u D", mesh, S=tokens)
        tables = F.rope_tables(positions, cfg.rope, cfg.qk_rope_head_dim)
        q_latent, kv_latent, key_rope = F.mla_latents(params, x, cfg)
        q_nope, q_rope = F.mla_queries(params, q_latent, cfg).split((cfg.qk_nope_head_dim, cfg.qk_rope_head_dim), -1)
        q = torch.cat((q_nope, F.mla_rotary(q_rope, *tables, interleaved=True)), -1)
        key_rope = F.mla_rotary(key_rope[:, :, None], *tables, interleaved=True)[:, :, 0]
        o = moved(q, *F.mla_expand(params, kv_latent, key_rope, cfg), causal=cfg.causal, softmax_scale=cfg.scale)
        return F.mla_output(params, o, x, cfg)

    return layer


def layers(
    core: Callable[..., Tensor], cfg: F.MLAConfig, u: sh.Mesh, g: sh.Mesh, tokens: int
) -> dict[str, Layer]:  # fmt: skip
    """By name, each a function of parameters and of this rank's tokens."""
    found = {"materialised": materialised(core, cfg, u, tokens)}
    for layout, mesh in ((sh.mla_packed(), u), (sh.mla_latent(), u), (sh.mla_gather(), g)):
        layer = sh.shard(F.mla, layout, mesh, S=tokens)
        found[layout.name] = lambda params, x, layer=layer: layer(params, x, cfg, core=core)[0]
    return found


def one_rank(core: Callable[..., Tensor], cfg: F.MLAConfig, tokens: int) -> Layer:
    """Of all tokens."""
    return lambda params, x: F.mla(params, x, cfg, positions=torch.arange(tokens)[None], core=core)[0]


def agree(engines: dict[str, Layer], dense: Layer, params: F.MLA, tokens: int, n: int) -> None:
    """Raise where one differs from one rank: in the output, or the gradients of x and of the parameters, summed."""
    made = torch.Generator().manual_seed(0)
    x, do = (torch.randn(1, tokens, SIZES["hidden_size"], generator=made) for _ in range(2))
    leaves = F.tree.leaves(params)
    x.requires_grad_()
    out = dense(params, x)
    wanted = [out, *torch.autograd.grad(out, [x, *leaves], do)]
    rows = slice(dist.get_rank() * tokens // n, (dist.get_rank() + 1) * tokens // n)
    wanted = [*(whole[:, rows] for whole in wanted[:2]), *wanted[2:]]
    for layer in engines.values():
        mine = x[:, rows].detach().requires_grad_()
        out = layer(params, mine)
        found = [out, *torch.autograd.grad(out, [mine, *leaves], do[:, rows])]
        for each in found[2:]:
            dist.all_reduce(each)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def rounds(engines: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of a call in each round, of the slowest rank."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for i in range(ROUNDS + 1):
        turned = names[i % len(names) :] + names[: i % len(names)]
        for name in turned[:: 1 if i % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                engines[name]()
            if i:  # the first round warms up
                found[name].append((time.perf_counter() - start) / CALLS * 1e3)
    slowest = torch.tensor(list(found.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


# %%
def sent(cfg: F.MLAConfig, u: sh.Mesh, g: sh.Mesh, tokens: int) -> dict[str, tuple[int, int]]:
    """Exchanges, and bytes of the busiest rank, forward and backward, by the plans."""
    H, E = cfg.num_attention_heads, cfg.qk_head_dim
    letters = {"B": 1, "S": tokens, "H": H} | {letter: cfg.sizes[letter] for letter in "LNRV"}
    plans = [sh.mla_packed().plan(u, **letters), sh.mla_latent().plan(u, **letters), sh.mla_gather().plan(g, **letters)]
    plain = sh.ulysses().plan(u, B=1, S=tokens, H=H, K=H, E=E, V=cfg.v_head_dim)
    found = {"materialised": plain} | {plan.title: plan for plan in plans}
    return {name: (len(p.exchanges), max(p.bytes(r)[0] for r in range(u.size))) for name, p in found.items()}


def show(what: str, timed: dict[str, list[float]], moved: dict[str, tuple[int, int]]) -> None:
    for name, times in timed.items():
        low, middle, high = statistics.quantiles(times, n=4)
        ratios = [a / b for a, b in zip(timed["materialised"], times, strict=True)]
        least, ratio, most = statistics.quantiles(ratios, n=4)
        spread, against = f"({low:.1f} .. {high:.1f})", f"{ratio:.2f} ({least:.2f} .. {most:.2f})"
        print(
            f"  {what:24}{name:16}{moved[name][0]:>9}{moved[name][1]:>12,}{middle:9.1f} {spread:20}{against}",
            flush=True,
        )


def rank(r: int, n: int, store: str, tokens: int, first: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=n, timeout=limit)
    u, g = (sh.ProcessGroup(init_device_mesh("cpu", (n,), mesh_dim_names=(axis,))).mesh for axis in "ug")
    if r == 0:
        print(f"{n} ranks, {tokens} tokens, forward and backward")
        print(
            f"  {'':24}{'':16}{'exchanges':>9}{'bytes sent':>12}{'ms':>9} {'quartiles':20}materialised / this",
            flush=True,
        )
    torch.manual_seed(r)
    x, do = (torch.randn(1, tokens // n, SIZES["hidden_size"]) for _ in range(2))
    x.requires_grad_()
    for what, core, cfg in CASES[first:]:
        params = F.tree.map(lambda p: p.requires_grad_(), F.MLA.init(cfg, seed=0))
        inputs = [x, *F.tree.leaves(params)]
        engines = layers(core, cfg, u, g, tokens)
        agree(engines, one_rank(core, cfg, tokens), params, tokens, n)
        timed = rounds(
            {name: lambda f=f, p=params, xs=inputs: torch.autograd.grad(f(p, x), xs, do) for name, f in engines.items()}
        )
        if r == 0:
            show(f"{what}, H={cfg.num_attention_heads} L={cfg.kv_lora_rank}", timed, sent(cfg, u, g, tokens))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process with groups over several meshes now and then aborts where it ends as usual


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description="Latent attention over ranks, on gloo.")
    parser.add_argument("--tokens", type=int, default=1024, help="S, of all ranks together, which divide it")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes; they divide 8 heads")
    parser.add_argument("--light", action="store_true", help="without attention: the light core alone")
    given = parser.parse_args()
    for n in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (n, os.path.join(folder, "store"), given.tokens, int(given.light)), nprocs=n)


if __name__ == "__main__":
    main()
