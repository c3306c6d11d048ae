"""Gated delta nets over ranks, by a layout of one's own: tokens become heads in front of the convolution."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

BY_HEADS = {name: f"B S/u {dims} -> B S {dims.replace('K', 'K/u')}" for name, dims in {
    "q": "K E", "k": "K E", "v": "(K G) V", "b": "(K G)", "a": "(K G) Y",
}.items()}  # fmt: skip
PARAMETERS = {name: f"{dims} -> {dims.replace('K', 'K/u')}" for name, dims in {
    "q_conv": "(K E) I W", "k_conv": "(K E) I W", "v_conv": "((K G) V) I W", "a_log": "(K G)", "dt_bias": "((K G) Y)",
}.items()}  # fmt: skip
LAYOUT = sh.Layout("tokens to heads", {
    **BY_HEADS, **PARAMETERS, "x": "B S/u D", "out": "B S/u D", "o": "B S (K/u G) V -> B S/u (K G) V",
    "q_positions": "B S/u -> B S", "q_segment_ids": "B S/u -> B S", "k_positions": "B T", "k_segment_ids": "B T",
})  # fmt: skip
SIZES = {"hidden_size": 7, "key_head_dim": 3, "value_head_dim": 4}
CONFIGS = {
    "interleaved": F.GDNConfig(num_key_heads=3, num_value_heads=6, interleaved=True, **SIZES),
    "by channel": F.GDNConfig(num_key_heads=3, num_value_heads=3, channel_decay=True, decay_rank=2, **SIZES),
}
S = 9
POSITIONS = torch.arange(S).expand(2, S).clone()
POSITIONS[1, 5:] = -1
TOLD = {
    "all": {},
    "padded": {"positions": POSITIONS},
    "packed": {"segment_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2], [0] * 8 + [1]])},
}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_a_layout_of_ones_own_is_the_layer(cfg, told):
    """Outputs and every gradient; three heads and nine tokens over two ranks."""
    params = F.tree.map(lambda p: p.detach().double().requires_grad_(), F.GDN.init(cfg, 0))
    x = torch.randn(2, S, 7, dtype=torch.float64, requires_grad=True)
    mesh = sh.Mesh(u=2)
    found = sh.simulate(sh.shard(F.gdn, LAYOUT, mesh, S=S), mesh)(params, x, cfg, **told)[0]
    wanted = F.gdn(params, x, cfg, **told)[0]
    there = told.get("positions", torch.zeros(2, S)) >= 0
    torch.testing.assert_close(found[there], wanted[there], rtol=1e-12, atol=1e-12)
    leaves, grad = [x, *F.tree.leaves(params)], torch.randn_like(wanted) * there[..., None]
    for a, b in zip(*(torch.autograd.grad(each, leaves, grad) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
