"""Plans for a GPU on a machine without one: which kernel takes which node, or why none does."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional import tree
from meshfn.functional.primitive import primitive
from meshfn.programs import dynamo
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import choose, join_all, lower, primitive_name
from meshfn.programs.sizes import Target

# Products and norms alone: other nodes get their kernels elsewhere.
SHOWN = ("norm_linear", "gated_mlp", "plain_mlp", "linear_add", "add_norm", "normalize")


def decoder(*, heads=4, kv_heads=2, width=96, attention=(), mlp=(), layer=(), change=None) -> programs.Model:
    """Two abstract layers, gated, SiLU, no biases. change: of a leaf, by its path."""
    norm = F.NormConfig()
    a = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "rope": F.RopeConfig()}
    attend = F.AttentionConfig(hidden_size=64, norm=norm, **{**a, **dict(attention)})
    feed = F.MLPConfig(hidden_size=64, intermediate_size=width, **{"norm": norm, **dict(mlp)})
    layers = (F.LayerConfig(attention=attend, mlp=feed, **dict(layer)),) * 2
    cfg = F.DecoderConfig(vocab_size=128, hidden_size=64, layers=layers, norm=norm)
    params = F.Decoder.abstract(cfg)
    if change is not None:
        params = tree.replace(params, {path: change(path, leaf) for path, leaf in tree.paths(params).items()})
    return programs.Model(name="tiny", config=cfg, params=params)


def plan(model, *, batch=1, dtype=torch.bfloat16):
    return programs.plan(model, device="cuda", arch="sm_90", dtype=dtype, batch=batch, max_len=64, chunk=32)


@functools.cache
def usual(batch=1):
    """A plan is traced for seconds: tests that read the same one share it."""
    return plan(decoder(), batch=batch)


def rows(found, phase="decode") -> str:
    shown = [r for block in found.phases[phase].blocks for r in block.rows if r.op in SHOWN]
    width = max(len(r.names) for r in shown)
    return "\n".join(f"{r.names:{width}} {r.op:11} {r.kernel}" for r in shown)


def of_mlp(batch=1, dtype=torch.bfloat16, arch="sm_90", change=None, **given) -> str:
    """The nodes of a feed-forward block and its residual, in one line. change: of a leaf, by its path."""
    cfg = F.MLPConfig(hidden_size=64, intermediate_size=96, **{"norm": F.NormConfig(), **given})
    params = tree.map(lambda leaf: leaf.to(dtype), F.MLP.abstract(cfg))
    if change is not None:
        params = tree.replace(params, {path: change(path, leaf) for path, leaf in tree.paths(params).items()})
    x = torch.empty(batch, 1, 64, dtype=dtype, device="meta")
    module = dynamo.capture(lambda params, x: x + F.mlp(params, x, cfg), params, x)
    target = Target("cuda", dtype, arch)
    join_all(module, target, CUDA_KERNELS)
    found = [node for node in module.graph.nodes if primitive_name(node)]
    return ", ".join(f"{primitive_name(node)} {choose(node, target, CUDA_KERNELS)[1]}" for node in found)


def test_one_token():
    assert_expected_inline(
        rows(usual()),
        """\
q k v    norm_linear gemv
x_BSD    linear_add  gemv
h_BSF    gated_mlp   gemv
x_BSD    linear_add  gemv
logits_Z norm_linear gemv""",
    )


def test_up_to_eight_tokens_of_any_dtype_are_alike():
    assert rows(plan(decoder(), dtype=torch.float16, batch=8)) == rows(usual())
    assert of_mlp(dtype=torch.float32, batch=3) == of_mlp()


def test_batch_64():
    assert_expected_inline(
        rows(usual(64)),
        """\
normalize    normalize   compiler (no cuda kernel)
q k v        norm_linear one_product
out_BSD      norm_linear compiler (gemv: 64 tokens, at most 8; one_product: 1 weight, only 2 to 6)
normed x_BSD add_norm    add_rms_norm
gate up      norm_linear one_product
out_BSD      norm_linear compiler (gemv: 64 tokens, at most 8; one_product: 1 weight, only 2 to 6)
logits_Z     norm_linear compiler (gemv: 64 tokens, at most 8; one_product: 1 weight, only 2 to 6)""",
    )


def test_prefill():
    assert_expected_inline(
        rows(usual(), "prefill"),
        """\
normalize    normalize   compiler (no cuda kernel)
q k v        norm_linear one_product
out_BSD      norm_linear compiler (gemv: 32 tokens, at most 8; one_product: 1 weight, only 2 to 6)
normed x_BSD add_norm    add_rms_norm
gate up      norm_linear one_product
out_BSD      norm_linear compiler (gemv: 32 tokens, at most 8; one_product: 1 weight, only 2 to 6)
logits_Z     norm_linear gemv""",
    )


def test_float64_and_older_devices():
    lines = [of_mlp(dtype=torch.float64), *(of_mlp(arch=arch) for arch in ("sm_75", None))]
    assert_expected_inline(
        "\n".join(lines),
        """\
normalize compiler (no cuda kernel), norm_linear one_product, norm_linear compiler (gemv: no float64; one_product: 1 weight, only 2 to 6)
gated_mlp compiler (gemv: sm_75 is older than sm_80), norm_linear compiler (gemv: sm_75 is older than sm_80; one_product: sm_75 is older than sm_80)
gated_mlp compiler (gemv: no architecture is named), norm_linear compiler (gemv: no architecture is named; one_product: no architecture is named)""",
    )


def test_biases():
    biased = plan(decoder(attention={"qkv_bias": True, "o_bias": True}, mlp={"bias": True, "hidden_act": "gelu"}))
    assert_expected_inline(
        rows(biased),
        """\
q k v    norm_linear gemv
x_BSD    linear_add  gemv
h_BSF    gated_mlp   gemv
x_BSD    linear_add  gemv
logits_Z norm_linear gemv""",
    )
    assert_expected_inline(
        str(biased.phases["decode"].graph).split("layer_0 ")[1],
        """\
  called 2 times
  q k v               1 1 64    meshfn_cuda.norm_linear(x, layer.attention.norm.weight, [layer.attention.q, layer.attention.k, layer.attention.v], [layer.attention.q_bias, layer.attention.k_bias, layer.attention.v_bias], eps=1e-05)
  q_1                 1 1 4 16  q.unflatten(-1, (-1, 16))
  k_1                 1 1 2 16  k.unflatten(-1, (-1, 16))
  v_BSKV              1 1 2 16  v.unflatten(-1, (-1, 16))
  positions_1         1 1       positions.expand((1, 1))
  q_BSHE k_positions  1 1 4 16  meshfn_cuda.qkv_rope_cache(q_1, k_1, v_BSKV, cos_1, sin_1, None, None, cache.k, cache.v, positions_1, read[0])
  k_read              1 n 2 16  cache.k.narrow(1, 0, read[0].size()[0])
  v_read              1 n 2 16  cache.v.narrow(1, 0, read[0].size()[0])
  o_BSHV              1 1 4 16  meshfn_cuda.decode_attention(q_BSHE, k_read, v_read, causal=True, k_positions=k_positions, q_positions=positions_1)
  x_BSD               1 1 64    meshfn_cuda.linear_add(o_BSHV.flatten(2), layer.attention.o, x, layer.attention.o_bias)
  h_BSF               1 1 96    meshfn_cuda.gated_mlp(x_BSD, layer.mlp.norm.weight, layer.mlp.gate, layer.mlp.up, layer.mlp.gate_bias, layer.mlp.up_bias, activation=gelu, eps=1e-05)
  x_BSD_1             1 1 64    meshfn_cuda.linear_add(h_BSF, layer.mlp.down, x_BSD, layer.mlp.down_bias)
  return                        (x_BSD_1)""",
    )


def test_activations_and_norms():
    lines = [f"{act}: {of_mlp(hidden_act=act)}" for act in F.ACTIVATIONS]
    lines.append(f"plain: {of_mlp(hidden_act='gelu', gated=False)}")
    lines.append(f"layer norm: {of_mlp(norm=F.NormConfig(norm_type='layer_norm', bias=True))}")
    lines.append(f"no norm in front: {of_mlp(norm=None)}")
    lines.append(f"norm behind: {of_mlp(post_norm=F.NormConfig())}")
    lines.append(f"1 + w: {of_mlp(norm=F.NormConfig(zero_centered=True))}")
    assert_expected_inline(
        "\n".join(lines),
        """\
silu: gated_mlp gemv, linear_add gemv
gelu: gated_mlp gemv, linear_add gemv
gelu_pytorch_tanh: gated_mlp gemv, linear_add gemv
relu2: gated_mlp gemv, linear_add gemv
plain: plain_mlp gemv, linear_add gemv
layer norm: normalize compiler (no cuda kernel), norm_linear gemv, linear_add gemv
no norm in front: gated_mlp gemv, linear_add gemv
norm behind: gated_mlp gemv, norm_linear gemv, normalize compiler (no cuda kernel)
1 + w: gated_mlp gemv, linear_add gemv""",
    )


def test_weights_that_lie_otherwise():
    def by_columns(path, leaf):
        return leaf.T.contiguous().T if path.endswith((".gate", ".o")) else leaf

    def padded(path, leaf):
        if leaf.dim() < 2:
            return leaf
        return torch.empty(leaf.shape[0], leaf.shape[1] + 8, dtype=leaf.dtype, device="meta")[:, : leaf.shape[1]]

    assert_expected_inline(
        rows(plan(decoder(change=by_columns), dtype=None)),
        """\
q k v        norm_linear gemv
out_BSD      norm_linear compiler (gemv: weights by columns; one_product: 1 weight, only 2 to 6)
normed x_BSD add_norm    add_rms_norm
h_BSF        gated_mlp   compiler (gemv: weights by columns)
x_BSD        linear_add  gemv
logits_Z     norm_linear gemv""",
    )
    assert of_mlp(change=padded) == of_mlp()


def test_a_tensor_parallel_ranks_own_heads():
    """One of 3 query heads and of 33 features, where 12 and 4 would be shared: as any other."""
    assert rows(plan(decoder(heads=1, kv_heads=1, width=33))) == rows(usual())


@torch.library.custom_op("meshfn_test::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@summed.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("batch", [1, 64])
def test_nothing_is_joined_past_a_pending_sum(batch):
    """A projection, its sum over ranks (an op between), the residual, a norm and the next projection."""

    def block(x, h, w, weight, v, pending):
        y = F.linear(h, w)
        x = x + (summed(y) if pending else y)
        (out,) = F.norm_linear(x, weight, [v], [None], eps=1e-6)
        return summed(out) + x if pending else out + x

    given = [torch.empty(batch, 64, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    given += [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 64), (64,), (64, 64))]
    found = {}
    for pending in (False, True):
        module = dynamo.capture(lambda *a, pending=pending: block(*a, pending), *given)
        lower(module, Target("cuda", torch.bfloat16, "sm_90"), CUDA_KERNELS)
        found[pending] = [str(n.target).removesuffix(".default") for n in module.graph.nodes if n.op == "call_function"]
        found[pending] = [t for t in found[pending] if "getitem" not in t]
    if batch == 1:
        assert found[False] == ["meshfn_cuda.linear_add", "meshfn_cuda.norm_linear", str(operator.add)]
        assert [t for t in found[True] if "meshfn_test" in t or "linear" in t] == [
            "meshfn_cuda.norm_linear", "meshfn_test.summed", "meshfn_cuda.norm_linear", "meshfn_test.summed",
        ]  # fmt: skip
    else:
        assert found[False][:2] == ["meshfn.norm_linear", "meshfn_cuda.add_norm"]
        assert found[True][:3] == ["meshfn.norm_linear", "meshfn_test.summed", "meshfn_cuda.add_norm"]


def test_a_primitive_has_no_edges_in_it():
    def layer_of_mine(x: torch.Tensor, *, wire=None) -> torch.Tensor:
        return wire.pass_(x=x)

    with pytest.raises(TypeError) as error:
        primitive(layer_of_mine)
    assert_expected_inline(
        str(error.value),
        """\
primitive(layer_of_mine): a primitive is one node of a graph, and a layout cannot reach the edges in it
    fix: make primitives of what lies between two edges""",
    )


def test_strict_lists_what_has_no_kernel():
    left = usual(64).phases["decode"].left
    assert any("norm_linear" in line and "gemv: 64 tokens, at most 8" in line for line in left)
