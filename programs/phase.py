"""One function of a program: compiled at its first call, with kernels put in place, and called like a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from . import dynamo
from .exchanges import in_order
from .graph import Graph
from .lower import lower

if TYPE_CHECKING:
    from .program import Program

__all__ = ["Phase"]


class Phase:
    """One function of a program. Calling it runs the phase; see `Program.prefill`, `Program.decode`.

    compiles: how often its graph was compiled.
    """

    def __init__(self, name: str, step: Callable[..., Any], program: Program, call: Callable[..., Any]) -> None:
        self.name = name
        self.compiles = 0
        self.__doc__ = call.__doc__
        self._program, self._call = program, call
        self._module: fx.GraphModule | None = None
        self.step = dynamo.compile_with(step, self._compile) if program.compiled else step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiles += 1
        left = lower(module, self._program.target, self._program.kernels)
        self._program.check_left({self.name: left})
        planned = self._program.planned_left(self.name)
        if planned is not None and left != planned:
            text = "\n    ".join(sorted(set(left) ^ set(planned)))
            raise RuntimeError(f"{self.name}: other kernels than planned\n    {text}")
        self._module = module
        in_order(module)
        return dynamo.inductor(module, inputs)

    def __repr__(self) -> str:
        return f"{self.name}, compiled {self.compiles} times\n{self.graph}"

    @property
    def graph(self) -> Graph:
        """The Dynamo-level graph as it was compiled, kernels in place; without compiling, as planned."""
        if self._module is None:
            return self._program.planned(self.name).graph
        return Graph(self.name, self._module, self._program.leaf_paths)
