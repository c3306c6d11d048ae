# %% [markdown]
# A gated delta net over ranks, on gloo: `gdn_ulysses`, whose heads move, beside `gdn_scan`, whose tokens stay.
#
#     python examples/benchmarks/gdn_layouts.py [--tokens 1024 8192] [--ranks 2 4] [--rounds 11]
#
# Forward and backward, fp32, one thread a process. Both run in the same processes, in an order that turns with each
# round; a figure is the median of the rounds, each as long as the slowest rank took, with its quartiles, and a ratio
# the median of each round's own: above 1 a scan is faster. Before that both must be what one rank computes: outputs and
# gradients. Bytes are those of the plan, which a trace of these calls must have moved too.
#
# Two lengths: what moves by heads grows with tokens, what a scan sends does not. Two shapes: decays of a head, and of
# each channel of a key (KDA). A scan also finds what becomes of each channel of a key, so that its rule has E values
# more a head than V. Processes of one machine move bytes through its memory, where they cost little beside what each
# exchange does, and more ranks than cores wait for each other: this is no network.

# %%
from __future__ import annotations

import argparse
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

Layer = Callable[[F.GDN, Tensor], Tensor]
SIZES: dict[str, Any] = {
    "hidden_size": 512, "num_key_heads": 8, "key_head_dim": 32, "value_head_dim": 32, "norm": F.NormConfig()
}  # fmt: skip
CASES = {
    "a decay a head": F.GDNConfig(num_value_heads=16, **SIZES),
    "a decay a channel": F.GDNConfig(num_value_heads=8, channel_decay=True, decay_rank=32, gate_rank=32, **SIZES),
}
LAYOUTS = [sh.gdn_ulysses("u"), sh.gdn_scan("u")]


# %%
def layers(cfg: F.GDNConfig, mesh: sh.Mesh, tokens: int) -> dict[str, Layer]:
    """By name, each a function of parameters and of this rank's tokens."""
    found = {}
    for layout in LAYOUTS:
        layer = sh.shard(F.gdn, layout, mesh, S=tokens)
        found[layout.name] = lambda params, x, layer=layer: layer(params, x, cfg)[0]
    return found


def planned(cfg: F.GDNConfig, mesh: sh.Mesh, tokens: int) -> dict[str, sh.Plan]:
    letters = {letter: n for letter, n in cfg.sizes.items() if letter in "HKEVWY"}
    return {layout.name: layout.plan(mesh, B=1, S=tokens, **letters) for layout in LAYOUTS}


def agree(cfg: F.GDNConfig, mesh: sh.Mesh, params: F.GDN, tokens: int) -> None:
    """Raise where one differs from one rank, in the output or in the gradients of x and of the parameters, summed; or
    where other bytes move than were planned."""
    made = torch.Generator().manual_seed(0)
    x, do = (torch.randn(1, tokens, cfg.hidden_size, generator=made) for _ in range(2))
    leaves = F.tree.leaves(params)
    x.requires_grad_()
    out, _ = F.gdn(params, x, cfg)
    wanted = [out, *torch.autograd.grad(out, [x, *leaves], do)]
    rows = slice(mesh.rank * tokens // mesh.size, (mesh.rank + 1) * tokens // mesh.size)
    wanted = [*(whole[:, rows] for whole in wanted[:2]), *wanted[2:]]
    plans, record = planned(cfg, mesh, tokens), sh.trace(mesh)
    for name, layer in layers(cfg, record.mesh, tokens).items():
        mine = x[:, rows].detach().requires_grad_()
        record.clear()
        out = layer(params, mine)
        found = [out, *torch.autograd.grad(out, [mine, *leaves], do[:, rows])]
        moved, said = record.bytes(mesh.rank), plans[name].bytes(mesh.rank)
        if moved != said:
            raise AssertionError(f"{name}, rank {mesh.rank}: {moved} bytes sent and received, and {said} planned")
        for each in found[2:]:
            dist.all_reduce(each)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def rounds(engines: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Milliseconds of a call in each round, of the slowest rank."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for i in range(count + 1):
        turned = names[i % len(names) :] + names[: i % len(names)]
        for name in turned:
            dist.barrier()
            start = time.perf_counter()
            engines[name]()
            if i:  # the first round warms up
                found[name].append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(list(found.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


# %%
def show(what: str, timed: dict[str, list[float]], plans: dict[str, sh.Plan]) -> None:
    heads = timed[LAYOUTS[0].name]
    for name, times in timed.items():
        low, middle, high = statistics.quantiles(times, n=4)
        least, ratio, most = statistics.quantiles([a / b for a, b in zip(heads, times, strict=True)], n=4)
        sent = max(plans[name].bytes(r)[0] for r in range(plans[name].mesh.size))
        spread, against = f"({low:.1f} .. {high:.1f})", f"{ratio:.2f} ({least:.2f} .. {most:.2f})"
        print(f"  {what:34}{name:18}{len(plans[name].exchanges):>9}{sent:>13,}{middle:9.1f} {spread:20}{against}")


def rank(r: int, n: int, store: str, lengths: list[int], count: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=n, timeout=limit)
    mesh = sh.ProcessGroup(init_device_mesh("cpu", (n,), mesh_dim_names=("u",))).mesh
    if r == 0:
        print(f"{n} ranks, forward and backward")
        print(f"  {'':52}{'exchanges':>9}{'bytes sent':>13}{'ms':>9} {'quartiles':20}by heads / this")
    for what, cfg in CASES.items():
        params = F.tree.map(lambda p: p.requires_grad_(), F.GDN.init(cfg, seed=0))
        for tokens in lengths:
            agree(cfg, mesh, params, tokens)
            torch.manual_seed(r)
            x, do = (torch.randn(1, tokens // n, cfg.hidden_size) for _ in range(2))
            inputs = [x.requires_grad_(), *F.tree.leaves(params)]
            engines = {
                name: lambda f=f, p=params, xs=inputs, do=do: torch.autograd.grad(f(p, xs[0]), xs, do)
                for name, f in layers(cfg, mesh, tokens).items()
            }
            timed = rounds(engines, count)
            if r == 0:
                show(f"{what}, {tokens:,} tokens", timed, planned(cfg, mesh, tokens))
                sys.stdout.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process with groups over several meshes now and then aborts where it ends as usual


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description="Gated delta nets over ranks, on gloo.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="S, which the ranks divide")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes; they divide 8 heads")
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    for n in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (n, os.path.join(folder, "store"), given.tokens, given.rounds), nprocs=n)


if __name__ == "__main__":
    main()
