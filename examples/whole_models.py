# %% [markdown]
# # Whole models over ranks
#
# One layout says where a model's activations and parameters lie, and `model.step` what a step of training will send and
# hold, before a byte moves. Then the same step runs: here on ranks that are threads, under `torchrun` on processes.

# %%
import torch
from meshfn import functional as F
from meshfn import sharding as sh

norm = F.NormConfig()
generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## Two models
# In the shape of Qwen3.5: three gated delta nets, then gated attention. In that of DeepSeek-V3: latent attention, a
# dense layer in front, then experts with a shared one. Small ones; a plan takes shapes alone.

# %%
delta = F.GDNConfig(
    hidden_size=64, num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=16, norm=norm
)  # fmt: skip
gated = F.AttentionConfig(
    hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, output_gate=True, rope=F.RopeConfig(),
    norm=norm,
)  # fmt: skip
latent = F.MLAConfig(
    hidden_size=64, num_attention_heads=8, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=4,
    v_head_dim=12, rope=F.RopeConfig(), norm=norm,
)  # fmt: skip
mlp = F.MLPConfig(hidden_size=64, intermediate_size=160, norm=norm)
experts = F.MoEConfig(
    hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, scoring_func="sigmoid",
    norm_topk_prob=True, shared=F.MLPConfig(hidden_size=64, intermediate_size=32), norm=norm, initializer_range=0.2,
)  # fmt: skip


def decoder(*layers):
    made = tuple(F.LayerConfig(attention=attention, mlp=block) for attention, block in layers)
    return F.DecoderConfig(vocab_size=512, hidden_size=64, layers=made)


qwen = decoder((delta, mlp), (delta, mlp), (delta, mlp), (gated, mlp))
deepseek = decoder((latent, mlp), (latent, experts), (latent, experts))

# %% [markdown]
# ## Two meshes of eight
# Rows over `dp`, which also keeps parameters in parts (`D/dp` in their fields) and gathers those of a block when it
# begins; tokens over `g`, along which attention gathers keys and gated delta nets pass a state; heads, features and
# vocabulary over `tp`. Experts over `ep`: each row of a token goes to the rank of its expert and comes back.

# %%
by_tokens = sh.beside(sh.all_gather(dp="dp", tp="tp"), sh.gdn_scan("g", dp="dp", tp="tp"))
plans = {
    "Qwen3.5": (qwen, sh.spread(by_tokens, parameters="dp"), sh.Mesh(dp=2, g=2, tp=2)),
    "DeepSeek-V3": (
        deepseek, sh.spread(sh.mla_latent(tp="tp"), experts="ep"), sh.Mesh(ep=2, u=2, tp=2),
    ),
}  # fmt: skip

# %% [markdown]
# ## The plan, and what runs
# Bytes of every collective, forward, backward and in the sums of gradients; a trace of the same step has them too.
# Loss and gradients are those of one rank. Which experts tokens choose only the router says, so of `rows` and `results`
# the plan counts an even share.

# %%
B, S = 4, 32
ids = torch.randint(0, 512, (B, S + 1), generator=generator)
for name, (cfg, layout, mesh) in plans.items():
    params = F.Decoder.init(cfg, seed=0, dtype=torch.float64)
    record = sh.trace(mesh)
    model = sh.shard(F.next_token_loss, layout, mesh, S=S)
    plan = model.step(F.Decoder.abstract(cfg, dtype=torch.float64), cfg, B=B)
    print(f"{name}\n{plan}\n")

    def body(at, model=model, cfg=cfg, params=params, record=record):
        """One rank's step, as on processes."""
        specs, at = model.specs(params, cfg), at.recording(record)
        mine = F.tree.map(lambda p: p.detach().clone().requires_grad_(), sh.cut(params, specs, at))
        tokens, targets = (sh.cut(x, model.layout["tokens"][0], at) for x in (ids[:, :-1], ids[:, 1:]))
        total, _ = model(mine, tokens, cfg, targets, mesh=at)
        loss = sh.counted_once(total, model, at) / ids[:, 1:].numel()
        grads = torch.autograd.grad(loss, F.tree.leaves(mine))
        return sh.sum_gradients(F.tree.unflatten(F.tree.structure(mine), grads), specs, at)

    found = sh.Threads(mesh).run(body)

    whole = F.tree.map(lambda p: p.requires_grad_(), params)
    total, count = F.next_token_loss(whole, ids[:, :-1], cfg, ids[:, 1:])
    wanted = torch.autograd.grad(total / count, F.tree.leaves(whole))
    wanted = F.tree.unflatten(F.tree.structure(whole), wanted)
    far = 0.0
    for rank, grads in enumerate(found):
        right = sh.cut(wanted, model.specs(params, cfg), mesh.at(rank, sh.Local()))
        pairs = zip(F.tree.leaves(grads), F.tree.leaves(right), strict=True)
        far = max(far, *((a - b).abs().max().item() for a, b in pairs))
    assert far < 1e-10
    assert record.count() == plan.exchanges
    sent = [record.bytes(rank)[0] for rank in range(mesh.size)]
    print(f"run: {record.count()} exchanges on each rank, {min(sent):,} to {max(sent):,} bytes sent, "
          f"gradients at most {far:.0e} from one rank's\n")  # fmt: skip
