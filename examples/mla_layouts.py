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
# The first row is what a layout that knows nothing of latents does: keys and values of every head are made first, each
# key with its copy of the rotary part, and all of them travel.

# %%
latent = [
    (sh.mla_packed(), one),
    (sh.mla_latent(), one),
    (sh.mla_latent("u", "g"), both),
    (sh.mla_gather(), other),
    (sh.mla_gather(zigzag=True), other),
]
materialised = sh.ulysses().plan(one, B=B, S=S, H=H, K=H, E=N + R, V=V, **asked)
plans = {"materialised, ulysses": materialised} | {x.name: x.plan(on, **sizes, **asked) for x, on in latent}
# A plan of q, k and v begins behind the up-projection, which a rank does for its tokens, as under `mla_packed`; what
# that reads is not in its peak.
before = 2 * B * (S // P) * L * H * (N + V)
work = {name: plan.flops[1] + before * (plan is materialised) for name, plan in plans.items()}
sent = {name: [sum(e.sends[1] for e in part) for part in (p.forward, p.backward)] for name, p in plans.items()}
element, token = torch.bfloat16.itemsize, B * S // P

print("| layout | mesh | elements a token | bytes forward | bytes backward | flops, busiest rank | peak bytes |")
print("|---|---|---|---|---|---|---|")
for name, plan in plans.items():
    forward, backward = sent[name]
    numbers = (forward // element // token, forward, backward, work[name], plan.peak)
    print(f"| {name} | {plan.mesh} | " + " | ".join(f"{n:,}" for n in numbers) + " |")

# %%
least = min(sent, key=lambda name: (sum(sent[name]), work[name]))
even = [name for name in plans if work[name] == min(work.values())]
frugal = min(even, key=lambda name: sum(sent[name]))
share = sum(sent[frugal]) / sum(sent["materialised, ulysses"])
print(f"\nOf the {len(even)} layouts with the least arithmetic, {frugal} sends least: {share:.0%} of materialised.")
print(f"{least} sends 1/{sum(sent['materialised, ulysses']) / sum(sent[least]):.1f} of materialised;")
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
for layout, mesh in latent:
    y, _ = sh.simulate(sh.shard(F.mla, layout, mesh, S=48), mesh)(params, x, cfg)
    print(f"{layout.name:32} largest difference from one rank {(y - dense).abs().max():.1e} of {dense.abs().max():.1e}")
    torch.testing.assert_close(y, dense, rtol=1e-12, atol=1e-12)

# %% [markdown]
# ## Which one?
# It depends on links and arithmetic. The costs here are stated, not measured (`sh.measure` does that): 20 us an
# exchange, 400 Tflop/s a rank, and links of a rank from slow to fast.


# %%
def seconds(bandwidth: dict[str, float]) -> dict[str, float]:
    """Of a forward and a backward under each layout; materialised with its up-projection."""
    costs = sh.Costs(latency=dict.fromkeys(bandwidth, 2e-5), bandwidth=bandwidth, flops=4e14)
    found = {c.layout.name: c.seconds for c in sh.best(latent, one, sizes, costs, **asked)}
    (plain,) = sh.best([sh.ulysses()], one, {"B": B, "S": S, "H": H, "K": H, "E": N + R, "V": V}, costs, **asked)
    return found | {"materialised, ulysses": plain.seconds + 3 * before / costs.flops}


costs = sh.Costs(latency={"u": 2e-5, "g": 2e-5}, bandwidth={"u": 4e11, "g": 4e11}, flops=4e14)
print(sh.best(latent, one, sizes, costs, **asked), "\n")
cases = {f"Links of {gb} GB/s": dict.fromkeys("ug", gb * 1e9) for gb in (12, 25, 50, 100, 200, 400)}
for said, bandwidth in cases.items():
    took = seconds(bandwidth)
    first, second = sorted(took, key=took.__getitem__)[:2]
    ratio = took["materialised, ulysses"] / took[first]
    print(f"{said}: {first} is fastest, {took[first] * 1e3:.2f} ms; {second} takes {took[second] * 1e3:.2f} ms, "
          f"and materialised {ratio:.2f} times as long.")  # fmt: skip
