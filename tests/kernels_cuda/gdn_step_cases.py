"""Arguments of a step of a gated delta net, and its kernel carried out on the CPU."""

from __future__ import annotations

import math

import torch
from meshfn.kernels_cuda import OPS, gdn_decode

from .harness import Host

KERNEL = OPS["gdn_decode"]
STATES = gdn_decode.STATES


def case(B=3, K=2, G=2, E=6, V=5, W=4, dtype=torch.float32, by_channel=False, positions=(5, 9, 1)):
    """Arguments by name: q, k, v and z are views of one packed projection, as `gemv` returns it."""
    H = K * G
    widths = {"q": (K, E), "k": (K, E), "v": (H, V), "z": (H, V), "b": (H,), "a": (H, E) if by_channel else (H,)}
    packed = torch.randn(B, 1, sum(map(math.prod, widths.values()))).to(dtype)
    parts = packed.split(list(map(math.prod, widths.values())), -1)
    found = {name: part.unflatten(-1, shape) for part, (name, shape) in zip(parts, widths.items(), strict=True)}
    for name, shape in {"q_conv": (K * E, 1, W), "k_conv": (K * E, 1, W), "v_conv": (H * V, 1, W)}.items():
        found[name] = torch.randn(shape).to(dtype)
    found |= {"a_log": torch.randn(H), "dt_bias": torch.randn(H * (E if by_channel else 1))}
    found["o_norm"] = torch.randn(V).to(dtype)
    for name, width in {"cache_q": K * E, "cache_k": K * E, "cache_v": H * V}.items():
        found[name] = torch.randn(B, width, W - 1).to(dtype)
    found["cache_state"] = torch.randn(B, H, V, E)
    return found | {"positions": torch.tensor(positions[:B] + (7,) * (B - len(positions)))[:, None]}


def wide(given):
    return {name: x.double() if x.is_floating_point() else x for name, x in given.items()}


def run(given, host=None, **options):
    """The kernel on copies of the states: o, and the four."""
    given = given | {name: given[name].clone() for name in STATES}
    o = KERNEL.run(host or Host(), **given, **options)
    return o, *(given[name] for name in STATES)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
