"""The gated feed-forward block.

    out = (act(norm(x) Wgate) * (norm(x) Wup)) Wdown                   (Shazeer 2020, arXiv:2002.05202)

Letters: B batch, S tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch.nn.functional as tnf
from torch import Tensor

from .norm import Norm, NormConfig, linear, norm_linear
from .primitive import primitive
from .shapes import check_positive, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, edges, identity

__all__ = ["ACTIVATIONS", "MLP", "MLPConfig", "gated_mlp", "mlp"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": tnf.silu,
        "gelu": tnf.gelu,
        "gelu_pytorch_tanh": partial(tnf.gelu, approximate="tanh"),
    }
)


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """hidden_act: a name of `ACTIVATIONS`, as in transformers' configs. norm: the norm in front, or None."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str = "silu"
    bias: bool = False
    norm: NormConfig | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_positive("MLPConfig", hidden_size=self.hidden_size, intermediate_size=self.intermediate_size)
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ValueError(f'MLPConfig(hidden_act="{self.hidden_act}") is unknown\n    known: {known}')

    @property
    def sizes(self) -> dict[str, int]:
        return {"D": self.hidden_size, "F": self.intermediate_size}


@pytree
class MLP(Tree):
    norm: Norm | None = None
    gate: Tensor = dim("F/tp D")
    up: Tensor = dim("F/tp D")
    down: Tensor = dim("D F/tp")
    gate_bias: Tensor | None = dim("F/tp", when="bias", initial=0.0)
    up_bias: Tensor | None = dim("F/tp", when="bias", initial=0.0)
    down_bias: Tensor | None = dim("D", when="bias", initial=0.0)


@edges(x="B S D", h="B S F", out="B S D")
def mlp(params: MLP, x: Tensor, cfg: MLPConfig, *, wire: Wire = identity) -> Tensor:
    """x `B S D` -> `B S D`."""
    check_presence("mlp", params, cfg)
    check_shapes("mlp", {"D": cfg.hidden_size}, x=(x, "B S D"), gate=(params.gate, "F D"), down=(params.down, "D F"))
    norm_weight = None if params.norm is None else params.norm.weight
    options = {} if cfg.norm is None else cfg.norm.options
    h_BSF = gated_mlp(
        wire.pass_(x=x),
        norm_weight,
        params.gate,
        params.up,
        params.gate_bias,
        params.up_bias,
        activation=cfg.hidden_act,
        **options,
    )
    out_BSD = wire.pass_(out=linear(wire.pass_(h=h_BSF), params.down))
    # The bias comes after the edge, which may be a sum over ranks.
    return out_BSD if params.down_bias is None else out_BSD + params.down_bias


@primitive
def gated_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> Tensor:
    """x `... D`, gate and up `F D` -> act(norm(x) gate) * (norm(x) up), `... F`. norm_weight: `D`, or None."""
    check_shapes("gated_mlp", x=(x, "... D"), gate=(gate, "F D"), up=(up, "F D"))
    if activation not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f'gated_mlp(activation="{activation}") is unknown\n    known: {known}')
    g, u = norm_linear(
        x,
        norm_weight,
        [gate, up],
        [gate_bias, up_bias],
        eps=eps,
        zero_centered=zero_centered,
        scale_in_fp32=scale_in_fp32,
    )
    return ACTIVATIONS[activation](g) * u
