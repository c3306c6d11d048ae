"""Gated delta nets of odd sizes: transformers' modules, ours on the same tensors, and the formula by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as tnf
from meshfn import functional as F
from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

DELTA = {
    "channel_decay": True,
    "decay_rank": 5,
    "gate_rank": 5,
    "gate_act": "sigmoid",
    "gated_norm": F.NormConfig(eps=1e-5, scale_in_fp32=True),
}
# What sets the layers of each family apart.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_next": {"interleaved": True},
    "olmo_hybrid": {"allow_neg_eigval": True, "gated_norm": F.NormConfig(eps=1e-5)},
    "kimi_linear": DELTA,
}
MODULES: dict[str, Any] = {
    "qwen3_5": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig),
    "qwen3_next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig),
    "olmo_hybrid": (OlmoHybridGatedDeltaNet, OlmoHybridConfig),
    "kimi_linear": (KimiLinearDeltaAttention, KimiLinearConfig),
}


def config(kind: str = "qwen3_5", K: int = 2, G: int = 2, E: int = 6, V: int = 5, **more: Any) -> F.GDNConfig:
    sizes = {"num_key_heads": K, "num_value_heads": K * G, "key_head_dim": E, "value_head_dim": V}
    return F.GDNConfig(hidden_size=11, initializer_range=0.5, **sizes, **KINDS[kind] | more)


def weights(cfg: F.GDNConfig, dtype: torch.dtype = torch.float64) -> F.GDN:
    """Leaves that need a gradient, each with entries of its own."""
    return F.tree.map(lambda p: (p + 0.3 * torch.randn_like(p)).requires_grad_(), F.GDN.init(cfg, 0, dtype=dtype))


def given(B: int = 2, S: int = 9, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x `B S D`, not contiguous."""
    return torch.randn(11, S, B, dtype=dtype).permute(2, 1, 0).requires_grad_()


def settings(kind: str, K: int = 2, G: int = 2, E: int = 6, V: int = 5) -> Any:
    """transformers' config, of a layer of each sort, since Olmo's wants both. Kimi's has one count and one width."""
    if kind == "kimi_linear":
        sizes: dict[str, Any] = {"linear_num_heads": K, "linear_head_dim": E}
    else:
        sizes = {"linear_num_key_heads": K, "linear_num_value_heads": K * G}
        sizes |= {"linear_key_head_dim": E, "linear_value_head_dim": V}
    types = ["linear_attention", "full_attention"]
    return MODULES[kind][1](hidden_size=11, num_hidden_layers=2, layer_types=types, **sizes)


def module(kind: str, K: int = 2, G: int = 2, E: int = 6, V: int = 5) -> tuple[Any, F.GDN, F.GDNConfig]:
    """transformers' layer with random weights, and ours on the same tensors."""
    theirs = MODULES[kind][0](settings(kind, K, G, E, V), 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 2 else 0.5))
    if kind == "kimi_linear":
        return theirs, read(theirs), config(kind, K, 1, E, E, decay_rank=E, gate_rank=E)
    return theirs, read(theirs), config(kind, K, G, E, V)


def read(theirs: Any) -> F.GDN:
    """The module's own tensors, and views of those that hold several of ours."""
    widths = [theirs.qkv_dim] * 3 if hasattr(theirs, "qkv_dim") else [theirs.key_dim, theirs.key_dim, theirs.value_dim]
    found = dict(theirs.named_parameters())
    leaves = dict(zip(("q_conv", "k_conv", "v_conv"), found.pop("conv1d.weight").split(widths), strict=True))
    if "in_proj_qkv.weight" in found:
        leaves |= zip("qkv", found.pop("in_proj_qkv.weight").split(widths), strict=True)
    names = {
        "in_proj_qkvz": "qkvz", "in_proj_ba": "ba", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a",
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "a_proj": "a", "b_proj": "b", "g_proj": "z", "g_a_proj": "z_down",
        "g_b_proj": "z_up", "f_a_proj": "a_down", "f_b_proj": "a_up", "A_log": "a_log", "dt_bias": "dt_bias",
        "norm": "o_norm", "o_norm": "o_norm", "out_proj": "o", "o_proj": "o",
    }  # fmt: skip
    for name, parameter in found.items():
        leaves[names[name.removeprefix("forget_gate.").removesuffix(".weight")]] = parameter
    leaves["a_log"] = leaves["a_log"].flatten()  # Kimi's is 1 1 H 1
    return F.GDN(**leaves)


def formula(params: F.GDN, x: torch.Tensor, cfg: F.GDNConfig) -> torch.Tensor:
    """The layer by its definition, token by token and with states that are key-major, without a norm in front:
    x `B S D` -> `B S D`."""
    (B, S, _), K, H = x.shape, cfg.num_key_heads, cfg.num_value_heads
    G, E, V, W = H // K, cfg.key_head_dim, cfg.value_head_dim, cfg.conv_kernel_dim
    if cfg.interleaved:
        q, k, v, z = params.qkvz.unflatten(0, (K, -1)).split((E, E, G * V, G * V), 1)
        b, a = params.ba.unflatten(0, (K, -1)).split((G, G), 1)
        q, k, v, z, b, a = (w.flatten(0, 1) for w in (q, k, v, z, b, a))
    else:
        q, k, v, b = params.q, params.k, params.v, params.b
        z = params.z if cfg.gate_rank is None else params.z_up @ params.z_down
        a = params.a if cfg.decay_rank is None else params.a_up @ params.a_down

    def conv(weight, taps, width):
        windows = tnf.pad(x @ weight.T, (0, 0, W - 1, 0)).unfold(1, W, 1) if S else x.new_zeros(B, 0, len(weight), W)
        mixed = (windows * taps[:, 0]).sum(-1)
        return (mixed * mixed.sigmoid()).unflatten(-1, (-1, width))

    def unit(t):
        return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q = unit(conv(q, params.q_conv, E)).repeat_interleave(G, 2)
    k = unit(conv(k, params.k_conv, E)).repeat_interleave(G, 2)
    v = conv(v, params.v_conv, V)
    beta = 1 / (1 + (-x @ b.T).exp()) * (2 if cfg.allow_neg_eigval else 1)
    rate = (1 + (x @ a.T + params.dt_bias).exp()).log().unflatten(-1, (H, -1))
    decay = (-params.a_log.exp()[:, None] * rate).exp()  # B S H 1|E
    state, outputs = x.new_zeros(B, H, E, V), []
    for s in range(S):
        key, decayed = k[:, s, :, :, None], decay[:, s, :, :, None] * state
        # (1 - beta k k^T) diag(decay) S + beta k v^T
        state = decayed + beta[:, s, :, None, None] * key * (v[:, s, :, None] - key.mT @ decayed)
        outputs.append((q[:, s, :, None] @ state)[:, :, 0] / E**0.5)
    o = torch.stack(outputs, 1) if outputs else v
    gate = (x @ z.T).unflatten(-1, (H, V))
    gate = gate.sigmoid() if cfg.gate_act == "sigmoid" else gate * gate.sigmoid()
    o = o / (o.square().mean(-1, keepdim=True) + cfg.gated_norm.eps).sqrt() * params.o_norm * gate
    return o.flatten(2) @ params.o.T


def total(out: torch.Tensor, cache: F.GDNCache | None = None) -> torch.Tensor:
    """A number that every output takes part in, each by itself, and every state."""
    found = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    return found if cache is None else found + sum(leaf.square().sum() for leaf in F.tree.leaves(cache))


def gradients(number: torch.Tensor, params: F.GDN, *more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every leaf, by its path, and of what else there is."""
    leaves = F.tree.paths(params) | {f"argument {i}": t for i, t in enumerate(more)}
    found = torch.autograd.grad(number, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def close(found: Any, wanted: Any, tolerance: float) -> None:
    """Trees, mappings or tensors."""
    assert F.tree.paths(found).keys() == F.tree.paths(wanted).keys()
    for (path, a), b in zip(F.tree.paths(found).items(), F.tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}")


def zeros(cfg: F.GDNConfig, batch: int = 2, dtype: torch.dtype = torch.float64) -> F.GDNCache:
    (cache,) = F.empty_caches([cfg], batch, 1, dtype=dtype)
    assert isinstance(cache, F.GDNCache)
    return cache


def rows(cache: F.GDNCache, *which: int) -> F.GDNCache:
    return F.tree.map(lambda leaf: leaf[list(which)], cache)
