"""A program decodes with the graph that a plan for a GPU shows, its ops carried out thread by thread."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.functional import tree
from meshfn.programs import dynamo, held
from meshfn.programs import lower as lowering
from meshfn.programs import program as program_file
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import lower
from meshfn.programs.replay import HostReplay
from meshfn.programs.sizes import Target

from ..families import family
from ..tiny import llama, ours
from .ops import host_ops


def as_on(arch: str) -> tuple[programs.Kernel, ...]:
    """The kernels of a GPU, for a program on a CPU: each is asked as if it were one."""

    def asked(kernel: programs.Kernel) -> programs.Kernel:
        def supports(call: programs.Call) -> str | None:
            return kernel.supports(dataclasses.replace(call, target=Target("cuda", call.target.dtype, arch)))

        return dataclasses.replace(kernel, supports=supports)

    return tuple(map(asked, CUDA_KERNELS))


@pytest.fixture
def as_planned(monkeypatch):
    """Programs of a CPU have the kernels of a GPU alone, and the lowered graph itself is run, as Inductor would get it."""
    monkeypatch.setattr(lowering, "KERNELS", {**lowering.KERNELS, "cpu": as_on("sm_90")})
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)


@pytest.mark.parametrize("options", [{"bias": True, "hidden_act": "gelu"}, {"tied": True}])
def test_tokens_are_those_of_transformers(as_planned, options):
    """A ragged batch of three, prompts of up to 4 tokens."""
    torch.manual_seed(1)
    module = llama(heads=4, kv_heads=2, **options)
    model = ours(module)
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    with host_ops() as launches:
        program = programs.build(model, batch=3, max_len=24, chunk=2)
        launches.clear()
        found = program.generate(prompts, max_new_tokens=8)
    assert {launch.source for launch in launches} >= {"gemv.cu"}
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        ids = torch.tensor([prompt])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()
    with host_ops(order="reversed"):
        assert program.generate(prompts, max_new_tokens=8).tokens == found.tokens
    # What ran is what the plan for a GPU shows.
    planned = programs.plan(model, device="cuda", arch="sm_90", batch=3, max_len=24, chunk=2)
    assert str(program.decode.graph) == str(planned.phases["decode"].graph)


def test_options_within_the_graph_of_several_steps(as_planned, monkeypatch):
    """Replayed by the host: what a launch of eight steps calls, in which order, and the tokens of an eager program."""
    torch.manual_seed(1)
    model = ours(llama(heads=4, kv_heads=2))
    prompts, given = [[1, 2, 3, 4], [5]], {"do_sample": True, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = programs.build(model, batch=3, max_len=24, compile=False).generate(prompts, max_new_tokens=10, **given)
    monkeypatch.setattr(held, "replay_of", lambda device, compiled: HostReplay())
    monkeypatch.setattr(program_file, "target_of", lambda device, dtype: Target(device.type, dtype, "sm_90"))
    with host_ops() as launches:
        program = programs.build(model, batch=3, max_len=24, chunk=4)
        assert program.generate(prompts, max_new_tokens=10, **given).tokens == expected.tokens
        launches.clear()
        assert program.generate(prompts, max_new_tokens=10, **given).tokens == expected.tokens
    layer = ["gemv.cu", "qkv_rope_cache.cu", "decode_attention.cu", *["gemv.cu"] * 3]
    step = [*layer * 2, "gemv.cu", "sample_advance.cu", "sample_options.cu"]
    assert [launch.source for launch in launches][-9 * len(step) :] == step * 9
    assert program._captured is not None
    assert program._captured.captures == 4


def test_the_norm_kernel_runs_in_prefill(as_planned):
    """More tokens than `gemv` takes: the residual's norm has a kernel, the products are the compiler's."""
    torch.manual_seed(2)
    module = llama(heads=4, kv_heads=2)
    with host_ops() as launches:
        program = programs.build(ours(module), batch=1, max_len=24, chunk=9)
        launches.clear()
        found = program.score([list(range(1, 15))])[0]
    assert {launch.source for launch in launches} == {"add_rms_norm.cu"}
    with torch.no_grad():
        logits = module(torch.arange(1, 15)[None]).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(found, logits.gather(-1, torch.arange(2, 15)[:, None])[:, 0], rtol=1e-4, atol=1e-4)


def test_a_program_is_compiled_with_its_kernels(monkeypatch):
    """Layers as regions of Inductor's: eager tokens, caches where they lie, every kernel called."""
    torch.manual_seed(1)
    model = ours(llama(heads=4, kv_heads=2))
    eager = programs.build(model, batch=2, max_len=24, chunk=2, compile=False)
    monkeypatch.setattr(lowering, "KERNELS", {**lowering.KERNELS, "cpu": as_on("sm_90")})
    prompts = [[1, 2, 3], [5]]
    with host_ops() as launches:
        program = programs.build(model, batch=2, max_len=24, chunk=2)
        places = [leaf.data_ptr() for cache in program.cache for leaf in tree.leaves(cache)]
        found = program.generate(prompts, max_new_tokens=4)
    assert found.tokens == eager.generate(prompts, max_new_tokens=4).tokens
    assert places == [leaf.data_ptr() for cache in program.cache for leaf in tree.leaves(cache)]
    named = {launch.source for launch in launches}
    assert named == {"gemv.cu", "qkv_rope_cache.cu", "decode_attention.cu", "sample_advance.cu"}


@pytest.mark.verify
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "qwen3_5", "kimi_linear"])
def test_programs_of_every_kind_are_compiled_with_their_kernels(monkeypatch, name):
    torch.manual_seed(1)
    model = programs.load(family(name))
    eager = programs.build(model, batch=2, max_len=24, chunk=4, compile=False)
    monkeypatch.setattr(lowering, "KERNELS", {**lowering.KERNELS, "cpu": as_on("sm_90")})
    with host_ops():
        found = programs.build(model, batch=2, max_len=24, chunk=4).generate([[1, 2, 3], [5]], max_new_tokens=3)
    assert found.tokens == eager.generate([[1, 2, 3], [5]], max_new_tokens=3).tokens


def test_through_the_compiler():
    """Inductor takes the ops as they are, of a graph with strided inputs, and writes around them what is left."""

    def block(x, h, o, norm, gate, up, down):
        x = x + F.linear(h[:, 0], o)
        m = F.gated_mlp(x, norm, gate, up, activation="silu", eps=1e-6)
        return (x + F.linear(m, down)).tanh()

    torch.manual_seed(3)
    shapes = ((3, 16), (3, 2, 16), (16, 16), (16,), (24, 16), (24, 16), (16, 24))
    given = [torch.randn(*shape).bfloat16() for shape in shapes]
    module = dynamo.capture(block, *given)
    lower(module, Target("cuda", torch.bfloat16, "sm_90"), CUDA_KERNELS)
    with host_ops() as launches, torch.no_grad():
        names = [str(node.name).split("_")[1] for node in module.graph.find_nodes(op="placeholder")]
        ordered = [given[("x", "h", "o", "norm", "gate", "up", "down").index(name)] for name in names]
        (found,) = dynamo.inductor(module, ordered)(*ordered)
    assert [launch.source for launch in launches] == ["gemv.cu"] * 3
    with torch.no_grad():
        right, usual = block(*(x.double() for x in given)), block(*given)
    assert (found - right).abs().max() <= 1.5 * (usual - right).abs().max()
