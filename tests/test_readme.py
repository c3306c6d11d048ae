"""The README's snippet gives the README's output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_snippet_prints_what_it_says():
    code, output = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL).groups()
    # Compiling is tested elsewhere, and costs half a minute.
    code = code.replace("max_len=256)", "max_len=256, compile=False)")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == output


def test_the_error_is_as_shown():
    import pytest
    import torch

    from meshfn import functional as F

    q, k = torch.ones(2, 5, 9, 64), torch.ones(2, 5, 3, 32)
    with pytest.raises(F.ShapeError) as error:
        F.dot_product_attention(q, k, k)
    assert f"ShapeError: {error.value}\n" in README
