"""A step of a gated delta net in one launch, carried out on the CPU: against its plain function in fp64, transformers'
layers, itself in another order, and rows that are none."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.recurrence import gdn_step
from meshfn.functional.wire import identity
from meshfn.kernels_cuda import ARCHITECTURES, OPS, compile_kernel, gdn_decode, missing
from meshfn.programs import dynamo
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import lower
from meshfn.programs.sizes import Target

from ..functional.gdn_cases import config, module, weights, zeros
from ..programs.published import PUBLISHED
from ..programs.test_donation import largest_allocation
from .harness import Host

KERNEL = OPS["gdn_decode"]
STATES = gdn_decode.STATES


def case(B=3, K=2, G=2, E=6, V=5, W=4, dtype=torch.float32, by_channel=False, positions=(5, 9, 1)):
    """Arguments by name: q, k, v and z are views of one packed projection, as `gemv` returns it."""
    H = K * G
    widths = {"q": (K, E), "k": (K, E), "v": (H, V), "z": (H, V), "b": (H,), "a": (H, E) if by_channel else (H,)}
    packed = torch.randn(B, 1, sum(map(math.prod, widths.values()))).to(dtype)
    parts = packed.split(list(map(math.prod, widths.values())), -1)
    found = {name: part.unflatten(-1, shape) for part, (name, shape) in zip(parts, widths.items(), strict=True)}
    for name, shape in {"q_conv": (K * E, 1, W), "k_conv": (K * E, 1, W), "v_conv": (H * V, 1, W)}.items():
        found[name] = torch.randn(shape).to(dtype)
    found |= {"a_log": torch.randn(H), "dt_bias": torch.randn(H * (E if by_channel else 1))}
    found["o_norm"] = torch.randn(V).to(dtype)
    for name, width in {"cache_q": K * E, "cache_k": K * E, "cache_v": H * V}.items():
        found[name] = torch.randn(B, width, W - 1).to(dtype)
    found["cache_state"] = torch.randn(B, H, V, E)
    return found | {"positions": torch.tensor(positions[:B] + (7,) * (B - len(positions)))[:, None]}


def wide(given):
    return {name: x.double() if x.is_floating_point() else x for name, x in given.items()}


def run(given, host=None, **options):
    """The kernel on copies of the states: o, and the four."""
    given = given | {name: given[name].clone() for name in STATES}
    o = KERNEL.run(host or Host(), **given, **options)
    return o, *(given[name] for name in STATES)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


KDA = {"gate_act": "sigmoid", "scale_in_fp32": True}
CASES = {
    "bf16": ({"dtype": torch.bfloat16}, {}),
    "fp16": ({"dtype": torch.float16}, {"allow_neg_eigval": True}),
    "fp32": ({}, {}),
    "bf16 KDA": ({"dtype": torch.bfloat16, "by_channel": True, "G": 1, "V": 6}, KDA),
    "fp32 KDA": ({"by_channel": True, "G": 1, "V": 6}, KDA),
    "odd widths": ({"E": 7, "V": 33, "W": 2, "K": 1, "G": 3}, {"activation": "gelu_pytorch_tanh"}),
    "published widths": ({"E": 128, "V": 128, "K": 1, "dtype": torch.bfloat16}, {"eps": 1e-5}),
    "wide keys": ({"E": 300, "V": 40, "K": 1, "G": 1, "W": 3, "by_channel": True}, KDA),
    "many rows": ({"B": 128, "E": 8}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_further_from_fp64_than_the_plain_function(name):
    torch.manual_seed(0)
    sizes, options = CASES[name]
    given = case(**sizes)
    found, plain, exact = run(given, **options), gdn_step(**given, **options), gdn_step(**wide(given), **options)
    for what, mine, theirs, wanted in zip(("o", *STATES), found, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (mine, theirs))
        assert error <= 1.5 * allowed + 1e-9, (what, float(error), float(allowed))


@pytest.mark.parametrize("by_channel", [False, True])
def test_bitwise_the_same_in_any_order_of_threads_and_for_a_row_alone(by_channel):
    torch.manual_seed(1)
    given = case(V=40, by_channel=by_channel)  # two blocks of a head
    found = run(given)
    for order in ("reversed", "shuffled:3"):
        for a, b in zip(found, run(given, Host(order=order)), strict=True):
            assert bits(a).equal(bits(b))
    shared = [name for name, x in given.items() if name.endswith("conv") or name in ("a_log", "dt_bias", "o_norm")]
    row = {name: x if name in shared else x[1:2] for name, x in given.items()}
    for a, b in zip(found, run(row), strict=True):
        assert bits(a[1:2]).equal(bits(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_token_change_no_byte_and_rows_that_begin_read_no_state(dtype):
    torch.manual_seed(2)
    given = case(dtype=dtype, positions=(4, -1, 0))
    fresh = {name: x.clone() for name, x in given.items() if name in STATES}
    for name in STATES:
        given[name][1:] = math.nan
        fresh[name][2] = 0
    for name in "qkvzba":
        given[name][1] = math.nan
    found = run(given)
    assert found[0][1].eq(0).all()
    for name, new in zip(STATES, found[1:], strict=True):
        assert bits(new[1]).equal(bits(given[name][1]))
    for a, b in zip(found, run(given | fresh | {"positions": torch.tensor([[4], [-1], [3]])}), strict=True):
        assert a[[0, 2]].isfinite().all()
        assert bits(a[[0, 2]]).equal(bits(b[[0, 2]]))
    whole = run({name: x[:1] if name in (*STATES, *"qkvzba") else x for name, x in given.items()} | {"positions": None})
    assert all(bits(a[:1]).equal(bits(b)) for a, b in zip(found, whole, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_token_by_token_it_is_the_layer_of_transformers(kind):
    torch.manual_seed(3)
    theirs, params, cfg = module(kind, E=6, V=6)
    x = torch.randn(2, 5, 11)
    given = {"attention_mask": None} if kind == "kimi_linear" else {}
    wanted = theirs(x, **given)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    cache, out = zeros(cfg, dtype=torch.float32), []
    norm = cfg.gated_norm
    options = {"gate_act": cfg.gate_act, "eps": norm.eps, "scale_in_fp32": norm.scale_in_fp32}
    for s in range(5):
        q, k, v, z, b, a = F.gdn_project(params, x[:, s : s + 1], cfg)
        o = KERNEL.run(
            Host(), q, k, v, z, b, a if cfg.channel_decay else a[..., 0], params.q_conv, params.k_conv, params.v_conv,
            params.a_log, params.dt_bias, params.o_norm, cache.q, cache.k, cache.v, cache.state,
            torch.full((2, 1), s), **options, allow_neg_eigval=cfg.allow_neg_eigval,
        )  # fmt: skip
        out.append(o.flatten(2) @ params.o.mT)
    torch.testing.assert_close(torch.cat(out, 1), wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture
def on_the_cpu():
    """The op itself, where a graph calls it, is carried out by the harness."""
    library = torch.library.Library("meshfn_cuda", "IMPL")
    library.impl("gdn_decode", lambda *args, **kwargs: KERNEL.run(Host(), *args, **kwargs), "CPU")
    yield
    library._destroy()


def test_the_op_is_an_operator_as_torch_wants_it_and_refuses_gradients(on_the_cpu):
    given = case()
    for name in ("gdn_decode", "gdn_step"):
        op = getattr(torch.ops.meshfn_cuda, name).default
        assert set(torch.library.opcheck(op, tuple(given.values()), {}).values()) == {"SUCCESS"}
        with pytest.raises(RuntimeError) as error:
            op(**given | {"q_conv": given["q_conv"].clone().requires_grad_()})
        assert_expected_inline(
            str(error.value),
            """\
gdn_decode(q_conv=...): it needs a gradient, and cache_q is written in place
    fix: torch.no_grad(), or the plain function to train""",
        )


def step(params, x, cache, positions, cfg, **wire):
    """A step as a program has it: the cache is copied back into its own buffers."""
    out, new = F.gdn(params, x, cfg, positions=positions, cache=cache, **wire)
    for old, value in zip(F.tree.leaves(cache), F.tree.leaves(new), strict=True):
        old.copy_(value)
    return out


def lowered(cfg, *, B=3, S=1, dtype=torch.float32, change=step):
    """The graph of a step with the kernel, and what does not have one."""
    params = F.tree.map(torch.Tensor.detach, weights(cfg, dtype))
    given = [params, torch.randn(B, S, 11).to(dtype), zeros(cfg, B, dtype), torch.tensor([[3], [-1], [0]]).expand(B, S)]
    graph = dynamo.capture(lambda *args: change(*args, cfg), *given)
    only = [kernel for kernel in CUDA_KERNELS if kernel.primitive == "gdn_step"]
    left = lower(graph, Target("cuda", dtype, "sm_90"), tuple(only))
    return graph, left, given


def calls(graph) -> str:
    names = [str(n.target).removesuffix(".default") for n in graph.graph.nodes if n.op.startswith("call")]
    return ", ".join(name for name in names if "meshfn" in name or name in ("copy_", "masked_fill"))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_a_lowered_step_is_the_plain_one(on_the_cpu, kind):
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


@torch.no_grad()
def test_within_a_region_it_is_compiled_and_its_states_stay_where_they_are(on_the_cpu):
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


def test_why_the_kernel_does_not_take_a_step():
    def reason(dtype=torch.bfloat16, arch="sm_90", **more):
        given = wide(case()) if dtype == torch.float64 else case(dtype=dtype)
        given |= {"activation": "silu", **more}
        return gdn_decode.supports(given, arch)

    columns = torch.zeros(3, 6, 1, 2, dtype=torch.bfloat16).permute(0, 2, 3, 1)
    reasons = [
        reason(), reason(torch.float64), reason(arch="sm_75"), reason(arch=None), reason(torch.float32, **{
            "cache_q": torch.zeros(3, 12, 3, dtype=torch.bfloat16)}), reason(a_log=torch.zeros(4, dtype=torch.float64)),
        reason(cache_state=torch.zeros(3, 4, 5, 6, dtype=torch.float64)), reason(q=torch.zeros(3, 1, 2, 513).bfloat16()),
        reason(q_conv=torch.zeros(12, 1, 9).bfloat16()), reason(activation="tanh"), reason(q=columns),
        reason(v=torch.zeros(3, 2, 4, 5).bfloat16()), reason(positions=torch.zeros(3, 1, dtype=torch.int32)),
        reason(cache_state=torch.zeros(3, 4, 6, 5).mT),
    ]  # fmt: skip
    assert_expected_inline(
        "\n".join(map(str, reasons)),
        """\
None
no float64
sm_75 is older than sm_80
no architecture is named
float32 with bfloat16
no float64
a state in float64
E=513, at most 512
W=9, at most 8
no tanh
q by columns
2 tokens a row, not 1
positions in int32
cache_state is not contiguous""",
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


@pytest.mark.skipif(missing() is not None, reason="NVRTC is not installed")
def test_nothing_is_spilled():
    names = [f"gdn_decode<{types}, 4, 4, 4, 8, {rows}>" for types in ("bf16, float", "float, float") for rows in (2, 4)]
    names += ["gdn_decode<fp16, fp16, 8, 4, 4, 32, 4>", "gdn_decode<bf16, float, 4, 1, 16, 32, 2>"]
    found = {
        name: [compile_kernel("gdn_decode.cu", name, arch).spilled_bytes for arch in ARCHITECTURES] for name in names
    }
    assert {name: sum(each) for name, each in found.items() if sum(each)} == {}
