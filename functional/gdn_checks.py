"""What a gated delta net checks before any work: shapes of arguments and parameters, and what a cache holds.

Letters as in `gdn`.
"""

from __future__ import annotations

from torch import Tensor

from .cache import GDNCache
from .core import wide
from .gdn_config import GDN, GDNConfig
from .shapes import ShapeError, check_positions, check_shapes
from .wire import Heads

__all__ = ["check", "check_cache"]


def check(
    params: GDN, x: Tensor, cfg: GDNConfig, positions: Tensor | None, segment_ids: Tensor | None, cache: GDNCache | None
) -> dict[str, int]:
    """Raise for arguments of `gdn` that do not fit each other -> the sizes of letters. Heads are the rank's own, as its
    weights have them."""
    if cache is not None and not isinstance(cache, GDNCache):
        raise TypeError(
            f"gdn(cache=...): a GDNCache is needed, not {type(cache).__name__}, of another kind of layer\n"
            "    fix: empty_caches(configs, ...) makes one a layer"
        )
    widths = {letter: n for letter, n in cfg.sizes.items() if letter not in "HK"}
    sizes = check_shapes(
        "gdn",
        widths,
        x=(x, "B S D"),
        positions=(positions, "B? S"),
        segment_ids=(segment_ids, "B S"),
        qkvz=(params.qkvz, "(K M) D"),
        ba=(params.ba, "(K J) D"),
        q=(params.q, "(K E) D"),
        k=(params.k, "(K E) D"),
        v=(params.v, "(H V) D"),
        z=(params.z, "(H V) D"),
        z_down=(params.z_down, "L D"),
        z_up=(params.z_up, "(H V) L"),
        b=(params.b, "H D"),
        a=(params.a, "(H Y) D"),
        a_down=(params.a_down, "Q D"),
        a_up=(params.a_up, "(H Y) Q"),
        a_log=(params.a_log, "H"),
        dt_bias=(params.dt_bias, "(H Y)"),
        q_conv=(params.q_conv, "(K E) I W"),
        k_conv=(params.k_conv, "(K E) I W"),
        v_conv=(params.v_conv, "(H V) I W"),
        o_norm=(params.o_norm, "V"),
        o=(params.o, "D (H V)"),
    )
    check_positions("gdn", positions)
    if cache is not None and segment_ids is not None:
        raise ValueError("gdn: segment_ids with a cache\n    fix: give each document a row of the cache")
    return sizes


def check_cache(params: GDN, x: Tensor, cfg: GDNConfig, cache: GDNCache, local: Heads) -> None:
    """Raise for a cache that does not fit. local: the heads that it has under a layout."""
    widths = {letter: n for letter, n in cfg.sizes.items() if letter not in "HK"}
    if local.local is None or local.groups is None:
        heads, q_conv, v_conv = params.a_log.shape[0], params.q_conv, params.v_conv
    else:
        heads, q_conv, v_conv = local.local, None, None
        widths |= {"K": local.groups, "H": heads}
    turned, wanted = cache.state.mT.shape[1:], (heads, cfg.value_head_dim, cfg.key_head_dim)
    if turned == wanted != cache.state.shape[1:]:
        raise ShapeError(
            f"gdn(cache=...): its state is key-major, H E V = {' '.join(map(str, cache.state.shape[1:]))}, and "
            f"value-major is needed, H V E = {' '.join(map(str, wanted))}\n"
            "    fix: dataclasses.replace(cache, state=cache.state.mT)"
        )
    check_shapes(
        "gdn",
        widths,
        x=(x, "B S D"),
        q_conv=(q_conv, "(K E) I W"),
        v_conv=(v_conv, "(H V) I W"),
        cache_q=(cache.q, "B (K E) U"),
        cache_k=(cache.k, "B (K E) U"),
        cache_v=(cache.v, "B (H V) U"),
        cache_state=(cache.state, "B H V E"),
    )
    for name in ("q", "k", "v", "state"):
        leaf, dtype = getattr(cache, name), wide(x).dtype if name == "state" else x.dtype
        if leaf.dtype != dtype:
            raise TypeError(
                f"gdn(cache=...): its {name} is in {leaf.dtype}, and for x in {x.dtype} it is in {dtype}\n"
                f"    fix: empty_caches(..., dtype={x.dtype})"
            )
