"""A mark takes coverage's tracer off a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def tracer() -> Iterator[object]:
    """A tracer that does nothing, in the place of coverage's; there again once the test has ended."""

    def trace(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    yield trace
    after = sys.gettrace()
    sys.settrace(before)
    assert after is trace


@pytest.mark.untraced
def test_a_test_that_is_marked_runs_without_the_tracer(tracer: object) -> None:
    """And has it back afterwards, or all that follow would count for nothing."""
    assert sys.gettrace() is None


def test_others_keep_it(tracer: object) -> None:
    """So that what they run is counted."""
    assert sys.gettrace() is tracer
