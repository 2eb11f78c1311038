"""Engines killed in the middle of each operation, as `tests/engine` does it with the current version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from highwater.terminal.demo.engine import DemoEngine
from tests.engine.conftest import Victim, engine_to_ruin
from tests.engine.test_kills import pytestmark, sidecar, test_an_engine_killed_in_an_operation

__all__ = ["pytestmark", "sidecar", "test_an_engine_killed_in_an_operation"]


@pytest.fixture(scope="module")
def victim(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """One of each version, for this file."""
    with engine_to_ruin(engine_factory, tmp_path_factory.mktemp("victim")) as victim:
        yield victim
