"""A page is now and then late, because a browser, a server and a kernel share the machine with
other tests: a test of a page that fails runs once more, and fails if it fails again."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):  # a GPU machine may have pytest alone
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=5))
