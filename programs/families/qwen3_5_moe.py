"""Qwen3.5 with experts, the language model."""

from __future__ import annotations

from . import Family, Wrapper, qwen3_5

FAMILY = Family(model_type="qwen3_5_moe_text", config=qwen3_5.config, names=qwen3_5.NAMES, left_out=qwen3_5.LEFT_OUT)
WRAPPER = Wrapper(model_type="qwen3_5_moe", **qwen3_5.PARTS)
