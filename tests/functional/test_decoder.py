"""Whole models against transformers."""

from __future__ import annotations

import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F

from ..tiny import VARIANTS, llama, ours


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient(variant):
    module = llama(**VARIANTS[variant], layers=3)
    model = ours(module)
    tokens, labels = torch.randint(0, 97, (2, 2, 11)).unbind()
    expected = module(tokens).logits
    logits, _ = F.decoder(model.params, tokens, model.config)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    found = tree_of_grads(model, tokens, labels)
    for path, parameter in F.tree.paths(model.params).items():
        (want,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert (found[path] - want).norm() <= 1e-4 * want.norm(), path


def tree_of_grads(model, tokens, labels):
    def loss(params):
        x, _ = F.backbone(params, tokens, model.config)
        normed = F.final_norm(params, x, model.config)
        head = params.embed if params.head is None else params.head
        return F.cross_entropy(normed, head, labels, chunk=5)[0]

    grads = torch.func.grad(loss)(model.params)
    assert isinstance(grads, F.Decoder)
    return F.tree.paths(grads)


def test_packed_documents_equal_documents_alone():
    model = ours(llama().double())
    tokens = torch.randint(0, 97, (1, 9))
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed, _ = F.decoder(model.params, tokens, model.config, positions=positions, segment_ids=ids)
    for document in range(3):
        part = ids[0] == document
        alone, _ = F.decoder(model.params, tokens[:, part], model.config)
        torch.testing.assert_close(packed[:, part], alone)


def test_transforms_and_compile():
    model = ours(llama())
    tokens = torch.randint(0, 97, (3, 5))
    expected, _ = F.decoder(model.params, tokens, model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = lambda row: F.decoder(model.params, row[None], model.config)[0][0]  # noqa: E731
        torch.testing.assert_close(torch.vmap(one)(tokens), expected)
    compiled = torch.compile(lambda p, t: F.decoder(p, t, model.config)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model.params, tokens), expected)
    jacobian = torch.func.jacrev(lambda w: F.decoder(F.tree.replace(model.params, {".norm.weight": w}), tokens, model.config)[0].sum((0, 1)))(model.params.norm.weight)  # fmt: skip
    normal = F.backbone(model.params, tokens, model.config)[0]
    normal = F.normalize(normal, torch.ones_like(model.params.norm.weight), **model.config.norm.options).sum((0, 1))
    torch.testing.assert_close(jacobian, model.params.head * normal, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
def test_empty_and_single(shape):
    model = ours(llama())
    logits, _ = F.decoder(model.params, torch.zeros(shape, dtype=torch.int64), model.config)
    assert logits.shape == (*shape, 97)


def test_a_layer_can_be_swapped():
    model = ours(llama(layers=3))
    seen = []

    def skip_second(params, x, cfg, **given):
        seen.append(given["positions"].shape)
        return (x, None) if len(seen) == 2 else F.layer(params, x, cfg, **given)

    tokens = torch.randint(0, 97, (2, 4))
    got, _ = F.decoder(model.params, tokens, model.config, layer=skip_second)
    two = F.Decoder(
        embed=model.params.embed, norm=model.params.norm, head=model.params.head, layers=model.params.layers[::2]
    )
    config = F.DecoderConfig(vocab_size=97, hidden_size=48, layers=model.config.layers[::2], norm=model.config.norm)
    torch.testing.assert_close(got, F.decoder(two, tokens, config)[0])


def test_errors():
    model = ours(llama())
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    cache = F.empty_caches([each.attention for each in model.config.layers], 2, 8, dtype=torch.float32)
    calls = [
        {"cache": cache},
        {"cache": cache[:1], "positions": torch.arange(3)[None]},
        {"positions": torch.arange(4)[None]},
        {"segment_ids": torch.zeros(3, 3)},
        {"cu_seqlens": [0, 3], "attention_mask": torch.ones(2, 3), "caches": cache},
    ]
    texts = []
    for given in calls:
        with pytest.raises((ValueError, TypeError), match="decoder") as error:
            F.decoder(model.params, tokens, model.config, **given)
        texts.append(str(error.value))
    with pytest.raises(ValueError, match="DecoderConfig") as error:
        F.DecoderConfig(vocab_size=97, hidden_size=32, layers=model.config.layers)
    assert_expected_inline(
        "\n\n".join([*texts, str(error.value)]),
        """\
decoder(positions=...): needed with a cache, which does not say how full it is
    fix: torch.arange(n, n + S)[None], with n tokens in the cache

decoder(cache=...): 1 entries for 2 layers
    fix: empty_caches([layer.attention for layer in cfg.layers], ...), and then what decoder returns

decoder(positions=...): S is 3 in tokens but 4 in positions
    tokens   : B S = 2 3
    positions: B S = 1 4
                       ^
    so far: B=2 S=3

decoder(segment_ids=...): B is 2 in tokens but 3 in segment_ids
    tokens     : B S = 2 3
    segment_ids: B S = 3 3
                       ^
    so far: B=2 S=3

decoder: unknown arguments
    cu_seqlens    did you mean segment_ids (cu_seqlens is for what shard returns)?
    attention_mask    did you mean positions, -1 for padding?
    caches    did you mean cache?
    known: params, tokens, cfg, positions, mask, segment_ids, cache, read, rope_positions, rope_length, return_routing, wire, core, layer

DecoderConfig(layers=...): layers[0] has AttentionConfig(hidden_size=48), the decoder has hidden_size=32""",
    )
