"""The feed-forward block, gated or plain.

    out = (act(norm(x) Wgate) * (norm(x) Wup)) Wdown                   (Shazeer 2020, arXiv:2002.05202)
    out = act(norm(x) Wup) Wdown                                       (Vaswani et al. 2017, arXiv:1706.03762)

Letters: B batch, S tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch.nn.functional as tnf
from torch import Tensor

from .norm import Norm, NormConfig, apply_norm, linear, norm_in_front, norm_linear
from .primitive import primitive
from .shapes import check_positive, check_shapes
from .tree import Tree, check_presence, dim, pytree
from .wire import Wire, edges, identity

__all__ = ["ACTIVATIONS", "MLP", "MLPConfig", "check_activation", "gated_mlp", "mlp", "plain_mlp"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": tnf.silu,
        "gelu": tnf.gelu,
        "gelu_pytorch_tanh": partial(tnf.gelu, approximate="tanh"),
        "relu2": lambda x: tnf.relu(x).square(),  # So et al. 2021, arXiv:2109.08668
    }
)


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """hidden_act: a name of `ACTIVATIONS`, as in transformers' configs. gated: without, there is no gate projection.
    norm, post_norm: the norms in front and behind, or None."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str = "silu"
    gated: bool = True
    bias: bool = False
    norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_positive("MLPConfig", hidden_size=self.hidden_size, intermediate_size=self.intermediate_size)
        check_activation("MLPConfig", "hidden_act", self.hidden_act)

    @property
    def gate_bias(self) -> bool:
        return self.bias and self.gated

    @property
    def sizes(self) -> dict[str, int]:
        return {"D": self.hidden_size, "F": self.intermediate_size}


@pytree
class MLP(Tree):
    config: ClassVar[type] = MLPConfig

    norm: Norm | None = None
    gate: Tensor | None = dim("F/tp D/dp", when="gated")
    up: Tensor = dim("F/tp D/dp")
    down: Tensor = dim("D/dp F/tp")
    gate_bias: Tensor | None = dim("F/tp", when="gate_bias", initial=0.0)
    up_bias: Tensor | None = dim("F/tp", when="bias", initial=0.0)
    down_bias: Tensor | None = dim("D", when="bias", initial=0.0)
    post_norm: Norm | None = None


@edges(x="B S D", h="B S F", out="B S D")
def mlp(params: MLP, x: Tensor, cfg: MLPConfig, *, wire: Wire = identity) -> Tensor:
    """x `B S D` -> `B S D`."""
    check_presence("mlp", params, cfg, MLP)
    params = wire.gather(params, D=cfg.hidden_size)
    check_shapes("mlp", {"D": cfg.hidden_size}, x=(x, "B S D"), up=(params.up, "F D"), down=(params.down, "D F"))
    wire = wire.layer(F=cfg.intermediate_size)
    x = wire.pass_(x=x)
    norm_weight, options = norm_in_front(params.norm, cfg.norm)
    options["activation"] = cfg.hidden_act
    if params.gate is None:
        h_BSF = plain_mlp(x, norm_weight, params.up, params.up_bias, **options)
    else:
        h_BSF = gated_mlp(x, norm_weight, params.gate, params.up, params.gate_bias, params.up_bias, **options)
    out_BSD = wire.pass_(out=linear(wire.pass_(h=h_BSF), params.down))
    # Bias and norm come after the edge, which may be a sum over ranks.
    if params.down_bias is not None:
        out_BSD = out_BSD + params.down_bias
    out_BSD = apply_norm(out_BSD, params.post_norm, cfg.post_norm)
    return out_BSD


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
    norm_bias: Tensor | None = None,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> Tensor:
    """x `... D`, gate and up `F D` -> act(norm(x) gate) * (norm(x) up), `... F`. norm_weight: `D`, or None."""
    check_shapes("gated_mlp", x=(x, "... D"), gate=(gate, "F D"), up=(up, "F D"))
    act = check_activation("gated_mlp", "activation", activation)
    g, u = norm_linear(
        x,
        norm_weight,
        [gate, up],
        [gate_bias, up_bias],
        norm_bias=norm_bias,
        norm_type=norm_type,
        eps=eps,
        zero_centered=zero_centered,
        scale_in_fp32=scale_in_fp32,
    )
    return act(g) * u


@primitive
def plain_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    norm_bias: Tensor | None = None,
    norm_type: str = "rms_norm",
    eps: float = 1e-5,
    zero_centered: bool = False,
    scale_in_fp32: bool = False,
) -> Tensor:
    """x `... D`, up `F D` -> act(norm(x) up), `... F`. norm_weight: `D`, or None."""
    check_shapes("plain_mlp", x=(x, "... D"), up=(up, "F D"))
    act = check_activation("plain_mlp", "activation", activation)
    (u,) = norm_linear(
        x,
        norm_weight,
        [up],
        [up_bias],
        norm_bias=norm_bias,
        norm_type=norm_type,
        eps=eps,
        zero_centered=zero_centered,
        scale_in_fp32=scale_in_fp32,
    )
    return act(u)


def check_activation(function: str, argument: str, name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name. Raises `ValueError`."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f'{function}({argument}="{name}") is unknown\n    known: {known}')
    return ACTIVATIONS[name]
