"""Models of several parts, such as one that sees, of which the language model alone is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Wrapper"]


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """How the language model lies in the whole.

    field: where its config stands in the other. prefixes: how names of its tensors begin, in modules and in files ->
    how they begin in its own family. left_out: how those of the other parts begin.
    """

    model_type: str
    field: str
    prefixes: Mapping[str, str]
    left_out: tuple[str, ...]

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The language model's config. What ties the head is said of the whole."""
        found = fields.get(self.field)
        if not isinstance(found, Mapping):
            raise ValueError(f"config of {self.model_type}: {self.field} is missing")
        whole = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
        return {**found, **whole}

    def names(self, names: Iterable[str]) -> dict[str, str]:
        """The family's name -> the name here, of the tensors that are not left out."""
        found = {}
        for name in names:
            if name.startswith(self.left_out):
                continue
            begin = next((each for each in self.prefixes if name.startswith(each)), "")
            found[self.prefixes.get(begin, "") + name.removeprefix(begin)] = name
        return found

    def shown(self, name: str, names: Collection[str]) -> str:
        """What a tensor that is missing would be called, among these."""
        begins = [each for each, ours in self.prefixes.items() if name.startswith(ours)]
        usual = [each for each in begins if any(other.startswith(each) for other in names)]
        begin = (usual or begins or [""])[0]
        return begin + name.removeprefix(self.prefixes.get(begin, ""))
