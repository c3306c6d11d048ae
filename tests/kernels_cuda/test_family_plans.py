"""Every family, planned for a GPU at each side of what the kernels take: none raises, and the graphs are whole."""

from __future__ import annotations

import pytest
import torch
from meshfn import programs
from meshfn.programs.lower import walk

from ..families import FAMILIES, family


@pytest.mark.verify
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_planned(name):
    model = programs.load(family(name))
    for batch in (1, 8, 9, 64):
        given = {"device": "cuda", "arch": "sm_90", "dtype": torch.bfloat16}
        plan = programs.plan(model, batch=batch, max_len=32, chunk=8, **given)
        for phase in plan.phases.values():
            for graph in {node.graph for node in walk(phase.graph.module)}:
                graph.lint()
