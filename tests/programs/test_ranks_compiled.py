"""Programs over ranks that are processes, compiled: tokens of one rank, how often they compile, what they send.

A dense one is compiled to the end, with its layers as one region; others by Dynamo alone, whose graphs run as they are.
Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs import dynamo, rank_held, rank_program, rank_steps
from meshfn.programs.exchanges import in_order, is_exchange
from meshfn.programs.lower import with_table
from meshfn.programs.pair_sums import PairSums
from meshfn.programs.rank_plan import make_rank_plan
from meshfn.programs.ranks import Ranks
from meshfn.programs.replay import HostReplay
from meshfn.programs.sizes import Sizes, Target
from meshfn.sharding import opaque
from meshfn.sharding.classes import Dry

from ..sharding import gloo
from . import test_ranks as ranks

DENSE = (ranks.dense, ((ranks.UNEVEN, ranks.MLP),) * 2)
HYBRID = (ranks.hybrid, ((ranks.DELTA, ranks.MLP), (ranks.PLAIN, ranks.MOE)))
LATENT = (ranks.latent, ((ranks.LATENT, ranks.MLP), (ranks.LATENT, ranks.MOE)))


@pytest.fixture(scope="module")
def two():
    return gloo.run(2, [one_fails, interleaved, replayed], timeout=120.0, limit=600.0)


def as_traced():
    """Within, Dynamo's graphs run as they are, with nothing compiled from them."""
    return mock.patch.object(dynamo, "inductor", lambda graph, inputs: graph)


class Pair:
    """A program over all processes, and that of one rank."""

    def __init__(self, layout, parts):
        of = ranks.made(parts)
        self.record = sh.trace(gloo.mesh_of(tp=2))
        self.program = ranks.build(of, layout, self.record.mesh)
        self.one = programs.build(of, compile=False, **ranks.SIZES)

    def same(self, prompts=ranks.PROMPTS, **options):
        mine, whole = (p.generate(prompts, max_new_tokens=9, **options) for p in (self.program, self.one))
        return mine.tokens == whole.tokens

    def sends(self):
        """Whether a step sends what the plan says."""
        state = self.program.prefill(ranks.PROMPTS)
        self.record.clear()
        self.program.decode(state)
        return gloo.facts(self.record) == gloo.facts(self.program.plan.phases["decode"])

    def compiles(self):
        return self.program.prefill.compiles, self.program.decode.compiles


def interleaved():
    """By turns: whether tokens, what is sent and log-probabilities are right, and how often each compiled."""
    dense = Pair(*DENSE)
    built = len(dense.record)
    with as_traced():
        hybrid = Pair(*HYBRID)
        pairs, found = (dense, hybrid), []
        for options in ranks.OPTIONS[:3]:
            found += [pair.same(**options) for pair in pairs]
        found += [pair.same([[5], [6, 7], [4] * 20]) for pair in pairs]
        found += [pair.sends() for pair in pairs]
        scores = [p.score(ranks.PROMPTS) for p in (hybrid.program, hybrid.one)]
        found += [torch.allclose(a, b, atol=1e-12) for a, b in zip(*scores, strict=True)]
    dense.program.close()
    with pytest.raises(RuntimeError, match="closed"):
        dense.program.generate(ranks.PROMPTS, max_new_tokens=5)
    found.append(hybrid.same())
    keys = [*opaque._ports]
    hybrid.program.close()
    return built, found, [pair.compiles() for pair in pairs], len(keys), len(opaque._ports)


def replayed():
    """Decode as one graph, by the host: whether tokens are right, how often it compiled, captures, and whether a launch
    of eight steps sends what eight do."""
    with as_traced(), mock.patch.object(rank_held, "replay_of", side_effect=lambda *_: HostReplay()):
        pair = Pair(*HYBRID)
        mesh, cpu = gloo.mesh_of(tp=2), torch.device("cpu")
        assert rank_steps.why_calls(mesh, cpu) == "gloo exchanges through the host"
        mesh.transport.check = True
        assert rank_steps.why_calls(mesh, cpu) == "the transport checks each of its calls"
        assert pair.program._replay is None, "what a device's graph cannot hold is called"
        with mock.patch.object(rank_program, "why_calls", return_value=None):
            pair = Pair(*HYBRID)
        found = [pair.same(**options) for options in ranks.OPTIONS[:3]] + [pair.sends()]
        sent = []
        for tokens in (2, 10):
            pair.record.clear()
            pair.program.generate(ranks.PROMPTS, max_new_tokens=tokens)
            sent.append(len(pair.record))
        step = len(pair.program.plan.phases["decode"]) - 2  # without the agreement in front of it
        return found, pair.compiles(), pair.program._captured.captures, sent[1] - sent[0] == 8 * step


def test_a_replayed_program(two):
    for found, compiles, captures, as_many in two["replayed"]:
        assert (found, compiles, captures, as_many) == ([True] * 4, (1, 1), 3, True)


def test_two_programs_by_turns(two):
    for built, found, compiles, open_, closed in two["interleaved"]:
        assert built == 6, "what ranks tell each other before and after they compile, and no more"
        assert found == [True] * len(found)
        assert compiles == [(1, 1)] * 2
        assert (open_, closed) == (1, 0)


def test_the_plan_and_the_graph():
    """Of the second of two ranks, in this process: graphs are traced without the other."""
    layout, parts = DENSE
    at = sh.Mesh(tp=2).at(1, Dry((("tp", 2),), 1))
    of, held = ranks.made(parts), Ranks(ranks.made(parts).config, at, layout, torch.device("cpu"))
    own = dataclasses.replace(of, params=held.params(of.params))
    target = Target("cpu", torch.float64)
    sums, by = PairSums(at, layout, torch.device("cpu"), torch.float64), ((held, own.params),) * 2
    plan = make_rank_plan(own, by, Sizes(**ranks.SIZES), target, with_table(target, ()), (None, None), sums)
    text, graph = str(plan), str(plan.steps["decode"].graph)
    layer = graph[graph.index("\nlayer_0") :]
    start, end = text.index("decode of this rank"), text.index("  after the layers", text.index("decode of this rank"))
    runs = next(line for line in text.splitlines() if line.startswith("  runs"))
    assert_expected_inline(
        "\n".join([runs, text[start:end], layer]),
        """\
  runs     compiled, one graph a step
decode of this rank   B=3 S=1 T<=64
  before the layers
    x         embedding         3 1 10   reads         240 B  compiler
  layers[0..1] x2, each reads <= 15.0 KiB and writes 192 B
    q k v     norm_linear       3 1 8    reads       1.3 KiB  gemv
    k_BSKE    apply_rope        3 1 1 4                       compiler (no cpu kernel)
    q_BSHE    apply_rope        3 1 2 4                       compiler (no cpu kernel)
    o_BSHV    decode_attention  3 1 2 4  reads <=   12.0 KiB  one_pass
    x         norm_linear       3 1 10   reads         640 B  gemv
    h_BSF     gated_mlp         3 1 4    reads         720 B  gemv
    x         norm_linear       3 1 10   reads         320 B  gemv
    cache.k   write             3 1 1 4  writes         96 B  compiler
    cache.v   write             3 1 1 4  writes         96 B  compiler


layer_0   called 2 times
  q k v        3 1 8     meshfn_cpu.norm_linear(y, layer.attention.norm.weight, [layer.attention.q, layer.attention.k, layer.attention.v], [None, None, None], eps=1e-05)
  q_1          3 1 2 4   q.unflatten(-1, (-1, 4))
  k_1          3 1 1 4   k.unflatten(-1, (-1, 4))
  v_BSKV       3 1 1 4   v.unflatten(-1, (-1, 4))
  k_BSKE       3 1 1 4   meshfn.apply_rope(k_1, cos_1, sin_1)
  q_BSHE       3 1 2 4   meshfn.apply_rope(q_1, cos_1, sin_1)
  part         3 65 1 4  meshfn.write_tokens(cache.k, k_BSKE, positions)
  part_1       3 65 1 4  meshfn.write_tokens(cache.v, v_BSKV, positions)
  k_read       3 n 1 4   part.narrow(1, 0, read[0].size()[0])
  v_read       3 n 1 4   part_1.narrow(1, 0, read[0].size()[0])
  k_positions  3 n       meshfn.slot_positions(read[0], positions)
  o_BSHV       3 1 2 4   meshfn_cpu.decode_attention(q_BSHE, k_read, v_read, causal=True, head_offset=4, k_positions=k_positions, local_heads=2, q_positions=positions, sinks=layer.attention.sinks)
  x            3 1 10    meshfn_cpu.norm_linear(o_BSHV.flatten(2), None, [layer.attention.o], [None])
  y_1          3 1 10    exchange(x, out: B S/u D +tp -> B S/u D)
  x_BSD        3 1 10    (y + y_1)
  h_BSF        3 1 4     meshfn_cpu.gated_mlp(x_BSD, layer.mlp.norm.weight, layer.mlp.gate, layer.mlp.up, None, None, activation=silu, eps=1e-05)
  x_1          3 1 10    meshfn_cpu.norm_linear(h_BSF, None, [layer.mlp.down], [None])
  y_2          3 1 10    exchange(x_1, out: B S/u D +tp -> B S/u D)
  x_BSD_1      3 1 10    (x_BSD + y_2)
                         cache.k.copy_(part)
                         cache.v.copy_(part_1)
  return                 (x_BSD_1)""",
    )


def one_fails():
    """What a rank says where the compiler of the last one fails; and that all go on."""
    mesh = gloo.mesh_of(tp=2)

    def fails(graph, inputs):
        if dist.get_rank() == 1:
            raise OSError("no space left")
        return graph

    said = []
    for compiler, options in ((fails, {}), (None, {"kernels": [1]})):
        with (
            mock.patch.object(dynamo, "inductor", compiler),
            pytest.raises((RuntimeError, ValueError, TypeError, OSError)) as error,
        ):
            programs.build(ranks.made(DENSE[1]), mesh=mesh, layout=DENSE[0], **ranks.SIZES, **options)
        said.append(str(error.value))
    sh.reshard(torch.zeros(1), "P/tp -> P", mesh, P=2)
    return said, len(opaque._ports)


def test_a_rank_that_cannot_compile(two):
    (first, left), (second, _) = two["one_fails"]
    assert left == 0
    assert "no space left" in second[0]
    assert first[0] == "build: rank 1 raised, and says why; so nothing ran"
    assert first[1:] == second[1:]
    assert_expected_inline(
        "\n".join(first[1:]),
        """\
kernels: a programs.Kernel is needed, not int
    fix: programs.Kernel(name=..., primitive=..., op=torch.ops.<namespace>.<name>.default)""",
    )


def test_threads_are_not_compiled():
    def compiled(of, layout, at):
        programs.build(of, mesh=at, layout=layout, compile=True, **ranks.SIZES)

    def strict(of, layout, at):
        programs.build(of, mesh=at, layout=layout, strict=True, **ranks.SIZES)

    def graph(of, layout, at):
        _ = ranks.build(of, layout, at).decode.graph

    found = [line for call in (compiled, strict, graph) for line in ranks.said(ranks.dense, {"tp": 2}, call)]
    assert_expected_inline(
        "\n".join(dict.fromkeys(found)),
        """\
build(compile=True): ranks are threads, among which the compiler is not safe
    fix: without it, or compile=False
build(strict=True): kernels are put into compiled graphs
    fix: without it: ranks are threads, among which the compiler is not safe
decode.graph: it runs eagerly, and there is none: ranks are threads, among which the compiler is not safe""",
    )


def test_exchanges_keep_their_order():
    """Two that do not depend on each other: the second reads what the first gave."""
    axes = (("tp", 2),)
    port = opaque.Port(sh.Mesh(tp=2).at(0, Dry(axes, 0)))

    def sums(x, y):
        first = sh.reshard(x, "B D +tp -> B D", port.mesh)
        return sh.reshard(y, "B D +tp -> B D", port.mesh), first, sh.reshard(first, "B D +tp -> B D", port.mesh)

    graph = dynamo.capture(sums, torch.zeros(2, 3), torch.zeros(2, 3))
    assert in_order(graph)
    exchanges = [node for node in graph.graph.nodes if is_exchange(node)]
    assert [node.kwargs.get("after") is not None for node in exchanges] == [False, True, True]
    assert [x.shape for x in graph(torch.zeros(2, 3), torch.zeros(2, 3))] == [(2, 3)] * 3
    port.close()
    with pytest.raises(RuntimeError, match="whose owner is closed"):
        graph(torch.zeros(2, 3), torch.zeros(2, 3))


def compiled_to_the_end():
    found = []
    with pytest.raises(ValueError, match=r"strict=True.: no kernel for\n    prefill (.|\n)*flash"):
        programs.build(ranks.made(DENSE[1]), mesh=gloo.mesh_of(tp=2), layout=DENSE[0], strict=True, **ranks.SIZES)
    for layout, parts in (HYBRID, LATENT):
        pair = Pair(layout, parts)
        found += [pair.same(**options) for options in ranks.OPTIONS] + [pair.sends(), pair.compiles() == (1, 1)]
    return found


@pytest.mark.verify
def test_other_kinds_compiled_to_the_end():
    for found in gloo.run(2, [compiled_to_the_end], timeout=300.0, limit=900.0)["compiled_to_the_end"]:
        assert found == [True] * 14
