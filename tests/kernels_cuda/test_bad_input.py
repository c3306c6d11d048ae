"""Every op of kernels_cuda, given each wrong thing in each argument: a message that names op and argument, before a
launch and before a byte is written, or what the plain function gives."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import kernels_cuda
from meshfn.functional.sampling import Controls
from meshfn.functional.shapes import ShapeError
from meshfn.kernels_cuda import OPS, Launch, compile_kernel, compiler, device, ops
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.kernel import Call
from meshfn.programs.sizes import target_of

from .gdn_step_cases import case as gdn_case
from .harness import Host
from .ops import host_ops

Arguments = dict[str, Any]
HOST = Host()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _gemv() -> Arguments:
    none = dict.fromkeys(["w2", "w3", "w4", "w5", "b0", "b2", "b3", "b4", "b5", "residual"])
    weights = {"w0": randn(4, 5), "w1": randn(3, 5), "b1": randn(3)}
    norm = {"eps": 1e-5, "zero_centered": False, "scale_in_fp32": False}
    return {"x": randn(3, 5), "norm_weight": randn(5), **weights, **none, "end": "plain", "activation": None, **norm}


def _add() -> Arguments:
    given = {"x": randn(3, 5), "residual": randn(3, 5), "weight": randn(5)}
    return given | {"eps": 1e-5, "zero_centered": False, "scale_in_fp32": False}


def _attention() -> Arguments:
    given = {"q": randn(2, 1, 4, 5), "k": randn(2, 7, 2, 5), "v": randn(2, 7, 2, 3)}
    positions = {"q_positions": torch.tensor([[4], [6]]), "k_positions": torch.arange(7).repeat(2, 1)}
    options = {"causal": True, "window": None, "softcap": None, "softmax_scale": None}
    return given | positions | {"sinks": randn(4), "gate": randn(2, 1, 4, 3)} | options


def _latent() -> Arguments:
    given = {"q": randn(2, 3, 7), "latent": randn(2, 9, 11), "kv_b": randn(3 * 9, 8)}
    positions = {"q_positions": torch.tensor([5, 8]), "k_positions": torch.arange(9).repeat(2, 1)}
    return given | positions | {"nope_dim": 4, "softmax_scale": 0.4, "causal": True, "window": None}


def _cache() -> Arguments:
    given = {"q": randn(2, 1, 4, 6), "k": randn(2, 1, 2, 6), "v": randn(2, 1, 2, 5)}
    given |= {"cos": randn(2, 1, 2), "sin": randn(2, 1, 2), "q_norm": randn(6), "k_norm": randn(6)}
    given |= {"k_cache": randn(2, 7, 2, 6), "v_cache": randn(2, 7, 2, 5)}
    given |= {"positions": torch.tensor([[4], [6]]), "slots": torch.arange(7)}
    return given | {"interleaved": False, "ring": None, "eps": 1e-5, "zero_centered": False, "scale_in_fp32": False}


def _gdn() -> Arguments:
    options = {"activation": "silu", "gate_act": "silu", "eps": 1e-6}
    return gdn_case() | options | {"scale_in_fp32": False, "allow_neg_eigval": False}


def _sample() -> Arguments:
    return {"logits": randn(3, 33), "positions": torch.tensor([2, -1, 5]), "eos_token_id": torch.tensor([3, 30])}


def _options() -> Arguments:
    given, off = _sample(), Controls.off(3, 33)
    counts = torch.randint(0, 3, (3, 33), dtype=torch.int32)
    return given | {"counts": counts} | {name: getattr(off, name) for name in Controls.__dataclass_fields__}


CASES: dict[str, Callable[[], Arguments]] = {
    "gemv": _gemv, "add_rms_norm": _add, "decode_attention_split": _attention, "mla_decode": _latent,
    "qkv_rope_write": _cache, "gdn_decode": _gdn, "sample": _sample, "sample_options": _options,
}  # fmt: skip


def as_stepped(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other one of a row."""
    return torch.stack((x, x), -1).flatten(-2)[..., ::2]


def as_shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element behind where memory begins."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


# what is wrong -> of a tensor, what stands in its place; the tensor itself where that cannot be wrong
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in another dtype": lambda x: x.double() if x.dtype != torch.float64 else x.float(),
    "int32 for int64": lambda x: x.int() if x.dtype == torch.int64 else x,
    "on another device": lambda x: x.to("meta"),
    "a row longer": lambda x: torch.cat((x, x[..., :1]), -1),
    "a row too many": lambda x: torch.cat((x, x[:1])),
    "a dimension less": lambda x: x[0] if x.dim() > 1 else x.sum(),
    "a dimension more": lambda x: x[None],
    "nothing in a row": lambda x: x[..., :0],
    "every other number": as_stepped,
    "by columns": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "one element behind": as_shifted,
    "one row for all": lambda x: x[:1].expand(x.shape) if x.dim() > 1 else x,
    "below zero": lambda x: x - 9 if x.dtype == torch.int64 else x,
    "far away": lambda x: x + 1_000_000 if x.dtype == torch.int64 else x,
}


def named(error: Exception, op: kernels_cuda.Op) -> bool:
    """Whether a message begins with an op and one of its arguments."""
    told = re.match(r"([a-z_]+)\(([a-z_0-9]+)=", str(error))
    return told is not None and told[2] in CASES[op.name]()


def outcome(op: kernels_cuda.Op, change: Callable[[Arguments], Arguments]) -> str:
    torch.manual_seed(0)
    mine = change(CASES[op.name]())
    before = {name: mine[name].clone() for name in op.mutates if mine[name].device.type == "cpu"}
    launches: list[Launch] = []

    def host(launch: Launch) -> None:
        launches.append(launch)
        HOST(launch)

    try:
        found = op.run(host, **mine)
    except (TypeError, ValueError) as error:
        if not named(error, op) or launches:
            raise
        assert all(torch.equal(mine[name], x) for name, x in before.items())
        return "refused"
    torch.manual_seed(0)
    theirs = change(CASES[op.name]())
    if op.name == "qkv_rope_write":  # torch refuses to write where no slot is, and the kernel writes nothing
        far = theirs["positions"] >= theirs["k_cache"].shape[1]
        theirs["positions"] = torch.where(far, -1, theirs["positions"])
        found = found[:1] if far.any() else found
    right = op.reference(**theirs)
    right, found = (x if isinstance(x, tuple) else (x,) for x in (right, found))
    for one, two in zip(found, right[: len(found)], strict=True):
        two = two if two.is_floating_point() or op.name != "qkv_rope_write" else two.clamp_min(-1)
        torch.testing.assert_close(one, two, equal_nan=True, rtol=1e-4, atol=1e-5)
    for name in op.mutates:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-5)
    return "right"


@torch.no_grad()
def test_each_wrong_thing_in_each_argument_of_each_op():
    """refused + right, of the arguments that there are."""
    assert set(CASES) == set(OPS) - {
        "one_shot_all_reduce"
    }  # which is no function of one rank, and has tests of its own
    lines = [f"{'':20} {' '.join(name.removeprefix('decode_')[:12].rjust(12) for name in CASES)}"]
    for what, wrong in WRONG.items():
        cells = []
        for op in map(OPS.__getitem__, CASES):
            found: Counter[str] = Counter()
            for name, value in CASES[op.name]().items():
                if isinstance(value, torch.Tensor) and wrong(value) is not value:
                    try:
                        found[outcome(op, lambda given, n=name, w=wrong: given | {n: w(given[n])})] += 1
                    except Exception as error:
                        raise AssertionError(f"{op.name}({name}=...) {what}: {error}") from error
            cells.append(f"{found['refused']} + {found['right']}".rjust(12))
        lines.append(f"{what:20} {' '.join(cells)}")
    assert_expected_inline(
        "\n".join(lines),
        """\
                             gemv add_rms_norm attention_sp   mla_decode qkv_rope_wri   gdn_decode       sample sample_optio
in another dtype            5 + 0        3 + 0        7 + 0        5 + 0       11 + 0       17 + 0        3 + 0       13 + 0
int32 for int64             0 + 0        0 + 0        2 + 0        2 + 0        2 + 0        1 + 0        2 + 0        4 + 0
on another device           5 + 0        3 + 0        7 + 0        5 + 0       11 + 0       17 + 0        3 + 0       13 + 0
a row longer                5 + 0        3 + 0        7 + 0        5 + 0       10 + 1       17 + 0        1 + 2       12 + 1
a row too many              3 + 2        3 + 0        7 + 0        5 + 0       10 + 1       17 + 0        2 + 1       12 + 1
a dimension less            5 + 0        3 + 0        7 + 0        5 + 0       11 + 0       17 + 0        3 + 0       13 + 0
a dimension more            5 + 0        3 + 0        7 + 0        5 + 0       11 + 0       16 + 1        3 + 0       13 + 0
nothing in a row            5 + 0        3 + 0        7 + 0        5 + 0       10 + 1       17 + 0        2 + 1       12 + 1
every other number          5 + 0        3 + 0        5 + 2        4 + 1       10 + 1       13 + 4        2 + 1       12 + 1
by columns                  3 + 0        2 + 0        4 + 2        4 + 0        5 + 3        7 + 7        1 + 0        2 + 0
one element behind          0 + 5        0 + 3        0 + 7        0 + 5       0 + 11       0 + 17        0 + 3       0 + 13
one row for all             0 + 3        0 + 2        0 + 6        0 + 4        2 + 6        7 + 7        0 + 1        1 + 1
below zero                  0 + 0        0 + 0        0 + 2        0 + 2        0 + 2        0 + 1        0 + 2        0 + 4
far away                    0 + 0        0 + 0        0 + 2        0 + 2        0 + 2        0 + 1        0 + 2        0 + 4""",
    )


def told(op: str, **change: Any) -> str:
    """The first line of the message that an op gives for options, or tensors, other than the usual ones."""
    with pytest.raises((TypeError, ValueError)) as error:
        OPS[op].run(HOST, **CASES[op]() | change)
    assert named(error.value, OPS[op]), error.value
    return str(error.value).splitlines()[0]


@torch.no_grad()
def test_options_and_sizes_that_a_kernel_has_not():
    wide = randn(2, 7, 2, 257)
    lines = [
        told("gemv", end="sum"),
        told("gemv", activation="tanh"),
        told("gemv", activation="silu"),
        told("gemv", end="act"),
        told("gemv", end="gated", w1=None, b1=None, activation="silu"),
        told("gemv", end="residual", w1=None, b1=None, norm_weight=None),
        told("gemv", end="residual", w1=None, b1=None, residual=randn(3, 4)),
        told("gemv", residual=randn(3, 7)),
        told("gemv", w1=None),
        told("gemv", x=randn(9, 5)),
        told("decode_attention_split", q=randn(2, 1, 4, 257), k=wide),
        told("decode_attention_split", v=wide, gate=None),
        told("decode_attention_split", q=randn(2, 1, 3, 5), sinks=None, gate=None),
        told("decode_attention_split", window=0),
        told("decode_attention_split", softcap=-1.0),
        told("decode_attention_split", softmax_scale=float("nan")),
        told("mla_decode", latent=randn(2, 9, 643), kv_b=randn(27, 640)),
        told("mla_decode", nope_dim=0),
        told("mla_decode", window=-1),
        told("qkv_rope_write", sin=None),
        told("qkv_rope_write", cos=randn(2, 1, 4), sin=randn(2, 1, 4)),
        told("qkv_rope_write", ring=8),
        told("qkv_rope_write", ring=0),
        told("gdn_decode", activation="tanh"),
        told("gdn_decode", gate_act="gelu"),
        told("gdn_decode", v=randn(3, 2, 4, 5)),
        told("sample", logits=randn(3, 0)),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
gemv(end='sum'): it is none of 'plain', 'act', 'gated', 'residual'
gemv(activation='tanh'): it is none of None, 'silu', 'gelu', 'gelu_pytorch_tanh', 'relu2'
gemv(activation='silu'): end='plain' has no activation
gemv(end='act'): it reads the weights w0, given are w0 w1
gemv(end='gated'): it reads the weights w0 w1, given are w0
gemv(residual=...): end='residual' needs one
gemv(norm_weight=...): end='residual' has none
gemv(residual=...): end='plain' has none
gemv(b1=...): there is no w1 that it belongs to
gemv(x=...): it has 9 tokens, and the kernel takes at most 8
decode_attention(q=...): E is 257, and the kernel takes 1 to 256
decode_attention(v=...): V is 257, and the kernel takes 1 to 256
decode_attention(k=...): H=3 query heads do not divide over K=2 key/value heads
decode_attention(window=...): a positive integer is needed, not 0
decode_attention(softcap=-1.0): a finite number above 0 is needed
decode_attention(softmax_scale=nan): a finite number above 0 is needed
mla_decode(latent=...): LR is 643, and the kernel takes 1 to 640
mla_decode(kv_b=...): 27 rows are not N + V of each of 3 heads, with N=0 of E=7 and V above 0
mla_decode(window=...): a positive integer is needed, not -1
qkv_rope_cache(sin=None): cos and sin are needed together
qkv_rope_cache(cos=...): R is 8, more than E=6 in q
qkv_rope_cache(ring=8): k_cache has 7 slots
qkv_rope_cache(ring=...): a positive integer is needed, not 0
gdn_decode(activation='tanh'): it is none of 'silu', 'gelu', 'gelu_pytorch_tanh', 'relu2'
gdn_decode(gate_act='gelu'): it is none of 'silu', 'sigmoid'
gdn_decode(v=...): S is 1 in q but 2 in v
sample_advance(logits=...): Z is 0, and the kernel takes 1 to 1073741824""",
    )


@torch.no_grad()
def test_what_a_primitive_has_and_its_kernel_has_not_is_not_left_out():
    ops, x, w = torch.ops.meshfn_cuda, randn(2, 1, 5), randn(5)
    attention = {name: x for name, x in _attention().items() if name not in ("q", "k", "v")}
    latent = _latent() | {"q": randn(2, 2, 3, 7), "q_positions": torch.tensor([[5], [8]])}
    calls: list[Callable[[], Any]] = [
        lambda: ops.norm_linear(x, w, [randn(4, 5)], [None], norm_type="layer_norm"),
        lambda: ops.norm_linear(x, w, [randn(4, 5)], [None], norm_bias=w),
        lambda: ops.norm_linear(x, w, [randn(4, 5)], []),
        lambda: ops.add_norm(x, x, w, w),
        lambda: ops.add_norm(x, x, w, norm_type="layer_norm"),
        lambda: ops.decode_attention(*_attention_qkv(), **attention, mask=torch.ones(1, 7, dtype=torch.bool)),
        lambda: ops.decode_attention(*_attention_qkv(), **attention, kv_index=torch.zeros(4, dtype=torch.int64)),
        lambda: ops.absorbed_core(**latent),
        lambda: ops.absorbed_core(**latent | {"q": randn(2, 1, 3, 7), "mask": torch.ones(1, 9, dtype=torch.bool)}),
        lambda: ops.absorbed_core(**latent | {"q": randn(2, 1, 3, 7), "k_positions": None}),
    ]
    messages = []
    for call in calls:
        with host_ops() as launches, pytest.raises((TypeError, ValueError)) as error:
            call()
        assert launches == []
        messages.append(str(error.value).splitlines()[0])
    assert_expected_inline(
        "\n".join(messages),
        """\
gemv(norm_type='layer_norm'): the kernel has rms_norm alone
gemv(norm_bias=...): the kernel has none
gemv(biases=...): 0 for 1 weights
add_rms_norm(bias=...): the kernel has none
add_rms_norm(norm_type='layer_norm'): the kernel has rms_norm alone
decode_attention(mask=...): the kernel has none
decode_attention(kv_index=...): the kernel has none
mla_decode(q=...): S is 1 in the config but 2 in q
mla_decode(mask=...): the kernel has none
mla_decode(k_positions=None): the kernel needs both positions""",
    )


def _attention_qkv() -> list[torch.Tensor]:
    given = _attention()
    return [given[name] for name in ("q", "k", "v")]


def test_more_blocks_than_a_gpu_takes():
    rows = torch.zeros(70_000, 3)
    given = {"logits": rows, "positions": rows[:, 0].long(), "eos_token_id": torch.tensor([1])}
    with pytest.raises(ShapeError) as error:
        OPS["sample"].run(HOST, **given)
    assert_expected_inline(
        str(error.value),
        """\
sample(logits=...): a launch of 1 x 70000 x 1 blocks, and a GPU takes 2147483647 x 65535 x 65535
    fix: fewer rows a call""",
    )


def test_an_older_architecture_is_refused_before_it_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"gemv<float>: sm_75 is older than sm_80\n    fix: the plain function"):
        device._kernel("gemv.cu", "gemv<float>", 0)


def test_what_is_needed_to_compile_is_not_here(monkeypatch, tmp_path):
    """The package, the library and the headers: in the words of a plan and of a launch."""

    def no_library():
        raise RuntimeError("Failure finding libnvrtc.so\nwhere it was looked for")

    def no_headers():
        raise RuntimeError("no cuda_bf16.h among the installed wheels\n    fix: pip install nvidia-cuda-runtime")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    lines = []
    for change in (
        lambda patch: patch.setitem(sys.modules, "cuda.core", None),
        lambda patch: patch.setattr(compiler, "_version", no_library),
        lambda patch: (patch.setattr(compiler, "wheel_headers", no_headers),
                       patch.setattr(compiler, "_brings_headers", lambda: False)),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            change(patch)
            target = target_of(torch.device("cuda", 0), torch.bfloat16)
            call = Call("norm_linear", {}, target)
            lines += {kernel.supports(call) for kernel in CUDA_KERNELS}
            with pytest.raises(
                RuntimeError, match=r"compile_kernel\(gemv<float>\): NVRTC is not here .*\n    fix: pip"
            ):
                compile_kernel("gemv.cu", "gemv<float>", "sm_90", cache=tmp_path)
    assert (target.arch, target.compiled_for) == ("sm_90", None)
    assert_expected_inline(
        "\n".join(lines),
        """\
NVRTC is not here (import of cuda.core halted; None in sys.modules)
NVRTC is not here (Failure finding libnvrtc.so)
NVRTC is not here (no cuda_bf16.h among the installed wheels)""",
    )


def test_tensors_that_are_on_no_gpu():
    """The tests carry ops out on a CPU; what a user gets is what they override."""
    with pytest.raises(TypeError) as error:
        ops._refuse_device(OPS["gemv"], **_gemv())
    assert_expected_inline(
        str(error.value),
        """\
gemv(x=...): it is on cpu, and the kernel runs on a GPU
    fix: x.cuda(), or the plain function""",
    )
