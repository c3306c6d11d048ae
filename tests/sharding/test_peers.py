"""Sharded attention beside that of other authors, on the same random cases: `pytest -m verify`.

They run by themselves, in an interpreter that has them: see tests/peers/peers.py.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

pytestmark = pytest.mark.verify
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers/bin/python"
LIMIT = 700  # seconds for all peers; peers.py gives up by itself before that, and says where


class Case(NamedTuple):
    """sizes: of B, S, H, K, E, V. mesh: of jax alone, which of its ranks gather keys and which exchange heads."""

    peer: str
    ranks: int
    sizes: dict[str, int]
    causal: bool
    cu_seqlens: list[int] | None
    mesh: tuple[int, int] | None
    seed: int

    def __str__(self) -> str:
        sizes = "".join(f"{letter}{n}" for letter, n in self.sizes.items())
        mesh = "x".join(map(str, self.mesh)) if self.mesh else str(self.ranks)
        documents = f"-{len(self.cu_seqlens) - 1}documents" if self.cu_seqlens else ""
        return f"{self.seed}-{self.peer}-{mesh}-{sizes}{'-causal' * self.causal}{documents}"

    def tensors(self) -> dict[str, np.ndarray]:
        """q, k, v and the gradient of the output."""
        generator, n = torch.Generator().manual_seed(self.seed), self.sizes
        shapes = {"q": ("H", "E"), "k": ("K", "E"), "v": ("K", "V"), "do": ("H", "V")}
        return {
            name: torch.randn(n["B"], n["S"], n[heads], n[width], generator=generator, dtype=torch.float64).numpy()
            for name, (heads, width) in shapes.items()
        }


def draw(peer: str, i: int, seed: int) -> Case:
    """A case that the peer can do, as odd as it can: peers.py says what each of them allows."""
    pick = random.Random(seed)
    ranks = 4 if peer == "jax" or i % 2 else 2
    mesh = ((1, 4), (2, 2), (4, 1))[i % 3] if peer == "jax" else None
    if peer == "deepspeed":
        K = pick.randint(ranks, 2 * ranks + 1)  # one key head a rank at least, and rarely as many on each
    elif peer == "ulysses_hf":
        K = pick.choice([1, ranks // 2, ranks, 2 * ranks])
    elif mesh:
        K = mesh[1] * pick.randint(1, 3)
    else:
        K = pick.randint(1, 4)
    G = ranks * pick.randint(1, 2) // min(ranks, K) if peer == "ulysses_hf" else pick.randint(1, 3)
    E = pick.randint(2, 5)
    V = pick.randint(1, 6) if peer in ("deepspeed", "jax") else E
    pieces = 2 * ranks if peer == "zigzag" else ranks
    S = pieces * pick.choice([3, 5, 7] if pieces < 8 else [1, 3])
    cuts = sorted(pick.choices(range(1, S), k=pick.randint(1, 4)))  # one drawn twice is an empty document
    documents = [0, *(sorted(set(cuts)) if peer != "llama3" else cuts), S] if i % 3 != 1 and peer != "zigzag" else None
    sizes = {"B": 1 + i % 3, "S": S, "H": K * G, "K": K, "E": E, "V": V}
    return Case(peer, ranks, sizes, peer == "zigzag" or i % 4 != 2, documents, mesh, seed)


COUNTS = {"deepspeed": 8, "ulysses_hf": 6, "llama3": 7, "zigzag": 4, "jax": 6}
CASES = [draw(peer, i, 100 * at + i) for at, (peer, n) in enumerate(COUNTS.items()) for i in range(n)]


def layouts(case: Case) -> dict[str, tuple[sh.Layout, dict[str, int]]]:
    """What to compare with a peer: its own way of sharding, and others, since each of them gives dense attention."""
    P = case.ranks
    ulysses = {"ulysses": (sh.ulysses("u"), {"u": P})}
    gather = {f"all_gather {x}": (sh.all_gather("g", exchange=x), {"g": P}) for x in ("all", "needed")}
    hybrid = {"hybrid": (sh.hybrid(ulysses="u", gather="g", exchange="needed"), {"g": 2, "u": 2})}
    if case.peer == "deepspeed":
        found = {**ulysses, "ulysses of 3": (sh.ulysses("u", overlap=True), {"u": 3}), **hybrid}
    elif case.peer == "zigzag":
        found = {f"zigzag {x}": (sh.all_gather("g", zigzag=True, exchange=x), {"g": P}) for x in ("all", "needed")}
        found["zigzag hybrid"] = (sh.hybrid(ulysses="u", gather="g", zigzag=True, overlap=True), {"g": 2, "u": 2})
    elif case.mesh:
        found = {"hybrid all": (sh.hybrid(), dict(zip("gu", case.mesh, strict=True))), **ulysses, **gather, **hybrid}
    else:
        found = {**gather, **hybrid, **ulysses}
    # Ulysses needs a query head for each rank.
    return {name: (layout, axes) for name, (layout, axes) in found.items() if case.sizes["H"] >= axes.get("u", 1)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that the peers make of the cases, in one run of theirs."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON.relative_to(ROOT)} is missing: `make verify` makes it", pytrace=False)
    folder = tmp_path_factory.mktemp("peers")
    arrays: dict[str, Any] = {}
    for i, case in enumerate(CASES):
        arrays |= {f"{i}/{name}": x for name, x in case.tensors().items()}
        told = {name: getattr(case, name) for name in ("peer", "ranks", "causal", "cu_seqlens", "mesh")}
        arrays[f"{i}/meta"] = np.array(json.dumps(told))
    np.savez(folder / "cases.npz", **arrays)
    command = [str(PYTHON), str(ROOT / "tests/peers/peers.py"), "cases.npz", "out.npz"]
    # An interpreter of its own, so none of what this one is told about modules.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
    )
    if not (folder / "out.npz").exists():
        pytest.fail(f"peers.py ended with {done.returncode}\n{done.stderr[-4000:]}", pytrace=False)
    with np.load(folder / "out.npz") as results:
        return dict(results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_attention_is_what_a_peer_computes(case, found):
    """The output and every gradient, in fp64. One peer sums in fp32."""
    at = CASES.index(case)
    assert f"{at}/error" not in found, str(found[f"{at}/error"])
    arrays = case.tensors()
    allowed = 1e-5 if case.peer == "zigzag" else 1e-11
    given = {} if case.cu_seqlens is None else {"cu_seqlens": torch.tensor(case.cu_seqlens)}
    wrong = {}
    for name, (layout, axes) in layouts(case).items():
        q, k, v, do = (torch.from_numpy(arrays[x]).requires_grad_(x != "do") for x in ("q", "k", "v", "do"))
        mesh = sh.Mesh(**axes)
        core = sh.shard(F.dot_product_attention, layout, mesh, **{x: case.sizes[x] for x in "SHK"})
        out = sh.simulate(core, mesh)(q, k, v, causal=case.causal, **given)
        results = dict(zip(("o", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), do)), strict=True))
        errors = {x: float((y.detach() - torch.from_numpy(found[f"{at}/{x}"])).abs().max()) for x, y in results.items()}
        wrong |= {f"{name}: {x}": error for x, error in errors.items() if not error < allowed}
    assert not wrong
