"""Engines with faults, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.engine.conftest import engine_environment

__all__ = ["engine_environment"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/growth" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(3600, func_only=True))
