"""Qwen3.5 with experts, the language model."""

from __future__ import annotations

from dataclasses import replace

from . import Wrapper, qwen3_5

FAMILY = replace(qwen3_5.FAMILY, model_type="qwen3_5_moe_text")
WRAPPER = Wrapper(model_type="qwen3_5_moe", **qwen3_5.PARTS)
