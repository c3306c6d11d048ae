"""What a trainer needs: batches that are shifted and cut, parameters, and sums of gradients."""

from __future__ import annotations

import pytest
import torch
from meshfn import functional as F
from meshfn import sharding as sh

from .test_layers import decoder


@pytest.mark.parametrize("text", ["B/dp S/g/u", "B S/g:zigzag/u", "B S"])
def test_a_batch_is_shifted_before_it_is_cut(text):
    mesh, ids = sh.Mesh(dp=2, g=2, u=2), torch.arange(4 * 16).reshape(4, 16)
    cu, three = [0, 5, 6, 16], torch.arange(3 * 16).reshape(3, 1, 16)
    targets = ids + 1
    targets[:, [4, 5, 15]] = -100
    labels = ids.clone()
    labels[0, 3] = -100  # so that the token before has no target
    targets[0, 2] = -100
    for rank in range(8):
        at = mesh.at(rank, object())
        held = sh.Spec.parse(text).slices({"B": 4, "S": 16}, mesh, rank)
        batch = sh.shard_batch(ids, labels, three, torch.tensor(cu), text, at)
        assert torch.equal(batch.tokens, ids[held])
        assert torch.equal(batch.labels, targets[held])
        assert batch.positions.shape == (3, 1, batch.tokens.shape[1])
        assert batch.count == 4 * 13 - 1
        plain = sh.shard_batch(ids, None, None, cu, text, at)
        assert torch.equal(plain.positions, sh.positions_of(text, mesh, rank, cu_seqlens=cu))


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": zeros(16)}, r"shard_batch\(tokens=...\): B S is needed"),
        ({"labels": zeros(2, 15)}, r"shard_batch\(labels=...\): \(2, 15\), the tokens are \(2, 16\)"),
        ({"positions": zeros(2, 15)}, r"shard_batch\(positions=...\): \(2, 15\); B\|1 S or M B\|1 S is needed"),
        ({"cu_seqlens": [0, 15]}, "ends with 15, but there are S=16"),
        ({"labels": torch.zeros(2, 16, dtype=torch.uint8)}, "signed integers are needed, not uint8, since -100 leaves"),
        ({"labels": [[1]]}, r"shard_batch\(labels=...\): a tensor is needed, not list"),
        ({"positions": [[1]]}, r"shard_batch\(positions=...\): a tensor is needed, not list"),
        ({"spec": "B S/u D"}, "a batch of tokens has two dimensions, B and S"),
        ({"spec": "B S/q"}, 'no axis "q"'),
        ({"spec": "B S/u:zigzag", "tokens": zeros(2, 15)}, "needs a multiple of 4"),
    ],
)
def test_batches_that_cannot_be(change, message):
    given = {"tokens": zeros(2, 16), "labels": None, "positions": None, "cu_seqlens": None, "spec": "B S/u"}
    with pytest.raises((ValueError, TypeError), match=message):
        sh.shard_batch(*{**given, **change}.values(), sh.Mesh(u=2).at(0, object()))


def test_gradients_are_summed_over_what_does_not_split_them():
    mesh = sh.Mesh(tp=2, u=2)
    assert sh.pending_axes("K/tp E", mesh) == ("u",)
    assert sh.pending_axes("D", mesh) == ("tp", "u")
    assert sh.pending_axes("D/u/tp", mesh) == ()
    record = sh.trace(mesh)

    def body(at):
        at = at.recording(record)
        grads = {"a": torch.full((2,), 1.0 + at.rank), "b": torch.full((3,), 1.0), "c": torch.ones(2) * at.rank}
        return sh.sum_gradients(grads, {"a": "D", "b": "D", "c": "D/tp"}, at)

    for rank, found in enumerate(sh.Threads(mesh).run(body)):
        assert found["a"].tolist() == [10.0] * 2
        assert found["b"].tolist() == [4.0] * 3
        assert found["c"].tolist() == [[1.0, 5.0][rank // 2]] * 2
    assert record.count("all-reduce") == 2  # a and b travel together


def test_parameters_cut_and_counted_once():
    (cfg, params), mesh = decoder(), sh.Mesh(tp=2, u=2)
    model = sh.shard(F.next_token_loss, sh.ulysses(tp="tp"), mesh, S=8)
    specs = model.specs(params, cfg)
    for rank in range(4):
        at = mesh.at(rank, object())
        mine = sh.cut(params, specs, at)
        tp = rank // 2
        first = mine.layers[0].attention
        assert torch.equal(first.q, params.layers[0].attention.q[16 * tp : 16 * tp + 16])
        assert torch.equal(first.sinks, params.layers[0].attention.sinks[4 * tp : 4 * tp + 4])
        assert mine.embed.shape == ((16, 15)[tp], 24)  # rows of the vocabulary, 31
        assert mine.layers[1].attention.k.shape == (4, 24)  # 2 heads of 4 over tp
        assert mine.layers[0].mlp.down.shape == (24, 10)
        loss = sh.counted_once(torch.tensor(3.0), "B S/u", at)
        assert loss.item() == (3.0 if tp == 0 else 0.0)
