"""Packed rows of a batch, by `segment_ids`: each document as if it were alone, in the convolution, the rule, the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshfn import functional as F
from torch import Tensor

# Three packed rows of one length: documents of one token, shorter than a convolution, longer than a chunk.
ROWS = ((1, 2, 40, 26), (69,), (33, 3, 1, 32))
S = 69
IDS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) % 2 for row in ROWS])
K, G, E, V = 2, 2, 3, 4


def documents(x: Tensor) -> list[Tensor]:
    """x `B S ...` -> each document, `1 n ...`."""
    return [part[None] for row, lengths in zip(x, ROWS, strict=True) for part in row.split(lengths)]


def packed(parts: list[Tensor]) -> Tensor:
    found, rows = iter(parts), []
    for lengths in ROWS:
        rows.append(torch.cat([next(found) for _ in lengths], 1))
    return torch.cat(rows)


def tensors(by_channel: bool) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(len(ROWS), S, *shape, generator=made, dtype=torch.float64)

    g = -draw(K * G, E).square() if by_channel else -draw(K * G).square()
    q, k = F.l2norm(draw(K, E)), F.l2norm(draw(K, E))
    return [x.requires_grad_() for x in (q, k, draw(K * G, V), g, draw(K * G).sigmoid())]


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("rule", [F.gated_delta_rule_scan, F.gated_delta_rule_chunked], ids=["scan", "chunked"])
def test_the_rule(rule, by_channel):
    given = tensors(by_channel)
    alone = packed([F.gated_delta_rule_scan(*each)[0] for each in zip(*map(documents, given), strict=True)])
    o, state = rule(*given, segment_ids=IDS, output_final_state=True)
    torch.testing.assert_close(o, alone, rtol=1e-11, atol=1e-12)
    last = [tuple(x[i : i + 1, -row[-1] :] for x in given) for i, row in enumerate(ROWS)]
    states = [F.gated_delta_rule_scan(*each, output_final_state=True)[1] for each in last]
    torch.testing.assert_close(state, torch.cat(states), rtol=1e-11, atol=1e-12)
    grad = torch.randn_like(o)
    wanted, found = (torch.autograd.grad(y, given, grad) for y in (alone, o))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_an_initial_state_is_that_of_the_first_document():
    given = tensors(False)
    begin = torch.randn(len(ROWS), K * G, V, E, dtype=torch.float64)
    o, state = F.gated_delta_rule_chunked(*given, segment_ids=IDS, initial_state=begin, output_final_state=True)
    wanted, final = F.gated_delta_rule_scan(*given, segment_ids=IDS, initial_state=begin, output_final_state=True)
    torch.testing.assert_close(o, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-12)
    plain = F.gated_delta_rule_scan(*given, segment_ids=IDS)[0]
    changed = (wanted - plain).abs().amax((2, 3)) > 0
    assert changed[:, 0].all()
    assert not any(each[row[0] :].any() for each, row in zip(changed, ROWS, strict=True))


def test_the_convolution():
    x = torch.randn(len(ROWS), S, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    alone = [F.causal_conv(each, weight, bias, activation="silu", output_final_state=True) for each in documents(x)]
    y, state = F.causal_conv(x, weight, bias, activation="silu", segment_ids=IDS, output_final_state=True)
    torch.testing.assert_close(y, packed([each for each, _ in alone]), rtol=1e-12, atol=1e-12)
    ends = torch.tensor([len(row) for row in ROWS]).cumsum(0) - 1
    assert torch.equal(state, torch.cat([alone[i][1] for i in ends]))
    grad = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(packed([each for each, _ in alone]), x, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], wanted, rtol=1e-12, atol=1e-12)


CFG = F.GDNConfig(
    hidden_size=7, num_key_heads=K, num_value_heads=K * G, key_head_dim=E, value_head_dim=V, norm=F.NormConfig(),
    initializer_range=0.5,
)  # fmt: skip


@pytest.mark.parametrize("padded", [0, 5])
def test_the_layer_and_its_gradients(padded):
    params = F.tree.map(lambda p: p.double().requires_grad_(), F.GDN.init(CFG, 0))
    x = torch.randn(len(ROWS), S, 7, dtype=torch.float64, requires_grad=True)
    ids, told, wide = IDS, {}, x
    if padded:  # behind a row, whatever its ids are
        ids = torch.nn.functional.pad(IDS, (0, padded), value=7)
        wide = torch.nn.functional.pad(x, (0, 0, 0, padded), value=torch.nan)
        told = {"positions": torch.arange(S + padded).where(torch.arange(S + padded) < S, -1)[None]}
    y = F.gdn(params, wide, CFG, segment_ids=ids, **told)[0][:, :S]
    alone = packed([F.gdn(params, each, CFG)[0] for each in documents(x)])
    torch.testing.assert_close(y, alone, rtol=1e-11, atol=1e-12)
    grad, inputs = torch.randn_like(y), [x, *F.tree.leaves(params)]
    for a, b in zip(*(torch.autograd.grad(each, inputs, grad) for each in (y, alone)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_hybrid_decoder_compiled():
    attention = F.AttentionConfig(
        hidden_size=7, num_attention_heads=2, num_key_value_heads=1, head_dim=4, rope=F.RopeConfig()
    )
    mlp = F.MLPConfig(hidden_size=7, intermediate_size=9)
    layers = tuple(F.LayerConfig(attention=each, mlp=mlp) for each in (CFG, attention))
    cfg = F.DecoderConfig(vocab_size=11, hidden_size=7, layers=layers)
    params = F.tree.map(lambda p: p.double(), F.Decoder.init(cfg, 0))
    tokens = torch.randint(0, 11, (len(ROWS), S))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS])
    told: dict[str, Any] = {"positions": positions, "segment_ids": (positions == 0).cumsum(1)}
    run = torch.compile(lambda t: F.decoder(params, t, cfg, **told)[0], backend="aot_eager", fullgraph=True)
    alone = packed([F.decoder(params, each, cfg)[0] for each in documents(tokens)])
    torch.testing.assert_close(run(tokens), alone, rtol=1e-11, atol=1e-12)


def test_both_ways_to_say_documents_are_refused():
    x, ids = torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens says already which documents there are"):
        F.causal_conv(x, torch.zeros(2, 4), cu_seqlens=torch.tensor([0, 3]), segment_ids=ids)
    with pytest.raises(F.ShapeError, match="segment_ids"):
        F.causal_conv(x, torch.zeros(2, 4), segment_ids=ids[:, :2])
