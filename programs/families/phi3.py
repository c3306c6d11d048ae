"""Phi-3, 3.5 and 4: projections fused in the checkpoint, partial and long rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import DecoderConfig
from . import Family, Leaves, parts

NAMES = parts.names({"self_attn.o_proj": "attention.o", "mlp.down_proj": "mlp.down"}, parts.PRE_NORMS)
FUSED = {
    f"{parts.LAYER}self_attn.qkv_proj.weight": Leaves(tuple(f"{parts.OURS}attention.{each}" for each in "qkv")),
    f"{parts.LAYER}mlp.gate_up_proj.weight": Leaves(tuple(f"{parts.OURS}mlp.{each}" for each in ("gate", "up"))),
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """transformers' `Phi3Config`, as a mapping, to ours."""
    norm, rope = parts.rms(hf), parts.rope(hf, partial=True)
    attention = parts.attention(hf, norm=norm, rope=rope, window=hf.get("sliding_window"))
    mlp = parts.mlp(hf, hf.get("hidden_act"), norm=norm)
    stack = parts.layers(hf, attention, mlp, resid_pdrop=hf.get("resid_pdrop", 0.0))
    return parts.decoder(hf, stack, norm, embd_pdrop=hf.get("embd_pdrop", 0.0))


FAMILY = Family(
    model_type="phi3",
    config=config,
    names={**NAMES, **FUSED},
    inert={
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
    },
)
