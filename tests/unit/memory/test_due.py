"""What is asked of the engine, by what its recorders say."""

from __future__ import annotations

import pytest

from highwater.memory.due import IDLE_SECONDS, SETTLE_SECONDS, Situation, is_due

IDLE_POLL_SECONDS = 5.0
RECORDED = {"is_recorded": True, "still_seconds": SETTLE_SECONDS}
IDLE = RECORDED | {"verdict": "idle"}
WORKING = RECORDED | {"verdict": "progressing", "still_seconds": 0.0}
STANDING = RECORDED | {"verdict": "progressing"}


def due(reach, seconds: float | None, **known) -> bool:
    return is_due(reach, Situation(**known), seconds, idle_poll_seconds=IDLE_POLL_SECONDS, slack=0.5)


def times(reach, **known) -> float:
    """After how many seconds it is asked again; 0: every round."""
    return next((seconds for seconds in range(100) if due(reach, float(seconds), **known)), float("inf"))


@pytest.mark.parametrize(
    ("known", "counts", "pause", "workers"),
    [
        (IDLE, IDLE_SECONDS, IDLE_SECONDS, float("inf")),
        (IDLE | {"is_held": True}, IDLE_SECONDS, IDLE_POLL_SECONDS, float("inf")),
        (IDLE | {"has_requests": True}, 0, 0, float("inf")),
        (IDLE | {"still_seconds": SETTLE_SECONDS - 0.1}, 0, 0, float("inf")),
        (IDLE | {"is_sure": False}, 0, 0, float("inf")),
        (WORKING, 0, float("inf"), float("inf")),
        (WORKING | {"is_held": True}, 0, 0, float("inf")),
        (STANDING, 0, 0, float("inf")),
        (RECORDED | {"verdict": "unknown"}, 0, 0, float("inf")),
        (RECORDED | {"verdict": "stuck"}, 0, float("inf"), float("inf")),
        (RECORDED | {"verdict": "stuck", "is_unanswered": True, "is_sure": False}, 0, 0, float("inf")),
        (RECORDED | {"verdict": "busy"}, 0, float("inf"), float("inf")),
        ({}, 0, 0, 0),
        ({"is_without_work": True}, 0, IDLE_POLL_SECONDS, IDLE_POLL_SECONDS),
        ({"is_without_work": True, "is_sure": False}, 0, 0, 0),
        ({"verdict": "idle"}, 0, 0, 0),
        ({"verdict": "stuck"}, 0, 0, 0),
        ({"verdict": "busy"}, 0, float("inf"), float("inf")),
    ],
    ids=[
        "idle",
        "idle and paused",
        "idle, and a request came",
        "idle since just now",
        "idle, and the last round failed",
        "steps progress",
        "steps progress again after a pause",
        "no step for a while",
        "recorders that cannot tell",
        "stuck in a step",
        "stuck because the loop does not answer",
        "a long step",
        "no recorders",
        "no recorders, at rest",
        "no recorders, at rest, and the last round failed",
        "recorders of some ranks",
        "recorders of some ranks, one of them dead",
        "recorders of some ranks, in a long step",
    ],
)
def test_how_often_each_question_is_asked(known, counts, pause, workers):
    """A round may come half a second early."""
    asked = [times(reach, **known) for reach in ("api_server", "engine", "workers")]
    assert asked == [counts, pause, workers]


@pytest.mark.parametrize("known", [IDLE, {"is_without_work": True}])
def test_what_was_never_answered_is_asked(known):
    """Of this engine; workers with recorders excepted."""
    assert due("api_server", None, **known)
    assert due("engine", None, **known)
    assert due("workers", None, **known) is not known.get("is_recorded", False)
