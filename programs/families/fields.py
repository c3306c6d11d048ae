"""The fields of a checkpoint's config, and which of them an adapter has looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["Fields", "Renamed"]

# Fields that say nothing about what a decoder computes, whatever their value.
_SILENT = frozenset(
    {
        # where it comes from and what it is for
        "_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map", "model_type", "torch_dtype",
        "dtype", "transformers_version", "transformers.js_config", "is_llama_config", "tokenizer_class",
        "task_specific_params", "problem_type", "id2label", "label2id", "num_labels",
        # special tokens
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id",
        "mask_token_id", "decoder_start_token_id",
        # how it is run, trained, split or initialised
        "use_cache", "cache_implementation", "return_dict", "output_attentions", "output_hidden_states",
        "chunk_size_feed_forward", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "pretraining_tp", "ep_size", "initializer_range",
        # what is added to the loss of a mixture of experts
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
        # how long a text may be
        "max_position_embeddings", "max_sequence_length", "model_max_length",
        # how text is generated, before that had a file of its own
        "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams",
        "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping",
    }
)  # fmt: skip


# Fields that any config may have, each with the one value that says nothing.
_INERT = {"is_causal": True}


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
        """A line for each field that was not read, says something and is not at its default, if it has one.

        inert: fields of published configs that nothing looks at, each with the value at which that is right, or a
        function of all fields to it.
        ignore: fields that the caller answers for.
        """
        inert, lines = {**_INERT, **inert}, []
        for name, value in self._fields.items():
            if (
                name in self.read
                or name in _SILENT
                or name.startswith("_")
                or name in ignore
                or value is None
                or value in ([], {})
            ):
                continue
            if name in inert:
                right = inert[name](self._fields) if callable(inert[name]) else inert[name]
                if value != right:
                    lines.append(f"{name}={value!r}, right where it is {right!r}")
                continue
            if name in defaults:
                if value != defaults[name]:
                    lines.append(f"{name}={value!r}, default {defaults[name]!r}")
            else:  # False too may be what is unusual: use_rope=False
                lines.append(f"{name}={value!r}, unknown")
        return lines


class Renamed(Mapping[str, Any]):
    """Fields of which some are found under their usual names too."""

    def __init__(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """names: the usual one -> the one there."""
        self._fields, self._names = fields, names

    def __getitem__(self, name: str) -> Any:
        return self._fields[self._names.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
