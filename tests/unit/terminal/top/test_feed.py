"""What `top` knows: what comes, what goes, and what stays when the sidecar is away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from

from highwater.model.components import MemoryPoint
from highwater.terminal.top.feed import MAX_EVENTS, MAX_POINTS, View, past_of, updated
from tests.unit.terminal.reports import NOW, as_json, event, ranks, report

KEY = (0, 0)


@pytest.fixture
def view() -> View:
    return View("http://127.0.0.1:8001", report(), 100.0)


def test_a_report_becomes_a_sample(view):
    later = view.with_report(report(), 101.0).with_report(report(), 102.0)
    assert [(point.at, point.used_bytes) for point in later.past[KEY]] == [(NOW, ranks()[0].used_bytes)]


def test_a_stale_report_is_no_sample(view):
    """Nobody knows what is now."""
    assert view.with_report(report(stale=True), 101.0).past == {}
    assert view.with_report(report(taken_at=None), 101.0).past == {}


def test_what_is_known_grows_old_while_the_sidecar_is_away(view):
    away = view.without_sidecar("refused", 103.0).without_sidecar("refused", 107.0)
    assert (away.problem, away.lost_at) == ("refused", 103.0)
    assert away.age_seconds(110.0) == pytest.approx(10.4)
    assert away.report == view.report


def test_the_next_report_ends_it(view):
    back = view.without_sidecar("refused", 103.0).with_report(report(), 104.0)
    assert (back.problem, back.lost_at, back.age_seconds(104.0)) == (None, None, 0.4)


def test_what_a_sidecar_forgot_by_its_restart_stays(view):
    """Its events begin at 1 again; ours are kept, in order and once."""
    before = view.with_history({}, [event("old", id_=1, at=NOW)]).with_report(report(), 101.0)
    after = before.with_history({}, [event("new", id_=1, at=NOW + 9), event("old", id_=1, at=NOW)])
    assert [e.summary for e in after.events] == ["new", "old"]
    assert len(after.past[KEY]) == 1


def test_what_is_kept_is_bounded(view):
    for second in range(MAX_POINTS + 10):
        view = view.with_report(report(taken_at=NOW + second), 100.0)
    assert len(view.past[KEY]) == MAX_POINTS
    assert view.past[KEY][-1].at == NOW + MAX_POINTS + 9
    view = view.with_history({}, [event(id_=number, at=NOW + number) for number in range(MAX_EVENTS + 5)])
    assert len(view.events) == MAX_EVENTS
    assert view.events[0].id == MAX_EVENTS + 4


class CountedPoint:
    """A point that counts how often its time is read, over all of them."""

    reads = 0

    def __init__(self, at: float) -> None:
        self._at = at

    @property
    def at(self) -> float:
        CountedPoint.reads += 1
        return self._at


def test_a_report_costs_no_look_at_every_point_of_the_past(view):
    full = replace(view, past={KEY: tuple(CountedPoint(NOW - 9000 + second) for second in range(MAX_POINTS))})
    CountedPoint.reads = 0
    later = full.with_report(report(), 101.0)
    assert CountedPoint.reads < 2 * MAX_POINTS.bit_length()
    assert (len(later.past[KEY]), later.past[KEY][-1].at) == (MAX_POINTS, NOW)
    assert full.with_history({}, [event()]).past[KEY] is full.past[KEY]


@given(known=lists(sampled_from(range(30)), unique=True), more=lists(sampled_from(range(30)), unique=True))
def test_the_past_of_two_sources_is_in_order_and_without_repetition(known, more):
    """The history after a reconnect has the readings of the time between, and those that are known; they stay."""
    before = View("http://x", report(), 0.0).with_history({KEY: tuple(MemoryPoint(at=at) for at in known)}, ())
    kept = {point.at: point for point in before.past[KEY]}
    after = before.with_history({KEY: tuple(MemoryPoint(at=at, used_bytes=1) for at in more)}, ()).past[KEY]
    assert [point.at for point in after] == sorted({*known, *more})
    assert all(point is kept[point.at] for point in after if point.at in kept)


@pytest.mark.parametrize(
    "readings", [None, {}, [None], [{"at": "x", "ranks": [{}]}], [{"at": 1, "ranks": [{"rank": 0}]}]]
)
def test_a_history_out_of_shape_is_left_out(readings):
    """It may be another version's, or no sidecar's at all."""
    assert past_of(readings) == {}


def test_a_history_is_read():
    entry = {"at": NOW, "requests_running": 2, "ranks": [{"dp_rank": None, "rank": 0, "used_bytes": 5}]}
    (point,) = past_of([entry])[KEY]
    assert (point.at, point.used_bytes, point.components.weights_bytes) == (NOW, 5, None)


def test_what_is_told_finds_its_place(view):
    view = updated(view, "report", as_json(report(taken_at=NOW + 1)), 101.0)
    view = updated(view, "event", as_json(event("reset")), 101.0)
    view = updated(view, "past", {"readings": [], "events": [as_json(event("old", id_=0, at=NOW - 9))]}, 101.0)
    assert (len(view.past[KEY]), [e.summary for e in view.events]) == (1, ["reset", "old"])
    assert updated(view, "lost", "refused", 102.0).problem == "refused"


@pytest.mark.parametrize("data", [None, [], "x", {"schema": 2, "engine": {}}, {"schema": 1, "engine": {}}])
def test_a_report_that_cannot_be_read_is_a_problem(view, data):
    after = updated(view, "report", data, 101.0)
    assert after.problem
    assert after.report == view.report


def test_an_event_that_is_not_known_is_left_out(view):
    """A newer sidecar may have others."""
    odd = as_json(event()) | {"kind": "eclipse"}
    assert updated(view, "event", odd, 101.0) == view
    assert updated(view, "comet", {}, 101.0) == view


def test_a_rank_that_left_has_no_points_of_another(view):
    view = view.with_report(report(), 101.0)
    stranger = replace(ranks()[0], dp_rank=7)
    assert view.points(stranger, "used_bytes") == []
    assert len(view.points(ranks()[0], "used_bytes")) == 1
