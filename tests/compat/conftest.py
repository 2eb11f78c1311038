"""Engines of older versions for the tests in this folder, which run when the marker expression asks for `compat`.

Each version's environment takes some minutes to build, once, and 6 to 8 GB.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.demo.environment import ensure_environment
from tests.engine.conftest import engine_factory

from .results import Result, keep

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.demo.environment import EngineEnvironment

__all__ = ["engine_factory"]
HERE = Path(__file__).parent
TEST_SECONDS = 600
VERSIONS = ("0.12.0", "0.23.0")
RESULTS = "HIGHWATER_COMPAT_RESULTS"
"""Names the file that results go to; without it they are not kept."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and "compat" not in config.option.markexpr:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
    for item in ours:
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
    return ensure_environment(version, announce=print)


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """`record(version, remedy, way, outcome, figures)` keeps a result for `docs/compat.md`; see `results.Result`."""
    path = os.environ.get(RESULTS)

    def keep_result(version: str, remedy: str, way: str, outcome: str, figures: dict[str, float | str]) -> None:
        if path:
            keep(Path(path), Result(version, remedy, way, outcome, figures))

    return keep_result
