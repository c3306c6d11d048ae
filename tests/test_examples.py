"""The examples of training, shortened: a loss that falls, a reward that rises, what they print and draw."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_hybrid_begins_to_learn_a_poem(capsys, tmp_path, monkeypatch):
    found = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    losses = found["train"](6, 3, compile=False)
    out = capsys.readouterr().out
    assert out.count("'Twas brillig") == 2
    assert "2.5 M parameters" in out
    assert 5 < losses[0] < 6
    assert losses[-1] < losses[0] - 0.5
    assert found["picture"](losses, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not found["picture"](losses, tmp_path / "none.png")


def test_the_reward_of_a_policy_rises(capsys):
    rewards = runpy.run_path(str(EXAMPLES / "rollout.py"))["train"](25, compile=False)
    assert sum(rewards[:5]) / 5 == pytest.approx(1 / 24, abs=0.02)
    assert sum(rewards[-5:]) / 5 > 0.1
