"""Parameters as pytrees: frozen dataclasses that say the shape of each leaf in letters.

    @pytree
    class Norm(Tree):
        weight: Tensor = dim("D", initial=1.0)
        bias: Tensor | None = dim("D", when="bias", initial=0.0)

A field made by `dim` is a leaf, `static` goes into the tree's definition, and a field of another `Tree` class (or a
tuple of one) is a child whose config is the attribute of the same name. A leaf or child that is None is absent: it
belongs to the definition, not to the leaves. Classes are registered with optree (namespace "meshfn") and with torch's
own pytree, so `torch.func`, `torch.compile` and optree all take and return them.

This is the only file that touches `torch.utils._pytree`, which is private.
"""

from __future__ import annotations

import dataclasses
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import optree
import torch
import torch.utils._pytree as _pytree
from torch import Tensor

from .shapes import letters, parse, shape_of

__all__ = [
    "Tree",
    "TreeError",
    "check",
    "dim",
    "fp32_paths",
    "leaves",
    "map",
    "paths",
    "pytree",
    "replace",
    "sizes_of",
    "static",
    "trainable",
]  # fmt: skip

NAMESPACE = "meshfn"
C = TypeVar("C")


class TreeError(ValueError):
    """A pytree whose structure or leaves are not what they must be; every fault is listed by path."""


def dim(
    spec: str,
    *,
    when: str | None = None,
    initial: float | Callable[[Any], float] | None = None,
    keep_fp32: bool = False,
) -> Any:
    """A leaf with this global shape in letters, such as `"((K/tp G) E) D"`; also its sharding and loading spec.

    when: the config attribute that says whether the leaf exists; without it, it always does.
    initial: a constant, or a function from the config to one; without it, normal with the config's `initializer_range`
        (0.02 where it has none).
    keep_fp32: where it is stored in fp32 it stays so, whatever half precision the others have (`fp32_paths`).
    """
    parse(spec)
    default: Any = dataclasses.MISSING if when is None else None
    metadata = {"spec": spec, "when": when, "initial": initial, "keep_fp32": keep_fp32}
    return dataclasses.field(default=default, metadata=metadata)


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A hashable value that belongs to the tree's definition; two trees that differ in it do not match."""
    return dataclasses.field(default=default, metadata={"static": True})


class Tree:
    """Base of all parameter and cache classes; see the module's docstring."""

    # fields that may be absent, each with the config attribute that says so; filled in by @pytree
    _optional: ClassVar[tuple[tuple[str, str], ...]] = ()
    # the class of its config; needed where a field may hold this class or another
    config: ClassVar[type]

    @classmethod
    def abstract(cls, cfg: Any, *, dtype: torch.dtype = torch.float32, **sizes: int) -> Self:
        """The tree of a config with leaves on the meta device: shapes and dtypes, no memory.

        sizes: letters that the config does not bind (`B=2, T=1024` for a cache).
        """

        def make(shape: tuple[int, ...], spec: str, field: dataclasses.Field[Any], *_: Any) -> Tensor:
            return torch.empty(shape, dtype=_dtype_of(field, dtype), device="meta")

        return _build(cls, cfg, sizes, make)

    @classmethod
    def init(
        cls,
        cfg: Any,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **sizes: int,
    ) -> Self:
        """The tree of a config with random weights. A leaf depends on the seed, an integer, and its path alone."""
        if not isinstance(seed, int):
            raise TypeError(f"{cls.__name__}.init(seed=...): an integer is needed, not {type(seed).__name__}")

        def make(shape: tuple[int, ...], spec: str, field: dataclasses.Field[Any], c: Any, path: str) -> Tensor:
            constant = field.metadata["initial"]
            if callable(constant):
                constant = constant(c)
            kind = _dtype_of(field, dtype)
            if constant is not None:
                return torch.full(shape, constant, dtype=kind, device=device)
            # crc32 and not hash(), which differs from process to process; a generator takes 32 bits of a seed alone.
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}{path}".encode()))
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return (values * getattr(c, "initializer_range", 0.02)).to(dtype=kind, device=device)

        return _build(cls, cfg, sizes, make)

    def specs(self) -> Self:
        """The same tree with each leaf's spec, as a string, in its place."""
        return typing.cast(Self, _said(self, "spec"))

    def __repr__(self) -> str:
        """One line a leaf: path, letters, shape, dtype."""
        specs = paths(self.specs())
        rows = [
            (path, letters(specs[path]), "x".join(str(n) for n in t.shape), str(t.dtype).removeprefix("torch."))
            if isinstance(t, Tensor)
            else (path, repr(t), "", "")
            for path, t in paths(self).items()
        ]
        widths = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines = ["    " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        return "\n".join([f"{type(self).__name__} ({len(rows)} leaves)", *lines])


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(dim, static))
def pytree(cls: type[C]) -> type[C]:
    """Make a `Tree` subclass a frozen, keyword-only dataclass, registered with optree and with torch's pytree."""
    if not issubclass(cls, Tree):
        raise TypeError(f"@pytree class {cls.__name__} must derive from Tree")
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    statics = [f.name for f in fields if f.metadata.get("static")]
    others = [f.name for f in fields if not f.metadata.get("static")]

    made._optional = tuple(
        (f.name, f.metadata.get("when") or f.name)
        for f in fields
        if f.metadata.get("when") or (f.default is None and "spec" not in f.metadata)
    )

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        present = tuple(n for n in others if getattr(node, n) is not None)
        return [getattr(node, n) for n in present], (present, tuple(getattr(node, n) for n in statics))

    def unflatten(children: Iterable[Any], context: Any) -> Any:
        present, values = context
        missing = dict.fromkeys(others)
        return made(**missing | dict(zip(present, children, strict=True)) | dict(zip(statics, values, strict=True)))

    def with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(node)
        return [(_pytree.GetAttrKey(n), c) for n, c in zip(context[0], children, strict=True)], context

    _pytree.register_pytree_node(
        made,
        flatten,
        unflatten,
        serialized_type_name=f"{NAMESPACE}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )

    def optree_flatten(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
        children, context = flatten(node)
        return children, context, context[0]

    optree.register_pytree_node(
        typing.cast(Any, made),
        optree_flatten,
        lambda context, children: unflatten(children, context),
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    return made


def leaves(tree: Any) -> list[Any]:
    """The leaves, in the order of their paths."""
    return list(_pytree.tree_leaves(tree))


def paths(tree: Any) -> dict[str, Any]:
    """`{".layers[0].attention.q": leaf, ...}`, in order."""
    pairs, _ = _pytree.tree_flatten_with_path(tree)
    return {_pytree.keystr(path): leaf for path, leaf in pairs}


def sizes_of(tree: Any, cfg: Any) -> dict[str, dict[str, int]]:
    """The global size of each letter at each leaf, by path, as its config and those above it say."""

    def walk(node: Any, cfg: Any, sizes: dict[str, int], path: str) -> Iterator[tuple[str, dict[str, int]]]:
        sizes = {**sizes, **getattr(cfg, "sizes", {})}
        for f in dataclasses.fields(node):
            value, here = getattr(node, f.name), f"{path}.{f.name}"
            if "spec" in f.metadata and value is not None:
                yield here, sizes
            elif isinstance(value, tuple):
                for i, (child, sub) in enumerate(zip(value, getattr(cfg, f.name), strict=True)):
                    yield from walk(child, sub, sizes, f"{here}[{i}]")
            elif isinstance(value, Tree):
                yield from walk(value, getattr(cfg, f.name), sizes, here)

    return dict(walk(tree, cfg, {}, ""))


def fp32_paths(tree: Any) -> set[str]:
    """The paths of leaves that stay in fp32 where they are so."""
    return {path for path, kept in paths(_said(tree, "keep_fp32")).items() if kept}


def _said(node: Any, key: str) -> Any:
    """The tree with what `dim` was told of each leaf in its place."""
    if isinstance(node, tuple):
        return tuple(_said(x, key) for x in node)
    if not isinstance(node, Tree):
        return node
    new = {}
    for f in dataclasses.fields(node):  # type: ignore[arg-type]
        value = getattr(node, f.name)
        new[f.name] = f.metadata[key] if key in f.metadata and value is not None else _said(value, key)
    return type(node)(**new)


def structure(tree: Any) -> Any:
    """The tree's definition; two are equal when a leaf list of one fits the other."""
    return _pytree.tree_structure(tree)


def unflatten(definition: Any, values: Iterable[Any]) -> Any:
    """The tree with this definition and these leaves."""
    return _pytree.tree_unflatten(list(values), definition)


def map(fn: Callable[..., Any], tree: C, *rest: Any) -> C:
    """Apply to each leaf of trees of one structure. Raises `TreeError` with the paths that differ."""
    for other in rest:
        if structure(other) != structure(tree):
            raise TreeError(_differences(tree, other))
    return typing.cast(C, _pytree.tree_map(fn, tree, *rest))


def replace(tree: C, new: dict[str, Any]) -> C:
    """The tree with the leaves at these paths replaced. Raises `TreeError` for a path that it lacks."""
    old = paths(tree)
    unknown = [p for p in new if p not in old]
    if unknown:
        raise TreeError("no leaf at " + ", ".join(unknown) + "\n    paths: " + _some(old))
    return typing.cast(C, unflatten(structure(tree), [new.get(path, leaf) for path, leaf in old.items()]))


def trainable(tree: Any) -> list[Tensor]:
    """The tensors an optimiser should own: each leaf that requires a gradient (of a file none does until it is told
    `requires_grad_()`), a view's base in place of the view, each once (tied leaves are one tensor)."""
    found: dict[int, Tensor] = {}
    for path, leaf in paths(tree).items():
        if not isinstance(leaf, Tensor):
            continue
        base = leaf._base
        if base is None or (leaf.is_leaf and leaf.requires_grad and not base.requires_grad):
            base = leaf  # a view that is itself a leaf of autograd (cut from a plain tensor) trains by itself
        elif base.requires_grad and leaf.is_leaf:
            raise TreeError(
                f"{path}: cut from a tensor that had no gradient then and has one now, which would not reach it\n"
                "    fix: load again, after requires_grad_()"
            )
        if base.requires_grad:
            found.setdefault(id(base), base)
    return list(found.values())


def check(tree: Any, expected: Any, *, what: str = "params") -> None:
    """Raise `TreeError` unless the leaves have the paths and shapes of `expected` (a tree from `abstract`)."""
    have, want = paths(tree), paths(expected)
    specs = paths(expected.specs()) if isinstance(expected, Tree) else dict.fromkeys(want, "")
    faults = [f"{p}: missing, {_described(specs[p], want[p])}" for p in want if p not in have]
    faults += [f"{p}: not expected, it has {_described('', have[p])}" for p in have if p not in want]
    for path, leaf in have.items():
        if path not in want:
            continue
        if not isinstance(leaf, Tensor):
            faults.append(f"{path}: a tensor is needed, not {type(leaf).__name__}")
        elif leaf.shape != want[path].shape:
            faults.append(f"{path}: {_described(specs[path], want[path])}, but the tensor has {tuple(leaf.shape)}")
    if faults:
        if type(tree) is not type(expected):
            raise TreeError(f"{what}: {type(expected).__name__} is needed, not {type(tree).__name__}")
        count = f"{len(faults)} leaf" if len(faults) == 1 else f"{len(faults)} leaves"
        raise TreeError(f"{what} do not match in {count}\n    " + "\n    ".join(faults))


def check_presence(function: str, params: Tree, cfg: Any, kind: type[Tree] | None = None) -> None:
    """Raise `TreeError` where the params have an optional part that the config does not ask for, or lack one. kind: the
    class that they must be of."""
    if kind is not None and not (isinstance(params, kind) and isinstance(cfg, kind.config)):
        raise TreeError(
            f"{function}: {kind.__name__} and {kind.config.__name__} are needed, not {type(params).__name__} and "
            f"{type(cfg).__name__}"
        )
    for name, attribute in params._optional:
        # not bool(...), which Dynamo of torch 2.11 cannot trace on a config
        asked = getattr(cfg, attribute) is not None and getattr(cfg, attribute) is not False
        there = getattr(params, name) is not None
        if asked != there:
            has = f"has .{name}" if there else f"lacks .{name}"
            name = type(params).__name__
            raise TreeError(
                f"{function}: the config says {attribute}={getattr(cfg, attribute)!r}, but {name} {has}\n"
                f"    fix: {name}.init(cfg, seed) makes what the config asks for"
            )


def _dtype_of(field: dataclasses.Field[Any], dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if field.metadata["keep_fp32"] else dtype


def _described(spec: str, leaf: Any) -> str:
    shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
    return f'"{spec}" = {shape}' if spec else f"{shape}"


def _differences(tree: Any, other: Any) -> str:
    a, b = paths(tree), paths(other)
    lines = [f"{p}: only in the first tree" for p in a if p not in b]
    lines += [f"{p}: only in a later tree" for p in b if p not in a]
    return "trees of one structure are needed\n    " + "\n    ".join(lines or ["static fields or classes differ"])


def _some(names: Iterable[str], limit: int = 6) -> str:
    every = list(names)
    return ", ".join(every[:limit]) + (f", ... ({len(every)})" if len(every) > limit else "")


def _child_classes(annotation: Any) -> tuple[list[type[Any]], bool]:
    """The Tree classes of an annotation, and whether they stand in a tuple: `X`, `X | Y | None`, `tuple[X, ...]`."""
    many = typing.get_origin(annotation) is tuple
    options: Iterator[Any] = iter(typing.get_args(annotation) if many else [annotation])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        options = iter(typing.get_args(annotation))
    return [option for option in options if isinstance(option, type) and issubclass(option, Tree)], many


def _class_of(classes: Sequence[type[Any]], cfg: Any) -> type[Any]:
    """Which of several Tree classes a config is of: the one whose `config` it is."""
    if len(classes) == 1:
        return classes[0]
    found = [cls for cls in classes if isinstance(cfg, cls.config)]
    if len(found) != 1:
        known = ", ".join(cls.config.__name__ for cls in classes)
        raise TypeError(f"a config of {known} is needed, not {type(cfg).__name__}")
    return found[0]


def _build(cls: type[C], cfg: Any, sizes: dict[str, int], make: Callable[..., Any], path: str = "") -> C:
    """Walk a class and its config together; `make` gives each leaf."""
    sizes = {**sizes, **getattr(cfg, "sizes", {})}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        here = f"{path}.{f.name}"
        if f.metadata.get("static"):
            values[f.name] = getattr(cfg, f.name)
        elif "spec" in f.metadata:
            when = f.metadata["when"]
            if when is None or getattr(cfg, when):
                spec = f.metadata["spec"]
                values[f.name] = make(shape_of(spec, sizes), spec, f, cfg, here)
            else:
                values[f.name] = None
        else:
            classes, many = _child_classes(hints[f.name])
            if not classes:
                raise TypeError(f"{cls.__name__}.{f.name}: a field is dim(...), static(...) or another Tree class")
            sub = getattr(cfg, f.name)
            if many:
                each = [_build(_class_of(classes, c), c, sizes, make, f"{here}[{i}]") for i, c in enumerate(sub)]
                values[f.name] = tuple(each)
            else:
                values[f.name] = None if sub is None else _build(_class_of(classes, sub), sub, sizes, make, here)
    return cls(**values)
