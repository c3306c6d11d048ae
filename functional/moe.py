"""Mixture of experts: a router chooses a few feed-forward blocks for each token (Shazeer et al. 2017,
arXiv:1701.06538; DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066).

    s = softmax(h Wr)   or   sigmoid(h Wr);      e_1 .. e_J = the J highest of s (+ b, a correction)
    w_j = s[e_j], divided by their sum where the config says so, times routed_scaling_factor
    out = sum_j w_j expert_{e_j}(h)  +  shared(h) (* sigmoid(h Wg)),      h = norm(x)

Experts may stand in groups, of which the best few take part alone (DeepSeek-V2, arXiv:2405.04434; V3, 2412.19437). Of
equal scores the lowest index is chosen. Scores are computed in fp32 at least, and so are sums over experts.

Letters: B batch, S tokens, D model width, F feed-forward width of an expert, X experts, J experts a token, I=1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .arguments import lists_unknown
from .core import as_dtype, full_precision, wide
from .experts import dealt_mlp, expert_mlp
from .mlp import MLP, MLPConfig, check_activation, mlp
from .norm import Norm, NormConfig, apply_norm, linear
from .shapes import check_positive, check_scale, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, edges, identity

__all__ = ["MoE", "MoEConfig", "Routing", "balance_loss", "expert_counts", "moe", "route"]

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Names as in transformers' configs.

    scoring_func: "softmax" over all experts, or "sigmoid". norm_topk_prob: the weights of a token sum to 1 (before
    routed_scaling_factor). correction_bias: added to the scores for the choice alone. n_group, topk_group: how many
    groups there are, and how many take part for a token; group_score_topk: by the sum of how many of their best scores.
    router_bias, bias: of the router, of the experts. swiglu_limit, swiglu_alpha: gpt_oss's gate, see `expert_mlp`.
    shared: experts that every token has, as one block; shared_gate: times the sigmoid of a projection of a token.
    norm, post_norm: in front and behind, or None.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    hidden_act: str = "silu"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score_topk: int = 2
    router_bias: bool = False
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    shared: MLPConfig | None = None
    shared_gate: bool = False
    norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
        groups = ("n_group", "topk_group", "group_score_topk")
        check_positive("MoEConfig", **{name: getattr(self, name) for name in (*sizes, *groups)})
        check_activation("MoEConfig", "hidden_act", self.hidden_act)
        check_scale("MoEConfig", self.routed_scaling_factor, "routed_scaling_factor")
        check_scale("MoEConfig", self.swiglu_limit, "swiglu_limit")
        check_scale("MoEConfig", self.swiglu_alpha, "swiglu_alpha")
        if self.swiglu_limit is not None and self.hidden_act != "silu":
            raise ValueError(
                f'MoEConfig(swiglu_limit=...): its gate is no "{self.hidden_act}"\n    fix: hidden_act="silu"'
            )
        experts, chosen, groups_of = self.num_experts, self.num_experts_per_tok, self.n_group
        if self.scoring_func not in SCORES:
            raise ValueError(
                f'MoEConfig(scoring_func="{self.scoring_func}") is unknown\n    known: {", ".join(SCORES)}'
            )
        if chosen > experts:
            raise ValueError(
                f"MoEConfig(num_experts_per_tok={chosen}): more than num_experts={experts}\n"
                f"    fix: num_experts_per_tok={experts} at most"
            )
        if experts % groups_of:
            raise ValueError(f"MoEConfig(n_group={groups_of}): num_experts={experts} do not divide over it")
        if self.topk_group > groups_of:
            raise ValueError(f"MoEConfig(topk_group={self.topk_group}): more than n_group={groups_of}")
        each = experts // groups_of
        if chosen > self.topk_group * each:
            raise ValueError(
                f"MoEConfig(num_experts_per_tok={chosen}): topk_group={self.topk_group} groups of {each} experts have "
                f"{self.topk_group * each}"
            )
        if groups_of > 1 and self.group_score_topk > each:
            raise ValueError(f"MoEConfig(group_score_topk={self.group_score_topk}): a group has {each} experts")
        if self.shared_gate and self.shared is None:
            raise ValueError("MoEConfig(shared_gate=True): there are no shared experts\n    fix: shared=MLPConfig(...)")
        if self.shared is not None and self.shared.hidden_size != self.hidden_size:
            raise ValueError(
                f"MoEConfig(shared=...): its hidden_size={self.shared.hidden_size}, not {self.hidden_size}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return {"D": self.hidden_size, "F": self.moe_intermediate_size, "X": self.num_experts, "I": 1}


@pytree
class MoE(Tree):
    config: ClassVar[type] = MoEConfig

    norm: Norm | None = None
    router: Tensor = dim("X D", keep_fp32=True)
    router_bias: Tensor | None = dim("X", when="router_bias", initial=0.0)
    correction_bias: Tensor | None = dim("X", when="correction_bias", initial=0.0, keep_fp32=True)
    gate: Tensor = dim("X/ep F/tp D/dp")
    up: Tensor = dim("X/ep F/tp D/dp")
    down: Tensor = dim("X/ep D/dp F/tp")
    gate_bias: Tensor | None = dim("X/ep F/tp", when="bias", initial=0.0)
    up_bias: Tensor | None = dim("X/ep F/tp", when="bias", initial=0.0)
    down_bias: Tensor | None = dim("X D", when="bias", initial=0.0)
    shared: MLP | None = None
    shared_gate: Tensor | None = dim("I D", when="shared_gate")
    post_norm: Norm | None = None


class Routing(NamedTuple):
    """What a router decided: indices `B S J` of the chosen experts, the best first; weights `B S J` and scores `B S X`,
    both in fp32 at least. Scores are before the correction bias."""

    indices: Tensor
    weights: Tensor
    scores: Tensor


@edges({"shared": mlp}, None, ("experts",), x="B S D", experts="X", out="B S D")
@lists_unknown
def moe(
    params: MoE,
    x: Tensor,
    cfg: MoEConfig,
    *,
    return_routing: bool = False,
    wire: Wire = identity,
) -> Any:
    """x `B S D` -> `B S D`; with return_routing also its `Routing`, for `balance_loss` and `expert_counts`."""
    check_presence("moe", params, cfg, MoE)
    params = wire.gather(params, D=cfg.hidden_size)
    wire = wire.layer(X=cfg.num_experts)
    own = wire.own("X")
    # F is the rank's own, as its weights have it, and so may experts be.
    X = "X" if own is None else "XP"
    widths = {letter: n for letter, n in cfg.sizes.items() if letter != "F"}
    widths |= {} if own is None else {"XP": own.stop - own.start}
    check_shapes(
        "moe",
        widths,
        x=(x, "B S D"),
        router=(params.router, "X D"),
        gate=(params.gate, f"{X} F D"),
        up=(params.up, f"{X} F D"),
        down=(params.down, f"{X} D F"),
        router_bias=(params.router_bias, "X"),
        correction_bias=(params.correction_bias, "X"),
        gate_bias=(params.gate_bias, f"{X} F"),
        up_bias=(params.up_bias, f"{X} F"),
        down_bias=(params.down_bias, "X D"),
        shared_gate=(params.shared_gate, "I D"),
    )
    h_BSD = apply_norm(wire.pass_(x=x), params.norm, cfg.norm)
    routing = route(params, h_BSD, cfg)
    blocks = (params.gate, params.up, params.down, params.gate_bias, params.up_bias)
    options = {"activation": cfg.hidden_act, "swiglu_limit": cfg.swiglu_limit, "swiglu_alpha": cfg.swiglu_alpha}
    compute: Callable[..., Tensor] = expert_mlp if own is None else partial(dealt_mlp, wire, cfg.num_experts)
    out_BSD = compute(h_BSD, routing.indices, routing.weights, *blocks, **options)
    out_BSD = wire.pass_(out=out_BSD)
    # Biases and norms come after the edge, which may be a sum over ranks.
    if params.down_bias is not None:
        biases = wide(params.down_bias)[routing.indices]
        out_BSD = out_BSD + (routing.weights[..., None] * biases).sum(-2).to(x.dtype)
    if params.shared is not None and cfg.shared is not None:
        shared_BSD = mlp(params.shared, h_BSD, cfg.shared, wire=wire.scope("shared"))
        if params.shared_gate is not None:
            gate_BSI = linear(h_BSD, params.shared_gate)
            shared_BSD = shared_BSD * gate_BSI.sigmoid()
        out_BSD = out_BSD + shared_BSD
    out_BSD = apply_norm(out_BSD, params.post_norm, cfg.post_norm)
    return (out_BSD, routing) if return_routing else out_BSD


@full_precision
def route(params: MoE, x: Tensor, cfg: MoEConfig) -> Routing:
    """x `B S D`, normalised -> which experts compute each token, and how much each counts."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, params.router.dtype), torch.float32)
    bias = None if params.router_bias is None else as_dtype(params.router_bias, dtype)
    router = as_dtype(params.router, dtype)
    logits = linear(as_dtype(x, dtype), router, bias)
    scores = logits.softmax(-1) if cfg.scoring_func == "softmax" else logits.sigmoid()
    choice = scores if params.correction_bias is None else scores + as_dtype(params.correction_bias, dtype)
    indices = _highest(_of_groups(choice.detach(), cfg), cfg.num_experts_per_tok)
    weights = scores.gather(-1, indices)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if cfg.routed_scaling_factor != 1:
        weights = weights * cfg.routed_scaling_factor
    return Routing(indices, weights, scores)


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the highest, best first; a stable sort, as `topk` says nothing of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _of_groups(choice: Tensor, cfg: MoEConfig) -> Tensor:
    """choice `B S X` with the experts of all but the best groups at -inf."""
    if cfg.topk_group == cfg.n_group:
        return choice
    by_group = choice.unflatten(-1, (cfg.n_group, -1))
    best = by_group.sort(-1, descending=True).values[..., : cfg.group_score_topk].sum(-1)
    taken = _highest(best, cfg.topk_group)
    out = torch.ones_like(best, dtype=torch.bool).scatter(-1, taken, False)
    left: Tensor = by_group.masked_fill(out[..., None], -torch.inf)
    return left.flatten(-2)


def expert_counts(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """-> `X`, how many tokens chose each expert. mask: boolean, `B S`, which tokens count."""
    _check_mask("expert_counts", routing, mask)
    chosen = torch.ones_like(routing.indices) if mask is None else mask[..., None].expand_as(routing.indices).long()
    counts = torch.zeros(routing.scores.shape[-1], dtype=torch.int64, device=chosen.device)
    return counts.scatter_add(0, routing.indices.flatten(), chosen.flatten())


def balance_loss(routings: Routing | Sequence[Routing | None], mask: Tensor | None = None) -> Tensor:
    """X sum_e f_e p_e, a scalar: f_e how many of an expert's choices a token makes on average, p_e its mean score (of
    scores that sum to 1), over all tokens and layers (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6; J where experts
    are even). mask: boolean, `B S`, which tokens count. A None is a layer without experts. 0 where no token counts.
    Raises `ValueError` where no layer has experts, or layers have other numbers of them."""
    given = [routings] if isinstance(routings, Routing) else [each for each in routings if each is not None]
    experts = {each.scores.shape[-1] for each in given}
    if len(experts) != 1:
        if not experts:
            raise ValueError("balance_loss(routings=...): no layer has experts")
        raise ValueError(
            f"balance_loss(routings=...): layers have {', '.join(map(str, sorted(experts)))} experts\n"
            "    fix: one loss for each number of them"
        )
    counts, scores, tokens = [], [], []
    for each in given:
        _check_mask("balance_loss", each, mask)
        p = each.scores if mask is None else each.scores.masked_fill(~mask[..., None], 0)  # whatever stands there
        counts.append(expert_counts(each, mask).to(p.dtype))
        scores.append((p / (p.sum(-1, keepdim=True) + 1e-20)).flatten(0, -2).sum(0))
        tokens.append(torch.ones_like(p[..., 0]).sum() if mask is None else mask.sum())
    rows = torch.stack(tokens).sum().clamp_min(1)
    share, mean = torch.stack(counts).sum(0) / rows, torch.stack(scores).sum(0) / rows
    return (share * mean).sum() * experts.pop()


def _check_mask(function: str, routing: Routing, mask: Tensor | None) -> None:
    check_shapes(function, indices=(routing.indices, "B S J"), scores=(routing.scores, "B S X"), mask=(mask, "B S"))
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{function}(mask=...): a boolean mask is needed, true for tokens that count, not {mask.dtype}")
