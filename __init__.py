"""meshfn: attention and language models as pure functions over parameter pytrees, and programs compiled of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["functional", "programs", "sharding"]

if TYPE_CHECKING:
    from . import functional, programs, sharding


def __getattr__(name: str) -> Any:
    """Import a room when it is first entered."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
