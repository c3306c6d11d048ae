"""What families with experts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import MoEConfig
from . import Leaves, parts

__all__ = ["experts", "moe", "sparse"]

_EACH = ("gate", "up", "down")
# The one block of a layer without experts, and the one beside the experts.
DENSE = {f"mlp.{each}_proj": f"dense.{each}" for each in _EACH}
SHARED = {f"mlp.shared_experts.{each}_proj": f"moe.shared.{each}" for each in _EACH}


def experts(
    file: str = "mlp.experts.{e}.{name}.weight", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Leaves]:
    """All experts of a layer in two tensors, as modules have them. file, names: what files have instead, for each
    expert `{e}` the projection of a name."""
    gate, up, down = (parts.LAYER + file.replace("{name}", name) for name in names)
    ours = {each: f"{parts.OURS}moe.{each}" for each in _EACH}
    return {
        f"{parts.LAYER}mlp.experts.gate_up_proj": Leaves((ours["gate"], ours["up"]), dim=1, files=(gate, up)),
        f"{parts.LAYER}mlp.experts.down_proj": Leaves((ours["down"],), files=(down,)),
    }


def moe(hf: Mapping[str, Any], count: int, width: int, **options: Any) -> MoEConfig:
    """count: of the experts, each of that width. What is not in `options` is read from its usual field."""
    return MoEConfig(
        hidden_size=hf["hidden_size"],
        moe_intermediate_size=width,
        num_experts=count,
        num_experts_per_tok=hf["num_experts_per_tok"],
        hidden_act=parts.activation(hf.get("hidden_act")),
        initializer_range=hf.get("initializer_range", 0.02),
        **options,
    )


def sparse(hf: Mapping[str, Any]) -> list[bool]:
    """Which layers have experts, as Qwen's configs say it."""
    without, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    return [i not in without and (i + 1) % step == 0 for i in range(hf["num_hidden_layers"])]
