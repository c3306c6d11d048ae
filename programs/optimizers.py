"""torch's own optimisers as functions of their state.

    state = {"state": {path: {name: tensor}}, "param_groups": [{"params": [path, ...], "lr": ..., ...}]}

That is `state_dict()` of an optimiser of torch, with the path of a leaf in place of its number: the form that
`torch.distributed.checkpoint` has. What is written in param_groups is read at the next step, so a schedule sets
`state["param_groups"][0]["lr"]`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["OptState", "Optimizer", "copied", "made", "state_of", "step"]

# From (path, leaf) pairs to an optimiser of them: `functools.partial(torch.optim.AdamW, lr=1e-3)`.
Optimizer = Callable[[Any], torch.optim.Optimizer]
OptState = dict[str, Any]


def made(optimizer: Optimizer, leaves: Mapping[str, Tensor], state: OptState | None = None) -> torch.optim.Optimizer:
    """The optimiser of these leaves, in a state if one is given, whose tensors are then its own.

    Raises `TypeError` and `ValueError` for what is no optimiser of these leaves, and for a state of others.
    """
    fix = "\n    fix: functools.partial(torch.optim.AdamW, lr=1e-3)"
    if not callable(optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"train_step(optimizer=...): what makes one of leaves is needed, not {kind}{fix}")
    found = optimizer(list(leaves.items()))
    if not isinstance(found, torch.optim.Optimizer):
        kind = type(found).__name__
        raise TypeError(f"train_step(optimizer=...): it makes a {kind}, and no torch.optim.Optimizer{fix}")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"train_step(optimizer=...): {type(found).__name__} computes the loss as often as it likes, by a closure, "
            f"and a step computes it once{fix}"
        )
    owned = {id(leaf) for group in found.param_groups for leaf in group["params"]}
    left = [path for path, leaf in leaves.items() if id(leaf) not in owned]
    if left or len(owned) != len(leaves):
        what = f"leaves out {', '.join(left[:3])}" if left else "has tensors that are no leaves of params"
        raise ValueError(
            f"train_step(optimizer=...): it {what}, of {len(leaves)} leaves that require a gradient\n"
            "    fix: requires_grad_(False) for what is not to be trained"
        )
    if state is not None:
        _enter(found, state, leaves)
    return found


def _enter(optimizer: torch.optim.Optimizer, state: OptState, leaves: Mapping[str, Tensor]) -> None:
    fix = "    fix: opt_state = step.init(params)"
    if not isinstance(state, dict) or set(state) != {"state", "param_groups"}:
        raise ValueError(f"train_step: opt_state is a dict of state and param_groups, as init makes it\n{fix}")
    wanted = [_paths(group, leaves) for group in optimizer.param_groups]
    given = [list(group["params"]) for group in state["param_groups"]]
    if wanted != given:
        differ = sorted(set(itertools.chain(*wanted)) ^ set(itertools.chain(*given))) or ["its groups"]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise ValueError(f"train_step: opt_state is of other leaves than params: {differ[0]}{more}\n{fix}")
    for group, held in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in held.items() if name != "params"})
    for path, held in state["state"].items():
        optimizer.state[leaves[path]] = dict(held)


def step(optimizer: torch.optim.Optimizer, leaves: Mapping[str, Tensor], grads: Sequence[Tensor]) -> OptState:
    """One step, in place of the leaves and of what the optimiser remembers -> its state, of the same tensors."""
    for leaf, grad in zip(leaves.values(), grads, strict=True):
        leaf.grad = grad
    optimizer.step()
    return state_of(optimizer, leaves)


def state_of(optimizer: torch.optim.Optimizer, leaves: Mapping[str, Tensor]) -> OptState:
    """By path. Before the first step nothing is remembered of any leaf: torch begins when it sees a gradient."""
    groups = [
        {"params": _paths(group, leaves)}
        | {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    held = {path: dict(optimizer.state[leaf]) for path, leaf in leaves.items() if leaf in optimizer.state}
    return {"state": held, "param_groups": groups}


def _paths(group: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> list[str]:
    names = {id(leaf): path for path, leaf in leaves.items()}
    return [names[id(leaf)] for leaf in group["params"]]


def copied(state: OptState) -> OptState:
    """The state with tensors of its own."""
    held = {path: {k: _clone(v) for k, v in each.items()} for path, each in state["state"].items()}
    return {"state": held, "param_groups": [dict(group) for group in state["param_groups"]]}


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
