"""Engines of their own, and what is read of engines: no test here shares the engine of tests/engine.

So the two folders run side by side.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine.conftest import engine_environment, engine_factory, mark_as_engine_tests, prometheus

if TYPE_CHECKING:
    import pytest

__all__ = ["engine_environment", "engine_factory", "prometheus"]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_as_engine_tests(items, HERE)
