"""The layers of a training step: compiled once for each kind of layer, called one after another, autograd between them.

One graph of a whole model would take as long to compile as the model is deep, and torch takes no layer with a gradient
by hand into a region of one. So a layer is a graph of its own, forward and backward, and a Python loop calls it; what
is computed again in backward is cut at the same places. Kernels of programs have no gradient, and no part in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from .. import functional as F
from ..functional import tree
from . import dynamo
from .weights import computed_dtype

__all__ = ["TrainingLayers", "computed"]


def computed(params: Any, dtype: torch.dtype | None) -> Any:
    """A tree with its leaves in the dtype to compute with, through which gradients reach them; None for their own."""
    if dtype is None:
        return params
    fp32 = tree.fp32_paths(params)
    cast = {path: x.to(computed_dtype(x.dtype, dtype, path in fp32)) for path, x in tree.paths(params).items()}
    return tree.replace(params, cast)


class TrainingLayers:
    """`F.layer`, compiled at the first call of each kind and shape; what `F.backbone` takes for its `layer`.

    dtype: see `computed`. again: activations within a layer are not kept, and computed again in backward.
    compiles: how often a layer was compiled; its backward with it.
    """

    def __init__(self, dtype: torch.dtype | None, *, again: bool, compiled: bool) -> None:
        self.dtype, self._again, self._compiled = dtype, again, compiled
        self._graphs: dict[Hashable, Callable[..., Any]] = {}
        self.compiles = 0

    def __call__(
        self, params: F.Layer, x: Tensor, cfg: F.LayerConfig, *, cache: Any = None, read: Any = None, **given: Any
    ) -> Any:
        """As `F.layer`, without a cache."""
        if cache is not None or read is not None:
            raise ValueError("train_step: a training step has no cache\n    fix: leave cache and read out")
        tensors = {name: value for name, value in given.items() if isinstance(value, (Tensor, tuple))}
        others = {name: value for name, value in given.items() if name not in tensors and value is not None}
        leaves = tree.leaves((params, x, tensors))
        definition = tree.structure((params, x, tensors))
        run = self._graph(cfg, definition, others, leaves)
        # No layer draws a random number, so there is no state of a generator to bring back.
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        x, *routing = checkpoint(run, *leaves, **options) if self._again else run(*leaves)
        return (x, None, *routing)

    def _graph(
        self, cfg: F.LayerConfig, definition: Any, others: dict[str, Any], leaves: Sequence[Tensor]
    ) -> Callable[..., Any]:
        """The layer as a function of its tensors; the same for all layers that a graph is good for."""
        lie = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in leaves)
        key = (cfg, definition, tuple(others.items()), lie)
        if key not in self._graphs:
            problem = dynamo.compiler_problem(leaves[0].device) if self._compiled else None
            if problem is not None:
                warnings.warn(f"train_step: {problem}; it runs eagerly, as with compile=False", stacklevel=2)
                self._compiled = False
            dtype = self.dtype

            def layer(*tensors: Tensor) -> Any:
                params, x, given = tree.unflatten(definition, tensors)
                x, _, *routing = F.layer(computed(params, dtype), x, cfg, **{"positions": None, **given, **others})
                return (x, *routing)

            if not self._compiled:
                return layer
            self._graphs[key] = dynamo.compile_with(layer, self._compile)
            return dynamo.without_warning(self._graphs[key])
        return self._graphs[key]

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiles += 1
        return dynamo.inductor(module, inputs)
