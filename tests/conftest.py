"""Shared fixtures, and the rule that a skip outside the list is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

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


SHARED = ("real", "tiny")


def _group(item: pytest.Item) -> str:
    return next((name for name in SHARED if name in getattr(item, "fixturenames", ())), "")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of one compiled program stay in one worker."""
    if _group(item):
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group is dealt out first."""
    items.sort(key=lambda item: (*SHARED, "").index(_group(item)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
