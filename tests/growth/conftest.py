"""Engines with faults, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.engine.conftest import engine_environment

__all__ = ["engine_environment"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/growth/"):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(3600, func_only=True))
            # They rest for most of their time, and their names keep them apart: each has a process of its own.
            item.add_marker(pytest.mark.xdist_group(item.name))
