# %% [markdown]
# # Hybrid models over ranks
#
# Most layers of Qwen3.5 and of Kimi Linear are gated delta nets, which carry a state along the tokens; every fourth has
# attention. Both kinds lie on one mesh: `beside` joins a layout of each, `stack` plans every layer and what moves
# between them. Nothing here needs 8 of anything.

# %%
import dataclasses
from typing import Any

import torch
from meshfn import functional as F
from meshfn import sharding as sh

mesh = sh.Mesh(g=2, u=4)
asked: dict[str, Any] = {"B": 1, "S": 32768, "dtype": torch.bfloat16, "causal": True}


# %% [markdown]
# ## Two models
# Configs alone: a plan asks for no weights. The sizes are those that transformers gives both families where nothing
# else is said. Decays are one a head in the first, and one a channel of the key in the second.


# %%
def of_both(delta: F.GDNConfig, attention: Any, layers: int) -> list[Any]:
    """The attention of each layer: three gated delta nets, then one of the other kind, and so on."""
    return [attention if i % 4 == 3 else delta for i in range(layers)]


norm = F.NormConfig()
qwen = of_both(
    F.GDNConfig(
        hidden_size=2048, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, norm=norm
    ),
    F.AttentionConfig(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, head_dim=256, output_gate=True,
        rope=F.RopeConfig(), norm=norm,
    ),
    40,
)  # fmt: skip
kimi = of_both(
    F.GDNConfig(
        hidden_size=2304, num_key_heads=32, num_value_heads=32, key_head_dim=128, value_head_dim=128, norm=norm,
        channel_decay=True, decay_rank=128, gate_rank=128, gate_act="sigmoid",
    ),
    F.MLAConfig(
        hidden_size=2304, num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, norm=norm,
    ),
    27,
)  # fmt: skip

# %% [markdown]
# ## Every exchange of a step
# Attention by heads within `u` and gathered over `g`, gated delta nets by tokens over both: activations lie alike, so
# nothing moves between layers.

# %%
alike = sh.beside(sh.hybrid(), sh.gdn_scan("g", "u"))
print(alike.stack(mesh, [each.sizes for each in qwen], **asked))

# %% [markdown]
# Kimi Linear's with latent attention, whose latents travel in place of keys and values.

# %%
latent = sh.beside(sh.mla_latent("u", "g"), sh.gdn_scan("g", "u"))
print("\n" + str(latent.stack(mesh, [each.sizes for each in kimi], **asked)))

# %% [markdown]
# ## Which pair?
# A scan over `g` alone sends fewer summaries, but its layers need the tokens of four ranks: activations move in and out
# of them, and `u` computes the same four times. The plan has these reshards too.

# %%
print("\n| gated delta nets | tokens | exchanges | bytes of the busiest rank | flops forward, busiest rank |")
print("|---|---|---|---|---|")
for S in (4096, 32768, 262144):
    for delta in (sh.gdn_scan("g", "u"), sh.gdn_scan("g")):
        plan = sh.beside(sh.hybrid(), delta).stack(mesh, [each.sizes for each in qwen], **asked | {"S": S})
        sent = max(max(plan.bytes(rank)) for rank in range(mesh.size))
        print(f"| {delta.name} | {S:,} | {plan.exchanges} | {sent:,} | {plan.flops[1]:,} |")

# %% [markdown]
# By heads or by tokens? What `gdn_ulysses` sends grows with tokens, what `gdn_scan` sends does not, and it computes a
# state's way for each channel of a key too. The costs here are stated, not measured (`sh.measure` does that): 20 us an
# exchange, 50 GB/s, 400 Tflop/s.

# %%
costs = sh.Costs(latency=dict.fromkeys("ug", 2e-5), bandwidth=dict.fromkeys("ug", 5e10), flops=4e14)
letters = {letter: n for letter, n in qwen[0].sizes.items() if letter in "HKEVW"}
for S in (1024, 4096, 16384, 65536):
    layouts = [(sh.gdn_ulysses(), sh.Mesh(u=8)), (sh.gdn_scan("u"), sh.Mesh(u=8)), (sh.gdn_scan("g", "u"), mesh)]
    ranking = sh.best(layouts, mesh, {"B": 1, "S": S, **letters}, costs, dtype=torch.bfloat16)
    first, second = ranking[:2]
    print(f"{S:,} tokens: {first.layout.name} on {first.plan.mesh} takes {first.seconds * 1e3:.2f} ms, "
          f"{second.layout.name} on {second.plan.mesh} {second.seconds * 1e3:.2f} ms")  # fmt: skip

# %% [markdown]
# ## The same function
# A small model of the same shape, packed documents, loss and every gradient: as one rank has them.

# %%
delta = dataclasses.replace(
    qwen[0], hidden_size=16, num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6
)  # fmt: skip
attention = dataclasses.replace(qwen[3], hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
mlp = F.MLPConfig(hidden_size=16, intermediate_size=24, norm=norm)
layers = tuple(F.LayerConfig(attention=each, mlp=mlp) for each in of_both(delta, attention, 4))
cfg = F.DecoderConfig(vocab_size=50, hidden_size=16, layers=layers)
params = F.tree.map(lambda p: p.requires_grad_(), F.Decoder.init(cfg, seed=0, dtype=torch.float64))
generator = torch.Generator().manual_seed(0)
tokens, targets = (torch.randint(0, 50, (2, 41), generator=generator) for _ in range(2))
boundaries = torch.tensor([0, 13, 14, 30, 41])
told = {
    "positions": torch.cat([torch.arange(int(n)) for n in boundaries.diff()])[None],
    "segment_ids": torch.searchsorted(boundaries, torch.arange(41), right=True).expand(2, 41),
}
loss, _ = F.next_token_loss(params, tokens, cfg, targets, **told)
wanted = torch.autograd.grad(loss, F.tree.leaves(params))
print("\nA small model, largest differences from one rank:")
for layout, on in (
    (alike, sh.Mesh(g=2, u=2)),
    (sh.beside(sh.hybrid(), sh.gdn_scan("g")), sh.Mesh(g=2, u=2)),
    (sh.beside(sh.ulysses(), sh.gdn_ulysses()), sh.Mesh(u=4)),
):
    run = sh.simulate(sh.shard(F.next_token_loss, layout, on, S=41), on)
    ours, _ = run(params, tokens, cfg, targets, cu_seqlens=boundaries)
    grads = torch.autograd.grad(ours, F.tree.leaves(params))
    far = max((a - b).abs().max().item() for a, b in zip(grads, wanted, strict=True))
    print(f"{layout.name:64} loss {(ours - loss).abs().item():.0e}, gradients {far:.0e}")
    torch.testing.assert_close((ours, *grads), (loss, *wanted), rtol=1e-10, atol=1e-10)

# %% [markdown]
# ## States
# A layer takes a cache and returns the new one: by heads under `gdn_ulysses`; whole on every rank under `gdn_scan`,
# with the state behind the whole sequence. So a long sequence may come in pieces.

# %%
layer, x = params.layers[0].attention, torch.randn(2, 41, 16, dtype=torch.float64, generator=generator)
(empty,) = F.empty_caches([delta], 2, 41, dtype=torch.float64)
dense, final = F.gdn(layer, x, delta, cache=empty)
for layout in (sh.gdn_ulysses(), sh.gdn_scan("u")):
    on, cache, found = sh.Mesh(u=4), empty, []
    for piece in x.split([19, 22], 1):
        call = sh.simulate(sh.shard(F.gdn, layout, on, S=piece.shape[1]), on)
        y, cache = call(layer, piece, delta, cache=cache)
        found.append(y)
    torch.testing.assert_close((torch.cat(found, 1), cache.state), (dense, final.state), rtol=1e-10, atol=1e-10)
    print(f"{layout.name}: two calls on 4 ranks leave the state of one call on one")
