"""Layouts over gloo: what simulated ranks give, counted where it runs; compiled; with a trainer around a model.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from meshfn import functional as F
from meshfn import sharding as sh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from . import attention_cases as cases
from . import gloo
from .gloo import mesh_of


@pytest.fixture(scope="module")
def two():
    return gloo.run(2, [random_layouts, counted])


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [random_layouts, counted, compiled, trained, measured, misfits], fresh=True)


@functools.cache
def chosen(ranks):
    """20 cases, 16 of them with uneven tokens or heads."""
    made = (cases.make(seed, ranks, tp=ranks > 2) for seed in itertools.count(5000))
    large = (case for case in made if case.sizes["S"] > 2)
    uneven = (c for c in large if c.sizes["S"] % ranks or c.sizes["K"] % c.axes.get("u", 1))
    return [*itertools.islice(uneven, 16), *itertools.islice(large, 4)]


def random_layouts():
    found = []
    for case in chosen(dist.get_world_size()):
        mesh = mesh_of(**case.axes)
        record = sh.trace(mesh)
        core = cases.core_of(case, record.mesh)

        def mine(name, x, case=case, mesh=mesh):
            text = case.layout[name][0]
            whole = x if name == "sinks" else cases.turned(case, x)
            return sh.cut(whole, text, mesh, **{n: case.sizes[n] for n in "SHK"}).detach().requires_grad_()

        xs = {name: mine(name, x) for name, x in case.tensors.items()}
        rest = {name: x for name, x in xs.items() if name == "sinks"}
        y = core(xs["q"], xs["k"], xs["v"], **rest, **case.options)
        grad = sh.cut(cases.turned(case, case.grad), case.layout["o"][-1], mesh, **{n: case.sizes[n] for n in "SHK"})
        grads = torch.autograd.grad(y, list(xs.values()), grad)
        want, wanted = cases.dense(case)
        right = close(y, sh.cut(cases.turned(case, want), case.layout["o"][-1], mesh, **case.sizes))
        for (name, x), g, w in zip(xs.items(), grads, wanted, strict=True):
            if name == "sinks":  # a pending sum
                g = sh.sum_gradients(g, case.layout["sinks"][0], mesh)
                right &= close(g, sh.cut(w, case.layout["sinks"][0], mesh, **case.sizes))
            else:
                right &= close(g, mine(name, w).detach())
            right &= g.shape == x.shape
        found.append((right, record.events))
    return found


def close(a, b):
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-12, atol=1e-12))


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_layouts(ranks, request):
    # The same values as on one rank, and event by event the same record as simulated ranks.
    results = request.getfixturevalue({2: "two", 4: "four"}[ranks])["random_layouts"]
    for i, case in enumerate(chosen(ranks)):
        record = sh.trace(sh.Mesh(**case.axes))
        cases.sharded(case, record.mesh)
        for rank, of_rank in enumerate(results):
            right, events = of_rank[i]
            assert right, f"rank {rank}: {case}"
            # A simulation's backward reaches collectives whose tensors nobody wants a gradient of, with zeros.
            assert gloo.facts(events) == gloo.facts(record.of(rank)), f"{case}"
    assert sum(len(events) > 0 for _, events in results[0]) >= 15


class Wire(TorchDispatchMode):
    """Counts what is handed to torch's collectives: below autograd, and independent of what we say we do."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("_c10d_functional::") and "wait" not in name:
            x, size = args[0], args[0].element_size()
            counts = args[2] if "all_to_all" in name else [x.numel()] * dist.get_world_size()
            self.sent.append((name, [n * size for n in counts]))
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    2: [("ulysses", {"u": 2}), ("all_gather", {"g": 2})],
    4: [("ulysses", {"u": 4}), ("all_gather", {"g": 4}), ("hybrid", {"g": 2, "u": 2})],
}


def counted():
    """Bytes of each collective, forward and backward, with and without overlap and checkpointing."""
    found = {}
    for name, axes in LAYOUTS[dist.get_world_size()]:
        for overlap, kept in itertools.product((False, True), (None, "again", "kept")):
            mesh = mesh_of(**axes)
            layout = getattr(sh, name)(overlap=overlap)
            core = sh.shard(F.dot_product_attention, layout, mesh, S=7, H=6, K=3)
            shapes = [
                sh.Spec.parse(layout[e][0]).local({"B": 2, "S": 7, "H": 6, "K": 3, "E": 4, "V": 4}, mesh, mesh.rank)
                for e in "qkv"
            ]
            xs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            with Wire() as wire:
                if kept is None:
                    y = core(*xs, causal=True)
                else:
                    more = {"context_fn": sh.keep_collectives} if kept == "kept" else {}
                    y = checkpoint(lambda *xs, core=core: core(*xs, causal=True), *xs, use_reentrant=False, **more)
                forward = len(wire.sent)
                torch.autograd.grad(y.sum(), xs)
            found[name, overlap, kept] = (forward, wire.sent)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_happens_is_the_plan(ranks, request):
    results = request.getfixturevalue({2: "two", 4: "four"}[ranks])["counted"]
    for (name, axes), overlap in itertools.product(LAYOUTS[ranks], (False, True)):
        plan = getattr(sh, name)(overlap=overlap).plan(sh.Mesh(**axes), B=2, S=7, H=6, K=3, E=4)
        for rank, found in enumerate(results):
            launches = [e for e in plan.of(rank).events if e.what == "launch"]
            forward, backward = ([e for e in launches if e.call.backward == way] for way in (False, True))
            # A checkpoint computes again what backward needs, once the gradient of the output has come back: not the
            # exchange of the output, which keeps nothing.
            behind = sum(e.call.edges == ("o",) for e in backward)
            again = [e for e in forward if e.call.edges != ("o",)]
            for kept, more in ((None, []), ("again", again), ("kept", [])):
                first, sent = found[name, overlap, kept]
                assert first == len(forward)
                events = [*forward, *backward[:behind], *more, *backward[behind:]]
                told = [to_others(rank, e, n) for e, n in zip(events, sent, strict=True)]
                assert told == [e.sent for e in events], (name, overlap, kept, rank)


def to_others(rank, event, sent):
    """Bytes that leave the rank, of what it hands over. On a CPU an uneven gather and each reduce-scatter travel as an
    all-to-all."""
    name, counts = sent
    if "all_to_all" in name:
        return sum(counts) - counts[event.group.index(rank)]
    return sum(counts[: len(event.group) - 1])


class Delayed:
    """A transport whose exchanges take so long for each tensor, from their launch on."""

    traces, spare = False, None

    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds

    def __getattr__(self, name):
        def launched(*args):
            work, ready = getattr(self.inner, name)(*args), time.monotonic() + self.seconds * len(args[-1].edges)
            return Late(work, ready)

        return launched


@dataclasses.dataclass
class Late:
    work: object
    ready: float

    def wait(self):
        y = self.work.wait()
        time.sleep(max(0.0, self.ready - time.monotonic()))
        return y


def delayed():
    """Seconds of a layer whose queries take 40 ms to project, with 20 ms a tensor on the wire."""
    cfg = F.AttentionConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    params, found, ranks = F.Attention.init(cfg, 0), {}, dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        cases.slow_projection(patch)
        for (name, axes), overlap in itertools.product(SLOW[ranks], (False, True)):
            mesh = mesh_of(**axes)
            mesh = mesh.at(mesh.rank, Delayed(mesh.transport, 0.02))
            layer = sh.shard(F.attention, getattr(sh, name)(overlap=overlap), mesh, S=8)
            x, times = torch.randn(1, 8 // ranks, 12, requires_grad=True), []
            for _ in range(3):
                dist.barrier()
                start = time.perf_counter()
                layer(params, x, cfg)[0].sum().backward()
                times.append(time.perf_counter() - start)
            found[name, overlap] = min(times)
    return found


SLOW = {2: LAYOUTS[2], 4: [("hybrid", {"g": 2, "u": 2})]}


@pytest.mark.verify  # a clock, which other work on the machine can upset
@pytest.mark.parametrize("ranks", [2, 4])
def test_overlap_hides_latency(ranks):
    for seconds in gloo.run(ranks, [delayed])["delayed"]:
        for name, _ in SLOW[ranks]:
            saved = seconds[name, False] - seconds[name, True]
            assert saved > 0.5 * 2 * cases.HIDDEN[name], seconds  # of both passes


def compiled():
    found = {}
    cfg = F.AttentionConfig(
        hidden_size=24, num_attention_heads=6, num_key_value_heads=3, head_dim=4, rope=F.RopeConfig(), sinks=True
    )
    params = F.tree.map(lambda p: p.double().requires_grad_(), F.Attention.init(cfg, 0))
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    for name, axes in LAYOUTS[4]:
        mesh, graphs = mesh_of(**axes), gloo.Graphs()
        layout = getattr(sh, name)(overlap=name == "hybrid")  # which a compiled function leaves to the compiler
        layer = sh.shard(F.attention, layout, mesh, S=10, H=6, K=3)
        shard = sh.cut(x, layout["x"][0], mesh).requires_grad_()

        def run(params, x, layer=layer):
            return layer(params, x, cfg)[0]

        results = []
        for fn in (run, torch.compile(run, backend=graphs, fullgraph=True)):
            y = fn(params, shard)
            grads = torch.autograd.grad(y.square().sum(), [shard, *F.tree.leaves(params)])
            results.append([y, *grads])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        found[name] = (graphs.frames, graphs.collectives)
    return found


def test_compiled_layers(four):
    for found in four["compiled"]:
        # Queries, keys and values in one all-to-all, and the output back; each has its adjoint.
        assert found == {
            "ulysses": (1, {"forward": [2], "backward": [2]}),
            "all_gather": (1, {"forward": [1], "backward": [1]}),
            "hybrid": (1, {"forward": [3], "backward": [3]}),
        }


def trained():
    """A step of a decoder on dp x u, packed, by the helpers; against one rank with everything."""
    norm, heads = F.NormConfig(), {"hidden_size": 16, "num_attention_heads": 4, "head_dim": 4}
    layers = tuple(
        F.LayerConfig(
            attention=F.AttentionConfig(**heads, num_key_value_heads=k, rope=F.RopeConfig(), norm=norm),
            mlp=F.MLPConfig(hidden_size=16, intermediate_size=12, norm=norm),
        )
        for k in (2, 4)
    )
    cfg = F.DecoderConfig(vocab_size=29, hidden_size=16, layers=layers)
    whole = F.tree.map(lambda p: p.requires_grad_(), F.Decoder.init(cfg, 0, dtype=torch.float64))
    ids, cu = torch.randint(0, 29, (4, 11)), [0, 4, 5, 11]
    targets = torch.full_like(ids, -100)
    for a, b in itertools.pairwise(cu):
        targets[:, a : b - 1] = ids[:, a + 1 : b]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])[None]
    total, count = F.next_token_loss(whole, ids, cfg, targets, positions=positions, segment_ids=cases.ids_of(cu, 4))
    wanted = torch.autograd.grad(total / count, F.tree.leaves(whole))
    errors = {}
    for name, layout, axes in (
        ("dp u", sh.ulysses(dp="dp"), {"dp": 2, "u": 2}),
        ("g u", sh.hybrid(exchange="needed", overlap=True), {"g": 2, "u": 2}),
        ("tp u", sh.ulysses(tp="tp"), {"tp": 2, "u": 2}),
    ):
        mesh = mesh_of(**axes)
        model = sh.shard(F.next_token_loss, layout, mesh, S=11)
        specs = model.specs(whole, cfg)
        params = F.tree.map(lambda p: p.detach().clone().requires_grad_(), sh.cut(whole, specs, mesh))
        batch = sh.shard_batch(ids, None, None, cu, layout["tokens"][0], mesh)
        assert batch.count == count
        mine, _ = model(params, batch.tokens, cfg, batch.labels, cu_seqlens=cu)
        loss = sh.counted_once(mine, layout["tokens"][0], mesh) / batch.count
        leaves = F.tree.leaves(params)
        grads = F.tree.unflatten(F.tree.structure(params), torch.autograd.grad(loss, leaves))
        grads = F.tree.leaves(sh.sum_gradients(grads, specs, mesh))
        dense = F.tree.unflatten(F.tree.structure(whole), wanted)
        right = F.tree.leaves(sh.cut(dense, specs, mesh))
        everywhere = sh.reshard(loss.detach()[None], f"D +{'+'.join(axes)} -> D", mesh)
        errors[name] = (
            max((a - b).abs().max().item() for a, b in zip(grads, right, strict=True)),
            abs(everywhere.item() - (total / count).item()),
        )
    group = mesh_of(dp=2, u=2).transport.group("dp", "u")
    return errors, dist.get_world_size(group)


def test_a_step_of_training(four):
    for errors, size in four["trained"]:
        assert set(errors) == {"dp u", "g u", "tp u"}
        assert all(error < 1e-13 for both in errors.values() for error in both), errors
        assert size == 4


def measured():
    return sh.measure(mesh_of(g=2, u=2), nbytes=2**16)


def test_measured_costs_are_the_same_on_every_rank(four):
    costs = four["measured"]
    assert all(c == costs[0] for c in costs)
    assert set(costs[0].latency) == set(costs[0].bandwidth) == {"g", "u"}
    assert all(0 < n < float("inf") for c in costs[:1] for n in (*c.latency.values(), *c.bandwidth.values(), c.flops))


def misfits():
    """Errors that every rank raises alike, after which the group still works."""
    mesh, said = mesh_of(u=4), []
    core = sh.shard(F.dot_product_attention, sh.ulysses(), mesh, S=8, H=4, K=4)
    x = torch.randn(1, 2, 4, 4)
    for args, options in (
        ((torch.randn(1, 8, 4, 4), x, x), {}),
        ((x, x, x), {"mask": torch.zeros(8, 8)}),
        ((x, x, x), {"mask": torch.ones(2, 8, dtype=torch.bool)}),
        ((x, x, x), {"cu_seqlens": [0, 9]}),
        ((x, x, x), {"q_positions": torch.arange(2)[None], "k_positions": torch.arange(2)[None]}),
    ):
        try:
            core(*args, **options)
        except (ValueError, TypeError) as error:
            said.append(str(error).splitlines()[0])
    assert core(x, x, x, causal=True).shape == x.shape
    return said


def test_misfits_raise_on_every_rank_before_anything_moves(four):
    said = four["misfits"]
    assert said[1:] == [
        [line.replace("rank 0", f"rank {r}") for line in said[0]] for r in (1, 2, 3)
    ]  # fmt: skip
    assert said[0] == [
        "dot_product_attention(q=...) does not fit its spec: rank 0 holds B 2 4 E, but it is 1 8 4 4",
        "mask: boolean, true where a query may see a key, not float32",
        "mask 2 8: S S, or B|1 H|1 S S, is needed, with all S=8 tokens on both sides",
        "cu_seqlens=[0, 9] ends with 9, but there are S=8 tokens",
        "q_positions 1 2: 1 8 is needed, rows of all S=8 tokens",
    ]
