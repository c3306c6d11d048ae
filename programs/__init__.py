"""Load a checkpoint, build a program of it, generate."""

from .build import build, plan
from .generate import Generation, Timings
from .kernel import Call, Kernel
from .load import load
from .model import Model
from .program import Phase, Program
from .report import Plan
from .save import save

__all__ = [
    "Call",
    "Generation",
    "Kernel",
    "Model",
    "Phase",
    "Plan",
    "Program",
    "Timings",
    "build",
    "load",
    "plan",
    "save",
]
