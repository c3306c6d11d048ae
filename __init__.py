"""meshfn: attention, MLA and gated delta nets as pure functions on a mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["functional", "programs"]

if TYPE_CHECKING:
    from . import functional, programs


def __getattr__(name: str) -> Any:
    """Import a room when it is first entered."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
