"""Fixtures for the engine's callers: a fake engine, and the sidecar's client of it, in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from highwater.engine.client import Engine
from tests.fakes.engine import Core, FakeClock, FakeEngine


@pytest.fixture
def fake() -> FakeEngine:
    """An engine whose time a test sets."""
    return FakeEngine(clock=FakeClock())


@pytest.fixture
async def engine(fake: FakeEngine) -> AsyncIterator[Engine]:
    """The client of the fake engine, allowed to call workers."""
    async with Engine("http://engine", transport=fake.transport()) as client:
        client.allow_rpc()
        yield client


@pytest.fixture
def cores() -> Iterator[list[Core]]:
    """Those that a test makes; the recorders and files that they hold open are closed in the end."""
    made: list[Core] = []
    yield made
    for core in made:
        core.recorders.close()
        for worker in core.fake.workers:
            worker.recorder.close()
