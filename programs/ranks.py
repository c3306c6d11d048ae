"""What a rank has of a model, and what ranks tell each other beside the steps: that they were asked for the same,
whether any goes on, and the tokens of all rows.

Letters: B batch, Z vocabulary, T cache slots, H query heads, K key/value heads, P ranks, N numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import sharding as sh
from ..functional import tree
from ..functional.cache import Cache
from ..functional.wire import Own
from ..sharding.spec import parse
from ..sharding.wires import LayoutWire
from .sizes import Sizes, by_channel
from .steps import Seam

__all__ = ["Ranks", "check_mesh", "check_ranks"]


class Ranks:
    """One rank among those of a mesh, by a layout.

    config: of the whole model. rows: the axes that split rows, in the order of the mesh.
    """

    def __init__(self, cfg: F.DecoderConfig, mesh: sh.Mesh, layout: sh.Layout, device: torch.device) -> None:
        self.mesh, self.layout, self.device = mesh, layout, device
        self.config = cfg
        (over,) = [atom.axes for atom in parse(layout["tokens"][0]).atoms if atom.name == "B"]
        self.rows = tuple(axis for axis in over if mesh[axis] > 1)
        self._tokens = parse(layout["tokens"][0])
        self._wires: dict[int, Any] = {}

    @property
    def deals(self) -> bool:
        """Whether experts are dealt out over ranks, which is known step by step and cannot be compiled."""
        return any(self.mesh[axis] > 1 for axis in self.layout.split("X"))

    def own(self, rows: int) -> slice:
        """Which of all rows this rank has."""
        sizes = {"B": rows, "S": 1}
        found: slice = self._tokens.slices(sizes, self.mesh, self.mesh.rank)[0]
        return found

    def sizes(self, sizes: Sizes) -> Sizes:
        """Those of a rank, of those of all."""
        mine = self.own(sizes.batch)
        return dataclasses.replace(sizes, batch=mine.stop - mine.start)

    def params(self, params: F.Decoder) -> F.Decoder:
        """This rank's shards of a whole model, views of its leaves where they are one range; or what already are."""
        lies = sh.shard(F.backbone, self.layout, self.mesh, S=1).specs(params, self.config)
        specs, leaves = tree.paths(lies), tree.paths(params)
        shapes = {path: each.spec.local(each.sizes, self.mesh, self.mesh.rank) for path, each in specs.items()}
        if all(tuple(leaf.shape) == shapes[path] for path, leaf in leaves.items()):
            return params
        tree.check(params, F.Decoder.abstract(self.config), what="params")
        found: F.Decoder = sh.cut(params, lies, self.mesh)
        return found

    def caches(self, sizes: Sizes, dtype: torch.dtype) -> tuple[Cache, ...]:
        """A cache a layer of the rank's own shapes, uninitialised but for states. sizes: of all ranks."""
        whole = sizes.caches(self.config, dtype, "meta")
        model = sh.shard(F.backbone, self.layout, self.mesh, S=1)
        given = {"params": F.Decoder.abstract(self.config), "cfg": self.config, "cache": whole}
        specs = model.in_specs({**given, "positions": torch.zeros(1, 1, dtype=torch.int64)})["cache"]
        return tuple(map(self._allocated, sh.cut(whole, specs, self.mesh)))

    def _allocated(self, like: Cache) -> Cache:
        make = torch.zeros if isinstance(like, F.GDNCache) else torch.empty
        found = tree.map(lambda leaf: make(leaf.shape, dtype=leaf.dtype, device=self.device), like)
        return by_channel(found) if isinstance(found, F.GDNCache) else found

    def wire(self, tokens: int) -> LayoutWire:
        """For choices of `tokens` tokens a row."""
        if tokens not in self._wires:
            wire = LayoutWire.of(self.layout, self.mesh, {"S": tokens}, device=self.device)
            self._wires[tokens] = wire.layer(Z=self.config.vocab_size)
        found: LayoutWire = self._wires[tokens]
        return found

    @property
    def vocabulary(self) -> Own:
        """The rows of it that this rank has."""
        return self.wire(1).own("Z") or Own(0, self.config.vocab_size, self.config.vocab_size)

    def seam(self, params: Any, caches: Any) -> Seam:
        """params, caches: the structures of trees that steps take packed."""

        def layer(core: Any) -> Any:
            def run(params: Any, x: Tensor, cfg: F.LayerConfig, *, cache: Any, **given: Any) -> Any:
                x, new = F.layer(params, x, cfg, cache=cache, **given)
                for old, value in zip(tree.leaves(cache), tree.leaves(new), strict=True):
                    old.copy_(value)
                return x, cache

            return run

        def backbone(packed: F.Decoder, tokens: Tensor, cfg: F.DecoderConfig, *, cache: Any, **given: Any) -> Any:
            whole = tree.unflatten(params, tree.leaves(packed))
            kept = tree.unflatten(caches, tree.leaves(cache))
            model = sh.shard(F.backbone, self.layout, self.mesh, S=tokens.shape[1])
            return model(whole, tokens, cfg, cache=kept, **given)

        def choose(logits: Tensor, positions: Tensor, eos_token_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            token, logprob = (x[:, 0] for x in F.best_token(logits[:, None], wire=self.wire(1)))
            return token, logprob, F.advance(token, logprob, positions, eos_token_id)

        def logprob(logits: Tensor, targets: Tensor) -> Tensor:
            return F.token_logprob(logits, targets, wire=self.wire(targets.shape[1]))

        return Seam(layer, backbone, choose, logprob)

    # What ranks tell each other.

    def anywhere(self, live: bool) -> bool:
        """Whether it holds on any rank that has other rows."""
        if not self.rows:
            return live
        flag = torch.tensor([int(live)], device=self.device)
        return bool(sh.reshard(flag, f"P/{'/'.join(self.rows)} -> P", self.mesh, P=self._ranks(self.rows)).any())

    def of_all(self, x: Tensor, rows: int) -> Tensor:
        """x `B N` of this rank's rows -> of all."""
        if not self.rows:
            return x
        pair = f"B/{'/'.join(self.rows)} N -> B N"
        return sh.reshard(x.to(self.device), pair, self.mesh, B=rows).to(x.device)

    def agree(self, function: str, told: Mapping[str, Any] | None, number: int = 0) -> int:
        """Raise `ValueError` on every rank unless all were told the same. told: by argument; None from a rank that
        raises for itself what is wrong with its own. -> the number that the first rank brings. Every rank makes this
        call, and tells as many things."""
        digests = [_digest(value) for value in (told or {}).values()]
        every = self._gathered([told is not None, number, _digest(digests)])
        failed = [rank for rank, row in enumerate(every) if not row[0]]
        if failed and told is not None:
            raise ValueError(f"{function}: {_named(failed)} refused what it was told, and says why; so nothing ran")
        if told is None:
            return 0
        if len({row[2] for row in every}) > 1:
            names = list(told)
            rows = self._gathered(digests)
            lines = []
            for i, name in enumerate(names):
                others = [rank for rank, row in enumerate(rows) if row[i] != rows[0][i]]
                lines += [f"{name}: {_named(others)} was told otherwise than rank 0"] if others else []
            raise ValueError(
                f"{function}: ranks were told different things\n    " + "\n    ".join(lines) + "\n"
                f"    fix: the same arguments on every rank     mesh: {self.mesh}"
            )
        return int(every[0][1])

    def _gathered(self, numbers: list[int]) -> list[list[int]]:
        """Of every rank, in their order."""
        over = "/".join(axis for axis, _ in self.mesh.axes)
        mine = torch.tensor([numbers], dtype=torch.int64, device=self.device)
        found: list[list[int]] = sh.reshard(mine, f"P/{over} N -> P N", self.mesh, P=self.mesh.size).tolist()
        return found

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return len(self.mesh.ranks(axes, self.mesh.rank))


def check_mesh(mesh: Any, layout: Any) -> None:
    """Raise for what is no mesh of a rank's own, or no layout."""
    if not isinstance(mesh, sh.Mesh) or not isinstance(layout, sh.Layout):
        given = f"{type(mesh).__name__} and {type(layout).__name__}"
        raise TypeError(
            f"build(mesh=..., layout=...): a Mesh and a Layout are needed, not {given}\n"
            '    fix: mesh=ProcessGroup(device_mesh).mesh, layout=ulysses(tp="tp")'
        )
    if not mesh.bound:
        raise ValueError(
            f"build(mesh={mesh!r}): it is no rank's own, and a program is\n"
            "    fix: the mesh that the body of Threads is handed, or ProcessGroup(device_mesh).mesh"
        )


def check_ranks(cfg: F.DecoderConfig, mesh: sh.Mesh, layout: sh.Layout, batch: int) -> None:
    """Raise `ValueError` and `SpecError` for a mesh and a layout over which no program of a model runs."""
    if parts := [axis for edge, chain in layout.chains if edge == "parameters" for axis in parse(chain[0]).axes]:
        raise ValueError(
            f"build(layout=...): {layout.name} keeps parameters in parts over {'/'.join(parts)}, which every step "
            "would gather\n    fix: the layout without parameters=..."
        )
    tokens = next(atom.axes for atom in parse(layout["tokens"][0]).atoms if atom.name == "S")
    if split := [axis for axis in tokens if mesh[axis] > 1]:
        raise ValueError(
            f"build(layout=...): {layout.name} splits tokens over {'/'.join(split)}={mesh[split[0]]}, and a step of "
            f"decode has one\n    fix: a mesh of tp, and dp for rows, without {'/'.join(split)}"
        )
    rows = [axis for atom in parse(layout["tokens"][0]).atoms if atom.name == "B" for axis in atom.axes]
    ranks = len(mesh.ranks(tuple(axis for axis in rows if axis in dict(mesh.axes)), mesh.rank))
    if batch < ranks:
        raise ValueError(
            f"build(batch={batch}): fewer rows than the {ranks} ranks of {'/'.join(rows)}\n    fix: batch={ranks}"
        )
    model = sh.shard(F.backbone, layout, mesh, S=1)
    model.in_specs({"params": F.Decoder.abstract(cfg), "cfg": cfg})


def _digest(value: Any) -> int:
    """63 bits of what a value prints as."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8]) >> 1


def _named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
