"""The soak's own arithmetic: what it would not notice could not fail it."""

from __future__ import annotations

import pytest

from tests.security.soak.clients import Answer, Reset, Service
from tests.security.soak.page import figures
from tests.security.soak.sidecar import Held
from tests.security.soak.soak import Part, SoakResult

MB = 1_000_000
IDLE = Held(15, {"Poller.run": 1}, {})


def measured(*, at_end: Held = IDLE, rss=None, answers=(), resets=()) -> SoakResult:
    """A run of a minute without attackers, a minute with them, and one without."""
    parts = [Part(False, 0.0, 60.0), Part(True, 60.0, 120.0), Part(False, 120.0, 180.0)]
    service = Service(answers=list(answers), resets=list(resets))
    return SoakResult(service, IDLE, at_end, parts, rss or [(float(second), 80 * MB) for second in range(180)])


def is_met(run: SoakResult, name: str) -> bool:
    figure = figures(run)[name]
    return figure.goal is not None and figure.goal.is_met(figure.value)


@pytest.mark.parametrize(
    "at_end",
    [
        Held(16, {"Poller.run": 1}, {}),
        Held(15, {"Poller.run": 2}, {}),
        Held(15, {"Poller.run": 1, "Exchange._open": 1}, {}),
        Held(14, {"Poller.run": 1}, {"ClientConnection": 1}),
    ],
)
def test_one_thing_left_misses_the_goal(at_end: Held):
    """A descriptor, a task or a connection; fewer of another kind do not make up for it."""
    assert not is_met(measured(at_end=at_end), "left")
    assert is_met(measured(), "left")


@pytest.mark.parametrize("grown", [range(100, 120), range(160, 180)])
def test_memory_that_is_more_at_either_end_misses_the_goal(grown: range):
    """While the last attackers are there, or when the run is over; one sample that stands out does not."""

    def is_met_with(grown: range) -> bool:
        sizes = [(float(second), (89 if second in grown else 80) * MB) for second in range(180)]
        return is_met(measured(rss=sizes), "rss_growth_mb")

    assert not is_met_with(grown)
    assert is_met_with(grown[-1:])


def test_slow_first_bytes_count_where_attackers_are():
    """Those that a safe reset may have held are left out, and those that a part's end falls into."""
    quick = [Answer(float(at), at + 0.05, 0.0) for at in range(180)]
    slow = [Answer(at + 0.5, at + 1.0, 0.0) for at in range(80, 90)]
    assert is_met(measured(answers=quick), "first_byte_ratio")
    assert not is_met(measured(answers=quick + slow), "first_byte_ratio")
    assert is_met(measured(answers=quick + slow, resets=[Reset(80.0, 8.0, 200, "done")]), "first_byte_ratio")
    assert is_met(measured(answers=[*quick, Answer(119.0, 125.0, 0.0)]), "first_byte_ratio")


def test_a_run_without_answers_met_nothing():
    """Without a served client, none was served in time."""
    assert not is_met(measured(), "first_byte_ratio")
