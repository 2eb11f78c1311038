"""Engines of older versions for the tests in this folder, which run when the marker expression asks for `compat`.

Each version's environment takes some minutes to build, once, and 6 to 8 GB.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.terminal.demo.engine import EngineEnvironment, ensure_environment
from tests.engine.conftest import engine_factory, record
from tests.engines import ALL_RECIPES

__all__ = ["engine_factory", "record"]
HERE = Path(__file__).parent
TEST_SECONDS = 600
VERSIONS = ("0.12.0", "0.23.0", "0.27.0")
HANGING_VERSIONS = ("0.12.0", "0.23.0")
"""Those that `/reset_mm_cache` under traffic can hang; fixed in 0.25.1."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/compat/"):
            item.add_marker(pytest.mark.compat)
            if item.get_closest_marker("timeout") is None:
                # The fixtures' time is not the test's: an install has no limit, a start has its own.
                item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """vLLM's version: every test that uses it runs once for each."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="session")
def engine_environment(version: str) -> EngineEnvironment:
    """In place of the current version's: everything that starts an engine builds on it.

    A test that needs an engine once ends it: `with engine_factory() as engine`. Two are too many for two cores.
    """
    return ensure_environment(version, recipes=ALL_RECIPES, announce=print)
