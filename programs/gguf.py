"""GGUF files (llama.cpp's format): the config from the metadata, weights dequantised to fp32.

Names and block formats are the `gguf` package's; this file turns them into what a Hugging Face checkpoint would hold,
so that a family needs one table. Rows that llama.cpp permuted for its rotary order are put back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .families import Family, find_gguf_family

__all__ = ["Gguf"]

# Metadata that says nothing about the mathematics.
_SILENT = ("general.", "tokenizer.", "GGUF.", "quantize.")


class Gguf:
    """An open file. `config`: Hugging Face fields. `names`: checkpoint names it has. `tensor(name)`: one, in fp32."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                'reading a GGUF file needs the gguf package\n    fix: pip install "meshfn[demo]"'
            ) from error
        self._gguf = gguf
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError, KeyError) as error:
            raise ValueError(f"{path.name} is no readable GGUF file: {error}") from error
        arch = self._field("general.architecture")
        self.family = find_gguf_family(str(arch))
        self.config = self._read_config(str(arch))
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.names = self._read_names(str(arch), self.config["num_hidden_layers"])

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _read_config(self, arch: str) -> dict[str, Any]:
        fields = self.family.gguf_fields or {}
        config: dict[str, Any] = {
            "model_type": self.family.model_type,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }
        unknown = []
        for key in self._reader.fields:
            name = fields.get(key.removeprefix(f"{arch}."))
            if name is not None:
                value = self._field(key)
                if config.setdefault(name, value) != value:
                    raise ValueError(f"GGUF metadata disagree on {name}: {config[name]} and {value} ({key})")
            elif not key.startswith(_SILENT):
                unknown.append(key)
        if unknown:
            raise ValueError(f"GGUF metadata that family {self.family.model_type} does not know: {', '.join(unknown)}")
        missing = [k for k in ("hidden_size", "num_hidden_layers", "num_attention_heads") if k not in config]
        if missing:
            raise ValueError(f"GGUF metadata lack {', '.join(missing)}")
        names = {t.name for t in self._reader.tensors}
        return config | self.family.gguf_extra(names)

    def _read_names(self, arch: str, layers: int) -> dict[str, str]:
        """checkpoint name -> GGUF name, of the tensors that are there; unknown ones keep their GGUF name."""
        archs = {v: k for k, v in self._gguf.MODEL_ARCH_NAMES.items()}
        table = self._gguf.get_tensor_name_map(archs[arch], layers)
        found = {}
        for name in self.family.held(layers):
            ggml = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if ggml in self._tensors:
                found[name] = ggml
        left = set(self._tensors) - set(found.values())
        return found | {name: name for name in sorted(left)}

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.model" in self._reader.fields

    def tensor(self, name: str) -> Tensor:
        raw = self._tensors[self.names[name]]
        try:
            values = torch.from_numpy(self._gguf.quants.dequantize(raw.data, raw.tensor_type).copy())
        except NotImplementedError as error:
            raise ValueError(f"GGUF tensor {raw.name}: format {raw.tensor_type.name} cannot be read") from error
        heads = _permuted_heads(self.family, name, self.config)
        if heads is None:
            return values
        halves: Tensor = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return halves.contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[self.names[name]].shape))


def _permuted_heads(family: Family, name: str, config: dict[str, Any]) -> int | None:
    for pattern, field in (family.gguf_permuted or {}).items():
        head, tail = pattern.split("{i}")
        if name.startswith(head) and name.endswith(tail):
            return int(config.get(field) or config["num_attention_heads"])
    return None
