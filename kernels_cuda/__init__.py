"""CUDA kernels as opaque ops: the text of each beside the Python that declares it. Importing this needs no GPU, no
driver and no compiler.

`KERNELS` says which primitive of `functional` each serves, and with what rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import (
    add_rms_norm,
    decode_attention,
    gdn_decode,
    gemv,
    mla_decode,
    one_product,
    peers,
    qkv_rope_cache,
    sample_advance,
    sample_options,
)
from .compiler import ARCHITECTURES, CompileError, Cubin, compile_kernel, missing
from .launch import Launch
from .ops import OPS, Op

__all__ = [
    "ARCHITECTURES",
    "KERNELS",
    "OPS",
    "CompileError",
    "Cubin",
    "Launch",
    "Op",
    "Serves",
    "compile_kernel",
    "missing",
    "peers",
    "sample_options",
]


@dataclass(frozen=True)
class Serves:
    """kernel: its name in plans. primitive: what it computes. op: with the primitive's arguments. supports: of the
    primitive's arguments, by name, and an architecture: None, or the reason why not. in_place: as of
    `programs.Kernel`."""

    kernel: str
    primitive: str
    op: Callable[..., Any]
    supports: Callable[[Mapping[str, Any], str | None], str | None]
    in_place: tuple[str, ...] = ()


KERNELS = (
    Serves("gemv", "norm_linear", gemv.norm_linear, gemv.supports),
    Serves("gemv", "gated_mlp", gemv.gated_mlp, gemv.supports),
    Serves("gemv", "plain_mlp", gemv.plain_mlp, gemv.supports),
    Serves("gemv", "linear_add", gemv.linear_add, gemv.supports),
    Serves("one_product", "norm_linear", one_product.norm_linear, one_product.supports),
    Serves("add_rms_norm", "add_norm", add_rms_norm.add_norm, add_rms_norm.supports),
    Serves("gdn_decode", "gdn_step", gdn_decode.gdn_step, gdn_decode.supports, gdn_decode.STATES),
    Serves("decode_attention", "decode_attention", decode_attention.decode_attention, decode_attention.supports),
    Serves("qkv_rope_cache", "qkv_rope_cache", qkv_rope_cache.fused_qkv_rope_cache, qkv_rope_cache.supports),
    Serves("mla_decode", "absorbed_core", mla_decode.absorbed_core, mla_decode.supports),
    Serves("sample_advance", "sample_advance", sample_advance.sample_advance, sample_advance.supports),
)
