"""Latent attention under its layouts equals latent attention on one rank, with every gradient; and what it sends."""

from __future__ import annotations

import pytest
import torch

from . import latent_cases as cases


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_layouts(first):
    for seed in range(first, first + 20):
        case = cases.make(seed)
        y, grads = cases.sharded(case)
        want, wanted = cases.dense(case)
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")
        torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, c=case: f"{c}\n{m}")
