"""What a sidecar answers becomes our types, or nothing where a terminal could not show it."""

from __future__ import annotations

import pytest

from highwater.client.answers import event_of


@pytest.mark.parametrize(
    ("at", "is_known"), [(0.0, True), (253402300799.0, True), (253402300800.0, False), (-1.0, False)]
)
def test_an_event_of_a_year_beyond_9999_or_before_1970_is_left_out(at: float, is_known: bool):
    """No calendar of Python's names it."""
    event = event_of({"id": 1, "at": at, "kind": "growth", "summary": "it leaks"})
    assert (event is not None) is is_known
