"""Programs over ranks that are processes, compiled: tokens of one rank, how often they compile, what they send.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh

from ..sharding import gloo
from . import test_ranks as ranks

PAIR = [ranks.CASES[0], ranks.CASES[7]]  # dense with a ring; a gated delta net, attention with a gate and experts


@pytest.fixture(scope="module")
def two():
    return gloo.run(2, [interleaved], timeout=60.0)


def interleaved():
    """Two programs by turns, each over a mesh that is traced."""
    found = {}
    made = []
    for i, (layout, axes, parts) in enumerate(PAIR):
        of, record = ranks.made(parts), sh.trace(gloo.mesh_of(**axes))
        made.append((record, ranks.build(of, layout, record.mesh), programs.build(of, compile=False, **ranks.SIZES)))
        found[i] = {"sent to compile": len(record.of(record.mesh.rank))}
    return found


def test_compiled(two):
    print(two["interleaved"])
