"""Build a program, or print what building it would make."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch

from .. import kernels_cuda
from ..sharding import Layout, Mesh
from . import dynamo
from .agreement import Agreement
from .handover import check_handover
from .kernel import Kernel
from .lower import with_table
from .model import Model, check_model
from .program import Program
from .rank_program import RankProgram
from .rank_steps import why_eager as of_ranks
from .ranks import Ranks, check_layout, check_mesh, check_ranks
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
    compile: bool | None = None,
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
    compile: False runs the same functions eagerly; so does a machine without a compiler, with a warning. Unless given,
    it is True but over ranks that cannot (threads, or experts dealt out), where the plan says so.
    kernels: tried before those of `lower.KERNELS`. Raises `ValueError` before any work.
    mesh, layout: of a rank among several, its own mesh and how the model lies; every rank makes this call, and gets its
    part, see `RankProgram`. batch is of all ranks. What one of them is told otherwise, or holds otherwise, raises on
    all. model: the whole one, of which a rank reads its shards where they lie, or one whose params are this rank's
    (`load_shards`). Ranks compile each in its own time, and then meet.
    prefill_layout: by which prompts are read, where it is another: with their tokens split over ranks. The caches are
    then handed over to `layout` once, behind the prompts. Such a program runs eagerly.
    """
    if any(each is not None for each in (mesh, layout, prefill_layout)):
        sizes_given, layouts = {"batch": batch, "max_len": max_len, "chunk": chunk}, (layout, prefill_layout)
        return _build_rank(model, mesh, layouts, sizes_given, dtype, device, kernels, strict, compile)
    _check_weights(model)
    sizes = Sizes.of("build", batch=batch, max_len=max_len, chunk=chunk)
    place = _device(device, model.device)
    dtype = dtype or model.dtype
    _check_dtype("build", dtype, place)
    _check_place(place, dtype)
    why_eager = _why_eager(compile, place, sizes)
    _check_graphs(kernels, strict, why_eager)
    program = Program(model, sizes, place, dtype, tuple(kernels), strict, why_eager is None)
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
    _check_dtype("plan", dtype or model.dtype, place)
    target = Target(place.type, dtype or model.dtype, arch)
    sizes = Sizes.of("plan", batch=batch, max_len=max_len, chunk=chunk)
    return make_plan(model, target, sizes, with_table(target, kernels), compiled=True)


def _build_rank(
    model: Model,
    mesh: Mesh | None,
    layouts: tuple[Layout | None, Layout | None],
    sizes: dict[str, int],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    kernels: Sequence[Kernel],
    strict: bool,
    compile: bool | None,
) -> RankProgram:
    """`build` of one rank among several. layouts: of decode and of prompts. Raises on every rank where one is told what
    others are not, or what is refused, before anything is allocated."""
    agreement, reads = Agreement(check_mesh(mesh, layouts[0]), _reachable(device, model)), layouts[1]
    try:
        layout = check_layout(agreement.mesh, layouts[0])
        if reads is not None:
            check_layout(agreement.mesh, reads, "prefill_layout")
        _check_weights(model)
        place, kind, read = _device(device, model.device), dtype or model.dtype, Sizes.of("build", **sizes)
        _check_dtype("build", kind, place)
        _check_place(place, kind)
        check_ranks(model.config, agreement.mesh, layout, read, reads)
        ranks = Ranks(model.config, agreement.mesh, layout, place)
        if reads is not None:
            check_handover(Ranks(model.config, agreement.mesh, reads, place), ranks, read, model.params)
        why_eager = _why_eager(compile, place, read, of_ranks(ranks, reads))
        _check_graphs(kernels, strict, why_eager)
        names = [kernel.name for kernel in with_table(Target(place.type, kind), kernels)]
        ranks.params(model.params)  # raises for what are none
    except Exception:
        agreement.refuse("build")
        raise
    told = {"device": place.type, "model.config": model.config, "mesh": agreement.mesh.axes}
    for name, each in (("layout", layout), ("prefill_layout", reads)):
        known = (None, None) if each is None else (each.name, (each.chains, each.overlap))  # None is told too
        told |= dict(zip((name, f"{name}.chains"), known, strict=True))
    told |= {"compile": why_eager is None, "strict": strict, "kernels": names}
    agreement.check("build", {**sizes, "dtype": kind, **told})
    program = RankProgram(
        model, read, place, kind, tuple(kernels), strict, why_eager,
        mesh=agreement.mesh, layout=layout, prefill_layout=reads,
    )  # fmt: skip
    try:
        program.warm_up()
    except Exception:
        program.close()
        raise
    return program


def _check_weights(model: Model) -> None:
    check_model("build", model)
    if model.device.type == "meta":
        raise ValueError("build: the model has no weights, it was loaded with abstract=True\n    fix: load it without")


def _reachable(device: torch.device | str | None, model: Model) -> torch.device:
    """Where ranks can tell each other what they were told, whatever that is."""
    try:
        place = torch.device(device or model.device)
        _check_there(place)
    except Exception:  # said by what reads them
        return torch.device("cpu")
    return torch.device("cpu") if place.type == "meta" else place


def _why_eager(compile: bool | None, place: torch.device, sizes: Sizes, never: str | None = None) -> str | None:
    """Why a program is not compiled, or None. never: why it cannot be, whatever the machine."""
    if compile is False:
        return "compile=False"
    if never is not None:
        if compile:
            raise ValueError(f"build(compile=True): {never}\n    fix: without it, or compile=False")
        return never
    problem = dynamo.compiler_problem(place)
    if problem is not None:
        warnings.warn(f"build: {problem}; this program runs eagerly, as with compile=False", stacklevel=3)
        return problem
    longest = dynamo.longest_sum(place)
    if longest is not None and sizes.slots - 1 > longest:
        raise ValueError(
            f"build(max_len={sizes.max_len}): torch {torch.__version__} compiles caches of {longest} tokens at most\n"
            f"    fix: max_len={longest}, compile=False, or torch 2.13"
        )
    if place.type == "cuda" and (absent := kernels_cuda.missing()) is not None:
        warnings.warn(f"build: no kernels for a GPU are in this program: {absent}", stacklevel=3)
    return None


def _check_graphs(kernels: Sequence[Kernel], strict: bool, why_eager: str | None) -> None:
    if (kernels or strict) and why_eager is not None:
        what = "kernels=..." if kernels else "strict=True"
        fix = "compile=True" if why_eager == "compile=False" else f"without it: {why_eager}"
        raise ValueError(f"build({what}): kernels are put into compiled graphs\n    fix: {fix}")


def _device(device: torch.device | str | None, default: torch.device) -> torch.device:
    try:
        return torch.device(device or default)
    except RuntimeError as error:
        raise ValueError(f'device="{device}": no such device\n    fix: "cpu" or "cuda"') from error


def _check_dtype(function: str, dtype: object, device: torch.device) -> None:
    known = ", ".join(map(str, _DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{function}(dtype={dtype!r}): a torch.dtype is needed\n    known: {known}")
    if dtype not in _DTYPES or (device.type == "mps" and dtype == torch.float64):
        raise ValueError(f"{function}(dtype={dtype}): {device.type} cannot run it\n    known: {known}")


def _check_place(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "meta":
        raise ValueError('build(device="meta"): nothing runs there\n    fix: programs.plan(model) prints the plan')
    _check_there(device)
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ValueError(f"build(dtype={dtype}): {torch.cuda.get_device_name(device)} cannot run it")


def _check_there(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            'build(device="cuda"): no CUDA device is available\n'
            '    fix: programs.plan(model, device="cuda", arch="sm_90") prints the plan without one'
        )
