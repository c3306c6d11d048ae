"""The gated delta rule: the scan against transformers, then everything else against the scan."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshfn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next import modeling_qwen3_next as qwen_next

from .delta_cases import CHUNKED, KINDS, SCAN, STEP, all_of, case, close, cut, loss

PEERS = {
    "qwen3_next": (qwen_next.torch_recurrent_gated_delta_rule, False),
    "qwen3_5": (qwen.torch_chunk_gated_delta_rule, False),
    "olmo_hybrid": (olmo.torch_recurrent_gated_delta_rule, False),
    "kimi_linear": (kimi.recurrent_kimi_delta_attention, True),
    "kimi_linear in chunks": (kimi.chunk_kimi_delta_attention, True),
}


def repeated(q, k, v):
    """A key head for each value head, as older versions of transformers want them."""
    return (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))


@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
@pytest.mark.parametrize("peer", PEERS)
def test_the_rule_is_that_of_transformers(peer, fn):
    """Outputs, states and gradients; their state is key-major, their arithmetic fp32."""
    theirs, by_channel = PEERS[peer]
    inputs = case(S=70, G=1 if by_channel else 2, by_channel=by_channel, dtype=torch.float32)

    def peers(q, k, v, g, beta, *, initial_state, output_final_state):
        q, k = repeated(q, k, v)
        o, state = theirs(q, k, v, g, beta, initial_state=initial_state.mT, output_final_state=True)
        return o, state.mT

    close(all_of(fn, inputs), all_of(peers, inputs), 2e-5)


@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("chunk_size", [1, 3, 16, 20, 64])
def test_chunks_are_the_scan(chunk_size, by_channel):
    inputs = case(by_channel=by_channel)
    close(all_of(CHUNKED, inputs, chunk_size=chunk_size), all_of(SCAN, inputs), 1e-12)


@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_without_a_state_it_begins_with_zeros(by_channel, fn):
    inputs = case(S=5, by_channel=by_channel)
    begun = {**inputs, "initial_state": torch.zeros_like(inputs["initial_state"])}
    del inputs["initial_state"]
    assert torch.equal(fn(**inputs)[0], fn(**begun)[0])
    assert fn(**inputs)[1] is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_any_split_is_one_call(by_channel, dtype, tolerance):
    inputs = case(S=140, by_channel=by_channel, dtype=dtype, decay=20.0 if dtype is torch.float32 else 1.0)
    with torch.no_grad():
        whole, end = CHUNKED(**inputs, output_final_state=True)
        state, parts, at = inputs["initial_state"], [], 0
        for tokens in (1, 2, 3, 64, 65, *[1] * 5):
            fn = STEP if tokens == 1 else CHUNKED
            o, state = fn(**cut(inputs, at, at + tokens), initial_state=state, output_final_state=True)
            parts.append(o)
            at += tokens
    close((torch.cat(parts, 1), state), (whole, end), tolerance)


@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_a_step_is_the_scan(by_channel):
    inputs = case(S=1, by_channel=by_channel)
    close(all_of(STEP, inputs), all_of(SCAN, inputs), 1e-12)
    absent = {"positions": torch.tensor([[-1], [7]])}
    close(all_of(STEP, inputs, **absent), all_of(SCAN, inputs, **absent), 1e-12)
    packed = case(S=3, B=1, states=4, by_channel=by_channel)
    documents = {"cu_seqlens": torch.tensor([0, 1, 1, 2, 3])}
    close(all_of(STEP, packed, **documents), all_of(SCAN, packed, **documents), 1e-12)


@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("left", [False, True])
def test_padding_has_no_effect(left, by_channel, fn):
    """Rows of 5, 0 and 11 tokens, and whatever stands where none is: NaN, gates above 0. Gradients too."""
    inputs, counts = case(S=11, B=3, by_channel=by_channel), [5, 0, 11]
    positions = torch.full((3, 11), -1)
    for row, n in enumerate(counts):
        positions[row, 11 - n if left else 0 :][:n] = torch.arange(n)
    told = {"positions": positions} if left else {"lengths": torch.tensor(counts)}
    dirty = {**inputs}
    for name in ("q", "k", "v", "g", "beta"):
        spoil = (positions < 0)[(..., *[None] * (inputs[name].dim() - 2))]
        dirty[name] = inputs[name].detach().masked_fill(spoil, 3.0 if name == "g" else torch.nan).requires_grad_()
    found = all_of(fn, dirty, **told)
    assert all(x.isfinite().all() for x in found)
    o, state, *gradients = found
    assert torch.equal(state[1], inputs["initial_state"][1])
    for row, n in enumerate(counts):
        here = slice(11 - n, 11) if left else slice(0, n)
        assert o[row].any(-1).any(-1).sum() == n
        if n:
            alone = {
                name: (x if x is inputs["initial_state"] else x[:, here])[row : row + 1] for name, x in inputs.items()
            }
            alone = {name: x.detach().requires_grad_() for name, x in alone.items()}
            o_alone, state_alone = fn(**alone, output_final_state=True)
            close((o[row : row + 1, here], state[row : row + 1]), (o_alone, state_alone), 1e-12)
            weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)[row : row + 1, here]
            total = (o_alone * weight).sum() + state_alone.square().sum()
            for name, mine, own in zip(alone, gradients, torch.autograd.grad(total, list(alone.values())), strict=True):
                mine = mine[row : row + 1] if name == "initial_state" else mine[row : row + 1, here]
                torch.testing.assert_close(mine, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_packed_documents_are_rows_by_themselves(by_channel, fn):
    """Documents of 0, 1, 3, 0, 2, 40 and 0 tokens: outputs, states and gradients."""
    bounds = [0, 0, 1, 4, 4, 6, 46, 46]
    inputs = case(S=46, B=1, states=7, by_channel=by_channel)
    o, state, *gradients = all_of(fn, inputs, cu_seqlens=torch.tensor(bounds))
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    for n, (at, end) in enumerate(itertools.pairwise(bounds)):
        alone = {**cut(inputs, at, end), "initial_state": inputs["initial_state"][n : n + 1]}
        alone = {name: x.detach().requires_grad_() for name, x in alone.items()}
        o_alone, state_alone = SCAN(**alone, output_final_state=True)
        close((o[:, at:end], state[n : n + 1]), (o_alone, state_alone), 1e-12)
        total = (o_alone * weight[:, at:end]).sum() + state_alone.square().sum()
        own = torch.autograd.grad(total, list(alone.values()), materialize_grads=True)
        for name, mine, wanted in zip(alone, gradients, own, strict=True):
            mine = mine[n : n + 1] if name == "initial_state" else mine[:, at:end]
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_hard_inputs_stay_finite_and_right(by_channel):
    """Decays down to -20 a token, and one by one; identical keys that are overwritten whole; huge states in fp16."""
    for every in (1, 2):
        inputs = case(S=130, by_channel=by_channel, dtype=torch.float32, decay=20.0)
        with torch.no_grad():  # at every second token a small decay, right behind a large one
            inputs["g"][:, ::every].mul_(1 if every == 1 else 1e-3)
        exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        wanted = all_of(SCAN, exact)
        close(all_of(CHUNKED, inputs), [x.float() for x in wanted], 1e-5)
    same = case(S=70, by_channel=by_channel, dtype=torch.float32, decay=0.0)
    same["k"] = same["k"].detach()[:, :1].expand(-1, 70, -1, -1).clone().requires_grad_()
    same["beta"] = torch.ones_like(same["beta"]).requires_grad_()
    exact = {name: x.detach().double().requires_grad_() for name, x in same.items()}
    close(all_of(CHUNKED, same)[:2], [x.float() for x in all_of(SCAN, exact)[:2]], 1e-5)


def test_half_precision_keeps_its_state_in_fp32():
    inputs = case(S=40, dtype=torch.float32)
    half = {name: x.detach().half() for name, x in inputs.items()}
    half |= {"g": inputs["g"].detach(), "initial_state": inputs["initial_state"].detach() * 1e5}
    half["q"] = half["q"] * 1e-3
    for fn in (SCAN, CHUNKED):
        o, state = fn(**half, output_final_state=True)
        exact = SCAN(**{name: x.double() for name, x in half.items()}, output_final_state=True)
        assert (o.dtype, state.dtype) == (torch.float16, torch.float32)
        torch.testing.assert_close(o.double(), exact[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(state.double(), exact[1], rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
def test_half_precision_is_as_near_as_that_of_transformers(fn, dtype):
    inputs = {name: x.detach() for name, x in case(S=70, K=2, dtype=torch.float32).items()}
    half = {name: x.to(dtype) if name in ("q", "k", "v") else x for name, x in inputs.items()}
    exact = SCAN(**{name: x.double() for name, x in half.items()})[0]
    q, k, v, g, beta, state = half.values()
    theirs = qwen.torch_chunk_gated_delta_rule(*repeated(q, k, v), v, g, beta, initial_state=state.mT)[0]
    error, bound = ((o.double() - exact).norm() for o in (fn(**half)[0], theirs))
    assert error <= 1.5 * bound


@pytest.mark.parametrize("fn", [SCAN, CHUNKED])
@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_transforms(by_channel, fn):
    """`torch.func.grad`, `vmap` of it over each argument by itself, and a whole graph."""
    inputs = case(S=5, by_channel=by_channel)
    args, every = [x.detach() for x in inputs.values()], tuple(range(6))
    options = {"chunk_size": 3} if fn is CHUNKED else {}
    wanted = torch.autograd.grad(loss(SCAN, *inputs.values()), list(inputs.values()))
    gradient = torch.func.grad(lambda *args: loss(fn, *args, **options), argnums=every)
    close(gradient(*args), wanted, 1e-12)
    for i in every:
        one = [x[None] if i == j else x for j, x in enumerate(args)]
        mapped = torch.vmap(gradient, in_dims=tuple([0 if i == j else None for j in every]))(*one)
        close([x[0] for x in mapped], wanted, 1e-12)
    torch.compiler.reset()
    graph = torch.compile(lambda *args: loss(fn, *args, **options), fullgraph=True, backend="aot_eager")
    close(torch.autograd.grad(graph(*inputs.values()), list(inputs.values())), wanted, 1e-12)


@pytest.mark.parametrize("by_channel", KINDS.values(), ids=KINDS)
def test_gradients_by_differences_twice(by_channel):
    inputs = case(S=5, B=1, K=1, G=1 if by_channel else 2, E=2, V=2, by_channel=by_channel)
    names = list(inputs)

    def fn(*args):
        return CHUNKED(**dict(zip(names, args, strict=True)), output_final_state=True, chunk_size=3)

    assert torch.autograd.gradcheck(fn, list(inputs.values()))
    assert torch.autograd.gradgradcheck(fn, list(inputs.values()))


def _held(fn, inputs):
    """The bytes that a backward of fn holds."""
    held = {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = fn(*list(inputs.values())[:5], output_final_state=True)
    assert result[0].requires_grad
    return sum(storage.nbytes() for storage in held.values())


def test_the_backward_holds_less_than_that_of_transformers():
    inputs = case(S=256, B=1, K=2, G=1, E=32, V=32, dtype=torch.float32)
    assert _held(CHUNKED, inputs) < _held(qwen.torch_chunk_gated_delta_rule, inputs) / 2
    inputs = case(S=256, B=1, K=2, G=1, E=32, V=32, by_channel=True, dtype=torch.float32)
    assert _held(CHUNKED, inputs) < _held(kimi.chunk_kimi_delta_attention, inputs) / 2


def test_softplus_of_the_decay_is_never_zero():
    a = torch.linspace(-60, 60, 4801)[None, :, None]
    one, zero = torch.zeros(1), torch.zeros(1)
    g, _ = F.gdn_gates(a, a, one, zero)
    exact = -torch.logaddexp(a.double(), torch.zeros((), dtype=torch.float64))
    assert ((g.double() - exact) / exact).abs().max() < 1e-6
    assert (g < 0).all()


def test_gates_are_fp32_whatever_the_activations():
    a, b = torch.randn(2, 3, 4, 5).bfloat16(), torch.randn(2, 3, 4).bfloat16()
    a_log, dt_bias = torch.randn(4), torch.randn(4, 5)
    g, beta = F.gdn_gates(a, b, a_log, dt_bias)
    wanted = -a_log.double().exp()[:, None] * torch.nn.functional.softplus(a.double() + dt_bias.double())
    torch.testing.assert_close(g.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(beta.double(), b.double().sigmoid(), rtol=1e-6, atol=0)
    assert g.dtype == beta.dtype == torch.float32


def test_l2norm_is_that_of_transformers():
    x = torch.randn(2, 3, 7)
    assert torch.equal(F.l2norm(x), qwen.l2norm(x))
    assert torch.equal(F.l2norm(x.bfloat16()), qwen.l2norm(x.bfloat16().float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("module", "options"),
    [(Qwen3_5RMSNormGated, {}), (KimiLinearRMSNormGated, {"activation": "sigmoid", "scale_in_fp32": True})],
    ids=["qwen3_5", "kimi_linear"],
)
def test_the_gated_norm_rounds_as_its_family_to_the_bit(module, options, dtype):
    norm = module(33, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(33))
    x, z = (torch.randn(3, 5, 33) * 3).to(dtype), (torch.randn(3, 5, 33) * 3).to(dtype)
    assert torch.equal(F.gated_rms_norm(x, norm.weight, z, eps=1e-6, **options), norm(x, z))
