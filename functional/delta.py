"""The gated delta rule: a state that decays, forgets what a key held, and learns a new value.

    S <- exp(g) S                              decay first
    S <- S + beta (v - S k) k^T                what the state says of k moves to v by beta
    o  = scale * S q

(Yang et al. 2025, arXiv:2412.06464; with a decay for each channel of the key, Kimi's delta attention, KDA,
arXiv:2510.26692.) Three functions compute it: the scan is this definition, the chunked form (`delta_chunked`) is the
same by matrix products, the step takes one token. They take and return the same, under the names of
flash-linear-attention.

- The state is `B H V E`, value-major (there `state_v_first`), in fp32, in fp64 for inputs in fp64.
- g is a logarithm, at most 0: the factor of a step is exp(g).
- q and k are taken as they are (there `use_qk_l2norm_in_kernel=False`): `l2norm` them before.
- beta and g are fp32 at least in every path, whatever the dtype of the values.

Letters: B batch, S tokens, K key heads, H = K G value heads (value head h reads key head h // G), E key width, V value
width, N packed documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as tnf
from torch import Tensor

from .core import as_dtype, full_precision, wide
from .primitive import primitive
from .rows import check_rows, check_state, document_of, documents_before, readable, tokens_of, zero_absent
from .shapes import ShapeError, check_scale, check_shapes

__all__ = ["gated_delta_rule_scan", "gated_delta_rule_step", "gdn_gates", "l2norm", "prepare"]


def l2norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension: x `... E` -> `... E` in fp32 at least, as the rule wants it."""
    x_wide = wide(x)
    return x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + eps)


@primitive
def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(a_log) softplus(a + dt_bias), a logarithm and below 0; beta = sigmoid(b).

    a `B S H` or, for a decay of each channel, `B S H E`; b `B S H`; a_log `H`; dt_bias as the last dimensions of a
    -> g as a, beta as b, both in fp32 at least: a beta rounded to half precision drifts over a long decode.
    """
    by_channel = a.dim() == 4
    shape = "B S H E" if by_channel else "B S H"
    check_shapes(
        "gdn_gates", a=(a, shape), b=(b, "B S H"), a_log=(a_log, "H"), dt_bias=(dt_bias, "H E" if by_channel else "H")
    )
    rate = wide(a_log).exp()
    # log(1 + exp(x)) is exactly 0 below -17; torch's softplus is log1p, right to the last place.
    g = -(rate[:, None] if by_channel else rate) * tnf.softplus(wide(a) + wide(dt_bias))
    return g, wide(b).sigmoid()


@dataclass(frozen=True)
class Rule:
    """The arguments of a rule after their checks: in fp32 at least, with what is no token zeroed (its decay is then 1
    and its beta 0, which leaves the state as it is). documents: see `documents_before`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    documents: Tensor | None
    scale: float
    sizes: Mapping[str, int]


@full_precision
def gated_delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The rule token by token. q, k `B S K E`, v `B S H V`, g `B S H` or `B S H E`, beta `B S H` -> o `B S H V` in v's
    dtype, and the final state where it is asked for.

    g: a logarithm, at most 0; a decay for each channel of the key with `B S H E`.
    scale: E^-0.5 unless given. q and k as they are: `l2norm` them before.
    initial_state, final state: `B H V E` in fp32 (fp64 for fp64 inputs), `N H V E` with cu_seqlens; zeros unless given.
    cu_seqlens: `N+1` (B = 1), where each packed document begins, and the end of the last; each has its own state.
    lengths: `B`, the tokens of each row, which is padded behind them. positions: `B|1 S` instead, below 0 where there
    is no token, anywhere in a row. A padded token gives zeros and changes no state, whatever it holds.
    segment_ids: `B S`, the packed document of each token, of any batch: where it changes, a state of zeros begins, so
    that the initial state is that of a row's first document and the final state that of its last.
    Computed in fp32 at least. Raises `ShapeError`, `TypeError`, `ValueError` before any work.
    """
    rule = prepare(
        "gated_delta_rule_scan", q, k, v, g, beta, scale, initial_state, cu_seqlens, lengths, positions, segment_ids
    )
    tokens, states = rule.sizes["S"], rule.state
    documents = None if cu_seqlens is None else document_of(cu_seqlens, tokens)
    outputs = []
    for s in range(tokens):
        state = states if documents is None else states[documents[s : s + 1]]
        if rule.documents is not None:
            state = state.masked_fill((rule.documents[:, s + 1] != rule.documents[:, s])[:, None, None, None], 0)
        o, state = _token(rule, s, state)
        states = state if documents is None else states.index_copy(0, documents[s : s + 1], state)
        outputs.append(o)
    o_BSHV = torch.stack(outputs, 1) if outputs else rule.v
    return as_dtype(o_BSHV, v.dtype), states if output_final_state else None


def _token(rule: Rule, s: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: token s against the state `B H V E`."""
    groups = rule.v.shape[2] // rule.k.shape[2]
    q_BHE, k_BHE = (x[:, s].repeat_interleave(groups, 1) for x in (rule.q, rule.k))
    state_BHVE = state * _decay(rule.g[:, s])[:, :, None]
    said_BHV = torch.einsum("bhve,bhe->bhv", state_BHVE, k_BHE)
    delta_BHV = rule.beta[:, s, :, None] * (rule.v[:, s] - said_BHV)
    state_BHVE = state_BHVE + delta_BHV[..., None] * k_BHE[:, :, None]
    return rule.scale * torch.einsum("bhve,bhe->bhv", state_BHVE, q_BHE), state_BHVE


def _decay(g: Tensor) -> Tensor:
    """g `B H` or `B H E` -> `B H 1|E`."""
    return g.exp() if g.dim() == 3 else g.exp()[..., None]


@full_precision
def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule_scan` for one token a row (S = 1), or a document (at most one each, with cu_seqlens): reads the
    state twice and writes it once."""
    rule = prepare("gated_delta_rule_step", q, k, v, g, beta, scale, initial_state, cu_seqlens, lengths, positions)
    dtype = v.dtype
    _check_one(rule.sizes["S"], cu_seqlens)
    if cu_seqlens is not None:
        at = document_of(cu_seqlens, rule.sizes["S"])
        o, new = _step(rule.q[0], rule.k[0], rule.v[0], rule.g[0], rule.beta[0], rule.state[at], rule.scale)
        o, state = o[None], rule.state.index_copy(0, at, new)
    else:
        q, k, v, g, beta = (x[:, 0] for x in (rule.q, rule.k, rule.v, rule.g, rule.beta))
        o, state = _step(q, k, v, g, beta, rule.state, rule.scale)
        o = o[:, None]
    return as_dtype(o, dtype), state if output_final_state else None


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k `B K E`, v `B H V`, g `B H` or `B H E`, beta `B H`, state `B H V E` -> o `B H V` and the new state."""
    groups = v.shape[1] // k.shape[1]
    q_BHE, k_BHE = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (q, k))
    decay = _decay(g)
    # One product reads the state for key and query; the query then adds what the token wrote.
    read_BH2V = torch.stack((decay * k_BHE, decay * q_BHE), 2) @ state.mT
    delta_BHV = beta[..., None] * (v - read_BH2V[:, :, 0])
    o_BHV = read_BH2V[:, :, 1] + (q_BHE * k_BHE).sum(-1, keepdim=True) * delta_BHV
    return scale * o_BHV, torch.addcmul(state * decay[:, :, None], delta_BHV[..., None], k_BHE[:, :, None])


def _check_one(tokens: int, cu_seqlens: Tensor | None) -> None:
    longest = tokens if cu_seqlens is None else max(readable(cu_seqlens.diff()) or [1])
    if longest > 1 or (cu_seqlens is None and tokens != 1):
        what = f"{'a row' if cu_seqlens is None else 'a document'} has {longest} tokens"
        raise ShapeError(f"gated_delta_rule_step(q=...): {what}, a step takes 1\n    fix: gated_delta_rule_chunked")


def prepare(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    positions: Tensor | None,
    segment_ids: Tensor | None = None,
) -> Rule:
    """Check everything, then widen, zero what is no token, and begin a state where there is none."""
    gate = "B S H E" if g.dim() == 4 else "B S H"
    sizes = check_shapes(
        function, q=(q, "B S K E"), k=(k, "B S K E"), v=(v, "B S H V"), g=(g, gate), beta=(beta, "B S H")
    )
    if sizes["K"] == 0 or sizes["H"] % sizes["K"]:
        raise ShapeError(
            f"{function}(v=...): H={sizes['H']} value heads do not divide over K={sizes['K']} key heads\n"
            "    fix: value head h reads key head h // G, so H = K G"
        )
    check_scale(function, scale, "scale")
    states = check_rows(function, sizes["B"], sizes["S"], cu_seqlens, lengths, positions, segment_ids)
    dtype = torch.promote_types(torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype), torch.float32)
    if initial_state is not None:
        _check_layout(function, initial_state, sizes)
        check_state(function, initial_state, "N H V E", states, dtype, {"q": (q, "B S K E"), "v": (v, "B S H V")})
    there = tokens_of(sizes["S"], lengths, positions)
    q, k, v, g, beta = (zero_absent(as_dtype(x, dtype), there) for x in (q, k, v, g, beta))
    _check_gates(function, g)
    if initial_state is None:
        initial_state = q.new_zeros(states, sizes["H"], sizes["V"], sizes["E"])
    documents = None if segment_ids is None else documents_before(segment_ids, there)
    scale = sizes["E"] ** -0.5 if scale is None else scale
    return Rule(q, k, v, g, beta, initial_state, documents, scale, sizes)


def _check_layout(function: str, state: Tensor, sizes: Mapping[str, int]) -> None:
    """A key-major state, which other libraries have."""
    wanted = tuple([sizes[letter] for letter in "HVE"])
    if tuple(state.shape[1:]) == (wanted[0], wanted[2], wanted[1]) != wanted:
        raise ShapeError(
            f"{function}(initial_state=...): it is key-major, H E V = {' '.join(map(str, state.shape[1:]))}, and "
            f"value-major is needed, H V E = {' '.join(map(str, wanted))}\n    fix: initial_state.mT"
        )


def _check_gates(function: str, g: Tensor) -> None:
    if g.numel() and (highest := readable(g.detach().amax())) is not None and highest > 0:
        raise ValueError(
            f"{function}(g=...): a decay of exp({highest:.3g}) grows the state; g is a logarithm, at most 0\n"
            "    fix: g.log() if it is the factor itself"
        )
