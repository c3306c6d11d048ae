# %% [markdown]
# # Attention over ranks
#
# A layout says where each edge of a layer lies and moves. All of it runs here, in one process: the ranks are threads.

# %%
import torch
from meshfn import functional as F
from meshfn import sharding as sh

torch.manual_seed(0)
mesh = sh.Mesh(g=2, u=2)
layout = sh.hybrid(ulysses="u", gather="g")
print(layout)

# %% [markdown]
# ## Before anything moves
# The plan counts every exchange of a forward and a backward, to the byte. 9 query heads over 2 ranks go as 6 and 3, as
# the 3 key/value heads do; with a causal mask the ranks that hold the later tokens do most of the work.

# %%
sizes = {"B": 2, "S": 96, "H": 9, "K": 3, "E": 64}
print(layout.plan(mesh, **sizes, causal=True))

# %% [markdown]
# Head-tail order evens the work out, and costs nothing:

# %%
zigzag = sh.hybrid(zigzag=True)
print(sh.diff(layout.plan(mesh, **sizes, causal=True), zigzag.plan(mesh, **sizes, causal=True)))

# %% [markdown]
# ## A core
# `shard` turns a function of global tensors into one of a rank's shards; `simulate` runs it on every rank and joins the
# result. It equals attention on one rank, with its gradients.

# %%
q, k, v = (torch.randn(2, 96, heads, 64, dtype=torch.float64, requires_grad=True) for heads in (9, 3, 3))
core = sh.shard(F.dot_product_attention, layout, mesh, S=96, H=9, K=3)
y = sh.simulate(core, mesh)(q, k, v, causal=True)
dense = F.dot_product_attention(q, k, v, causal=True)
torch.testing.assert_close(y, dense)
for found, wanted in zip(
    torch.autograd.grad(y.sum(), (q, k, v)), torch.autograd.grad(dense.sum(), (q, k, v)), strict=True
):
    torch.testing.assert_close(found, wanted)


# %% [markdown]
# A core of your own is told where its queries stand, if it asks. Under `ulysses` alone it need not: it has all tokens.


# %%
def sdpa(q, k, v, *, q_positions, k_positions, **_):
    see = q_positions[:, None, :, None] >= k_positions[:, None, None, :]
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*swapped, attn_mask=see, enable_gqa=True).transpose(1, 2)


mine = sh.simulate(sh.shard(sdpa, layout, mesh, S=96, H=9, K=3), mesh)
torch.testing.assert_close(mine(q, k, v), dense)

# %% [markdown]
# ## Packed documents
# Boundaries are whole on every rank. With `exchange="needed"` only keys that some query of the receiver may see travel,
# and nothing where no document crosses from one rank to the next.

# %%
documents = [0, 30, 31, 96]
needed = sh.hybrid(exchange="needed")
print(sh.diff(layout.plan(mesh, **sizes, causal=True, cu_seqlens=documents),
              needed.plan(mesh, **sizes, causal=True, cu_seqlens=documents)))  # fmt: skip
packed = sh.simulate(sh.shard(F.dot_product_attention, needed, mesh, S=96, H=9, K=3), mesh)
y = packed(q, k, v, causal=True, cu_seqlens=documents)
alone = [
    F.dot_product_attention(*(x[:, a:b] for x in (q, k, v)), causal=True) for a, b in ((0, 30), (30, 31), (31, 96))
]
torch.testing.assert_close(y, torch.cat(alone, 1))

# %% [markdown]
# ## A whole layer, and what it did
# Keys and values fly while queries are projected. A trace has what happened; it is the plan.

# %%
cfg = F.AttentionConfig(hidden_size=64, num_attention_heads=9, num_key_value_heads=3, head_dim=16, rope=F.RopeConfig())
params, x = F.Attention.init(cfg, seed=0), torch.randn(2, 96, 64, requires_grad=True)
trace = sh.trace(mesh)
layer = sh.shard(F.attention, sh.hybrid(overlap=True), mesh, S=96)
out, _ = sh.simulate(layer, trace.mesh)(params, x, cfg)
torch.testing.assert_close(out, F.attention(params, x, cfg, positions=torch.arange(96)[None])[0], rtol=1e-4, atol=1e-5)
out.sum().backward()
print([f"{e.what} {e.call.title}" for e in trace.of(0)])
print(trace.bytes(0) == layer.plan(B=2, H=9, K=3, E=16).bytes(0))

# %% [markdown]
# ## Which layout?
# Nothing picks one for you. `best` ranks them on the costs of a mesh, measured or given, by the model that it prints.

# %%
costs = sh.Costs(latency={"cp": 2e-5}, bandwidth={"cp": 5e10}, flops=4e14)
layouts = [sh.ulysses("cp"), sh.all_gather("cp"), sh.all_gather("cp", zigzag=True)]
print(sh.best(layouts, sh.Mesh(cp=8), {"B": 1, "S": 131072, "H": 32, "K": 8, "E": 128}, costs, causal=True))
