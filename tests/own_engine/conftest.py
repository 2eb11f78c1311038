"""Engines of their own, and what is read of engines: no test here shares the engine of tests/engine.

So the two folders run side by side.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engine.conftest import (
    engine_environment,
    engine_factory,
    mark_as_engine_tests,
    prometheus,
    sidecar_beside,
)
from tests.engines import watching
from tests.patience import LIMIT_SECONDS

__all__ = ["engine_environment", "engine_factory", "prometheus"]
FOLDER = "tests/own_engine/"
GROUPS = Path("/sys/fs/cgroup")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_as_engine_tests(items, FOLDER)
    for item in items:
        if item.nodeid.startswith(FOLDER) and "watched_alone" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("watched_alone"))


class Watched(NamedTuple):
    """An engine whose workers record themselves, a sidecar that reads their folder, and the engine's memory cgroup."""

    engine: DemoEngine
    sidecar: DemoSidecar
    rings: Path
    group: Path | None


@pytest.fixture(scope="session")
def watched_alone(
    engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """The engine of test_host_real and then of test_watch_real, whose last test ends it."""
    folder = tmp_path_factory.mktemp("watched")
    rings = folder / "rings"
    with (
        cgroup_of_its_own() as group,
        engine_factory(**watching(rings, TASK_QUEUE_ENABLE="2")) as engine,
        sidecar_beside(engine, folder, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        yield Watched(engine, sidecar, rings, group)


@contextlib.contextmanager
def cgroup_of_its_own() -> Iterator[Path | None]:
    """Put what is started in the block into a memory cgroup; this process goes back into its own.

    None where none can be made: not root, no cgroup file system, or memory not delegated.
    """
    top = GROUPS / "memory" if (GROUPS / "memory/memory.usage_in_bytes").exists() else GROUPS
    before = _own_group(top)
    made = top / f"highwater-test-{os.getpid()}"
    try:
        made.mkdir()
        # Missing where the memory controller is not delegated.
        (made / ("memory.usage_in_bytes" if top.name == "memory" else "memory.current")).read_text()
        (made / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        yield None
        return
    home = before / "cgroup.procs"
    # What the engine's first process starts is its own: once it is a child, we can go.
    mover = threading.Thread(target=_leave_to_child, args=(made / "cgroup.procs", home))
    mover.start()
    try:
        yield made
    finally:
        mover.join()
        home.write_text(str(os.getpid()))
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:  # it can be removed once the last process has gone
            with contextlib.suppress(OSError):
                made.rmdir()
                break
            time.sleep(0.2)


def _leave_to_child(group: Path, home: Path) -> None:
    deadline = time.monotonic() + 600.0
    while len(group.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    home.write_text(str(os.getpid()))


def _own_group(top: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if top.name == "memory" else controllers == "":
            return top / path.lstrip("/")
    return top
