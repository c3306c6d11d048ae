"""Load a checkpoint, build a program of it, generate, and train the weights that it reads."""

from .build import build, plan
from .generate import Generation, Timings
from .kernel import Call, Kernel
from .load import load
from .model import Model
from .program import Phase, Program
from .report import Plan
from .save import save
from .train import TrainStep, train_step

__all__ = [
    "Call",
    "Generation",
    "Kernel",
    "Model",
    "Phase",
    "Plan",
    "Program",
    "Timings",
    "TrainStep",
    "build",
    "load",
    "plan",
    "save",
    "train_step",
]
