"""Decoders with gated delta nets beside attention: training, ragged batches, caches of each kind."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F

from .gdn_cases import KINDS, close, config
from .latent_cases import tiny

NORM = F.NormConfig()
MLP = F.MLPConfig(hidden_size=11, intermediate_size=13, norm=NORM, initializer_range=0.3)
MOE = F.MoEConfig(
    hidden_size=11, moe_intermediate_size=7, num_experts=3, num_experts_per_tok=2, norm=NORM, initializer_range=0.3
)
HEADS = F.AttentionConfig(
    hidden_size=11, num_attention_heads=6, num_key_value_heads=2, head_dim=4, norm=NORM, rope=F.RopeConfig(),
    window=5, initializer_range=0.3,
)  # fmt: skip
LATENT = tiny(hidden_size=11, norm=NORM)


def model(kind):
    """Gated delta nets around attention over a window and around latent attention, with experts."""
    gdn = config(kind, 2, 3, norm=NORM)
    kinds = ((gdn, MLP), (HEADS, MLP), (gdn, MOE), (LATENT, MLP), (gdn, MLP))
    layers = tuple(F.LayerConfig(attention=attention, mlp=mlp) for attention, mlp in kinds)
    cfg = F.DecoderConfig(vocab_size=31, hidden_size=11, layers=layers, initializer_range=0.5)
    made = F.Decoder.init(cfg, 0, dtype=torch.float64)
    return cfg, F.tree.map(lambda p: (p + 0.1 * torch.randn_like(p)).requires_grad_(), made)


def caches(cfg, batch, slots):
    return F.empty_caches([each.attention for each in cfg.layers], batch, slots, dtype=torch.float64)


def row_of(cache, row):
    return F.tree.map(lambda leaf: leaf[row : row + 1], cache)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_training(kind):
    """A small step lowers the loss by the square of the gradient, and larger ones lower it on."""
    cfg, params = model(kind)
    ids = torch.randint(0, 31, (3, 41))

    def loss(p):
        summed, count = F.next_token_loss(p, ids[:, :-1], cfg, ids[:, 1:])
        return summed / count

    def step(p, grads, rate):
        return F.tree.map(lambda p, g: (p - rate * g).detach(), p, grads)

    grads, begun = torch.func.grad_and_value(loss)(params)
    assert all(g.isfinite().all() and g.any() for g in F.tree.leaves(grads))
    square = sum(g.square().sum() for g in F.tree.leaves(grads))
    torch.testing.assert_close((begun - loss(step(params, grads, 1e-9))) / 1e-9, square, rtol=1e-4, atol=0)
    for _ in range(5):
        params = step(params, torch.func.grad(loss)(params), 0.01)
    assert loss(params) < 0.99 * begun


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_is_its_rows_alone(kind, side):
    """Logits, the loss, and every gradient; whatever tokens and targets stand where none is."""
    (cfg, params), counts, S = model(kind), [7, 40, 1], 40
    ids, positions, targets = torch.randint(0, 31, (3, S)), torch.full((3, S), -1), torch.full((3, S), -100)
    for row, n in enumerate(counts):
        here = slice(S - n, S) if side == "left" else slice(0, n)
        positions[row, here] = torch.arange(n)
        targets[row, here] = torch.randint(0, 31, (n,))
    logits, _ = F.decoder(params, ids, cfg, positions=positions)
    found = F.next_token_loss(params, ids, cfg, targets, positions=positions)[0]
    total = 0
    for row in range(3):
        there = positions[row : row + 1] >= 0
        alone = ids[row : row + 1][there][None]
        close(logits[row : row + 1][there], F.decoder(params, alone, cfg)[0][0], 1e-10)
        total = total + F.next_token_loss(params, alone, cfg, targets[row : row + 1][there][None])[0]
    close(found, total, 1e-10)
    leaves = F.tree.leaves(params)
    close(list(torch.autograd.grad(found, leaves)), list(torch.autograd.grad(total, leaves)), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_each_kind_in_one_model(kind):
    """A ragged prompt, padded in front, then steps in which a row stops; full of NaN before, but for what begins."""
    (cfg, params), counts = model(kind), [3, 9, 1]
    ids = torch.randint(0, 31, (3, 14))
    wanted = [F.decoder(params, ids[row : row + 1, : n + 5], cfg)[0][0] for row, n in enumerate(counts)]
    held = F.tree.map(lambda leaf: leaf.fill_(torch.nan), caches(cfg, 3, 15))
    kinds = [type(each).__name__ for each in held]
    assert kinds == ["GDNCache", "KVCache", "GDNCache", "LatentCache", "GDNCache"]
    prompt, positions = torch.zeros(3, 9, dtype=torch.int64), torch.full((3, 9), -1)
    for row, n in enumerate(counts):
        prompt[row, 9 - n :], positions[row, 9 - n :] = ids[row, :n], torch.arange(n)
    with torch.no_grad():
        logits, held = F.decoder(params, prompt, cfg, positions=positions, cache=held)
        for row, n in enumerate(counts):
            close(logits[row, 9 - n :], wanted[row][:n], 1e-10)
        for step in range(5):
            at = torch.tensor([[n + step] for n in counts])
            if step >= 2:
                at[1] = -1
                stopped = row_of(held, 1)
            logits, held = F.decoder(params, ids.gather(1, at.clamp_min(0)), cfg, positions=at, cache=held)
            for row, n in enumerate(counts):
                if row != 1 or step < 2:
                    close(logits[row], wanted[row][n + step : n + step + 1], 1e-10)
            if step >= 2:
                pairs = zip(F.tree.leaves(row_of(held, 1)), F.tree.leaves(stopped), strict=True)
                assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def test_packed_documents_are_documents_alone():
    (cfg, params), ids = model("qwen3_5"), torch.randint(0, 31, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] + [2] * 6])
    positions = torch.cat([torch.arange(n) for n in (5, 1, 6)])[None]
    packed, _ = F.decoder(params, ids, cfg, positions=positions, segment_ids=documents)
    for document in range(3):
        here = documents[0] == document
        close(packed[:, here], F.decoder(params, ids[:, here], cfg)[0], 1e-10)


def test_under_transforms():
    (cfg, params), ids = model("qwen3_next"), torch.randint(0, 31, (3, 9))
    expected, _ = F.decoder(params, ids, cfg)
    close(torch.vmap(lambda row: F.decoder(params, row[None], cfg)[0][0])(ids), expected, 1e-10)

    def loss(p, tokens):
        return F.next_token_loss(p, tokens[:, :-1], cfg, tokens[:, 1:])[0]

    wanted = torch.autograd.grad(loss(params, ids), F.tree.leaves(params))
    close(F.tree.leaves(torch.func.grad(loss)(params, ids)), list(wanted), 1e-10)
