"""Build a program, or print what building it would make."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..sharding import Layout, Mesh
from . import dynamo
from .handover import check_handover
from .kernel import Kernel
from .lower import with_table
from .model import Model, check_model
from .program import Program
from .rank_program import RankProgram
from .ranks import Ranks, check_mesh, check_ranks
from .report import Plan, make_plan
from .sizes import Sizes, Target

__all__ = ["build", "plan"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def build(
    model: Model,
    *,
    batch: int = 1,
    max_len: int = 1024,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    compile: bool = True,
    kernels: Sequence[Kernel] = (),
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    prefill_layout: Layout | None = None,
) -> Program:
    """Trace, lower and compile prefill and decode of a model, which then never compile again.

    batch: rows at most. max_len: tokens a row at most, prompt and new ones. chunk: tokens of a prompt that one prefill
    call takes. dtype, device: the model's unless given; weights that must be converted are copied once and refreshed
    in place before each use. strict: a primitive without a kernel is an error that lists them all (those of `score` at
    its first use).
    compile: False runs the same functions eagerly; so does a machine without a compiler, with a warning.
    kernels: tried before those of `lower.KERNELS`. Raises `ValueError` before any work.
    mesh, layout: of a rank among several, its own mesh and how the model lies; every rank makes this call, and gets its
    part, see `RankProgram`. batch is of all ranks. model: the whole one, of which a rank reads its shards where they
    lie, or one whose params are this rank's (`load_shards`). It runs eagerly.
    prefill_layout: by which prompts are read, where it is another: with their tokens split over ranks. The caches are
    then handed over to `layout` once, behind the prompts.
    """
    check_model("build", model)
    if any(each is not None for each in (mesh, layout, prefill_layout)):
        given, of_all = {"strict": strict, "kernels": tuple(kernels)}, Sizes(batch=batch, max_len=max_len, chunk=chunk)
        return _build_rank(model, mesh, (layout, prefill_layout), of_all, dtype, device, given)
    sizes = Sizes(batch=batch, max_len=max_len, chunk=chunk)
    if model.device.type == "meta":
        raise ValueError("build: the model has no weights, it was loaded with abstract=True\n    fix: load it without")
    place = _device(device, model.device)
    dtype = dtype or model.dtype
    _check_place(place, dtype)
    problem = dynamo.compiler_problem(place) if compile else None
    if problem is not None:
        warnings.warn(f"build: {problem}; this program runs eagerly, as with compile=False", stacklevel=2)
        compile = False
    longest = dynamo.longest_sum(place) if compile else None
    if longest is not None and sizes.slots - 1 > longest:
        raise ValueError(
            f"build(max_len={max_len}): torch {torch.__version__} compiles caches of {longest} tokens at most\n"
            f"    fix: max_len={longest}, compile=False, or torch 2.13"
        )
    if (kernels or strict) and not compile:
        what = "kernels=..." if kernels else "strict=True"
        raise ValueError(f"build({what}): kernels are put into compiled graphs\n    fix: compile=True")
    program = Program(model, sizes, place, dtype, tuple(kernels), strict, compile)
    if strict and (left := [f"{name} {line}" for name, p in program.plan.phases.items() for line in p.left]):
        raise ValueError("build(strict=True): no kernel for\n    " + "\n    ".join(left))
    program.warm_up()
    return program


def plan(
    model: Model,
    *,
    batch: int = 1,
    max_len: int = 1024,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    arch: str | None = None,
    kernels: Sequence[Kernel] = (),
) -> Plan:
    """What `print(build(...))` would print, without weights (`load(..., abstract=True)`) and without the device.

    device: the model's unless given, "cpu" for an abstract model. arch: of a CUDA device, such as "sm_90"; without one
    no kernel for a GPU is in the plan. kernels: as in `build`. Raises `ValueError` before any work.
    """
    check_model("plan", model)
    place = _device(device, torch.device("cpu") if model.device.type == "meta" else model.device)
    if arch is not None and not (isinstance(arch, str) and re.fullmatch(r"sm_\d+[a-z]?", arch)):
        told = f'"{arch}"' if isinstance(arch, str) else repr(arch)
        raise ValueError(f'plan(arch={told}): an architecture such as "sm_90" is needed')
    if arch is not None and place.type != "cuda":
        raise ValueError(
            f'plan(arch="{arch}"): the plan is for a device of type {place.type}, which has none\n'
            '    fix: device="cuda" with it, or no arch'
        )
    target = Target(place.type, dtype or model.dtype, arch)
    sizes = Sizes(batch=batch, max_len=max_len, chunk=chunk)
    return make_plan(model, target, sizes, with_table(target, kernels), compiled=True)


def _build_rank(
    model: Model,
    mesh: Mesh | None,
    layouts: tuple[Layout | None, Layout | None],
    sizes: Sizes,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    given: dict[str, Any],
) -> RankProgram:
    """`build` of one rank among several. layouts: of decode and of prompts."""
    layout, reads = layouts
    if mesh is None or layout is None:
        missing = "mesh" if mesh is None else "layout"
        raise ValueError(f"build({missing}=...): mesh and layout go together\n    fix: both, or neither for one rank")
    for name, each in (("layout", layout), ("prefill_layout", reads)):
        if each is not None:
            check_mesh(mesh, each, name)
    place, kind = _device(device, model.device), dtype or model.dtype
    _check_there(place)  # a rank without its device cannot tell the others
    ranks = Ranks(model.config, mesh, layout, place)
    try:
        if idle := [name for name, value in given.items() if value]:
            raise ValueError(f"build({idle[0]}=...): programs over ranks are not compiled\n    fix: without {idle[0]}")
        if model.device.type == "meta":
            raise ValueError(
                "build: the model has no weights, it was loaded with abstract=True\n    fix: load it without"
            )
        _check_place(ranks.device, kind)
        check_ranks(model.config, mesh, layout, sizes, reads)
        if reads is not None:
            check_handover(Ranks(model.config, mesh, reads, place), ranks, sizes, model.params)
    except Exception:
        ranks.agree("build", None)
        raise
    ranks.agree("build", {"model.config": model.config, "batch, max_len or chunk": sizes, "dtype": kind,
                          "layout": layout.chains, "mesh": mesh.axes,
                          "prefill_layout": None if reads is None else reads.chains})  # fmt: skip
    program = RankProgram(model, sizes, ranks.device, kind, mesh=mesh, layout=layout, prefill_layout=reads)
    program.warm_up()
    return program


def _device(device: torch.device | str | None, default: torch.device) -> torch.device:
    try:
        return torch.device(device or default)
    except RuntimeError as error:
        raise ValueError(f'device="{device}": no such device\n    fix: "cpu" or "cuda"') from error


def _check_place(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "meta":
        raise ValueError('build(device="meta"): nothing runs there\n    fix: programs.plan(model) prints the plan')
    known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
    if dtype not in _DTYPES or (device.type == "mps" and dtype == torch.float64):
        raise ValueError(f"build(dtype={dtype}): {device.type} cannot run it\n    known: {known}")
    _check_there(device)
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ValueError(f"build(dtype={dtype}): {torch.cuda.get_device_name(device)} cannot run it")


def _check_there(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            'build(device="cuda"): no CUDA device is available\n'
            '    fix: programs.plan(model, device="cuda", arch="sm_90") prints the plan without one'
        )
