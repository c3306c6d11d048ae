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


class _ByProgram(LoadScopeScheduling):
    """Files that share a compiled program stay in one worker; every other file goes by itself."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "tiny" if file.rpartition("test_")[2].removesuffix(".py") in _TINY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByProgram(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups are dealt out first."""
    first = ("smollm2", "families_compiled", "processes", *_TINY)
    items.sort(key=lambda item: next((i for i, name in enumerate(first) if f"test_{name}.py" in item.nodeid), 99))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
