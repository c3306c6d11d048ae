"""Attention whose sequence is sharded over processes, computed by programs that meshfn's authors did not write.

`python peers.py CASES.npz OUT.npz` where case i of CASES has global fp64 arrays `i/q` `B S H E`, `i/k` `B S K E`,
`i/v` `B S K V`, `i/do` `B S H V` (the gradient of the output) and `i/meta`, the JSON of
{"peer": name, "ranks": P, "causal": bool, "cu_seqlens": list or null, "mesh": [gather, ulysses] (jax alone, optional)}.
OUT gets global fp64 arrays `i/o`, `i/dq`, `i/dk`, `i/dv`. A case that failed has instead `i/error`, a traceback, beside
what it came to; then the exit status is 1. `python peers.py --selftest` compares every peer with dense attention.

It runs in the environment that `make .venv-peers/made` makes from constraints.txt, and never imports meshfn. Peers, and
what each allows (S divides over P always):
deepspeed    DistributedAttention. K >= P, even or not. Documents only by the local attention's own mask.
ulysses_hf   UlyssesSPAttentionHF. H % P == 0, K % P == 0 or P % K == 0 (it repeats heads), V == E.
llama3       ring-flash-attn's llama3_flash_attn_varlen_func. V == E; batch rows are packed as documents: B * S over P.
zigzag       ring-flash-attn's zigzag_ring_flash_attn_func. Causal, no documents, S over 2 P. It sums in fp32.
jax          jax.shard_map on 4 virtual devices: all_to_all over u, all_gather of keys over g. H % u == K % u == 0.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from attentions import PEERS, RESULTS, Case, jax_results, seen
from torch import Tensor

# They are read when deepspeed and jax are imported. One thread a process: there are more processes than cores.
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}


def load(path: Path) -> list[Case]:
    """Every case of a file, in order."""
    with np.load(path) as stored:
        names = sorted({key.split("/")[0] for key in stored.files}, key=int)
        return [_case(name, stored) for name in names]


def _case(name: str, stored: Any) -> Case:
    meta = json.loads(str(stored[f"{name}/meta"]))
    tensors = {key: torch.from_numpy(stored[f"{name}/{key}"]).double() for key in ("q", "k", "v", "do")}
    assert meta["ranks"] > 1, "one rank shards nothing"
    mesh = meta.get("mesh") or ([1, 4] if tensors["k"].shape[2] % 4 == 0 else [2, 2])
    cu_seqlens = meta.get("cu_seqlens")
    return Case(name, meta["peer"], meta["ranks"], meta["causal"], cu_seqlens, (mesh[0], mesh[1]), tensors)


# One case: which tokens are whose, and processes that work on many.


def packed(case: Case) -> Case:
    """llama3 has no batch: rows become further documents of one long row."""
    batch, tokens = case.tensors["q"].shape[:2]
    row = case.cu_seqlens or [0, tokens]
    cu_seqlens = [0] + [b * tokens + end for b in range(batch) for end in row[1:]]
    tensors = {key: x.flatten(0, 1)[None] for key, x in case.tensors.items()}
    return dataclasses.replace(case, cu_seqlens=cu_seqlens, tensors=tensors)


def owned(case: Case) -> list[Tensor]:
    """Which tokens each rank has: its run of them, or with zigzag one piece from either end."""
    tokens, pieces = case.tensors["q"].shape[1], case.ranks * (2 if case.peer == "zigzag" else 1)
    assert tokens % pieces == 0, f"{tokens} tokens over {pieces} pieces"
    parts = torch.arange(tokens).chunk(pieces)
    return [torch.cat([parts[r], parts[-1 - r]]) if case.peer == "zigzag" else parts[r] for r in range(case.ranks)]


def _work(rank: int, ranks: int, path: Path, names: list[str], folder: Path) -> None:
    """One process: its part of the results of each case, a file each, so that what is done outlives an abort."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers call what torch has deprecated
    try:
        cases = [case for case in load(path) if case.name in names]
        if cases[0].peer != "jax":
            limit, store = datetime.timedelta(seconds=30), f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
        for case in cases:  # only jax has cases of one process
            for key, value in jax_results(case).items() if case.peer == "jax" else _shards(case, rank):
                np.save(folder / f"{case.name}.{key}.{rank}.npy", value)
        if ranks > 1:
            dist.barrier()
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others wait in a group that no longer agrees, and are ended from outside
    os._exit(0)  # a process with deepspeed in it now and then aborts where it ends as usual


def _shards(case: Case, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """One rank's results; the output first, should the gradients abort."""
    case = packed(case) if case.peer == "llama3" else case
    mine = owned(case)[rank]
    inputs = [case.tensors[key][:, mine].clone().requires_grad_() for key in ("q", "k", "v")]
    out = PEERS[case.peer](case, *inputs)
    yield "o", out.detach().numpy()
    grads = torch.autograd.grad(out, inputs, case.tensors["do"][:, mine])
    yield from zip(RESULTS[1:], (x.numpy() for x in grads), strict=True)


def _collect(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Global results of one case: those that every process wrote."""
    shapes = {key: case.tensors["do" if key == "o" else key[1:]].shape for key in RESULTS}
    case = packed(case) if case.peer == "llama3" else case
    results = {}
    for key, shape in shapes.items():
        files = [folder / f"{case.name}.{key}.{rank}.npy" for rank in range(case.processes)]
        if all(f.exists() for f in files):
            shards = np.concatenate([np.load(f) for f in files], axis=1)
            order = slice(None) if case.peer == "jax" else torch.cat(owned(case)).argsort().numpy()
            results[key] = shards[:, order].reshape(shape)
    return results


def _run(path: Path, names: list[str], processes: int, folder: Path, deadline: float) -> str:
    """Run cases on so many new processes, until all or one has ended. Returns what went wrong."""
    if time.monotonic() >= deadline:
        return "the time limit, before it began"
    context = mp.get_context("spawn")
    rest = (processes, path, names, folder)
    started = [context.Process(target=_work, args=(rank, *rest), daemon=True) for rank in range(processes)]
    for process in started:
        process.start()
    while time.monotonic() < deadline and all(p.exitcode in (None, 0) for p in started):
        if all(p.exitcode == 0 for p in started):
            return ""
        time.sleep(0.05)
    time.sleep(1.0)  # the others notice, and say where they were
    codes = [p.exitcode for p in started]
    for process in started:
        process.kill()
        process.join()
    told = [f"rank {f.suffix[1:]}: {f.read_text()}" for f in sorted(folder.glob("error.*"))]
    late = ["the time limit"] if time.monotonic() >= deadline else []
    return "\n".join([f"exit codes {codes}", *late, *told])


def run(path: Path, limit: float = 600.0) -> dict[str, np.ndarray]:
    """Results of every case of a file. limit: seconds for all of it."""
    os.environ.update(_ENVIRONMENT)
    cases, results, deadline = load(path), dict[str, np.ndarray](), time.monotonic() + limit
    for processes in sorted({case.processes for case in cases}):
        todo = [case for case in cases if case.processes == processes]
        while todo:
            with tempfile.TemporaryDirectory() as folder:
                told = _run(path, [case.name for case in todo], processes, Path(folder), deadline)
                for done, case in enumerate(todo, 1):  # noqa: B007
                    found = _collect(case, Path(folder))
                    results.update({f"{case.name}/{key}": x for key, x in found.items()})
                    if len(found) < len(RESULTS):  # what comes after it is for new processes
                        results[f"{case.name}/error"] = np.array(f"{case.peer}: {told}")
                        break
                todo = todo[done:]
    return results


def selftest() -> int:
    """Odd cases of every peer, against torch's own attention."""
    generator, cases = torch.Generator().manual_seed(0), dict[str, Any]()
    for i, (peer, ranks, (b, s, h, k, e, v), causal, cu_seqlens, mesh) in enumerate(_SELFTEST):
        for key, shape in {"q": (h, e), "k": (k, e), "v": (k, v), "do": (h, v)}.items():
            cases[f"{i}/{key}"] = torch.randn(b, s, *shape, generator=generator, dtype=torch.float64).numpy()
        meta = {"peer": peer, "ranks": ranks, "causal": causal, "cu_seqlens": cu_seqlens, "mesh": mesh}
        cases[f"{i}/meta"] = np.array(json.dumps(meta))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.npz"
        np.savez(path, **cases)
        results, loaded = run(path), load(path)
    wrong, greatest = 0, dict[str, float]()
    print("peer, ranks, (B, S, H, K, E, V), causal, cu_seqlens, mesh")
    for case, row in zip(loaded, _SELFTEST, strict=True):
        q, k, v = (case.tensors[key].transpose(1, 2).requires_grad_() for key in ("q", "k", "v"))
        mask = seen(q.shape[2], case.causal, case.cu_seqlens)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        grads = torch.autograd.grad(out, (q, k, v), case.tensors["do"].transpose(1, 2))
        expected = dict(zip(RESULTS, (x.detach().transpose(1, 2).numpy() for x in (out, *grads)), strict=True))
        found = {key: results[f"{case.name}/{key}"] for key in RESULTS if f"{case.name}/{key}" in results}
        errors = {key: float(np.abs(x - expected[key]).max()) for key, x in found.items()}
        told = str(results.get(f"{case.name}/error", ""))
        allowed = 1e-5 if case.peer == "zigzag" else 1e-12
        good = not told and all(error < allowed for error in errors.values())
        wrong += not good
        greatest[case.peer] = max(greatest.get(case.peer, 0.0), *errors.values(), 0.0)
        print("ok " if good else "BAD", row, *(f"{key} {error:.1e}" for key, error in errors.items()), told)
    print("greatest:", " ".join(f"{peer} {error:.1e}" for peer, error in greatest.items()))
    return int(wrong > 0)


# peer, ranks, (B, S, H, K, E, V), causal, cu_seqlens, mesh
_SELFTEST: list[tuple[str, int, tuple[int, int, int, int, int, int], bool, list[int] | None, list[int] | None]] = [
    ("deepspeed", 2, (1, 10, 6, 3, 5, 7), True, None, None),
    ("deepspeed", 2, (2, 14, 9, 3, 4, 4), False, None, None),
    ("deepspeed", 2, (3, 6, 4, 2, 3, 5), True, [0, 1, 4, 6], None),
    ("deepspeed", 4, (2, 12, 6, 6, 5, 3), True, None, None),
    ("deepspeed", 4, (3, 20, 10, 5, 3, 4), False, None, None),
    ("deepspeed", 4, (1, 12, 21, 7, 3, 3), True, [0, 5, 12], None),
    ("deepspeed", 4, (2, 12, 8, 4, 5, 2), True, None, None),
    ("ulysses_hf", 2, (2, 10, 6, 2, 5, 5), False, None, None),
    ("ulysses_hf", 2, (1, 10, 6, 1, 5, 5), True, [0, 3, 4, 10], None),
    ("ulysses_hf", 4, (3, 12, 8, 2, 5, 5), True, None, None),
    ("ulysses_hf", 4, (2, 12, 12, 1, 3, 3), False, None, None),
    ("ulysses_hf", 4, (1, 20, 8, 4, 3, 3), True, [0, 9, 20], None),
    ("llama3", 2, (1, 22, 6, 3, 5, 5), True, [0, 3, 4, 13, 22], None),
    ("llama3", 2, (3, 10, 5, 1, 3, 3), False, [0, 1, 7, 10], None),
    ("llama3", 4, (1, 28, 6, 2, 3, 3), True, [0, 2, 25, 28], None),
    ("llama3", 4, (1, 28, 4, 4, 3, 3), False, [0, 7, 12, 28], None),
    ("llama3", 4, (2, 18, 6, 3, 5, 5), True, None, None),
    ("llama3", 2, (1, 10, 4, 2, 3, 3), True, [0, 3, 3, 5, 5, 10], None),
    ("zigzag", 2, (3, 12, 6, 3, 5, 5), True, None, None),
    ("zigzag", 4, (2, 24, 4, 2, 3, 3), True, None, None),
    ("jax", 4, (3, 12, 8, 4, 5, 7), True, None, [1, 4]),
    ("jax", 4, (1, 20, 4, 4, 3, 3), False, [0, 7, 20], [1, 4]),
    ("jax", 4, (2, 12, 6, 2, 5, 3), True, [0, 1, 9, 12], [2, 2]),
    ("jax", 4, (1, 28, 10, 2, 3, 3), False, None, [2, 2]),
    ("jax", 4, (2, 12, 5, 1, 3, 3), True, None, [4, 1]),
]


def main() -> int:
    if sys.argv[1:] == ["--selftest"]:
        return selftest()
    source, target = map(Path, sys.argv[1:])
    results = run(source)
    np.savez(target, **results)
    errors = [f"case {key}: {text}" for key, text in results.items() if key.endswith("/error")]
    print("\n".join(errors), file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
