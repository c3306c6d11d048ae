"""A step of training on the weights that a program reads: a function of parameters, optimiser state and batch.

    step = train_step(cfg, functools.partial(torch.optim.AdamW, lr=1e-3))
    opt_state = step.init(params)
    params, opt_state, metrics = step(params, opt_state, {"input_ids": ids})

The gradient is that of a sum over tokens, divided by how many tokens of the whole batch have a target; so microbatches,
packed documents and padding change nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..functional import tree
from ..functional.loss import IGNORE
from ..functional.shapes import check_positive
from . import optimizers
from .optimizers import Optimizer, OptState
from .train_batch import read_batch, split
from .train_layers import TrainingLayers, computed

__all__ = ["TrainStep", "next_token", "train_step"]

Metrics = dict[str, Tensor]
# params, cfg, batch, forward -> a sum over tokens, and if it likes further sums by name
Loss = Callable[[F.Decoder, F.DecoderConfig, Mapping[str, Any], Callable[..., Any]], Any]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def next_token(
    params: F.Decoder, cfg: F.DecoderConfig, batch: Mapping[str, Any], forward: Callable[..., Any]
) -> Tensor:
    """The sum of the losses of the next tokens, without the logits of all of them at once."""
    total: Tensor = forward(F.next_token_loss, params, batch["input_ids"], cfg, batch["targets"])[0]
    return total


def train_step(
    cfg: F.DecoderConfig,
    optimizer: Optimizer,
    loss: Loss = next_token,
    *,
    dtype: torch.dtype | None = None,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    checkpoint: bool = False,
    donate: bool = True,
    compile: bool = True,
) -> TrainStep:
    """A function `(params, opt_state, batch) -> (params, opt_state, metrics)`; see `TrainStep`.

    optimizer: makes an optimiser of torch of (path, leaf) pairs: `functools.partial(torch.optim.AdamW, lr=1e-3)`, or a
    function that makes groups of them by their paths. Its rule is torch's, and its state a value (`optimizers`). It
    sees leaves: of a tensor that a family fuses, each part by itself.
    loss: `(params, cfg, batch, forward)` -> a sum over the tokens it is given, or that and a dict of further sums; the
    step divides each by the tokens of the whole batch that have a target. `forward(fn, params, tokens, cfg, ...)` calls
    `F.decoder`, `F.backbone` or `F.next_token_loss` with the positions and documents of the batch, layers compiled.
    dtype: what layers compute in, as a program of that dtype does, where the parameters keep theirs: bf16 over fp32.
    microbatches: so many equal parts of the rows one after another, whose gradients add up. max_grad_norm: gradients
    with a larger norm, over all leaves, are scaled to it. checkpoint: what layers compute in forward is not kept, and
    computed again in backward, a layer at a time.
    donate: leaves and optimiser state are stepped in place, and the trees that come back hold the very tensors that
    were given: whatever else reads them, a program or a module, reads the new values, and no second copy exists. False
    leaves the arguments as they are, and returns others.
    compile: False runs the same functions eagerly; so does a machine without a compiler, with a warning.
    Raises `ValueError` and `TypeError`, naming the argument, before any work.
    """
    if not isinstance(cfg, F.DecoderConfig):
        fix = "\n    fix: model.config" if hasattr(cfg, "config") else ""
        raise TypeError(f"train_step(cfg=...): a DecoderConfig is needed, not {type(cfg).__name__}{fix}")
    check_positive("train_step", microbatches=microbatches)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"train_step(max_grad_norm={max_grad_norm}): must be above 0\n    fix: leave it out")
    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise ValueError(f"train_step(dtype={dtype}): layers cannot compute in it\n    known: {known}")
    try:
        inspect.signature(loss).bind("params", "cfg", "batch", "forward")
    except TypeError as error:
        raise TypeError(
            f"train_step(loss=...): it is called as loss(params, cfg, batch, forward), and this cannot be: {error}\n"
            "    fix: def loss(params, cfg, batch, forward): ..."
        ) from error
    return TrainStep(
        cfg,
        optimizer,
        loss,
        TrainingLayers(dtype, again=checkpoint, compiled=compile),
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
        donate=donate,
    )


class TrainStep:
    """What `train_step` returns: a function, and `init`, which makes its first state. It holds compiled code alone.

    A leaf is trained if it requires a gradient; one tensor at two places is one, with the sum of both gradients.
    """

    def __init__(
        self,
        cfg: F.DecoderConfig,
        optimizer: Optimizer,
        loss: Loss,
        layers: TrainingLayers,
        *,
        microbatches: int,
        max_grad_norm: float | None,
        donate: bool,
    ) -> None:
        self.cfg, self._optimizer, self._loss, self._layers = cfg, optimizer, loss, layers
        self._microbatches, self._max_grad_norm, self._donate = microbatches, max_grad_norm, donate
        self._wanted = F.Decoder.abstract(cfg)

    @property
    def compiles(self) -> int:
        """How often a layer was compiled: once for each kind of layer and each shape of a batch."""
        return self._layers.compiles

    def init(self, params: F.Decoder) -> OptState:
        """The optimiser's state before the first step, by the paths of the leaves that it trains.

        Raises `TreeError` for other parameters than the config's, `ValueError` where no leaf requires a gradient.
        """
        _, trained = self._aliased(params)
        return optimizers.state_of(optimizers.made(self._optimizer, trained), trained)

    def __call__(
        self, params: F.Decoder, opt_state: OptState, batch: Mapping[str, Any]
    ) -> tuple[F.Decoder, OptState, Metrics]:
        """params, opt_state, batch -> the first two after a step, and its metrics.

        batch: input_ids `B S`, and what there is of labels `B S`, those of the tokens themselves as in transformers
        (-100 is left out), or loss_mask `B S`, which tokens are to be predicted; positions `B|1 S` (-1: padding), or
        attention_mask `B S`; segment_ids `B S`, the document of each token, whose positions begin anew unless given.
        What else is in it goes to a loss of your own, with targets `B S`, the label of the token after each; without
        one, which would read it, it is refused.
        metrics: loss, grad_norm (before it is clipped), tokens (those with a target), and what the loss says: scalars
        on the device, which nothing waits for.
        Raises `ValueError` and `TypeError` before any work.
        """
        alias, trained = self._aliased(params)
        read = read_batch(batch, params.embed.device, more=self._loss is not next_token)
        parts = list(split(read, self._microbatches))
        optimizer = optimizers.made(self._optimizer, trained, opt_state)
        if not self._donate:
            params = _apart(params)
            alias, trained = self._aliased(params)
            optimizer = optimizers.made(self._optimizer, trained, optimizers.copied(opt_state))
        tokens = (read["targets"] != IGNORE).sum()
        # What is ambient has no part in a step.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(params.embed.device.type, enabled=False),
        ):
            share = 1 / tokens.clamp_min(1).to(torch.promote_types(params.embed.dtype, torch.float32))
            grads, sums = self._gradients(alias, list(trained.values()), parts, share)
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm(grads)
            if self._max_grad_norm is not None:
                torch._foreach_mul_(grads, (self._max_grad_norm / (norm + 1e-6)).clamp_max(1.0))
            state = optimizers.step(optimizer, trained, grads)
        return params, state, {**sums, "grad_norm": norm, "tokens": tokens}

    def _aliased(self, params: F.Decoder) -> tuple[F.Decoder, dict[str, Tensor]]:
        """The parameters as leaves of autograd on the same memory, whatever they were computed from, and those of them
        that are trained, each once, by path."""
        tree.check(params, self._wanted)
        if params.embed.is_meta:
            raise ValueError("train_step: the parameters are abstract\n    fix: load without abstract=True")
        new: list[Tensor] = []
        trained: dict[str, Tensor] = {}
        seen: dict[Any, Tensor] = {}
        for path, leaf in tree.paths(params).items():
            alias = leaf.detach()
            if leaf.requires_grad:
                lies = (leaf.data_ptr(), leaf.shape, leaf.stride())
                if lies not in seen:
                    seen[lies] = trained[path] = alias.requires_grad_()
                alias = seen[lies]
            new.append(alias)
        if not trained:
            raise ValueError(
                "train_step: no leaf requires a gradient\n"
                "    fix: params = F.tree.map(lambda leaf: leaf.requires_grad_(), params)"
            )
        return tree.unflatten(tree.structure(params), new), trained

    def _gradients(
        self, params: F.Decoder, leaves: list[Tensor], parts: list[dict[str, Any]], share: Tensor
    ) -> tuple[list[Tensor], Metrics]:
        """The gradient of the losses of all parts, and these, each times a token's share in the whole."""
        grads: list[Tensor] = []
        sums: Metrics = {}
        for part in parts:
            given = {"positions": part["positions"], "segment_ids": part["segment_ids"], "layer": self._layers}
            found = self._loss(params, self.cfg, part, _Forward(given, self._layers.dtype))
            total, others = found if isinstance(found, tuple) else (found, {})
            _check_loss(total, others)
            # Divided before and not after: a sum may be beyond half precision where the mean is not.
            new = torch.autograd.grad(total, leaves, share.to(total.dtype), materialize_grads=True)
            if grads:
                torch._foreach_add_(grads, new)
            else:
                grads = _own(new)
            for name, value in {"loss": total, **others}.items():
                mean = value.detach() * share
                sums[name] = sums[name] + mean if name in sums else mean
        return grads, sums


class _Forward:
    """What a loss calls functions of `functional` by."""

    def __init__(self, given: dict[str, Any], dtype: torch.dtype | None) -> None:
        self._given, self._dtype = given, dtype

    def __call__(self, fn: Callable[..., Any], params: F.Decoder, *args: Any, **options: Any) -> Any:
        # Layers are converted in their graphs.
        top = computed(dataclasses.replace(params, layers=()), self._dtype)
        return fn(dataclasses.replace(top, layers=params.layers), *args, **{**self._given, **options})


def _own(grads: Iterable[Tensor]) -> list[Tensor]:
    """To be written to: autograd may return one tensor for two leaves, or one number for many of a leaf."""
    found: list[Tensor] = []
    seen = set[int]()
    for grad in grads:
        lies = grad.untyped_storage().data_ptr()
        found.append(grad.clone() if lies in seen or 0 in grad.stride() else grad)
        seen.add(lies)
    return found


def _apart(params: F.Decoder) -> F.Decoder:
    """The tree with memory of its own; one tensor at two places stays one."""
    new = {id(leaf): leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in tree.leaves(params)}
    return tree.map(lambda leaf: new[id(leaf)], params)


def _check_loss(total: Any, others: Any) -> None:
    if not isinstance(total, Tensor) or total.dim() or not total.requires_grad:
        found = f"a tensor of {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        what = "one without a gradient" if isinstance(total, Tensor) and not total.dim() else found
        raise TypeError(
            f"train_step(loss=...): it returned {what}; a sum over tokens is needed, a scalar that depends on params, "
            "or that and a dict of scalars"
        )
    wrong = sorted({"grad_norm", "tokens", "loss"} & set(others))
    wrong += [name for name, value in others.items() if not isinstance(value, Tensor) or value.dim()]
    if wrong:
        raise TypeError(
            f'train_step(loss=...): its "{wrong[0]}" is no scalar tensor, or a name that the step has for itself'
        )
