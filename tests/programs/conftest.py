"""One compiled tiny program for all tests here: a compile costs seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from meshfn import programs

from ..tiny import llama, ours


class Tiny(NamedTuple):
    module: Any
    model: programs.Model
    program: programs.Program


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """Batch 3, two layers that share a region, chunks of 8; the cache starts as NaN and is long: 385 KiB a tensor."""
    torch.manual_seed(1)
    module = llama(bias=True)
    model = ours(module)
    program = programs.build(model, batch=3, max_len=2048, chunk=8)
    for cache in program.cache:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    return Tiny(module, model, program)


@pytest.fixture
def eager(tiny: Tiny) -> programs.Program:
    """The same program, not compiled."""
    return programs.build(tiny.model, batch=3, max_len=70, chunk=8, compile=False)
