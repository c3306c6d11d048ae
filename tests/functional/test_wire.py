from __future__ import annotations

from typing import Any

import pytest
import torch
from meshfn import functional as F
from meshfn.functional.attention import project_qkv
from meshfn.functional.wire import Heads, edges_of, identity
from torch import Tensor

from ..tiny import llama, ours


class Counting:
    """A wire that notes each edge with its scope, its call and its shape, and moves nothing."""

    heads = Heads()

    def __init__(self, log: list[tuple[str, str, Any]], scope: str = "") -> None:
        self.log, self.prefix = log, scope

    def _note(self, call: str, named: dict[str, Tensor | None]) -> None:
        self.log += [(call, self.prefix + n, None if t is None else tuple(t.shape)) for n, t in named.items()]

    def send(self, **named: Tensor | None) -> Any:
        self._note("send", named)
        return identity.send(**named)

    def receive(self, sent: Any = None, **named: Tensor | None) -> tuple[Any, ...]:
        self._note("receive", named)
        return identity.receive(sent, **named)

    def pass_(self, **named: Tensor | None) -> Any:
        self._note("pass", named)
        return identity.pass_(**named)

    def scope(self, name: str) -> Counting:
        return Counting(self.log, f"{self.prefix}{name}.")


def test_every_edge_passes_with_the_shape_it_declares():
    model = ours(llama(layers=2))
    tokens = torch.randint(0, 97, (2, 5))
    log: list[tuple[str, str, Any]] = []
    plain, _ = F.decoder(model.params, tokens, model.config)
    wired, _ = F.decoder(model.params, tokens, model.config, wire=Counting(log))
    assert torch.equal(plain, wired)
    one_layer = [
        ("pass", "layers.attention.x", (2, 5, 48)),
        ("send", "layers.attention.k", (2, 5, 2, 8)),
        ("send", "layers.attention.v", (2, 5, 2, 8)),
        ("send", "layers.attention.k_positions", (1, 5)),
        ("send", "layers.attention.k_segment_ids", None),
        ("receive", "layers.attention.q", (2, 5, 6, 8)),
        ("receive", "layers.attention.q_positions", (1, 5)),
        ("receive", "layers.attention.q_segment_ids", None),
        ("receive", "layers.attention.sinks", None),
        ("pass", "layers.attention.o", (2, 5, 6, 8)),
        ("pass", "layers.attention.out", (2, 5, 48)),
        ("pass", "layers.mlp.x", (2, 5, 48)),
        ("pass", "layers.mlp.h", (2, 5, 40)),
        ("pass", "layers.mlp.out", (2, 5, 48)),
    ]
    assert log == [("pass", "tokens", (2, 5)), *one_layer, *one_layer, ("pass", "logits", (2, 5, 97))]
    declared = edges_of(F.decoder)
    assert {name for _, name, _ in log} == set(declared)
    sizes = {"B": 2, "S": 5, "T": 5, "D": 48, "K": 2, "G": 3, "E": 8, "V": 8, "F": 40, "Z": 97}
    for _, name, shape in log:
        if shape is not None and "positions" not in name:
            assert F.shapes.shape_of(declared[name], sizes) == shape


def test_sinks_are_an_edge_and_per_head_parameters_can_be_cut():
    """A wire that keeps the first key/value head computes the first heads of the whole."""
    cfg = F.AttentionConfig(hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4, sinks=True)
    params = F.Attention.init(cfg, 0, dtype=torch.float64)
    params = F.tree.replace(params, {".sinks": torch.randn(6, dtype=torch.float64)})
    x, positions = torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5)[None]
    seen = []

    class FirstHead(Counting):
        def receive(self, sent: Any = None, **named: Any) -> tuple[Any, ...]:
            q, q_positions, q_ids, sinks, k, v, *rest = super().receive(sent, **named)
            return (q[:, :, :3], q_positions, q_ids, sinks[:3], k[:, :, :1], v[:, :, :1], *rest)

        def pass_(self, **named: Any) -> Any:
            seen.append(named)
            if "o" in named:
                return torch.nn.functional.pad(named["o"], (0, 0, 0, 3))
            return super().pass_(**named)

    F.attention(params, x, cfg, positions=positions, wire=FirstHead([]))
    (part,) = [n["o"] for n in seen if "o" in n]
    q, k, v = project_qkv(params, x, cfg)
    whole = F.dot_product_attention(q, k, v, causal=True, sinks=params.sinks)
    torch.testing.assert_close(part, whole[:, :, :3])


def test_a_function_without_edges_is_refused():
    with pytest.raises(ValueError, match="declares no edges"):
        edges_of(F.rms_norm)
