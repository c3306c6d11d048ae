"""Primitives: a plain call in eager code, one node in a graph, transparent to transforms."""

from __future__ import annotations

import warnings

import pytest
import torch
from meshfn import functional as F
from meshfn.functional.recurrence import gated_delta_rule, short_conv

X, W = torch.randn(3, 4, 8), torch.randn(5, 8)
POSITIONS = torch.arange(4)[None]
CALLS = {
    "norm_linear": lambda x: F.norm_linear(x, torch.ones(8), [W, W], [None, torch.ones(5)])[1],
    "gated_mlp": lambda x: F.gated_mlp(x, torch.ones(8), W, W, activation="gelu"),
    "apply_rope": lambda x: F.apply_rope(x[..., None, :], *F.rope_tables(POSITIONS, F.RopeConfig(), 8)),
    "core_attention": lambda x: F.dot_product_attention(x[..., None, :], x[..., None, :], x[..., None, :], causal=True),
    "decode_attention": lambda x: F.decode_attention(
        x[..., None, :], x[..., None, :], x[..., None, :], q_positions=POSITIONS, k_positions=POSITIONS
    ),
    "gated_rms_norm": lambda x: F.gated_rms_norm(x, torch.ones(8), x),
    "sample_advance": lambda x: F.sample_advance(x[:, 0], POSITIONS[0, :3], torch.tensor([1]))[1],
}

# Those with a derivative of their own.
DERIVED = {
    "short_conv": lambda x: short_conv(x[..., None, :], torch.ones(8, 1, 3), None, activation="silu")[0],
    "gated_delta_rule": lambda x: gated_delta_rule(
        x[..., None, :], x[..., None, :], x[..., None, :], -x[..., :1].abs(), x[..., :1].sigmoid(), None
    )[0],
}


def one_node(name, fn):
    """In the graph of fn, which computes the same."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend=backend)(X), fn(X))
    nodes = [n for n in graphs[0].graph.nodes if getattr(n.target, "_qualified_op_name", "") == f"meshfn::{name}"]
    assert len(nodes) == 1


@pytest.mark.parametrize("name", CALLS)
def test_one_node_that_decomposes(name):
    fn = CALLS[name]
    one_node(name, fn)
    x = X.clone().requires_grad_()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, fn))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", DERIVED)
def test_one_with_a_derivative_of_its_own_is_inlined_where_one_is_taken(name):
    fn = DERIVED[name]
    with torch.no_grad():
        one_node(name, fn)
    gradient = torch.func.grad(lambda x: fn(x).square().sum())
    torch.testing.assert_close(torch.compile(gradient, fullgraph=True, backend="aot_eager")(X), gradient(X))


@pytest.mark.parametrize("name", [n for n in CALLS if n != "sample_advance"])
def test_vmap_sees_through_the_op_without_a_warning(name):
    fn = lambda x: CALLS[name](x[None])[0]  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.vmap(fn)(X), CALLS[name](X))
        batched = torch.compile(torch.vmap(fn), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(batched(X), CALLS[name](X))


def test_the_op_itself_vmaps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(lambda x: torch.ops.meshfn.norm_linear(x, torch.ones(8), [W], [None])[0])(X)
    torch.testing.assert_close(got, F.norm_linear(X, torch.ones(8), [W], [None])[0])


def test_greedy_takes_the_lowest_of_equals_and_survives_nan():
    logits = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 5.0, 1.0], [-torch.inf] * 3, [7.0, 7.0, 7.0]])
    token, logprob = F.greedy(logits)
    assert token.tolist() == [1, 0, 0, 0]
    assert bool(logprob[1].isnan())
    torch.testing.assert_close(logprob[0], logits[0].log_softmax(0)[1])


def test_sample_advance_ends_rows():
    logits = torch.eye(4)
    token, _, positions = F.sample_advance(logits, torch.tensor([5, 6, 7, -1]), torch.tensor([1, 9]))
    assert token.tolist() == [0, 1, 2, 3]
    assert positions.tolist() == [5, -1, 7, -1]
