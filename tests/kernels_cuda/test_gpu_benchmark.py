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
    """`gpu.py` and its cases, at sizes that the harness carries out in a moment."""
    monkeypatch.syspath_prepend(str(FOLDER))
    cases, gpu = importlib.import_module("_gpu_cases"), importlib.import_module("gpu")
    tiny = cases.Sizes(64, 96, 4, 2, 16, 50, turned=16)
    gated = cases.Sizes(48, 40, 3, 1, 24, 50, turned=8, gated=True, delta=(2, 4, 8, 4))
    monkeypatch.setattr(cases, "MODELS", {"tiny": tiny, "gated": gated})
    monkeypatch.setattr(cases, "BATCHES", (1, 3))
    monkeypatch.setattr(cases, "CONTEXTS", (5, 40))

    def randn(*shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(*shape) * scale).to(dtype)

    monkeypatch.setattr(cases, "randn", randn)
    return cases, gpu


def test_cases_are_right(scripts):
    cases, gpu = scripts
    with host_ops():
        for name, make in cases.KERNELS.items():
            for case in make():
                error, plain = gpu.errors(case)
                assert error <= 1.5 * plain + 1e-5, (name, case.label)


def test_bytes_are_those_of_arguments_results_and_slots_written(scripts):
    """All arguments are read, but for the caches that a token is only written to; of what an op writes in place, the
    slots, rows and channels count that are others after it."""
    cases, gpu = scripts
    with host_ops(), torch.no_grad():
        for name, make in cases.KERNELS.items():
            for case in make():
                args = case.make()
                before = gpu.copied(args, None)
                results = gpu.tensors(case.op(*args))
                given = gpu.tensors(args)
                new = [x for x in results if all(x is not each for each in given)]
                read = gpu.tensors(args[:7] + args[9:] if name == "qkv_rope_cache" else args)
                changed = [a[(a != b).any(-1)] for a, b in zip(given, gpu.tensors(before), strict=True)]
                assert case.moved == cases.size_of(*read, *new, *changed), (name, case.label)
                in_place = name in ("qkv_rope_cache", "gdn_decode")
                assert (cases.size_of(*changed) > 0) == in_place, (name, case.label)


def test_a_kernel_that_is_wrong_is_said(scripts):
    cases, gpu = scripts
    case = next(cases.add_rms_norm())
    wrong = type(case)(case.label, case.make, lambda *a: [1.01 * y for y in case.plain(*a)], case.plain, case.moved)
    with pytest.raises(ArithmeticError, match="against fp64"):
        gpu.errors(wrong)


def test_the_table_without_a_device():
    done = subprocess.run([sys.executable, FOLDER / "gpu.py"], capture_output=True, text=True)
    if torch.cuda.is_available():
        pytest.skip("a device is here")
    assert done.returncode == 1
    assert done.stderr.strip() == "gpu.py: no CUDA device is available"


def test_a_process_that_dies_is_a_line_of_the_table(scripts, monkeypatch, capsys):
    """What it had printed before is kept; one that takes too long is stopped."""
    _, gpu = scripts
    line = '{"kernel": "k", "copy_gbps": 3.0}'
    for code, limit, why in (
        (f"print('{line}', flush=True); raise SystemExit('broken')", 60, "ended with 1 / broken"),
        (f"print('{line}', flush=True); import time; time.sleep(60)", 3, "was stopped after 3 s"),
    ):
        monkeypatch.setattr(gpu, "command_of", lambda name, code=code: [sys.executable, "-c", code])
        copied, failed = gpu.child("k", limit)
        assert copied == {"kernel": "k", "copy_gbps": 3.0}
        assert failed == {"kernel": "k", "failed": why}
    assert "k              FAILED  was stopped after 3 s" in capsys.readouterr().out
