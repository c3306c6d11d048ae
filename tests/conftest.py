"""Shared fixtures, and the rule that a skip outside the list is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# Nothing may reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# test id -> why it may skip
ALLOWED_SKIPS: dict[str, str] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.skipped and item.nodeid not in ALLOWED_SKIPS:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped, and is not in ALLOWED_SKIPS: {report.longrepr}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that skips itself is a failure too."""
    if report.skipped:
        report.outcome = "failed"


_TINY = ("donation", "generate", "lower", "messages", "plan", "rollout", "sampling")


# Files that compile with Inductor, NVRTC or g++ or start processes, the longest first. One that a worker came to last
# would leave the other without work.
_LONG = (
    *("smollm2", "families_compiled", *_TINY, "processes", "compiler", "ranks_processes", "cpu", "ranks"),
    *("plan_table", "step_families", "whole_processes", "train_families", "gdn_decode", "layout_processes"),
    *("gdn_program", "latent", "latent_processes", "recurrent_processes", "planted", "simt_building", "decode_step"),
    *("lowered", "latent_models", "experts", "families", "examples", "readme", "replay", "load", "whole_models"),
)


def _subject(nodeid: str) -> str:
    return nodeid.split("::")[0].rpartition("test_")[2].removesuffix(".py")


class _ByProgram(LoadScopeScheduling):
    """Files that share a compiled program stay in one worker; every other file goes by itself."""

    def _split_scope(self, nodeid: str) -> str:
        return "tiny" if _subject(nodeid) in _TINY else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # by the number of tests, whatever they cost
    return _ByProgram(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups are dealt out first."""
    items.sort(key=lambda item: _LONG.index(name) if (name := _subject(item.nodeid)) in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
