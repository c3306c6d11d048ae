"""What the README shows is what happens; its snippet runs in programs/test_smollm2.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from meshfn import functional as F

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_a_layer_of_your_own():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    found = {"torch": torch, "F": F}
    exec(code, found)
    assert isinstance(found["params"], F.Attention)


def test_the_error_is_as_shown():
    q, k = torch.ones(2, 5, 9, 64), torch.ones(2, 5, 3, 32)
    with pytest.raises(F.ShapeError) as error:
        F.dot_product_attention(q, k, k)
    assert f"ShapeError: {error.value}\n" in README
