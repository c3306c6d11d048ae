"""Programs over ranks that are processes: tokens of one rank, and arguments that differ.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from meshfn import programs
from meshfn import sharding as sh

from ..sharding import gloo
from . import test_ranks as ranks
from . import test_reading as reading


@pytest.fixture(scope="module")
def four():
    return gloo.run(4, [tokens, read, differing])


def tokens():
    """Whether a rank generates what one rank does, by the options of a call, and sends what its plan says."""
    found = []
    for i, axes in ((2, {"dp": 2, "tp": 2}), (1, {"tp": 4}), (8, {"tp": 4}), (6, {"ep": 2, "tp": 2})):
        layout, _, parts = ranks.CASES[i]
        of, record = ranks.made(parts), sh.trace(gloo.mesh_of(**axes))
        program, one = ranks.build(of, layout, record.mesh), programs.build(of, compile=False, **ranks.SIZES)
        for options in ranks.OPTIONS:
            mine, whole = (p.generate(ranks.PROMPTS, max_new_tokens=12, **options) for p in (program, one))
            found.append(mine.tokens == whole.tokens)
        if "ep" not in axes:  # there only the router says what is sent
            state = program.prefill(ranks.PROMPTS)
            record.clear()
            program.decode(state)
            found.append(gloo.facts(record) == gloo.facts(program.plan.phases["decode"]))
    return found


def test_tokens_are_those_of_one_rank(four):
    for of_rank in four["tokens"]:
        assert of_rank == [True] * 23, of_rank


def read():
    """Whether prompts that are read with their tokens over ranks go on as one rank's."""
    found = []
    for case in ("heads become rows", "states by head"):
        of, record = ranks.made(reading.CASES[case][3]), sh.trace(gloo.mesh_of(**reading.CASES[case][2]))
        program, one = (
            reading.build(case, record.mesh, of, chunk=12),
            programs.build(of, compile=False, **reading.SIZES),
        )
        for options in reading.OPTIONS:
            mine, whole = (p.generate(reading.PROMPTS, max_new_tokens=12, **options) for p in (program, one))
            found.append(mine.tokens == whole.tokens)
    return found


def test_prompts_read_with_their_tokens_over_ranks(four):
    assert four["read"] == [[True] * 4] * 4


def differing():
    """What a rank says where the last was told something else; and that all go on."""
    layout, _, parts = ranks.CASES[0]
    program = ranks.build(ranks.made(parts), layout, gloo.mesh_of(dp=2, tp=2))
    with pytest.raises(ValueError, match="told") as error:
        program.generate(ranks.PROMPTS, max_new_tokens=5 + (dist.get_rank() == 3))
    return str(error.value), program.generate(ranks.PROMPTS, max_new_tokens=5).lengths


def test_ranks_that_are_told_different_things(four):
    for said, lengths in four["differing"]:
        assert "max_new_tokens: rank 3 was told otherwise than rank 0" in said
        assert lengths == [5] * 3
