"""What `mla` and its stages are given, checked before any work. Letters as in `mla`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .cache import LatentCache
from .mla_config import MLA, MLAConfig
from .shapes import ShapeError, check_positions, check_shapes

__all__ = ["check_call", "check_latents", "check_range"]


def check_call(
    params: MLA,
    x: Tensor,
    cfg: MLAConfig,
    *,
    positions: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    cache: LatentCache | None,
) -> None:
    """The arguments of `mla`. Heads are the rank's own, as its weights have them."""
    if cache is not None and not isinstance(cache, LatentCache):
        raise TypeError(
            f"mla(cache=...): a LatentCache is needed, not {type(cache).__name__}, of another kind of layer\n"
            "    fix: empty_caches(configs, ...) makes one a layer"
        )
    widths = {letter: n for letter, n in cfg.sizes.items() if letter != "H"}
    sizes = check_shapes(
        "mla",
        widths,
        x=(x, "B S D"),
        positions=(positions, "B? S"),
        q=(params.q, "(H E) D"),
        q_a=(params.q_a, "Q D"),
        q_b=(params.q_b, "(H E) Q"),
        kv_a=(params.kv_a, "LR D"),
        kv_b=(params.kv_b, "(H NV) L"),
        gate=(params.gate, "(H V) D"),
        o=(params.o, "D (H V)"),
        q_norm=(params.q_norm, "Q"),
        kv_norm=(params.kv_norm, "L"),
        q_a_bias=(params.q_a_bias, "Q"),
        kv_a_bias=(params.kv_a_bias, "LR"),
        o_bias=(params.o_bias, "D"),
        segment_ids=(segment_ids, "B S"),
        cache=(None if cache is None else cache.latent, "B T LR"),
    )
    check_positions("mla", positions)
    if cache is not None:
        if cache.latent.dtype != x.dtype:
            raise TypeError(f"mla(cache=...): its dtype is {cache.latent.dtype}, that of x {x.dtype}")
        if segment_ids is not None:
            raise ValueError("mla: segment_ids with a cache\n    fix: give each document a row of the cache")
    _check_mask(mask, segment_ids, x, sizes, cached=cache is not None)
    if rope is not None:
        _check_tables(rope, x, cfg)


def _check_mask(
    mask: Tensor | None, segment_ids: Tensor | None, x: Tensor, sizes: Mapping[str, int], *, cached: bool
) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mla(mask=...): a boolean mask is needed, true where a query may see a key, not {mask.dtype}\n"
            "    fix: pass mask == 0 if it is additive"
        )
    if segment_ids is not None:
        raise ValueError(
            "mla: a mask together with segment_ids, which both say what a token sees\n"
            "    fix: mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])"
        )
    if mask.device != x.device:
        raise ValueError(f"mla(mask=...): it is on {mask.device}, x on {x.device}\n    fix: mask.to(x.device)")
    # With a cache there are as many keys as `read` says, and the core looks at it.
    keys = "T" if cached else "S"
    spec = f"S {keys}" if mask.dim() == 2 else f"B? H? S {keys}"
    check_shapes("mla", {"H": sizes["H"]}, x=(x, "B S D"), mask=(mask, spec))


def _check_tables(rope: tuple[Tensor, Tensor], x: Tensor, cfg: MLAConfig) -> None:
    if cfg.rope is None:
        raise ValueError("mla(rope=...): the config has rope=None, a layer without positions\n    fix: leave rope out")
    for name, table in zip(("cos", "sin"), rope, strict=True):
        half = cfg.qk_rope_head_dim // 2
        right = (table.dim(), *table.shape[1:]) == (3, x.shape[1], half) and table.shape[0] in (1, x.shape[0])
        if not right:
            whole = table.dim() == 3 and table.shape[-1] == 2 * half
            fix = (
                f"{name}[..., :{half}], each pair of channels once" if whole else "rope_tables(positions, cfg.rope, R)"
            )
            raise ShapeError(
                f"mla(rope=...): {name} must be B|1 S R/2 = {x.shape[0]}|1 {x.shape[1]} {half}, not "
                f"{' '.join(map(str, table.shape))}\n    fix: {fix}"
            )
        if table.requires_grad:
            raise ValueError(
                f"mla(rope=...): {name} requires a gradient, and tables are not trained\n    fix: {name}.detach()"
            )
        if table.device != x.device:
            raise ValueError(f"mla(rope=...): {name} is on {table.device}, x on {x.device}")


def check_latents(function: str, sizes: Mapping[str, int], **named: tuple[Tensor, str]) -> None:
    """Latents of one dtype, on one device, of the shapes that their letters say."""
    check_shapes(function, sizes, **named)
    (first, (one, _)), *others = named.items()
    for name, (other, _) in others:
        if other.dtype != one.dtype:
            raise TypeError(f"{function}({name}=...): its dtype is {other.dtype}, that of {first} {one.dtype}")
        if other.device != one.device:
            raise ValueError(f"{function}({name}=...): it is on {other.device}, {first} on {one.device}")


def check_range(function: str, heads: tuple[int, int] | range | None, weight: Tensor, width: int) -> slice:
    """The rows of a projection that a range of heads has, `width` a head."""
    if heads is None:
        return slice(None)
    pair = isinstance(heads, tuple) and len(heads) == 2 and all(type(n) is int for n in heads)
    if not pair and not (isinstance(heads, range) and heads.step == 1):
        raise TypeError(
            f"{function}(heads={heads!r}): a pair (first, end) or a range of neighbours is needed\n"
            "    fix: heads=(0, 2) for the first two"
        )
    first, end = (heads.start, heads.stop) if isinstance(heads, range) else heads
    count = weight.shape[0] // width
    if not 0 <= first < end <= count:
        raise ValueError(
            f"{function}(heads=({first}, {end})): outside the projection, which has {count} heads\n"
            f"    fix: 0 <= first < end <= {count}"
        )
    return slice(first * width, end * width)
