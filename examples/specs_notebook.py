# %% [markdown]
# # How a tensor lies on a mesh
#
# A mesh has named axes; a spec is one line that says which axis cuts which dimension. All of it runs here, in one
# process, on a laptop: the ranks are threads.

# %%
import torch
from meshfn import sharding as sh

torch.manual_seed(0)
mesh = sh.Mesh(g=2, u=2)  # four ranks, numbered with the last axis fastest
print(mesh.size, [mesh.coordinates(rank) for rank in range(mesh.size)])

# %% [markdown]
# ## A spec
# `S/g/u`: tokens cut by `g`, each piece then by `u`. `(K G)`: one dimension made of two, query heads as key/value heads
# and the queries of each. Sizes are global, and shards may be uneven: the first ranks hold one more.

# %%
spec = sh.Spec.parse("B S/g/u (K G) E")
sizes = {"B": 1, "S": 97, "K": 3, "G": 2, "E": 4}
for rank in range(mesh.size):
    print(rank, spec.local(sizes, mesh, rank), spec.slices(sizes, mesh, rank)[1])

sh.show("S/g (K/u G)", mesh, S=6, K=3, G=2)

# %% [markdown]
# ## The one verb
# `reshard` moves one rank's shard from a layout to another. The pair says which collective that is. Here `u` moves from
# tokens to heads, an all-to-all; and as `K` is what is cut, each query head lands where its key/value head is: [4, 2].

# %%
PAIR = "B S/g/u (K G) E -> B S/g (K/u G) E"
BACK = "B S/g (K/u G) E -> B S/g/u (K G) E"
print([sh.Spec.parse("B S/g (K/u G) E").local(sizes, mesh, rank) for rank in range(mesh.size)])
print(sh.explain(PAIR, mesh, dtype=torch.float32, **sizes))


# %% [markdown]
# ## A body for one rank
# A sharded function is written once, for one rank, which is handed its own mesh. `simulate` makes it a function of
# global tensors.


# %%
def body(x, w, mesh):
    heads = sh.reshard(x, PAIR, mesh, S=97, K=3)
    return sh.reshard((heads @ w).tanh(), BACK, mesh, S=97, K=3)


def dense(x, w):
    return (x @ w).tanh()


f = sh.simulate(body, mesh, ("B S/g/u (K G) E", None), "B S/g/u (K G) E", K=3)
x, w = torch.randn(1, 97, 6, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
torch.testing.assert_close(f(x, w), dense(x, w))

# %% [markdown]
# ## Gradients from outside
# It is one differentiable function: backward enters the ranks again, and what comes out equals dense.

# %%
ours, theirs = (torch.func.grad(lambda w, f=f: f(x, w).square().sum())(w) for f in (f, dense))
torch.testing.assert_close(ours, theirs)
print("gradients equal dense:", ours.norm().item())

# %% [markdown]
# ## What moved
# A trace records each launch and wait, with its bytes and the copies that packing took.

# %%
record = sh.trace(mesh)
pair = "B S/u E -> B S E"
sh.simulate(lambda x, mesh: sh.reshard(x, pair, mesh, S=97), record.mesh, "B S/u E", "B S E")(x[:, :, 0])
print(record)

# %% [markdown]
# ## When it is wrong
# An error shows your own line and says what to write instead, before anything moves.

# %%
try:
    sh.simulate(lambda x, mesh: sh.reshard(x, "B S/g/u -> B S/u/g", mesh, S=97), mesh, "B S/g/u", "B S/u/g")(
        x[..., 0, 0]
    )
except sh.SpecError as error:
    print(error)


# %%
def disagree(x, mesh):
    """Half of the ranks gather, and the other half does something else."""
    return sh.reshard(x, "B S/u -> B S" if mesh.rank % 2 else "B S/u -> B/u S", mesh, S=97)


try:
    sh.simulate(disagree, mesh, "B S/u", "B S")(x[..., 0, 0])
except sh.TransportError as error:
    print(error)  # a run of processes would hang here
