# %% [markdown]
# # Latent attention over ranks
#
# What is small travels, and what is large is made where it is used. One layer in the sizes of DeepSeek-V3, whose tokens
# lie on 8 ranks: ways to bring queries and keys together, planned, run and ranked. Nothing here needs 8 of anything.

# %%
import torch
from meshfn import functional as F
from meshfn import sharding as sh

B, S, H, L, N, R, V, P = 1, 8192, 128, 512, 128, 64, 128, 8
sizes = {"B": B, "S": S, "H": H, "L": L, "N": N, "R": R, "V": V}
asked = {"dtype": torch.bfloat16, "causal": True}
one, other, both = sh.Mesh(u=P), sh.Mesh(g=P), sh.Mesh(g=2, u=4)

# %% [markdown]
# ## Plans side by side
# The first row is a layout that knows nothing of latents: keys and values of every head are materialised first, each
# key with its copy of the rotary part, and all of them travel. Its plan counts the up-projection of a rank's tokens.

# %%
layouts = [
    (sh.ulysses(), one),
    (sh.mla_packed(), one),
    (sh.mla_latent(), one),
    (sh.mla_latent("u", "g"), both),
    (sh.mla_gather(), other),
    (sh.mla_gather(zigzag=True), other),
]
plans = {layout.name: layout.plan(on, **sizes, **asked) for layout, on in layouts}
work = {name: plan.flops[1] for name, plan in plans.items()}
sent = {name: [sum(e.sends[1] for e in part) for part in (p.forward, p.backward)] for name, p in plans.items()}

print("| layout | mesh | elements a token | bytes forward | bytes backward | flops, busiest rank | peak bytes |")
print("|---|---|---|---|---|---|---|")
for name, plan in plans.items():
    numbers = (plan.volume, *sent[name], work[name], plan.peak)
    print(f"| {name} | {plan.mesh} | " + " | ".join(f"{n:,.0f}" for n in numbers) + " |")

# %%
least = min(sent, key=lambda name: (sum(sent[name]), work[name]))
even = [name for name in plans if work[name] == min(work.values())]
frugal = min(even, key=lambda name: sum(sent[name]))
plain = sum(sent['ulysses("u")'])
share = sum(sent[frugal]) / plain
print(f"\nOf the {len(even)} layouts with the least arithmetic, {frugal} sends least: {share:.0%} of materialised.")
print(f"{least} sends 1/{plain / sum(sent[least]):.1f} of materialised;")
print(f"its busiest rank computes {work[least] / min(work.values()):.2f} times the least.")

# %% [markdown]
# ## The same function
# `shard` joins a layout to the layer, `simulate` runs it on ranks that are threads, and joins what they return.

# %%
cfg = F.MLAConfig(
    hidden_size=64, num_attention_heads=8, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, norm=F.NormConfig(eps=1e-6), rope=F.RopeConfig(),
)  # fmt: skip
params = F.MLA.init(cfg, seed=0, dtype=torch.float64)
x = torch.randn(2, 48, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
dense, _ = F.mla(params, x, cfg, positions=torch.arange(48)[None])
for layout, mesh in layouts[1:]:
    y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=48), mesh)(params, x, cfg)
    print(f"{layout.name:32} largest difference from one rank {(y - dense).abs().max():.1e} of {dense.abs().max():.1e}")
    torch.testing.assert_close(y, dense, rtol=1e-12, atol=1e-12)

# %% [markdown]
# ## Which one?
# It depends on links and arithmetic. The costs here are stated, not measured (`sh.measure` does that): 20 us an
# exchange, 400 Tflop/s a rank, and links of a rank from slow to fast. One ranking has them all, with the reasons.

# %%
for gb in (12, 25, 50, 100, 200, 400):
    costs = sh.Costs(latency=dict.fromkeys("ug", 2e-5), bandwidth=dict.fromkeys("ug", gb * 1e9), flops=4e14)
    ranking = sh.best(layouts, one, sizes, costs, **asked)
    first, second = ranking[:2]
    ratio = next(choice for choice in ranking if choice.layout == sh.ulysses()).seconds / first.seconds
    print(f"Links of {gb} GB/s: {first.layout.name} is fastest, {first.seconds * 1e3:.2f} ms; {second.layout.name} "
          f"takes {second.seconds * 1e3:.2f} ms, and materialised {ratio:.2f} times as long.")  # fmt: skip
print(f"\nOf the last:\n{ranking}")
