# %% [markdown]
# # Gated delta nets
#
# A layer that keeps a matrix a head instead of the keys and values of all tokens. All of it runs here, in some seconds,
# on a laptop.

# %%
import torch
from meshfn import functional as F

torch.manual_seed(0)

# %% [markdown]
# ## One head's memory
# The state S is `V E`: what it says of a key k is S k. A token lets S decay by exp(g), then moves what S says of its
# key towards its value by beta:
#
#     S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = scale * S q
#
# Here each key is a direction of its own. The first three tokens write three values; the fourth writes to the second
# key again, and takes the place of what was there, which a sum of outer products (linear attention) would have added
# to; the fifth writes half a value; the sixth writes nothing, and all decays to a quarter.

# %%
E = V = 8
directions = torch.eye(E)
tokens = [  # which key, beta, decay
    (0, 1.0, 1.0),
    (1, 1.0, 1.0),
    (2, 1.0, 1.0),
    (1, 1.0, 1.0),
    (5, 0.5, 1.0),
    (0, 0.0, 0.25),
]
S = len(tokens)
which = torch.tensor([key for key, _, _ in tokens])
k = directions[which][None, :, None]  # B S K E, one of each but tokens
v = torch.randn(1, S, 1, V)
beta = torch.tensor([[[beta] for _, beta, _ in tokens]])  # B S H
g = torch.tensor([[[decay] for _, _, decay in tokens]]).log()

state, states = torch.zeros(1, 1, V, E), []
for s in range(S):
    one = (x[:, s : s + 1] for x in (k, k, v, g, beta))  # the query is the key: read what was just written
    o, state = F.gated_delta_rule_step(*one, scale=1.0, initial_state=state, output_final_state=True)
    states.append(state[0, 0])
    left = (o - v[:, s : s + 1]).norm() / v[:, s].norm()
    print(f"token {s} writes to key {which[s]} by beta={beta[0, s, 0]}; what it reads lacks {left:.0%} of its value")
torch.testing.assert_close(states[3][:, 1], v[0, 3, 0])  # the later value alone


def picture(states):
    """Keys along, values down, a square for each token."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        for s, each in enumerate(states):
            print(
                f"after token {s}", *("".join(" .:+#"[min(int(2 * abs(n)), 4)] for n in row) for row in each), sep="\n"
            )
        return None
    figure = Figure(figsize=(12, 2.4), layout="constrained")
    for s, (axes, each) in enumerate(zip(figure.subplots(1, len(states)), states, strict=True)):
        axes.imshow(each, cmap="RdBu", vmin=-2, vmax=2)
        axes.set_title(f"after token {s}", fontsize=9)
    return figure


picture(states)

# %% [markdown]
# ## Chunks
# The scan is the definition, a step for each token. The chunked form computes the same with products of matrices and
# its gradient by hand; `gdn` uses it for more than one token.

# %%
B, S, K, G = 2, 100, 2, 3  # value head h reads key head h // G
H = K * G
q, k = (F.l2norm(torch.randn(B, S, K, E, dtype=torch.float64)) for _ in "qk")
v = torch.randn(B, S, H, V, dtype=torch.float64)
g, beta = -torch.rand(B, S, H, dtype=torch.float64), torch.rand(B, S, H, dtype=torch.float64)
scan, end = F.gated_delta_rule_scan(q, k, v, g, beta, output_final_state=True)
chunked, same_end = F.gated_delta_rule_chunked(q, k, v, g, beta, output_final_state=True)
torch.testing.assert_close(chunked, scan)
torch.testing.assert_close(same_end, end)
print("chunks and scan differ by", f"{(chunked - scan).abs().max().item():.0e}")

# %% [markdown]
# A function of one head, mapped over heads, is the same function of all of them.


# %%
def one_head(q, k, v, g, beta):
    """q, k `S E`, v `S V`, g, beta `S` -> `S V`."""
    return F.gated_delta_rule_chunked(*(x[None, :, None] for x in (q, k, v, g, beta)))[0][0, :, 0]


heads = torch.vmap(one_head, in_dims=1, out_dims=1)  # of one row
rows = torch.vmap(heads)
by_head = (x.repeat_interleave(G, 2) for x in (q, k))  # each value head with the key head that it reads
torch.testing.assert_close(rows(*by_head, v, g, beta), scan)

# %% [markdown]
# ## A layer
# Projections, a convolution of a few tokens over queries, keys and values, gates, the rule, a gated norm. The cache
# does not grow: it has the state, and the last tokens that the convolution saw.

# %%
cfg = F.GDNConfig(
    hidden_size=48, num_key_heads=2, num_value_heads=6, key_head_dim=8, value_head_dim=8, norm=F.NormConfig(),
    initializer_range=0.3,
)  # fmt: skip
params = F.GDN.init(cfg, seed=0)
print(params)
(empty,) = F.empty_caches([cfg], batch=1, slots=1, dtype=torch.float32)
x = torch.randn(1, 50, 48)
whole, end = F.gdn(params, x, cfg, cache=empty)
prompt, cache = F.gdn(params, x[:, :47], cfg, cache=empty)
steps = [prompt]
for s in range(47, 50):
    out, cache = F.gdn(params, x[:, s : s + 1], cfg, cache=cache)
    steps.append(out)
torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(cache.state, end.state, rtol=1e-4, atol=1e-5)
print("a cache of", sum(leaf.numel() for leaf in F.tree.leaves(cache)), "numbers, whatever the context")

# %% [markdown]
# ## A ragged batch
# A position of -1 says that there is no token, in front of a row or behind it: it changes no state, whatever it holds,
# and a row without tokens keeps its cache to the byte. A row that begins at 0 forgets what the cache held of it.

# %%
lengths = [3, 0, 9]
positions = torch.full((3, 9), -1)
for row, n in enumerate(lengths):
    positions[row, 9 - n :] = torch.arange(n)
x = torch.randn(3, 9, 48).masked_fill((positions < 0)[..., None], torch.nan)
(cache,) = F.empty_caches([cfg], batch=3, slots=1, dtype=torch.float32)
out, cache = F.gdn(params, x, cfg, positions=positions, cache=cache)
for row, n in enumerate(lengths):
    alone, _ = F.gdn(params, x[row : row + 1, 9 - n :], cfg)
    torch.testing.assert_close(out[row : row + 1, 9 - n :], alone, rtol=1e-4, atol=1e-5)
print("numbers in the states of each row:", [int(each.count_nonzero()) for each in cache.state])

# %% [markdown]
# ## Gradients of each example
# The layer is a function of a pytree, so `torch.func` has what a module would need hooks for.

# %%
examples = torch.randn(4, 20, 48)


def loss(params, example):
    return F.gdn(params, example[None], cfg)[0].square().mean()


each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, examples)
mean = torch.func.grad(lambda p: torch.vmap(lambda example: loss(p, example))(examples).mean())(params)
for found, wanted in zip(F.tree.leaves(each), F.tree.leaves(mean), strict=True):
    torch.testing.assert_close(found.mean(0), wanted, rtol=1e-3, atol=1e-6)
norms = torch.stack([g.flatten(1).norm(dim=1) for g in F.tree.leaves(each)]).norm(dim=0)
print("gradient norm of each example:", [f"{n:.2f}" for n in norms])
