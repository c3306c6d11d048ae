"""What the gated delta rule refuses, before any work, and what it says."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F

from .delta_cases import CHUNKED, SCAN, STEP, case


def refused(fn=CHUNKED, inputs=None, **changes):
    inputs = inputs or case(S=9)
    with pytest.raises((ValueError, TypeError)) as error:
        fn(**{**inputs, **changes})
    return str(error.value)


def test_states_that_do_not_fit():
    state = case(S=9)["initial_state"]
    assert_expected_inline(
        refused(initial_state=state.mT),
        """\
gated_delta_rule_chunked(initial_state=...): it is key-major, H E V = 6 8 5, and value-major is needed, H V E = 6 5 8
    fix: initial_state.mT""",
    )
    assert_expected_inline(
        refused(initial_state=state[..., :7]),
        """\
gated_delta_rule_chunked(initial_state=...): E is 8 in q but 7 in initial_state
    q            : B S K E = 2 9 3 8
    initial_state: N H V E = 2 6 5 7
                                   ^
    so far: B=2 S=9 K=3 E=8 H=6 V=5 N=2""",
    )
    assert_expected_inline(
        refused(SCAN, initial_state=state[:1]),
        """\
gated_delta_rule_scan(initial_state=...): 2 rows or documents need a state each, and it has 1
    N H V E = 1 6 5 8""",
    )
    assert_expected_inline(
        refused(STEP, case(S=1), initial_state=state.float()),
        """\
gated_delta_rule_step(initial_state=...): its dtype is torch.float32, where torch.float64 is carried
    fix: initial_state.to(torch.float64)""",
    )


def test_rows_that_do_not_fit():
    packed = case(S=9, B=1, states=2)
    assert_expected_inline(
        refused(inputs=packed, cu_seqlens=torch.tensor([0, 5, 3])),
        """\
gated_delta_rule_chunked(cu_seqlens=[0, 5, 3]): it must begin with 0, never fall, and end with the S=9 tokens
    fix: torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), and a last document for padding""",
    )
    assert_expected_inline(
        refused(inputs=packed, cu_seqlens=torch.tensor([1, 5, 9])),
        """\
gated_delta_rule_chunked(cu_seqlens=[1, 5, 9]): it must begin with 0, never fall, and end with the S=9 tokens
    fix: torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), and a last document for padding""",
    )
    assert_expected_inline(
        refused(inputs=packed, cu_seqlens=torch.tensor([0, 5, 8])),
        """\
gated_delta_rule_chunked(cu_seqlens=[0, 5, 8]): it must begin with 0, never fall, and end with the S=9 tokens
    fix: torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), and a last document for padding""",
    )
    assert_expected_inline(
        refused(inputs=packed, cu_seqlens=torch.tensor([0.0, 9.0])),
        """gated_delta_rule_chunked(cu_seqlens=...): N+1 >= 2 integers are needed, not 2 of torch.float32""",
    )
    assert_expected_inline(
        refused(cu_seqlens=torch.tensor([0, 9])),
        """\
gated_delta_rule_chunked(cu_seqlens=...): packed documents lie in one row, but there are B=2
    fix: x.flatten(0, 1)[None], and cu_seqlens of all rows""",
    )
    assert_expected_inline(
        refused(lengths=torch.tensor([4, 10])),
        """\
gated_delta_rule_chunked(lengths=[4, 10]): a row has S=9 tokens
    fix: lengths.clamp(0, 9)""",
    )
    assert_expected_inline(
        refused(lengths=torch.tensor([4, -1])),
        """\
gated_delta_rule_chunked(lengths=[4, -1]): a row has S=9 tokens
    fix: lengths.clamp(0, 9)""",
    )
    assert_expected_inline(
        refused(lengths=torch.tensor([4, 9]), positions=torch.arange(9)[None]),
        """\
gated_delta_rule_chunked(lengths=...): positions says already which tokens there are
    fix: pass positions alone""",
    )


def test_other_arguments_that_do_not_fit():
    inputs = case(S=9)
    assert_expected_inline(
        refused(g=inputs["g"].exp()),
        """\
gated_delta_rule_chunked(g=...): a decay of exp(0.999) grows the state; g is a logarithm, at most 0
    fix: g.log() if it is the factor itself""",
    )
    assert_expected_inline(
        refused(chunk_size=0), """gated_delta_rule_chunked(chunk_size=...): a positive integer is needed, not 0"""
    )
    assert_expected_inline(
        refused(scale=0.0), """gated_delta_rule_chunked(scale=0.0): a finite number above 0 is needed"""
    )
    assert_expected_inline(
        refused(beta=inputs["beta"][..., :5]),
        """\
gated_delta_rule_chunked(beta=...): H is 6 in v but 5 in beta
    v   : B S H V = 2 9 6 5
    beta: B S H = 2 9 5
                      ^
    so far: B=2 S=9 K=3 E=8 H=6 V=5""",
    )
    few = {name: inputs[name][:, :, :5] for name in ("v", "g", "beta")}
    assert_expected_inline(
        refused(**few),
        """\
gated_delta_rule_chunked(v=...): H=5 value heads do not divide over K=3 key heads
    fix: value head h reads key head h // G, so H = K G""",
    )
    assert_expected_inline(
        refused(STEP),
        """\
gated_delta_rule_step(q=...): a row has 9 tokens, a step takes 1
    fix: gated_delta_rule_chunked""",
    )
    packed = case(S=9, B=1, states=2)
    assert_expected_inline(
        refused(STEP, packed, cu_seqlens=torch.tensor([0, 1, 9])),
        """\
gated_delta_rule_step(q=...): a document has 8 tokens, a step takes 1
    fix: gated_delta_rule_chunked""",
    )


def test_gates_above_0_are_seen_where_values_may_be_read():
    """Not in a graph, where reading would stop it, and not of a padded token."""
    inputs = {name: x.detach() for name, x in case(S=3).items()}
    inputs["g"][:, 2] = 1.0
    assert torch.equal(CHUNKED(**inputs, lengths=torch.tensor([2, 2]))[0][:, 2], torch.zeros(2, 6, 5).double())
    torch.compile(CHUNKED, fullgraph=True, backend="eager")(**inputs)
    torch.vmap(lambda g: CHUNKED(**{**inputs, "g": g})[0])(inputs["g"][None])


def test_the_gated_norm_refuses():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match='activation="tanh"\\) is unknown'):
        F.gated_rms_norm(x, torch.ones(3), x, activation="tanh")
    with pytest.raises(F.ShapeError, match="its gate \\(1, 3\\)"):
        F.gated_rms_norm(x, torch.ones(3), x[:1])
