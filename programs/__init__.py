"""Load a checkpoint, build a program of it, generate, and train the weights that it reads."""

from .beside import side_by_side
from .build import build, plan
from .generate import Generation, Timings
from .kernel import Call, Kernel
from .load import load
from .model import Model
from .phase import Phase
from .program import Program
from .report import Plan
from .save import save
from .shards import Shards, load_shards, restore_shards, save_shards
from .train import TrainStep, train_step

__all__ = [
    "Call",
    "Generation",
    "Kernel",
    "Model",
    "Phase",
    "Plan",
    "Program",
    "Shards",
    "Timings",
    "TrainStep",
    "build",
    "load",
    "load_shards",
    "plan",
    "restore_shards",
    "save",
    "save_shards",
    "side_by_side",
    "train_step",
]
