"""How tensors lie on a mesh: the spec language, `reshard`, and three executors for one body."""

from .errors import SpecError
from .mesh import Mesh
from .processes import ProcessGroup
from .reshard import Pending, launch, reshard
from .simulate import simulate
from .spec import Spec
from .threads import Threads
from .trace import Event, Trace, trace
from .transport import Call, Local, Transport, TransportError

__all__ = [
    "Call",
    "Event",
    "Local",
    "Mesh",
    "Pending",
    "ProcessGroup",
    "Spec",
    "SpecError",
    "Threads",
    "Trace",
    "Transport",
    "TransportError",
    "launch",
    "reshard",
    "simulate",
    "trace",
]
