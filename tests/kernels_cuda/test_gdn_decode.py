"""A step of a gated delta net in one launch, carried out on the CPU: against its plain function in fp64, transformers'
layers, itself in another order, and rows that are none."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.recurrence import gdn_step
from meshfn.kernels_cuda import ARCHITECTURES, compile_kernel, gdn_decode, missing

from ..functional.gdn_cases import module, zeros
from .gdn_step_cases import KERNEL, STATES, bits, case, run, wide
from .harness import Host
from .ops import host_ops

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


@host_ops()
def test_the_op_is_an_operator_as_torch_wants_it_and_refuses_gradients():
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


def test_why_the_kernel_does_not_take_a_step():
    def reason(dtype=torch.bfloat16, arch="sm_90", **more):
        given = wide(case()) if dtype == torch.float64 else case(dtype=dtype)
        given |= {"activation": "silu", "gate_act": "silu", **more}
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


@host_ops()
def test_bad_input_is_refused_before_a_byte_is_written():
    wrong = [
        {"cache_q": torch.zeros(3, 12, 4)}, {"cache_state": torch.zeros(2, 4, 5, 6)}, {"dt_bias": torch.zeros(5)},
        {"v": torch.zeros(3, 1, 5, 5)}, {"o_norm": torch.zeros(5).double()}, {"k_conv": torch.zeros(4, 1, 12).mT},
    ]  # fmt: skip
    messages = []
    for each in wrong:
        given = case() | each
        before = [given[name].clone() for name in STATES]
        with pytest.raises((ValueError, TypeError), match="gdn_decode") as error:
            torch.ops.meshfn_cuda.gdn_step(**given)
        messages.append(str(error.value).splitlines()[0])
        assert all(given[name].equal(x) for name, x in zip(STATES, before, strict=True))
    assert_expected_inline(
        "\n".join(messages),
        """\
gdn_decode(cache_q=...): U is 3 in the config but 4 in cache_q
gdn_decode(cache_state=...): B is 3 in q but 2 in cache_state
gdn_decode(dt_bias=...): 5 numbers, where a has 4 decays
gdn_decode(z=...): H is 5 in v but 4 in z
gdn_decode(o_norm=...): it is torch.float64, and v torch.float32
gdn_decode(k_conv=...): F is 12 in the config but 4 in k_conv""",
    )


INSTANCES = [
    *(f"gdn_decode<{types}, 4, 4, 4, 8, {rows}>" for types in ("bf16, float", "float, float") for rows in (2, 4)),
    *("gdn_decode<fp16, fp16, 8, 4, 4, 32, 4>", "gdn_decode<bf16, float, 4, 1, 16, 32, 2>"),
]


@pytest.mark.skipif(missing() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        # The usual one everywhere, the others once.
        pytest.param(name, arch, marks=[] if name == INSTANCES[1] or arch == "sm_90" else pytest.mark.verify)
        for name in INSTANCES
        for arch in ARCHITECTURES
    ],
)
def test_nothing_is_spilled(name, arch):
    assert compile_kernel("gdn_decode.cu", name, arch).spilled_bytes == 0
