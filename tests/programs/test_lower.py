"""A kernel from the table takes a primitive's place; without one, the plan says why."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo
from meshfn.programs.cpu import MOST_TOKENS
from meshfn.programs.lower import lower, primitive_name, walk
from meshfn.programs.sizes import Sizes, Target
from meshfn.programs.steps import make_steps, packed

from ..tiny import llama, ours

calls: list[tuple[int, ...]] = []


@torch.library.custom_op("meshfn_test::gated", mutates_args=())
def gated(
    x: torch.Tensor, norm: torch.Tensor | None, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None, *, activation: str, eps: float, zero_centered: bool, scale_in_fp32: bool,
) -> torch.Tensor:  # fmt: skip
    calls.append(tuple(x.shape))
    options = {"eps": eps, "zero_centered": zero_centered, "scale_in_fp32": scale_in_fp32}
    return F.gated_mlp(x, norm, gate, up, gate_bias, up_bias, activation=activation, **options)


@gated.register_fake
def _(x, norm, gate, up, gate_bias, up_bias, **options):
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def one_token(call: programs.Call) -> str | None:
    x = call.arguments["x"]
    return None if x.shape[1] == 1 else f"S is {x.shape[1]}, not 1"


KERNEL = programs.Kernel("test_gated", "gated_mlp", torch.ops.meshfn_test.gated.default, one_token)


def test_lowered_program_calls_the_kernel_where_it_is_supported(monkeypatch):
    """Through Dynamo alone (no Inductor), so that the swapped graph itself is run."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    model = ours(llama())
    calls.clear()
    program = programs.build(model, batch=2, max_len=20, chunk=MOST_TOKENS, kernels=[KERNEL])
    plain = programs.build(model, batch=2, max_len=20, chunk=MOST_TOKENS, compile=False)
    calls.clear()
    got = program.generate([[1, 2, 3, 4, 5], [6]], max_new_tokens=5)
    assert got.tokens == plain.generate([[1, 2, 3, 4, 5], [6]], max_new_tokens=5).tokens
    assert calls == [(2, 1, 48)] * 2 * 4
    rows = {
        (phase.name, row.op): (row.kernel, row.chosen)
        for phase in program.plan.phases.values()
        for block in phase.blocks
        for row in block.rows
        if row.op == "gated_mlp"
    }
    assert rows == {
        ("prefill", "gated_mlp"): ("onednn (test_gated: S is 8, not 1)", True),
        ("decode", "gated_mlp"): ("test_gated", True),
    }


def test_lower_lists_what_is_left():
    model = ours(llama())
    sizes, target = Sizes(batch=1, max_len=16, chunk=4), Target("cpu", torch.float32)
    params = F.Decoder.abstract(model.config)
    caches = sizes.caches(model.config, torch.float32, "meta")
    inputs = sizes.idle("decode", model.config, torch.float32, "meta")
    graph = dynamo.capture(make_steps(model.config)["decode"], *packed(params, caches), *inputs)
    left = lower(graph, target, (KERNEL,))
    assert_expected_inline(
        "\n".join(left),
        """\
norm_linear (norm_linear): compiler (no cpu kernel)
k_BSKE (apply_rope): compiler (no cpu kernel)
q_BSHE (apply_rope): compiler (no cpu kernel)
part (write_tokens): compiler (no cpu kernel)
part_1 (write_tokens): compiler (no cpu kernel)
k_positions (slot_positions): compiler (no cpu kernel)
o_BSHV (decode_attention): compiler (no cpu kernel)
norm_linear_1 (norm_linear): compiler (no cpu kernel)
norm_linear_2 (norm_linear): compiler (no cpu kernel)
norm_linear (norm_linear): compiler (no cpu kernel)
sample_advance (sample_advance): compiler (no cpu kernel)""",
    )
    assert sum(n.target is KERNEL.op for n in walk(graph)) == 1
    assert {primitive_name(n) for n in walk(graph)} - {None} == {
        "norm_linear", "apply_rope", "write_tokens", "slot_positions", "decode_attention", "sample_advance",
    }  # fmt: skip


def test_strict_lists_every_reason():
    with pytest.raises(ValueError, match="no kernel for") as error:
        programs.build(
            ours(llama()), max_len=16, chunk=MOST_TOKENS + 1, dtype=torch.bfloat16, strict=True, kernels=[KERNEL]
        )
    text = str(error.value)
    assert (
        "prefill h_BSF (gated_mlp): compiler (test_gated: S is 9, not 1; gemv: 9 tokens, at most 8; onednn: float32 alone)"
        in text
    )
    assert "decode h_BSF" not in text


@torch.library.custom_op("meshfn_test::few", mutates_args=())
def few(x: torch.Tensor, norm: torch.Tensor | None, gate: torch.Tensor, *, activation: str) -> torch.Tensor:
    return x.clone()


def test_an_op_with_other_arguments_than_the_primitive_declines():
    kernel = programs.Kernel("few", "gated_mlp", torch.ops.meshfn_test.few.default)
    text = str(programs.plan(ours(llama()), max_len=16, chunk=MOST_TOKENS + 1, dtype=torch.bfloat16, kernels=[kernel]))
    assert "few: its op takes 3 arguments by place, not 6" in text


def contiguous_gate(call: programs.Call) -> str | None:
    return None if call.arguments["gate"].is_contiguous() else "gate is not contiguous"


def test_a_kernel_sees_weights_as_they_lie(monkeypatch):
    """The plan, the strict check and the compiled graph decide alike on a weight that is transposed."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    kernel = programs.Kernel("picky", "gated_mlp", KERNEL.op, contiguous_gate)
    for transposed in (False, True):
        module = llama()
        if transposed:
            for layer in module.model.layers:
                layer.mlp.gate_proj.weight = torch.nn.Parameter(layer.mlp.gate_proj.weight.detach().T.contiguous().T)
        program = programs.build(ours(module), max_len=16, chunk=4, kernels=[kernel])
        calls.clear()
        program.generate([[1, 2]], max_new_tokens=3)
        planned = [r.chosen for b in program.plan.phases["decode"].blocks for r in b.rows if r.op == "gated_mlp"]
        assert planned == [not transposed]
        assert bool(calls) == (not transposed)
        assert ("meshfn_test.gated(" in str(program.decode.graph)) == (not transposed)
        assert str(program.decode.graph) == str(program.plan.phases["decode"].graph)


def test_a_plan_is_of_parameters_as_they_lie_now(monkeypatch):
    """Set to others after the build; a graph that is compiled again is held to that plan."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    kernel = programs.Kernel("picky", "gated_mlp", KERNEL.op, contiguous_gate)
    program = programs.build(ours(llama()), max_len=16, chunk=4, kernels=[kernel])
    plan, expected = program.plan, program.generate([[1, 2]], max_new_tokens=3).tokens
    assert program.plan is plan
    gates = {path: x.detach().T.contiguous().T for path, x in F.tree.paths(program.params).items() if "gate" in path}
    with pytest.warns(UserWarning, match="gate lie otherwise in memory"):
        program.params = F.tree.replace(program.params, gates)
    calls.clear()
    assert program.generate([[1, 2]], max_new_tokens=3).tokens == expected
    assert not calls
    assert "gate is not contiguous" in str(program)
    assert str(program.decode.graph) == str(program.plan.phases["decode"].graph)


def test_a_plain_function_is_no_kernel():
    with pytest.raises(TypeError, match=r"op must be an operator of torch\.ops, not function"):
        programs.Kernel("plain", "gated_mlp", F.gated_mlp)


def test_one_layer_that_lies_otherwise_has_its_own_region(monkeypatch):
    """Layers of one kind, the second with a transposed weight: another graph, and the tokens of transformers."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    module = llama(layers=3)
    gate = module.model.layers[1].mlp.gate_proj
    gate.weight = torch.nn.Parameter(gate.weight.detach().T.contiguous().T)
    program = programs.build(ours(module), max_len=16, chunk=4)
    titles = [block.title for block in program.plan.phases["decode"].blocks]
    assert titles == ["before the layers", "layers[0,2] x2", "layers[1]", "after the layers"]
    assert [row.op for row in program.plan.phases["decode"].blocks[2].rows][:2] == ["norm_linear", "apply_rope"]
    rows = [len(block.rows) for block in program.plan.phases["decode"].blocks]
    assert rows == [1, 9, 9, 2]
    expected = module.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)[0, 3:].tolist()
    assert program.generate([[1, 2, 3]], max_new_tokens=5).tokens == [expected]


def test_strict_holds_for_score_too(monkeypatch):
    """Its graph is compiled at its first use, long after the others were checked."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    program = programs.build(ours(llama()), max_len=16, chunk=MOST_TOKENS + 1, dtype=torch.bfloat16, kernels=[KERNEL])
    program.strict = True
    with pytest.raises(Exception, match="no kernel for") as error:
        program.score([[1, 2, 3]])
    assert (
        "score h_BSF (gated_mlp): compiler (test_gated: S is 9, not 1; gemv: 9 tokens, at most 8; onednn: float32 alone)"
        in str(error.value)
    )
    program.strict = False
    assert len(program.score([[1, 2, 3]])[0]) == 2
