"""The script that measures on a GPU: all of it that needs none is run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .ops import host_ops

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """`gpu.py`, its cases and what measures them, at sizes that the harness carries out in a moment."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("_gpu_cases", "gpu", "_gpu_kernels", "_gpu_dry")
    cases, gpu, kernels, dry = map(importlib.import_module, names)
    dry.tiny(monkeypatch.setattr)
    return cases, gpu, kernels


def test_bytes_are_those_of_arguments_results_and_slots_written(scripts):
    """All arguments are read, but for the caches that a token is only written to; of what an op writes in place, the
    slots, rows and channels count that are others after it."""
    cases, _, kernels = scripts
    with host_ops(), torch.no_grad():
        for name, make in cases.KERNELS.items():
            for case in make():
                args = case.make()
                before = kernels.copied(args, None)
                results = kernels.tensors(case.op(*args))
                given = kernels.tensors(args)
                new = [x for x in results if all(x is not each for each in given)]
                read = kernels.tensors(args[:7] + args[9:] if name == "qkv_rope_cache" else args)
                changed = [
                    a[(a != b).any(-1)] for a, b in zip(given, kernels.tensors(before), strict=True) if a.dim() > 1
                ]
                assert case.moved == cases.size_of(*read, *new, *changed), (name, case.label)
                in_place = name in ("qkv_rope_cache", "gdn_decode")
                assert (cases.size_of(*changed) > 0) == in_place, (name, case.label)


def test_a_kernel_that_is_wrong_is_said(scripts):
    cases, _, kernels = scripts
    case = next(cases.add_rms_norm())
    wrong = type(case)(case.label, case.make, lambda *a: [1.01 * y for y in case.plain(*a)], case.plain, case.moved)
    with pytest.raises(ArithmeticError, match="against fp64"):
        kernels.errors(wrong)


def test_every_section_runs_at_tiny_sizes(scripts, tmp_path, capsys):
    """Kernels against fp64, models on the CPU; a line each, and what stands in the files."""
    cases, gpu, _ = scripts
    dry = importlib.import_module("_gpu_dry")
    assert {f"kernel {name}" for name in cases.KERNELS} == {name for name in gpu.SECTIONS if "kernel" in name}
    names = [name for name in gpu.SECTIONS if not name.endswith((" 4", " 64", " 16"))]
    dry.dry(names, gpu.Report(tmp_path), host_ops, plans=False)
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "gpu.txt").read_text().splitlines() == lines
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == len(lines)
    for start in (
        "kernel sample_options",
        "ours Llama-3.2-1B",
        "ours Qwen3.5-4B",
        "transformers DeepSeek-V3",
        "transformers compiled",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert sum(line.startswith("ours DeepSeek-V3") for line in lines) == len(gpu.BATCHES)


def test_without_a_device(scripts, monkeypatch):
    _, gpu, _ = scripts
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device is available\n    fix: --dry"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "gemm"])
    with pytest.raises(SystemExit, match="--only gemm is in no section"):
        gpu.main()


def test_arguments_that_are_none(scripts, monkeypatch, capsys):
    _, gpu, _ = scripts
    said = []
    for wrong in (["--budget", "nan"], ["--budget", "-1"], ["--budget", "x"], ["--out", __file__]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *wrong])
        with pytest.raises(SystemExit):
            gpu.main()
        said.append(capsys.readouterr().err.splitlines()[-1].replace(__file__, "FILE"))
    assert said == [
        "gpu.py: error: argument --budget: a finite number of seconds above 0 is needed, not nan",
        "gpu.py: error: argument --budget: a finite number of seconds above 0 is needed, not -1",
        "gpu.py: error: argument --budget: invalid seconds value: 'x'",
        "gpu.py: error: argument --out: FILE is a file, and a folder is needed",
    ]


def test_sections_are_measured_in_turn_within_the_budget(scripts, monkeypatch):
    """One that dies, one that takes too long and one for which no time is left are lines, and no more; a model is
    measured when none is built any more, a kernel before."""
    _, gpu, _ = scripts
    figure = 'print(\'{"section": "%s", "copy": 3.0, "datasheet": null}\', flush=True)'
    ready = "print('{\"ready\": 1}', flush=True); import sys, time; sys.stdin.readline(); "
    scripts_of = {
        "kernel k": ready + figure % "kernel k",
        "ours a": "import time; time.sleep(1); " + ready + figure % "ours a",
        "ours b": ready + figure % "ours b" + "; raise SystemExit('broken')",
        "ours c": ready + figure % "ours c" + "; time.sleep(60)",
        "ours d": ready,
    }
    monkeypatch.setattr(gpu, "SECTIONS", {"kernel k": 1, "ours a": 1, "ours b": 1, "ours c": 1, "ours d": 100})
    monkeypatch.setattr(gpu, "command_of", lambda name: [sys.executable, "-c", scripts_of[name]])
    said = []
    gpu.run(list(scripts_of), 60, said.append)
    assert said[0] == {"section": "ours d", "skipped": "60 s are left"}
    assert said[1]["section"] == "kernel k"
    assert [each["section"] for each in said[2:]] == ["ours a", "ours b", "ours b", "ours c", "ours c"]
    assert said[4]["failed"] == "ended with 1 / broken"
    assert said[6]["failed"] == "was stopped after 2 s"
    assert gpu.text_of(said[6]).split() == ["ours", "c", "FAILED", "was", "stopped", "after", "2", "s"]
    assert subprocess.run(gpu.command_of("kernel k"), input="", capture_output=True, timeout=60).returncode == 0
