"""How tensors lie on a mesh: the spec language, `reshard`, layouts of attention, and three executors for one body.

Mesh, Spec          named axes of ranks; one line that says how a tensor lies on them (help(Spec) has the language)
show, explain       who holds what; what a move will send, before it does
reshard, launch     a rank's shard from one layout to another, at once or in two halves
simulate, Threads   a body on ranks that are threads: a function of global tensors, or of nothing
ProcessGroup        the same body on processes, gloo or NCCL
trace               what moved

ulysses, all_gather, hybrid, Layout   where the edges of a layer lie and move; layout.plan(...) says what that takes
mla_latent, mla_packed, mla_gather    the same for latent attention
gdn_ulysses, gdn_scan                 the same for gated delta nets, by heads and by tokens
beside                                one layout for a model of two kinds of layer; layout.stack(...) plans all of them
spread                                experts and parameters of a whole model over ranks
shard                                 a core, a layer or a model, by a layout, as a function of one rank's shards
diff, measure, best                   two plans compared; what a mesh costs; layouts ranked on it
shard_batch, cut, positions_of        a rank's part of a batch, of parameters, of positions
sum_gradients, counted_once, pending_axes   what a trainer adds up, and over which axes
"""

from .batch import Batch, counted_once, cut, pending_axes, shard_batch, sum_gradients
from .costs import Costs, best, measure
from .dealt import spread
from .documents import positions_of
from .errors import SpecError
from .explain import Explanation, explain
from .latents import mla_gather, mla_latent, mla_packed
from .layouts import Layout, all_gather, hybrid, ulysses
from .mesh import Mesh
from .plan import Plan, diff
from .processes import ProcessGroup, keep_collectives
from .recurrent import beside, gdn_scan, gdn_ulysses
from .reshard import Pending, launch, reshard
from .shard import Sharded, shard
from .show import Picture, show
from .simulate import simulate
from .spec import Spec
from .stack import Stack
from .threads import Threads
from .trace import Event, Trace, trace
from .transport import Call, Local, Transport, TransportError

__all__ = [
    "Batch",
    "Call",
    "Costs",
    "Event",
    "Explanation",
    "Layout",
    "Local",
    "Mesh",
    "Pending",
    "Picture",
    "Plan",
    "ProcessGroup",
    "Sharded",
    "Spec",
    "SpecError",
    "Stack",
    "Threads",
    "Trace",
    "Transport",
    "TransportError",
    "all_gather",
    "beside",
    "best",
    "counted_once",
    "cut",
    "diff",
    "explain",
    "gdn_scan",
    "gdn_ulysses",
    "hybrid",
    "keep_collectives",
    "launch",
    "measure",
    "mla_gather",
    "mla_latent",
    "mla_packed",
    "pending_axes",
    "positions_of",
    "reshard",
    "shard",
    "shard_batch",
    "show",
    "simulate",
    "spread",
    "sum_gradients",
    "trace",
    "ulysses",
]
