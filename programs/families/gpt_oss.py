"""gpt_oss: the attention alone; its experts are not computed yet, and a whole checkpoint is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...functional import AttentionConfig, DecoderConfig
from . import Family, parts

NAMES = parts.names(parts.ATTENTION, parts.PRE_NORMS) | {
    f"{parts.LAYER}self_attn.sinks": f"{parts.OURS}attention.sinks"
}


def attentions(hf: Mapping[str, Any]) -> list[AttentionConfig]:
    """One a layer: sinks, biases, windows in every other layer, YaRN."""
    norm, bias = parts.rms(hf), hf.get("attention_bias", True)
    return [
        parts.attention(hf, qkv_bias=bias, o_bias=bias, norm=norm, rope=parts.rope(hf), window=window, sinks=True)
        for window in parts.windows(hf)
    ]


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    raise ValueError(
        f"family gpt_oss: its {hf.get('num_local_experts')} experts a layer are not computed yet, only its attention\n"
        "    fix: programs.families.gpt_oss.attentions(config.to_dict()) are the configs of F.attention"
    )


FAMILY = Family(model_type="gpt_oss", config=config, names=NAMES)
