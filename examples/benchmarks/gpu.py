"""Kernels and whole models on a GPU: right, and how near they come to what memory allows. In under six minutes.

    python examples/benchmarks/gpu.py [--out FOLDER] [--budget SECONDS] [--only TEXT] [--dry]

Needs this repository on the path as `meshfn`, a CUDA build of torch (2.11 on), transformers, and `cuda-core` with
NVRTC. Each section is a process of its own, so that one that fails is a line and no more; all of them begin at once,
build what they run, and are measured one after another, kernels while models still build, models when none does. What
is worth most comes first; a section for which too little time is left is skipped, and that is said. Each figure is
printed as it comes and stands in FOLDER/gpu.txt and FOLDER/gpu.jsonl from then on.

--dry runs all of it at tiny sizes on a CPU, kernels carried out by the tests' harness, and prints what plans for an
H200 say of the models; so a slip costs no time on the device. --only: sections whose name has this text.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
BATCHES, THEIRS = (1, 4, 16, 64), (1, 16)
KERNELS = (
    *("gemv", "decode_attention", "gdn_decode", "mla_decode", "qkv_rope_cache", "add_rms_norm"),
    *("sample_advance", "sample_options"),
)
# In order of worth; the seconds that measuring one takes at most, once it is built.
SECTIONS: dict[str, int] = {
    "bandwidth": 5,
    **{f"kernel {name}": 12 for name in KERNELS},
    **{f"ours {model} {batch}": 8 for batch in (1, 16) for model in ("Llama-3.2-1B", "Qwen3.5-4B")},
    **{f"transformers {model}": 20 for model in ("Llama-3.2-1B", "Qwen3.5-4B")},
    "all DeepSeek-V3": 40,
    **{f"ours {model} {batch}": 8 for batch in (4, 64) for model in ("Llama-3.2-1B", "Qwen3.5-4B")},
    "compiled Llama-3.2-1B": 10,
}
# Between two GPUs, at the end, where they are.
PAIR = "kernel one_shot_all_reduce"
# Of the budget, from when on models are measured although others still build.
PATIENCE = 0.6


def work_of(section: str, device: str) -> Callable[[], Iterator[dict[str, Any]]]:
    """What measures a section, after all that comes before."""
    import _gpu_kernels
    import _gpu_models as models

    kind, _, rest = section.partition(" ")
    if kind == "bandwidth":
        return _gpu_kernels.bandwidth
    if kind == "kernel":
        return lambda: _gpu_kernels.Kernel(rest)()
    name, _, batch = rest.partition(" ")
    if kind == "ours":
        return models.Ours(name, (int(batch),), device)
    if kind == "all":  # whose weights are too large for two processes
        ours = models.Ours(name, BATCHES, device)
        theirs = models.Eager(name, THEIRS, device, ours.module)
        return lambda: (figure for each in (ours, theirs) for figure in each())
    engine = {"transformers": models.Eager, "compiled": models.Compiled}[kind]
    return engine(name, THEIRS if kind == "transformers" else (1,), device)


def child(section: str) -> None:
    """A section in this process: it says that it is ready, waits for a line, and prints its figures as JSON."""
    begin = time.monotonic()
    work = work_of(section, "cuda")
    torch.cuda.synchronize()
    print(json.dumps({"ready": time.monotonic() - begin}), flush=True)
    sys.stdin.readline()
    for figure in work():
        print(json.dumps(figure), flush=True)


def command_of(section: str) -> list[str]:
    return [sys.executable, __file__, "--child", section]


@dataclass
class Child:
    """A section in a process of its own. ready: it has built what it measures, or has ended."""

    section: str
    ready: bool = False

    def __post_init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # All of them compile at once.
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command_of(self.section), text=True, env=environment, **pipes)
        self.figures: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._rest: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if not line.startswith("{"):
                self._rest = [*self._rest, line.strip()][-3:]
            elif "ready" in (told := json.loads(line)):
                self.ready = True
            else:
                self.figures.put(told)
        self.process.wait()
        self.ready = True
        self.figures.put(None)

    def measured(self, limit: float) -> Iterator[dict[str, Any]]:
        """The figures as they come; of a process that fails, or takes longer than `limit` seconds, why."""
        end = time.monotonic() + limit
        try:
            assert self.process.stdin is not None
            print("go", file=self.process.stdin, flush=True)
        except OSError:
            pass  # it has ended, and what it said comes
        try:
            while (figure := self.figures.get(timeout=max(0.1, end - time.monotonic()))) is not None:
                yield figure
        except queue.Empty:
            self.stop()
            yield {"section": self.section, "failed": f"was stopped after {limit:.0f} s"}
            return
        if self.process.returncode:
            why = " / ".join([f"ended with {self.process.returncode}", *self._rest])
            yield {"section": self.section, "failed": why}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(names: list[str], budget: float, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure sections one after another, in the order of their worth as far as they are ready."""
    begin = time.monotonic()
    waiting = [Child(name) for name in names]
    try:
        while waiting:
            spent = time.monotonic() - begin
            building = sum(not each.ready for each in waiting)
            alone = not building or spent > PATIENCE * budget
            ready = [each for each in waiting if each.ready and (alone or each.section.startswith(("kernel", "band")))]
            short = [each for each in waiting if budget - spent < SECTIONS[each.section]]
            for each in short:
                say({"section": each.section, "skipped": f"{budget - spent:.0f} s are left"})
                each.stop()
                waiting.remove(each)
            ready = [each for each in ready if each not in short]
            if not ready:
                time.sleep(0.1)
                continue
            waiting.remove(ready[0])
            for figure in ready[0].measured(min(2 * SECTIONS[ready[0].section], budget - spent)):
                say(figure | ({"building": building} if building else {}))
            ready[0].stop()
    finally:
        for each in waiting:
            each.stop()


class Report:
    """Prints each figure, and keeps it in two files as it comes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / "gpu.txt", folder / "gpu.jsonl"]
        for file in self._files:
            file.write_text("")
        self._copy = self._sheet = None

    def __call__(self, figure: dict[str, Any]) -> None:
        if figure.get("section") == "bandwidth" and "copy" in figure:
            self._copy, self._sheet = figure["copy"], figure["datasheet"]
        if "moved" in figure and "us" in figure:
            rate = figure["moved"] / figure["us"] * 1e6
            figure = {
                **figure,
                "of_copy": self._copy and rate / self._copy,
                "of_sheet": self._sheet and rate / self._sheet,
            }
        line = text_of(figure)
        print(line, flush=True)
        for file, text in zip(self._files, (line, json.dumps(figure)), strict=True):
            with file.open("a") as out:
                out.write(text + "\n")


def text_of(figure: dict[str, Any]) -> str:
    if "section" not in figure:
        return "  ".join(f"{name} {value}" for name, value in figure.items())
    head = f"{figure['section']:24}"
    if "batch" in figure:
        head += f" B={figure['batch']:<3}"
    tail = f"  (while {figure['building']} others were built)" if "building" in figure else ""
    if "failed" in figure or "skipped" in figure:
        what = "failed" if "failed" in figure else "skipped"
        return f"{head} {what.upper()}  {figure[what]}"
    if "nccl_us" in figure:
        sent = f"{figure['bytes']:9,} bytes  {figure['us']:7.2f} us  {figure['gbps']:6.1f} GB/s each way"
        return f"{head} {sent}  NCCL {figure['nccl_us']:7.2f} us  error {figure['error']:.1e}"
    if "copy" in figure:
        sheet = f", {figure['copy'] / figure['datasheet']:.1%} of the datasheet" if figure["datasheet"] else ""
        return f"{head} a copy of 1 GiB reads and writes {figure['copy'] / 1e9:.0f} GB/s{sheet}{tail}"
    if "label" in figure:
        speed = ""
        if "us" in figure:
            speed = f"{figure['us']:8.2f} us  {figure['gbps']:6.0f} GB/s  {figure['share']:5.1%} of a copy's  "
        errors = f"error {figure['error']:.1e} (plain {figure['plain_error']:.1e})"
        return f"{head} {figure['label']:48} {speed}{errors}{tail}"
    if "bound_us" in figure:
        told = f"predicted: {figure['moved'] / 1e9:.3f} GB a step, {figure['bound_us']:.0f} us at 4.8 TB/s"
        return f"{head} {told}; {figure['planned']}"
    told = f"{figure['tokens']:9.1f} tokens/s  {figure['us']:9.1f} us a step"
    if figure.get("device_us") is not None:
        told += f"  device {figure['device_us']:.1f} us, host beside {figure['host_us']:.1f} us"
        told += f"  {figure['launches']:.1f} launches"
    for name, what in (("of_copy", "of a copy's rate"), ("of_sheet", "of the datasheet")):
        told += f"  {figure[name]:.1%} {what}" if figure.get(name) else ""
    for name, what in (("build_s", "build"), ("capture_s", "captured again"), ("first_s", "first token")):
        told += f"  {what} {figure[name]:.2f} s" if figure.get(name) is not None else ""
    return f"{head} {told}{tail}"


def seconds(text: str) -> float:
    found = float(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"a finite number of seconds above 0 is needed, not {text}")
    return found


def folder(text: str) -> Path:
    found = Path(text)
    if found.exists() and not found.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, and a folder is needed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=folder, default=Path("gpu-figures"))
    parser.add_argument("--budget", type=seconds, default=330)
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in SECTIONS if given.only in name]
    if not names and given.only not in PAIR:
        sys.exit(f"gpu.py: --only {given.only} is in no section\n    known: {', '.join((*SECTIONS, PAIR))}")
    if given.dry:
        from _gpu_dry import dry, harness

        return dry(names, Report(given.out), harness())
    if not torch.cuda.is_available():
        sys.exit("gpu.py: no CUDA device is available\n    fix: --dry runs all of it that needs none")
    if given.child:
        return child(given.child)
    import _two_gpus

    begin, report = time.monotonic(), Report(given.out)
    major, minor = torch.cuda.get_device_capability()
    report({"device": torch.cuda.get_device_name(), "arch": f"sm_{major}{minor}", "torch": torch.__version__})
    run(names, given.budget, report)
    if given.only in PAIR:
        for figure in _two_gpus.figures(max(10, given.budget - (time.monotonic() - begin))):
            report(figure)
    print(f"{given.out / 'gpu.txt'} and gpu.jsonl, after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
