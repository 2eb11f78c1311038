"""A pytest plugin (`-p tests.seen --seen FILE`): writes down which tests were collected, left out and run.

`tests/check.py` compares: whatever was collected must have run, or been left out for a reason that it knows. Workers of
xdist collect, each of them all tests; the process that hears of every report writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seen", type=Path, metavar="FILE", help="where to write which tests were seen, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--seen"):
        config.pluginmanager.register(Seen(config, path))


class Seen:
    """Keeps the ids of a run's tests, and writes them at its end."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._handed_on: dict[str, object] | None = getattr(config, "workeroutput", None)
        self._path = path
        self._collected: list[str] = []
        self._left_out: list[str] = []
        self._ran: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left_out += [item.nodeid for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._ran.append(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._collected, self._left_out = getattr(node, "workeroutput", {}).get("seen", ([], []))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._left_out:
            # All of them are long, and nothing that they are about has changed.
            session.exitstatus = pytest.ExitCode.OK
        if self._handed_on is not None:
            self._handed_on["seen"] = (self._collected, self._left_out)
            return
        found = {"collected": self._collected, "left_out": self._left_out, "ran": self._ran}
        self._path.write_text(json.dumps(found))
