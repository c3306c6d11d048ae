"""How tensors lie on a mesh: the spec language, `reshard`, and three executors for one body."""

from .errors import SpecError
from .explain import Explanation, explain
from .mesh import Mesh
from .processes import ProcessGroup, keep_collectives
from .reshard import Pending, launch, reshard
from .show import Picture, show
from .simulate import simulate
from .spec import Spec
from .threads import Threads
from .trace import Event, Trace, trace
from .transport import Call, Local, Transport, TransportError

__all__ = [
    "Call",
    "Event",
    "Explanation",
    "Local",
    "Mesh",
    "Pending",
    "Picture",
    "ProcessGroup",
    "Spec",
    "SpecError",
    "Threads",
    "Trace",
    "Transport",
    "TransportError",
    "explain",
    "keep_collectives",
    "launch",
    "reshard",
    "show",
    "simulate",
    "trace",
]
