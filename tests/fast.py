"""A pytest plugin (`-p tests.fast`): leaves to the whole check what `make test-fast` does not run, and says so.

Hypothesis draws a quarter of the examples, except in tests that give a number.

Left out are tests marked `whole`, which gives the reason, those that need a C compiler, and long ones, as `TEST_LONG`
has it. `make test` and `.ci/run` know nothing of this plugin: they run every test marked `whole`, whatever has changed.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings

EXAMPLES = 25


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("fast", max_examples=EXAMPLES)  # else as tests/conftest.py has it
    settings.load_profile("fast")
    config.pluginmanager.register(LeftOut(config), "left-out")


class LeftOut:
    """Counts what is left out by its reason; a worker of xdist hands its counts to the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._counts = Counter[str]()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if any(item.get_closest_marker(name) for name in ("whole", "compiled"))]
        items[:] = [item for item in items if item not in left]
        if left:
            config.hook.pytest_deselected(items=left)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._counts.update(map(reason, items))

    def pytest_sessionfinish(self) -> None:
        handed_on = getattr(self._config, "workeroutput", None)
        if handed_on is not None:
            handed_on["left_out"] = dict(self._counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        # Every worker collects all tests: their counts are the same.
        self._counts |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._counts:
            total = sum(self._counts.values())
            terminalreporter.section(f"{total} tests left to the whole check (`make test`, `.ci/run`)")
            for why, count in self._counts.most_common():
                terminalreporter.line(f"{count:5} {why}")


def reason(item: pytest.Item) -> str:
    """Return why a test is left out, by its mark."""
    if mark := item.get_closest_marker("whole"):
        return str(mark.args[0])
    if item.get_closest_marker("compiled"):
        return "the data plane compiled"
    mark = item.get_closest_marker("long")
    return f"a long test of {mark.args[0]}" if mark else "left out by the command line"
