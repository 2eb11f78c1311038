"""Fixtures and hooks of every test: no deadlines on examples, tokens in a folder of the run, long tests left out."""

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.topics import TOPICS, asked_for

HERE = Path(__file__).parent
WITH_TOOLS = {HERE / "browser", HERE / "observability"}

# A machine that is busy with something else makes an example slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _state_home() -> Iterator[None]:
    """Sidecars keep their tokens in a folder of the test run, not in the user's home."""
    with tempfile.TemporaryDirectory(prefix="highwater-tests-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield


@pytest.fixture(scope="session", autouse=True)
def _slow_starts() -> Iterator[None]:
    """A sidecar that a test starts may take as long as a busy machine needs, which is many times three seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("highwater.demo.sidecar.START_SECONDS", 600.0)
        yield


@pytest.hookimpl(trylast=True)  # the folders' own mark their tests first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if WITH_TOOLS & {*item.path.parents}:
            item.add_marker(pytest.mark.tools)
    if left := [item for item in items if topic_of(item) not in {None, *asked_for()}]:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Take coverage's tracer off a test that is marked so: it goes through the same lines thousands of times."""
    tracer = sys.gettrace()
    if item.get_closest_marker("untraced") is None or tracer is None:
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def topic_of(item: pytest.Item) -> str | None:
    """Return the topic that a long test is about, by the mark nearest to it; most tests have none."""
    mark = item.get_closest_marker("long")
    if mark is None:
        return None
    topic: str = mark.args[0]
    if topic not in TOPICS:
        raise pytest.UsageError(f"{item.nodeid} is a long test of {topic}; tests/topics.py has {list(TOPICS)}")
    return topic
