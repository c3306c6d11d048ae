"""`shard`: a function of global tensors, by a layout, as a function of one rank's shards.

    core = shard(F.dot_product_attention, hybrid(), mesh, S=96, H=9, K=3)
    layer = shard(F.attention, hybrid(), mesh, S=96)

Activations and parameters come as shards, as the layout's first specs say. Positions, `segment_ids`, `cu_seqlens` and
masks are small, and every rank gets all of them: nothing has to move for a query to know where it stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..functional import tree
from ..functional.wire import choices_of, edges_of, optional_of
from . import caches, cores, joining, misfits, owned, rules, shards, whole
from .errors import SpecError
from .layouts import Layout, compose
from .mesh import Mesh, constant_axes
from .reshard import planned
from .spec import Spec, parse
from .wires import LayoutWire

if TYPE_CHECKING:
    from .step import Step

__all__ = ["Sharded", "shard"]

CORE = dict.fromkeys(("q", "k", "v", "o"), "")  # of a core that does not say what its edges hold


def shard(fn: Callable[..., Any], layout: Layout, mesh: Mesh, /, **sizes: int) -> Sharded:
    """A layer or a core, as one rank computes it.

    fn: a layer with edges and a `wire` (`functional.attention`, `decoder`, yours), or a core: any function of q, k, v.
    mesh: this rank's own, or any for `simulate(shard(...), mesh)`. sizes: global; S always, H and K for a core (a
    layer's config has them; where given, they are compared).

    The result takes what fn takes, as shards: q, k, v, x, tokens as the layout's specs begin, parameters as their own
    specs say of the axes that split heads and features. Whole on every rank: positions, q_positions and k_positions
    `B|1 S` (0 .. S-1, or within documents, unless given), segment_ids `B S`, mask (boolean, `S S` or `B|1 H|1 S S`)
    and `cu_seqlens`, the boundaries of packed documents, the same in each row. It returns the shard of the result. A
    cache comes in and goes out as the layer's edges `cache_...` lie, that of a decoder layer by layer: by heads where
    keys or states are met by heads, else whole; with exchange="needed" there is none. With one, tokens of a gated
    delta net go on from it unless positions are given; a decoder needs them.

    A core is told what a shard cannot know, as far as it takes it: q_positions, k_positions, segment_ids (both sides),
    kv_index, head_offset, local_heads; one that takes no kv_index gets its keys and values repeated instead.

    Around a sharded function, layouts are composed: `ulysses` around `all_gather` is `hybrid`.

    Raises `SpecError` for a layout, mesh and sizes that do not go together, here; for arguments that do not fit, before
    anything moves.
    """
    if not isinstance(layout, Layout) or not isinstance(mesh, Mesh):
        given = f"{type(layout).__name__} and {type(mesh).__name__}"
        raise TypeError(f"shard(fn, layout, mesh): a Layout and a Mesh are needed, not {given}")
    if isinstance(fn, Sharded):
        if fn.mesh.axes != mesh.axes:
            raise SpecError(f"shard: the function is sharded over {fn.mesh}, and this mesh is {mesh}", fix="one mesh")
        return Sharded(fn.fn, compose(layout, fn.layout), mesh, {**fn.given, **sizes})
    if not callable(fn):
        raise TypeError(f"shard(fn=...): a function is needed, not {type(fn).__name__}")
    return Sharded(fn, layout, mesh, sizes)


class Sharded:
    """A function of one rank's shards: see `shard`. Call it with the rank's mesh, unless it was made with one."""

    def __init__(self, fn: Callable[..., Any], layout: Layout, mesh: Mesh, sizes: Mapping[str, int]) -> None:
        self.fn, self.layout, self.mesh, self.given = fn, layout, mesh, dict(sizes)
        self.sizes = shards.complete(sizes)
        self.takes = cores.takes(fn)
        self.signature = inspect.signature(fn)
        self.is_layer = "wire" in self.signature.parameters
        name = getattr(fn, "__name__", type(fn).__name__)
        self.name = "this core" if name == "<lambda>" else name
        self.declared = dict(edges_of(fn)) if self.is_layer else dict(getattr(fn, "edges", CORE))
        self.chains = dict(layout.chains)
        # A layout may have edges for a part of a model, which is this function itself.
        self.part = name if any(edge.startswith(f"{name}.") for edge in self.chains) else ""
        if self.part:
            self.declared = {f"{name}.{edge}": letters for edge, letters in self.declared.items()}
        left_out = {f"{name}.{edge}" if self.part else edge for edge in optional_of(fn)}
        self.declared = {
            edge: letters for edge, letters in self.declared.items()
            if edge not in left_out or joining.rule_of(self.chains, edge) is not None
        }  # fmt: skip
        self._join()

    def _join(self) -> None:
        """Raise where function, layout, mesh and sizes do not go together."""
        joined = joining.check_edges(self.declared, self.layout, self.name, choices_of(self.fn))
        self.declared, self.lacking = joined.edges, joined.lacking
        joining.check_letters(self.given, self.layout, self.name)
        missing = [letter for letter in (("S",) if self.is_layer else ("S", "H", "K")) if letter not in self.sizes]
        if missing:
            raise SpecError(
                f"shard({self.name}, ...): no size for {' and '.join(missing)}", known=shards.known(self.given),
                mesh=str(self.mesh), fix=", ".join(f"{letter}=..." for letter in missing) + ", globally",
            )  # fmt: skip
        found = rules.resolve(self.layout.name, self.layout.chains, self.mesh.axes, self._heads)
        misfits.check_used(self.declared, self.layout, self.mesh.axes, self.name)
        for _, chain in found:
            for text in chain:
                atoms = tuple(a for a in parse(text).atoms if a.name in self.sizes)
                shards.check(Spec((atoms,), (), text), self.sizes, self.mesh.axes)
        if not self.is_layer:
            cores.check(self.takes, self.name, self.layout.name, dict(found)["q"][-1], self.mesh.axes)

    @property
    def _heads(self) -> tuple[int, int] | None:
        """H and K, where they are known here."""
        return (self.sizes["H"], self.sizes["K"]) if {"H", "K"} <= set(self.sizes) else None

    def plan(self, **sizes: Any) -> Any:
        """`Layout.plan` with the sizes that are known here."""
        return self.layout.plan(self.mesh, **{**self.given, **sizes})

    def step(self, params: tree.Tree, cfg: Any, *, cu_seqlens: Any = None, **sizes: int) -> Step:
        """What a step of training a whole model sends and holds, forward, backward, and in `sum_gradients`.

        params: of the whole model, `F.Decoder.abstract(cfg)` does. cu_seqlens: boundaries of packed documents. sizes:
        B, rows of the whole batch. Raises `SpecError` where layout, mesh, sizes and parameters do not fit.
        """
        from .step import step

        return step(self, params, cfg, sizes, cu_seqlens)

    def __repr__(self) -> str:
        return f"shard({self.name}, {self.layout.name}, {self.mesh!r}, {shards.known(self.given)})"

    def __call__(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> Any:
        at = self.mesh if mesh is None else mesh
        if not at.bound:
            raise ValueError(
                f"{self!r} is one rank's function, and its mesh is no rank's own\n"
                "    fix: simulate(...)(global tensors), or shard(..., ProcessGroup(device_mesh).mesh, ...)"
            )
        rules.complete(self.layout.name, self.layout.chains, (*self.layout.keys,), constant_axes(at))
        return self._layer(at, args, kwargs) if self.is_layer else self._core(at, *args, **kwargs)

    def _core(self, at: Mesh, q: Tensor, k: Tensor, v: Tensor, /, **given: Any) -> Tensor:
        for name in ("kv_index", "head_offset", "local_heads"):
            if given.get(name) is not None:
                raise ValueError(f"{self.name}({name}=...) under a layout, which says it itself\n    fix: without it")
        known = whole.take(given, self.layout, self.sizes["S"], self._rows({"q": q}), q.device)
        sinks = given.pop("sinks", None)
        must = {"segment_ids": known.edges["q_segment_ids"], "mask": known.edges["mask"], "sinks": sinks}
        must |= {"q_positions": known.positions} if known.given else {}
        cores.ready(self.takes, self.name, given, [name for name, x in must.items() if x is not None])
        causal, window = (self._option(given, name) for name in ("causal", "window"))
        wire = LayoutWire.of(
            self.layout, at, self.sizes, whole=known.edges, cu=known.cu, ordered=known.ordered, device=q.device
        ).layer(H=self.sizes["H"], K=self.sizes["K"], causal=causal, window=window)
        self._check(at, {"q": q, "k": k, "v": v, "sinks": sinks}, wire.edges)
        sent = wire.send(k=k, v=v, k_positions=None, k_segment_ids=None)
        q, q_positions, q_ids, mask, sinks, k, v, k_positions, k_ids = wire.receive(
            sent, q=q, q_positions=None, q_segment_ids=None, mask=None, sinks=sinks
        )
        told = {"segment_ids": None if q_ids is None else (q_ids, k_ids), "mask": mask, "sinks": sinks}
        told |= {"q_positions": q_positions, "k_positions": k_positions}
        heads = wire.heads()
        told |= {"kv_index": heads.kv_index, "head_offset": heads.offset, "local_heads": heads.local}
        told = {name: value for name, value in told.items() if value is not None}
        return wire.pass_(o=cores.call(self.fn, self.takes, q, k, v, given, told))

    def _layer(self, at: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound, given = self._bound(args, kwargs)
        named = bound.arguments
        self._refuse_own(given)
        needs = {"mask": "mask", "segment_ids": "q_segment_ids", "cu_seqlens": "q_segment_ids",
                 "q_positions": "q_positions", "k_positions": "k_positions"}  # fmt: skip
        passed = {edge.rsplit(".", 1)[-1] for edge in self.declared}
        for name, edge in needs.items():
            if given.get(name) is not None and edge not in passed:
                raise ValueError(
                    f"{self.name}({name}=...) under a layout: it passes no edge {edge} that would bring it"
                )
        if given.get("mask") is not None:
            joining.check_mask(given, edges_of(self.fn), choices_of(self.fn), self.name)
        if not torch.compiler.is_compiling():  # there the wire refuses, as nothing moves while a graph is made
            joining.check_parts(given, self.lacking, self.layout.name, self.name)
            joining.check_weights(given, self.declared, self.layout, self.mesh.axes, self.name)
            misfits.check_parts_of(given, _config(given), self.layout, self.mesh.axes, self.name)
        if given.get("cache") is not None:
            caches.check(self.name, given, self._kept(given), self.layout, at, own=True)
        self._check(at, given, dict(rules.of_rows(self.layout.chains)))
        device = next(x.device for name, x in given.items() if isinstance(x, Tensor) and name in self.chains)
        known = whole.take(given, self.layout, self.sizes["S"], self._rows(given), device)
        wire = LayoutWire.of(
            self.layout, at, self.sizes, whole=known.edges, cu=known.cu, ordered=known.ordered, device=device,
            part=self.part,
        )  # fmt: skip
        positions = None if known.positions is None else wire.mine(known.positions)
        local: dict[str, Any] = {"positions": positions, "wire": wire}
        if known.edges["q_segment_ids"] is not None:
            local["segment_ids"] = wire.mine(known.edges["q_segment_ids"])
        for name, used in (("core", True), ("absorbed_core", bool(given.get("absorbed")))):
            if name in given and used:
                taken = cores.takes(given[name])
                cores.check(taken, name, self.layout.name, wire.edges["q"][-1], at.axes)
                must = {"segment_ids": known.edges["q_segment_ids"], "mask": known.edges["mask"]}
                cores.ready(taken, name, {}, [rule for rule, x in must.items() if x is not None])
                local[name] = cores.fitted(given[name])
        for name in whole.NAMES:
            named.pop(name, None)
        takes = self.signature.parameters
        extra = self._extra()
        for name, x in local.items():
            if name in takes:
                named[name] = x
            elif extra:
                named[extra] = {**named.get(extra, {}), name: x}
        return self.fn(*bound.args, **bound.kwargs)

    def _refuse_own(self, given: Mapping[str, Any]) -> None:
        if given.get("wire") is not None:
            raise ValueError(f"{self.name}(wire=...) under a layout: the layout is the wire\n    fix: without it")

    def _kept(self, given: Mapping[str, Any]) -> list[caches.Kept]:
        return caches.kept_by(given, self.declared, self.layout, self.part, choices_of(self.fn))

    def _extra(self) -> str | None:
        """The name of `**given`, if there is one."""
        return next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[inspect.BoundArguments, dict[str, Any]]:
        """What fn is to be called with, and all that was given, by name: also what the layout alone understands."""
        extra = self._extra()
        ours = {n: x for n, x in kwargs.items() if n in whole.NAMES and n not in self.signature.parameters}
        if self.is_layer and extra is None:
            joining.check_arguments(kwargs, [*self.signature.parameters, *whole.NAMES], self.name)
        bound = self.signature.bind_partial(*args, **{n: x for n, x in kwargs.items() if n not in ours})
        named = {n: x for n, x in bound.arguments.items() if n != extra}
        return bound, {**named, **(bound.arguments.get(extra, {}) if extra else {}), **ours}

    def _option(self, given: Mapping[str, Any], name: str) -> Any:
        """What the caller says of what queries see. Of a core's own defaults True and None count, whose meaning is
        plain; others (a window of -1) may mean anything, and then queries are taken to see everything."""
        if name in given:
            return given[name]
        default = self.signature.parameters[name].default if name in self.signature.parameters else None
        return default if default is True or default is None else None

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name. A core's first three are q, k, v, whatever it calls them."""
        if not self.is_layer:
            if len(args) != 3:
                raise TypeError(f"{self.name} under a layout: q, k and v come first, {len(args)} given")
            return {**dict(zip("qkv", args, strict=True)), **kwargs}
        return self._bound(args, kwargs)[1]

    def _rows(self, named: Mapping[str, Any]) -> int:
        """How many rows of the batch this rank has."""
        for name, x in named.items():
            if isinstance(x, Tensor) and name in self.chains:
                at, dims = rules.batch(self.chains[name][0])
                if at >= 0 and x.dim() == dims:
                    return x.shape[at]
        raise TypeError(f"{self.name}: no argument whose batch the layout knows")

    def _check(self, at: Mesh, named: Mapping[str, Any], edges: Mapping[str, tuple[str, ...]]) -> None:
        """Raise `SpecError` unless every argument is this rank's shard."""
        for name, x in named.items():
            if name in edges and name not in whole.NAMES and isinstance(x, Tensor):
                text = edges[name][0]
                letters = rules.letters((text,))
                sizes = {letter: n for letter, n in self.sizes.items() if letter in letters}
                planned(x, f"{text} -> {text}", at, sizes, name=f"{self.name}({name}=...)")

    def specs(self, params: tree.Tree, cfg: Any) -> Any:
        """How parameters lie: each by its own spec, split by those axes alone by which the layout splits its letters.

        A tree as `cut` and `sum_gradients` take it. cfg: the parameters' config, which has the sizes.
        """
        layers = self._kept({"params": params, "cfg": cfg})
        return owned.specs(params, cfg, layers, self.layout, self.mesh.axes)

    # What `simulate` needs.

    def widths(self, named: Mapping[str, Any]) -> dict[str, int]:
        """Sizes that no shard of a result shows, and a config has."""
        cfg = _config(named)
        return {letter: n for letter, n in getattr(cfg, "sizes", {}).items() if letter == "Z"}

    def in_specs(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """How each argument is split, None for what every rank gets whole."""
        if self.is_layer:
            self._refuse_own(named)
        rules.complete(self.layout.name, self.layout.chains, self.layout.keys, self.mesh.axes)
        edges = dict(rules.resolve(self.layout.name, self.layout.chains, self.mesh.axes, self._heads))
        joining.check_parts(named, self.lacking, self.layout.name, self.name)
        joining.check_weights(named, self.declared, self.layout, self.mesh.axes, self.name)
        if named.get("cache") is not None and self.is_layer:
            caches.check(self.name, named, self._kept(named), self.layout, self.mesh, own=False)
        misfits.check_parts_of(named, _config(named), self.layout, self.mesh.axes, self.name)
        specs = {name: self._in_spec(name, x, edges) for name, x in named.items()}
        cfg = _config(named)
        inside = {
            letter for letter in joining.letters_of(self.chains) if letter not in "BS" and self.layout.split(letter)
        }
        for name, x in named.items():
            if name == "cache" and cfg is not None:
                specs[name] = self._of_cache(x, self._kept(named))
            elif isinstance(x, tree.Tree) and cfg is not None:
                specs[name] = self.specs(x, cfg)
            elif name == "read":  # slots, of which every rank has all
                continue
            elif inside and name not in edges and name not in whole.NAMES and _holds_tensors(x):
                what = f"a {type(x).__name__}" + " without a config" * isinstance(x, tree.Tree)
                raise SpecError(
                    f"{self.name}({name}=...): {self.layout.name} splits {', '.join(sorted(inside))}, and nothing says "
                    f"how {what} lies",
                    fix="a tree of parameters beside its config, which has the sizes of their letters",
                )
        return specs

    def _in_spec(self, name: str, x: Any, edges: Mapping[str, tuple[str, ...]]) -> Any:
        if isinstance(x, (tuple, list)) and _holds_tensors(x) and (name in edges or name == "segment_ids"):
            return type(x)(self._in_spec(name, each, edges) for each in x)
        if not isinstance(x, Tensor):
            return None
        batch = next(
            (a for a in parse(self.chains["x" if "x" in self.chains else "q"][0]).atoms if a.name == "B"), None
        )
        if name in whole.NAMES:
            # One row for all rows goes to every rank; rows of their own lie as the batch does.
            by_row = batch is not None and bool(batch.axes) and x.dim() in (2, 4) and name != "cu_seqlens"
            shared = x.dim() == 0 or (x.shape[0] == 1 and name != "segment_ids") or (name == "mask" and x.dim() == 2)
            return f"{batch} ..." if by_row and not shared else None
        if name not in edges:
            return None
        spec = parse(edges[name][0])
        at, dims = rules.batch(edges[name][0])
        if name in ("rope", "rope_positions") and x.dim() == dims and x.shape[at] == 1:
            return "... " + " ".join(edges[name][0].split()[at + 1 :])  # one row for all
        return str(spec)

    def _of_cache(self, cache: Any, kept: list[caches.Kept]) -> Any:
        """How caches lie, one a layer, when they come in and when they go out."""
        if not isinstance(cache, (tuple, list)):
            return caches.specs(cache, kept[0], self.layout, self.mesh)
        if len(cache) != len(kept):
            return None
        pairs = zip(cache, kept, strict=True)
        return type(cache)(caches.specs(each, layer, self.layout, self.mesh) for each, layer in pairs)

    def out_specs(self, result: Any, cache: Any = None) -> Any:
        """How the result is split: as the last edge that the function passes itself; a cache as it came in."""
        own = [edge for edge in self.declared if "." not in edge] or list(self.declared)
        found = dict(rules.resolve(self.layout.name, self.layout.chains, self.mesh.axes, self._heads))
        text = found[joining.rule_of(found, own[-1]) or ""][-1]

        # A tuple with names (a routing) holds what belongs to tokens.
        inner = parse(self.chains["x"][0]).dims if "x" in self.chains else ()
        tokens = " ".join(str(Spec((dim,))) for dim in inner[:2]) + " ..."

        def of(x: Any, spec: str) -> Any:
            if isinstance(x, Tensor):
                return spec
            if isinstance(x, tree.Tree) or (isinstance(x, tuple) and x and isinstance(x[0], tree.Tree)):
                return tuple(cache) if isinstance(cache, list) else cache
            if hasattr(x, "_fields"):
                return type(x)(*(of(each, tokens) for each in x))
            return tuple(of(each, spec) for each in x) if isinstance(x, tuple) else None

        return of(result, text)


def _config(named: Mapping[str, Any]) -> Any:
    return next((x for x in named.values() if hasattr(x, "sizes") and not isinstance(x, tree.Tree)), None)


def _holds_tensors(x: Any) -> bool:
    return not isinstance(x, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree.leaves(x))
