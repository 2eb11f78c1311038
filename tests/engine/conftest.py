"""Real engines for the tests in this folder: built and started on first use, ended whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.demo.engine import Engine, EngineOptions
from app.demo.environment import EngineEnvironment, ensure_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
TEST_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # The fixtures' time is not the test's: an install and a start have limits of their own.
                item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))


@pytest.fixture(scope="session")
def engine_environment() -> EngineEnvironment:
    """The environment that vLLM is installed in; made once per machine, which takes minutes."""
    return ensure_environment(announce=print)


@pytest.fixture(scope="session")
def engine_factory(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """`engine_factory(**options)` starts an engine; it is ended with the session, or earlier by its user."""
    engines: list[Engine] = []

    def start(**options: object) -> Engine:
        folder = tmp_path_factory.mktemp("engine")
        engine = Engine(engine_environment, EngineOptions(**options), folder=folder)
        engines.append(engine)
        return engine.start()

    try:
        yield start
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="session")
def engine(engine_factory: Callable[..., Engine]) -> Engine:
    """The engine that the tests share: one worker, images, dev mode, Highwater's extension. Leave it as it was."""
    return engine_factory()
