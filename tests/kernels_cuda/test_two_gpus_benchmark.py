"""The part of the script that takes two GPUs: what it says without them, and all of one rank's run that needs none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import sharding as sh
from meshfn.kernels_cuda.peers import connect

from .ops import host_ops
from .two_gpus import TwoGpus, tell_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_two_gpus"), importlib.import_module("gpu")


def test_without_two_it_says_why(scripts, monkeypatch):
    two, gpu = scripts
    lines = []
    for count in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        lines += map(gpu.text_of, two.figures(60))
    assert_expected_inline(
        "\n".join(lines),
        """\
kernel one_shot_all_reduce SKIPPED  0 GPUs here, and it takes 2
kernel one_shot_all_reduce SKIPPED  1 GPU here, and it takes 2""",
    )


def test_what_two_processes_say(scripts, monkeypatch, tmp_path):
    """Figures as they come; one that ends with an error, or that does not end, is a line too."""
    two, gpu = scripts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    child = tmp_path / "child.py"
    figure = {"section": two.SECTION, "bytes": 4096, "us": 5.0, "gbps": 0.8, "nccl_us": 12.5, "error": 0.0}
    child.write_text(
        "import json, sys, time\n"
        f"print(json.dumps({figure}), flush=True) if sys.argv[1] == '0' else sys.exit('a rank failed')\n"
    )
    monkeypatch.setattr(two, "__file__", str(child))
    lines = list(map(gpu.text_of, two.figures(60)))
    child.write_text("import time; time.sleep(60)\n")
    lines += map(gpu.text_of, two.figures(0.5))
    assert_expected_inline(
        "\n".join(lines),
        """\
kernel one_shot_all_reduce     4,096 bytes     5.00 us     0.8 GB/s each way  NCCL   12.50 us  error 0.0e+00
kernel one_shot_all_reduce FAILED  rank 1 ended with 1 / a rank failed
kernel one_shot_all_reduce FAILED  rank 0 ended with -9
kernel one_shot_all_reduce FAILED  rank 1 ended with -9""",
    )


def test_figures_of_two_ranks(scripts, monkeypatch):
    two, _ = scripts
    monkeypatch.setattr(two, "NUMBERS", (5, 4097))
    gpus = TwoGpus()

    def body(at):
        def both(x):
            return list(sh.reshard(x[None], "P/tp N -> P N", at, P=2))

        link = connect(lambda: gpus.of(at), at.rank, tell_of(at), torch.bfloat16, limit_s=60.0)
        found = list(two.compared(link, both, lambda x: x, lambda calls: (calls[0](), 1e-5 * (at.rank + 1))[1], "cpu"))
        link.close()
        return found

    with host_ops(gpus):
        one, other = sh.Threads(sh.Mesh(tp=2)).run(body)
    assert one == other
    assert [(f["bytes"], f["us"]) for f in one] == [(10, 20.0), (8194, 20.0)]
    assert all(0 <= f["error"] < 0.05 for f in one)
