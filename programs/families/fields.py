"""The fields of a checkpoint's config, and which of them an adapter has looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["Fields"]

# Fields that say nothing about what a decoder computes: where it comes from, special tokens, what transformers returns,
# how it is trained or split.
_SILENT = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "architectures",
        "auto_map",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "use_cache",
        "cache_implementation",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "task_specific_params",
        "tokenizer_class",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "max_position_embeddings",
        "initializer_range",
    }
)


class Fields(Mapping[str, Any]):
    """A mapping that remembers what was read of it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def unexplained(self, defaults: Mapping[str, Any], inert: Mapping[str, Any], ignore: Collection[str]) -> list[str]:
        """A line for each field that was not read, says something and is not at its default (without one: not off).

        inert: fields of old or converted configs, each with the value at which it changes nothing, `...` for any.
        ignore: fields that the caller answers for.
        """
        lines = []
        for name, value in self._fields.items():
            if name in self.read or name in _SILENT or name in ignore or inert.get(name, value is None) in (..., value):
                continue
            if name in defaults:
                if value != defaults[name]:
                    lines.append(f"{name}={value!r}, default {defaults[name]!r}")
            elif value not in (None, False, [], {}):
                lines.append(f"{name}={value!r}, unknown")
        return lines
