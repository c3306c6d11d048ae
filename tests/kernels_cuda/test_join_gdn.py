"""A step of a gated delta net in graphs: joined where nothing stands between its parts, lowered, compiled, planned."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.wire import identity
from meshfn.kernels_cuda import KERNELS
from meshfn.programs import dynamo
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.kernel import Kernel
from meshfn.programs.lower import choose, lower, primitive_name
from meshfn.programs.sizes import Target

from ..functional.gdn_cases import config, weights, zeros
from ..programs.published import PUBLISHED
from ..programs.test_donation import largest_allocation
from .gdn_step_cases import STATES, bits, case, run
from .ops import host_ops


def step(params, x, cache, positions, cfg, **wire):
    """A step as a program has it: the cache is copied back into its own buffers."""
    out, new = F.gdn(params, x, cfg, positions=positions, cache=cache, **wire)
    for old, value in zip(F.tree.leaves(cache), F.tree.leaves(new), strict=True):
        old.copy_(value)
    return out


def lowered(cfg, *, B=3, S=1, dtype=torch.float32, change=step, first=()):
    """The graph of a step with the kernel, and what does not have one."""
    params = F.tree.map(torch.Tensor.detach, weights(cfg, dtype))
    given = [params, torch.randn(B, S, 11).to(dtype), zeros(cfg, B, dtype), torch.tensor([[3], [-1], [0]]).expand(B, S)]
    graph = dynamo.capture(lambda *args: change(*args, cfg), *given)
    only = [kernel for kernel in CUDA_KERNELS if kernel.primitive == "gdn_step"]
    left = lower(graph, Target("cuda", dtype, "sm_90"), (*first, *only))
    return graph, left, given


def calls(graph) -> str:
    names = [str(n.target).removesuffix(".default") for n in graph.graph.nodes if n.op.startswith("call")]
    return ", ".join(name for name in names if "meshfn" in name or name in ("copy_", "masked_fill"))


@host_ops()
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_a_lowered_step_is_the_plain_one(kind):
    torch.manual_seed(4)
    cfg = config(kind, G=1 if kind == "kimi_linear" else 2)
    with torch.no_grad():
        graph, left, (params, x, cache, positions) = lowered(cfg)
        assert [line for line in left if "norm_linear" not in line] == []
        assert "copy_" not in calls(graph)
        for leaf in F.tree.leaves(cache):
            leaf.copy_(torch.randn_like(leaf))
        plain = F.tree.map(torch.clone, cache)
        wanted = step(params, x, plain, positions, cfg)
        compiled = torch.compile(
            lambda *args: step(*args, cfg), backend=lambda *_: graph.forward, fullgraph=True, dynamic=False
        )
        found = compiled(params, x, cache, positions)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(F.tree.leaves(cache), F.tree.leaves(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@host_ops()
@torch.no_grad()
def test_within_a_region_it_is_compiled_and_its_states_stay_where_they_are():
    torch.manual_seed(5)
    given = [case(B=1, E=16, V=40), case(B=1, E=16, V=40)]
    wanted = [run(each) for each in given]
    region = dynamo.region(lambda *args: torch.ops.meshfn_cuda.gdn_step(*args) * 2, "layer", lambda *args: 0)
    step = dynamo.compile_with(lambda *args: (region(*args[0]), region(*args[1])), dynamo.inductor)
    args = [tuple(each.values()) for each in given]
    step(*[tuple(x.clone() for x in each) for each in args])
    found = []
    assert largest_allocation(lambda: found.extend(step(*args))) < given[0]["cache_state"].nbytes / 4
    for o, each, (theirs, *states) in zip(found, given, wanted, strict=True):
        assert bits(o).equal(bits(theirs * 2))
        assert all(bits(each[name]).equal(bits(x)) for name, x in zip(STATES, states, strict=True))


@torch.library.custom_op("meshfn_test::moved", mutates_args=())
def moved(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@moved.register_fake
def _(x):
    return torch.empty_like(x)


class Moves(type(identity)):
    """Something moves on one edge."""

    def __init__(self, edge):
        self.edge = edge

    def layer(self, **sizes):
        return self

    def send(self, **named):
        return tuple(moved(x) if name == self.edge else x for name, x in named.items())

    def receive(self, *sent, **named):
        return super().receive(*sent, **dict(zip(named, self.send(**named), strict=True)))


def test_nothing_is_joined_past_an_edge_that_moves_something():
    found = {}
    for edge in ("none", "q", "o", "v_conv", "a_log", "cache_state"):

        def over(params, x, cache, positions, cfg, edge=edge):
            return step(params, x, cache, positions, cfg, wire=Moves(edge))

        found[edge] = calls(lowered(config(), change=over)[0])
    assert_expected_inline(
        "\n".join(f"{edge:12}{text}" for edge, text in found.items()),
        """\
none        meshfn.norm_linear, meshfn_cuda.gdn_step, meshfn.norm_linear
q           masked_fill, meshfn.norm_linear, meshfn_test.moved, meshfn_cuda.gdn_step, meshfn.norm_linear
o           masked_fill, meshfn.norm_linear, meshfn.short_conv, meshfn.short_conv, meshfn.short_conv, meshfn.gdn_gates, meshfn.gated_delta_rule, meshfn_test.moved, meshfn.gated_rms_norm, meshfn.norm_linear, copy_, copy_, copy_, copy_
v_conv      meshfn.norm_linear, meshfn_test.moved, meshfn_cuda.gdn_step, meshfn.norm_linear
a_log       meshfn.norm_linear, meshfn_test.moved, meshfn_cuda.gdn_step, meshfn.norm_linear
cache_state masked_fill, meshfn.norm_linear, meshfn_test.moved, meshfn.short_conv, meshfn.short_conv, meshfn.short_conv, meshfn.gdn_gates, meshfn.gated_delta_rule, meshfn.gated_rms_norm, meshfn.norm_linear, copy_, copy_, copy_, copy_""",
    )


def test_nor_where_a_users_kernel_takes_a_part():
    for name in ("short_conv", "gdn_gates", "gated_delta_rule", "gated_rms_norm"):
        mine = Kernel("mine", name, getattr(torch.ops.meshfn, name).default)
        said = calls(lowered(config(), first=[mine])[0])
        assert "gdn_step" not in said
        assert f"meshfn.{name}" in said


def test_nor_where_a_state_is_read_otherwise_or_a_row_has_several_tokens():
    def kept(params, x, cache, positions, cfg):
        state = cache.state * 1
        return step(params, x, cache, positions, cfg), state

    def masked(params, x, cache, positions, cfg):
        return step(params, x.masked_fill((positions < 1)[..., None], 0), cache, positions, cfg)

    assert_expected_inline(
        "\n".join(
            [
                calls(lowered(config(), change=kept)[0]),
                calls(lowered(config(), S=2)[0]),
                calls(lowered(config(), change=masked)[0]),
            ]
        ),
        """\
masked_fill, meshfn.norm_linear, meshfn.short_conv, meshfn.short_conv, meshfn.short_conv, meshfn.gdn_gates, meshfn.gated_delta_rule, meshfn.gated_rms_norm, meshfn.norm_linear, copy_, copy_, copy_, copy_
masked_fill, meshfn.norm_linear, meshfn.short_conv, meshfn.short_conv, meshfn.short_conv, meshfn.gdn_gates, meshfn.gated_delta_rule, meshfn.gated_rms_norm, meshfn.norm_linear, copy_, copy_, copy_, copy_
masked_fill, meshfn.norm_linear, meshfn_cuda.gdn_step, meshfn.norm_linear""",
    )


def test_a_kernel_that_writes_in_place_takes_no_call_whose_results_stay():
    def both(params, x, cache, positions, cfg):
        out, new = F.gdn(params, x, cfg, positions=positions, cache=cache)
        cache.state.copy_(new.state)
        return out, new.q

    graph, _, _ = lowered(config(), change=both)
    mine = Kernel("mine", "gated_delta_rule", torch.ops.meshfn.gated_delta_rule.default, in_place=("state",))
    other = Kernel("other", "short_conv", torch.ops.meshfn.short_conv.default, in_place=("state",))
    nodes = [node for node in graph.graph.nodes if primitive_name(node) in ("short_conv", "gated_delta_rule")]
    target = Target("cuda", torch.float32, "sm_90")
    assert_expected_inline(
        "\n".join(f"{node.name}: {choose(node, target, (mine, other))[1]}" for node in nodes),
        """\
short_conv: compiler (other: a result is not copied back, and it writes in place)
short_conv_1: compiler (other: a result is not copied back, and it writes in place)
short_conv_2: compiler (other: a result is not copied back, and it writes in place)
gated_delta_rule: mine""",
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-9B", "moonshotai/Kimi-Linear-48B-A3B-Instruct"])
def test_plan(name, tmp_path):
    """Of a layer between its norm and its residual: three launches, and two more where gates are of low rank."""
    (tmp_path / "config.json").write_text(PUBLISHED[name])
    model = programs.load(tmp_path, abstract=True, layers=(2, 3))
    plan = programs.plan(model, max_len=1 << 15, chunk=8, device="cuda", arch="sm_90", dtype=torch.bfloat16)
    (block,) = [block for block in plan.phases["decode"].blocks if block.title == "layers[0]"]
    rows = [f"{r.names:38} {r.op:12} {r.shape:12} {r.kernel}" for r in block.rows if r.op != "write"]
    rows += [f"{r.names:38} written by {r.kernel}" for r in block.rows if r.op == "write"]
    text = "\n".join([str(block), *rows])
    if name == "Qwen/Qwen3.5-9B":
        assert_expected_inline(
            text,
            """\
layers[0], reads 418.6 MiB and writes 2.0 MiB
q k v b a z                            norm_linear  1 1 2048     gemv
o_BSHV q_state k_state v_state state   gdn_step     1 1 32 128   gdn_decode
x_BSD                                  linear_add   1 1 4096     gemv
h_BSF                                  gated_mlp    1 1 12288    gemv
x_BSD                                  linear_add   1 1 4096     gemv
cache.q                                written by gdn_decode
cache.k                                written by gdn_decode
cache.v                                written by gdn_decode
cache.state                            written by gdn_decode""",
        )
    else:
        assert_expected_inline(
            text,
            """\
layers[0], reads 200.1 MiB and writes 2.1 MiB
q k v b a z                            norm_linear  1 1 4096     gemv
a                                      norm_linear  1 1 4096     gemv
z                                      norm_linear  1 1 4096     gemv
o_BSHV q_state k_state v_state state   gdn_step     1 1 32 128   gdn_decode
x_BSD                                  linear_add   1 1 2304     gemv
h_BSD                                  normalize    1 1 2304     compiler (no cuda kernel)
router                                 to           256 2304     compiler
logits                                 norm_linear  1 1 256      gemv
to                                     to           256          compiler
out_BSD                                expert_mlp   1 1 2304     compiler (no cuda kernel)
h_BSF                                  gated_mlp    1 1 1024     gemv
out_BSD                                linear_add   1 1 2304     gemv
cache.q                                written by gdn_decode
cache.k                                written by gdn_decode
cache.v                                written by gdn_decode
cache.state                            written by gdn_decode""",
        )


def test_an_older_torch_gets_no_kernel_that_writes_in_place(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    for kernel in KERNELS:
        if kernel.kernel in ("gdn_decode", "qkv_rope_cache"):
            named = "q k v z b a cos sin q_norm k_norm k_cache v_cache q_conv k_conv v_conv a_log dt_bias o_norm"
            given = dict.fromkeys(
                [*named.split(), *(f"cache_{each}" for each in ("q", "k", "v", "state"))], torch.empty(1)
            )
            assert kernel.supports(given, "sm_90") == "torch 2.12.1 compiles no layer that writes in place, 2.13 does"
