"""What is asked of the engine, by what its recorders say."""

from __future__ import annotations

import pytest

from highwater.model.engine import EngineLoad, EngineStatus, Progress
from highwater.model.report import Report
from highwater.watch.recorder.recorders import Coverage
from highwater.watch.round import COUNTS_SETTLE_SECONDS, IDLE_REQUEST_SECONDS, KnownBefore, Round

IDLE_POLL_SECONDS = 5.0
RECORDED = {"coverage": Coverage(is_complete=True), "still_seconds": COUNTS_SETTLE_SECONDS}
BEFORE = {"work_done", "was_answered"}
AT_REST = {"load": EngineLoad(requests_running=0, requests_waiting=0, work_done=7.0), "work_done": 7.0}


def moves(verdict: str) -> dict[str, Progress]:
    return {"progress": Progress(verdict=verdict, since_seconds=None, ranks=(), summary=verdict)}


IDLE = RECORDED | moves("idle")
WORKING = RECORDED | moves("progressing") | {"still_seconds": 0.0}
STANDING = RECORDED | moves("progressing")


def due(reach, seconds: float | None, *, is_held: bool = False, **known) -> bool:
    engine = EngineStatus(url="http://e", state="paused" if is_held else "ready")
    of_before = {name: known.pop(name) for name in BEFORE & known.keys()}
    seen = Round(before=KnownBefore(last=Report(engine=engine, stale=False), **of_before), **known)
    return seen.is_due(reach, seconds, idle_poll_seconds=IDLE_POLL_SECONDS, slack=0.5)


def times(reach, **known) -> float:
    """After how many seconds it is asked again; 0: every round."""
    return next((seconds for seconds in range(100) if due(reach, float(seconds), **known)), float("inf"))


QUESTIONS = {
    "idle": (IDLE, IDLE_REQUEST_SECONDS, IDLE_REQUEST_SECONDS, float("inf")),
    "idle and paused": (IDLE | {"is_held": True}, IDLE_REQUEST_SECONDS, IDLE_POLL_SECONDS, float("inf")),
    "idle, and a request came": (IDLE | {"requests_under_way": 1}, 0, 0, float("inf")),
    "idle since just now": (IDLE | {"still_seconds": COUNTS_SETTLE_SECONDS - 0.1}, 0, 0, float("inf")),
    "idle, and the last round failed": (IDLE | {"was_answered": False}, 0, 0, float("inf")),
    "steps progress": (WORKING, 0, float("inf"), float("inf")),
    "steps progress again after a pause": (WORKING | {"is_held": True}, 0, 0, float("inf")),
    "no step for a while": (STANDING, 0, 0, float("inf")),
    "recorders that cannot tell": (RECORDED | moves("unknown"), 0, 0, float("inf")),
    "stuck in a step": (RECORDED | moves("stuck"), 0, float("inf"), float("inf")),
    "stuck because the loop does not answer": (
        RECORDED | moves("stuck") | {"is_unanswered": True, "was_answered": False},
        0,
        0,
        float("inf"),
    ),
    "a long step": (RECORDED | moves("busy"), 0, float("inf"), float("inf")),
    "no recorders": ({}, 0, 0, 0),
    "no recorders, at rest": (AT_REST, 0, IDLE_POLL_SECONDS, IDLE_POLL_SECONDS),
    "no recorders, at rest, and the last round failed": (AT_REST | {"was_answered": False}, 0, 0, 0),
    "recorders of some ranks": (moves("idle"), 0, 0, 0),
    "recorders of some ranks, one of them dead": (moves("stuck"), 0, 0, 0),
    "recorders of some ranks, in a long step": (moves("busy"), 0, float("inf"), float("inf")),
}


@pytest.mark.parametrize(("known", "counts", "pause", "workers"), QUESTIONS.values(), ids=QUESTIONS)
def test_how_often_each_question_is_asked(known, counts, pause, workers):
    asked = [times(reach, **known) for reach in ("api_server", "engine", "workers")]
    assert asked == [counts, pause, workers]


@pytest.mark.parametrize("known", [IDLE, AT_REST])
def test_what_was_never_answered_is_asked(known):
    assert due("api_server", None, **known)
    assert due("engine", None, **known)
    assert due("workers", None, **known) is not ("coverage" in known)
