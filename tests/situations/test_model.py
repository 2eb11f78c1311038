"""The situations' own arithmetic: a clock that jumped too far, or a judge that looked away, could fail no policy."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.situations.clock import run_virtually
from tests.situations.device import GIB, MIB, Card, Plan
from tests.situations.engine import EngineModel
from tests.situations.judge import (
    FIRST_SECONDS,
    MIN_GAIN,
    NEXT_SECONDS,
    Judge,
    Outcome,
    Remedy,
    marks,
    missed_goals,
)
from tests.situations.rows import SITUATIONS
from tests.situations.worker import EngineOptions, modelled_workers

PLAN = Plan(
    weights=4 * GIB,
    kv_cache=4 * GIB,
    context=GIB,
    peak=GIB,
    text_peak=256 * MIB,
    graphs_free=64 * MIB,
    outside=128 * MIB,
    image=64 * MIB,
    image_embeds=256,
    encoder_budget_embeds=2048,
)
OPTIONS = EngineOptions(kind="cuda", ranks=1, utilization=0.9)


@dataclass
class Due:
    """What is due, unless a test says else: nothing in particular."""

    fits: bool = False
    may_die: bool = False
    most_remedies: int | None = None
    needs: int = 0


def remedy(at: float, gave: int, *, kind: str = "release", was_working: bool = True) -> Remedy:
    return Remedy(kind, at, at + 0.4, (gave,), was_working)


def _engine(clock=time.monotonic) -> EngineModel:
    return EngineModel(plan=PLAN, cards=(Card(16 * GIB),), options=OPTIONS, version="0.32.0", clock=clock)


# --- the judge ---


def test_the_marks_are_those_of_the_story():
    """A quarter of what the plan leaves; 0.76 GiB for the 8B model at 0.95, 1.5 for the 32B one at 0.90."""
    total = 65_452_113_920
    found = [marks(total, int(total * share), 0) for share in (0.95, 0.90)]
    assert [round(one.high / GIB, 2) for one in found if one] == [0.76, 1.52]
    assert marks(total, int(total * 0.997), 0) is None


@pytest.mark.parametrize(
    ("outcome", "due", "word"),
    [
        (Outcome(deaths=["x"], covered_deaths=["x, y"]), Due(may_die=True), "though it was covered"),
        (Outcome(deaths=["x"]), Due(), "died once: x"),
        (Outcome(remedies=[remedy(10, GIB)]), Due(fits=True), "under steady traffic"),
        (Outcome(remedies=[remedy(10, 0), remedy(3000, 255 * MIB)]), Due(), "2 remedies in vain within an hour"),
        (Outcome(late=["no first remedy"]), Due(), "late once"),
        (Outcome(crowded_idle_periods=["at 5 s"]), Due(), "more than one release"),
        (Outcome(remedies=[remedy(10, GIB)]), Due(most_remedies=0), "1 remedies where 0"),
        (Outcome(), Due(needs=1), "0 remedies where 1"),
        (Outcome(problems=["GET /livez answered 503"]), Due(), "503"),
    ],
)
def test_each_goal_can_be_missed(outcome: Outcome, due: Due, word: str):
    (missed,) = missed_goals(outcome, due)
    assert word in missed


def _watched(seconds: float, *, remedies: dict[float, int], stray: int = 20 * GIB) -> Outcome:
    """A judge beside an engine that is urgently short from the tenth second on; what is given back, and when."""
    clock = FakeClock(0.0)
    engine = _engine(clock)
    card = engine.cards[0]
    judge = engine.watcher = Judge(engine)

    async def main(_):
        engine.load_seconds = 0.0
        with modelled_workers(engine.torch):
            engine.begin()
            await asyncio.sleep(1)
        engine.face.vanish()

    run_virtually(main)
    memory = engine.workers[0].memory
    while clock.now < seconds:
        clock.now += 0.25
        if clock.now == 10:
            memory.stray = min(stray, card.free - 100 * MIB)
        if clock.now in remedies:
            memory.stray -= remedies[clock.now]
            judge.remedy("release", clock.now, (remedies[clock.now],))
        judge.looked(0.25)
    return judge.finish()


def test_urgent_pressure_without_a_remedy_is_late():
    outcome = _watched(20, remedies={})
    assert outcome.late == ["no first remedy within 2 s of 10 s on rank 0"]
    assert outcome.seconds_short > 9


def test_a_remedy_in_time_is_not_late_and_its_delay_is_counted():
    outcome = _watched(20, remedies={11.5: 5 * GIB})
    assert (outcome.late, outcome.first_delays) == ([], [1.5])


def test_a_first_remedy_that_did_not_suffice_needs_a_next_one():
    few = 10 * MIB
    assert _watched(30, remedies={11.0: few}).late == ["no next remedy within 6 s of 11 s on rank 0"]
    outcome = _watched(30, remedies={11.0: few, 16.5: 5 * GIB})
    assert (outcome.late, outcome.next_delays) == ([], [5.5])


def test_a_trim_has_its_own_component_and_the_release_after_it_no_credit():
    clock = FakeClock(0.0)
    judge = Judge(_engine(clock))
    judge.remedy("trim", 0.0, (0,))
    judge.remedy("release", 0.1, (GIB,))
    (one,) = judge.outcome.remedies
    assert (one.kind, one.in_vain, judge.outcome.given_back) == ("trim", True, GIB)


def test_the_second_release_of_an_idle_period_is_one_too_many():
    outcome = _watched(20, remedies={12.0: 0, 15.0: 0}, stray=0)
    assert outcome.crowded_idle_periods == ["at 15 s"]


# --- the page ---

PAGE = Path("docs/policy-situations.md")


def test_the_page_in_the_documentation_has_the_rows_and_the_goals_that_there_are():
    written = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [row.name for row in SITUATIONS if f"`{row.name}`" not in written] == []
    assert f"gave its own component less than {MIN_GAIN // MIB} MiB on every rank" in written
    assert f"to the first remedy at most {FIRST_SECONDS:g} s; where that did not suffice" in written
    assert f"from its end to the next at most {NEXT_SECONDS:g} s." in written
