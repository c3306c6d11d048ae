"""Kimi K2.5 and K2.6: a DeepSeek-V3 that sees; the language model alone is read, as one of that family."""

from __future__ import annotations

from . import Wrapper

WRAPPER = Wrapper(
    model_type="kimi_k25",
    field="text_config",
    prefixes={
        "model.language_model.": "model.",
        # as transformers 5.24 saves it, which renames the blocks of the tower and these with them
        "language_model.model.blocks.": "model.layers.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    left_out=("model.vision_tower.", "model.mm_projector.", "vision_tower.", "mm_projector."),
)
