"""Engines of their own, and what is read of engines: no test here shares the engine of tests/engine.

So the two folders run side by side.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import engine_environment, engine_factory, mark_as_engine_tests, prometheus

__all__ = ["engine_environment", "engine_factory", "prometheus"]
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_as_engine_tests(items, HERE)
