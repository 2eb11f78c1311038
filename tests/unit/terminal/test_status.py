"""A report judged, and on one screen."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from highwater.http.text.report import report_text
from highwater.model.engine import MissingRank, Progress, StartFailure
from highwater.model.remedies import RemedyResult
from highwater.model.report import HostSummary
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK
from highwater.terminal.status import judged, since_text, status_json, status_text
from tests.fakes.engine import MIB
from tests.unit.terminal.reports import DEVICE, HELD, NOW, as_json, event, policy, report, short_policy

SLEEPING = "the engine is sleeping"
RESTING = policy(replace(DEVICE, phase="resting", reason="the last relief did not reach low water: cooldown"))


@pytest.mark.parametrize(
    ("changed", "code", "reason"),
    [
        ({}, OK, None),
        ({"policy": RESTING}, OK, None),
        ({"policy": policy(level="unknown"), "stale": True}, ATTENTION, "the readings are stale"),
        (
            {"policy": policy(replace(HELD, reason="the engine is sleeping", is_dormant=False)), "state": "sleeping"},
            ATTENTION,
            SLEEPING,
        ),
        ({"policy": None}, OK, None),
        ({"ranks_expected": None}, OK, None),
        ({"state": "paused"}, ATTENTION, "the engine is paused"),
        ({"state": "starting", "taken_at": None, "stale": True}, ATTENTION, "no worker was read yet"),
        ({"stale": True}, ATTENTION, "the readings are stale"),
        ({"ranks_expected": 3}, ATTENTION, "1 of 3 ranks are missing"),
        (
            {"policy": short_policy()},
            ATTENTION,
            "rule device is short: short by 620 MiB on rank 1; nothing here to give back",
        ),
        (
            {"policy": short_policy("urgent", can_release=MIB)},
            ATTENTION,
            "rule device is urgent: short by 620 MiB on rank 1",
        ),
        (
            {"policy": short_policy("acting", can_release=MIB)},
            ATTENTION,
            "rule device is acting: short by 620 MiB on rank 1",
        ),
        (
            {"policy": short_policy("resting", can_release=MIB)},
            ATTENTION,
            "rule device is resting: short by 620 MiB on rank 1",
        ),
        ({"policy": policy(HELD, level="held")}, ATTENTION, f"rule device cannot act: {HELD.reason}"),
        ({"host": HostSummary(processes=3, warnings=("it is full in 2 min",))}, ATTENTION, "it is full in 2 min"),
        ({"host": HostSummary(processes=3)}, OK, None),
        ({"state": "gone"}, CRITICAL, "the engine is gone"),
        ({"state": "stuck"}, CRITICAL, "the engine is stuck"),
        ({"state": "not_answering"}, CRITICAL, "the engine is not answering"),
        ({"state": "slow"}, ATTENTION, "the engine is slow"),
    ],
)
def test_what_is_made_of_a_report(changed, code, reason):
    """0: all is well; 1: somebody should look; 2: the engine is gone or hangs."""
    verdict = judged(report(**changed))
    assert verdict.code == code
    assert (reason in verdict.reasons) if reason else verdict.reasons == ()
    assert len(verdict.reasons) <= 1 or changed.get("state") == "starting"


def test_a_crash_loop_leads_with_the_start_that_failed():
    failure = StartFailure(at=NOW, recorder_instance="x", summary="the engine's start failed: it ended", ranks=())
    told = replace(report(state="starting"), start_failure=failure)
    screen = status_text(told, judged(told), None, now=NOW)
    assert screen.startswith("ATTENTION: the engine's start failed: it ended")


def test_a_start_that_goes_on_leads_and_the_failed_one_follows():
    failure = StartFailure(at=NOW, recorder_instance="x", summary="the engine did not start: rank 0 failed", ranks=())
    told = replace(report(state="starting"), start_failure=failure)
    told = replace(told, engine=replace(told.engine, is_loading=True))
    assert judged(told).reasons == ("the engine is starting", "the engine did not start: rank 0 failed")


def test_workers_that_nothing_could_show_are_not_missing():
    """Without worker extension and recorders nobody knows whether they run."""
    lost = MissingRank(dp_rank=0, pp_rank=0, tp_rank=0, status="never seen")
    blind = {"ranks": (), "ranks_reported": 0, "ranks_expected": 1, "ranks_missing": (lost,)}
    told = report(capabilities={"dev_mode": True, "collective_rpc": False}, **blind)
    screen = status_text(told, judged(told), None, now=NOW)
    assert "the workers cannot be read" in judged(told).reasons[0]
    assert "missing" not in screen
    seen = report(**blind)
    assert judged(seen).reasons == ("1 of 1 ranks are missing",)
    assert "missing: " in status_text(seen, judged(seen), None, now=NOW)


def test_an_engine_that_stopped_in_order_is_calm():
    """With when, and what to do; nothing else of it is a worry. A death has no such time."""
    told = report(state="gone", stale=True)
    told = replace(told, engine=replace(told.engine, stopped_at=NOW))
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW))
    screen = status_text(told, judged(told), None, now=NOW + 60)
    assert screen.startswith(f"ATTENTION: the engine stopped in order at {at}; start it again\n")
    assert ": stopped in order, 2 of 2 ranks" in screen
    assert "gone" not in screen


def test_the_verdict_stands_above_the_sidecars_own_text():
    last = replace(event("release done, gave back 282.0 MiB in 0.34 s", at=NOW - 240), rule="device")
    told = report(progress=Progress(verdict="progressing", since_seconds=1.0, ranks=(), summary="steps begin and end"))
    screen = status_text(told, judged(told), last, now=NOW)
    assert screen.startswith("OK: the engine is ready, 2 ranks, policy calm\nvLLM 0.32.0 ")
    assert report_text(told) in screen
    assert screen.endswith("last reset: 4 min ago by rule device: release done, gave back 282.0 MiB in 0.34 s")


def test_the_last_incident_stands_below_the_last_reset():
    told = report(state="gone")
    last = event("incident 20261121T143233Z-died: the engine died", kind="incident", at=NOW - 100)
    screen = status_text(told, judged(told), None, now=NOW, last_incident=last)
    shown = "incident 20261121T143233Z-died: the engine died"
    assert screen.endswith(
        f"last incident: 1 min 40 s ago: {shown} (what to change: highwater incidents 20261121T143233Z-died)"
    )


def test_a_screen_without_anything_to_tell():
    told = report(state="starting", hint="is vLLM running there?", version=None, ranks=(), policy=None, stale=True,
                  taken_at=None, age_seconds=None, encoder_cache=None)  # fmt: skip
    screen = status_text(told, judged(told), None, now=NOW)
    assert screen.startswith("ATTENTION: the engine is starting; no worker was read yet")
    assert "is vLLM running there?" in screen
    assert "none that the sidecar remembers" in screen
    assert "None" not in screen


def test_for_programs_the_report_is_as_it_was_told():
    told = report(state="gone")
    last = replace(event(), result=RemedyResult(remedy="release", outcome="done"))
    body = json.loads(json.dumps(status_json(judged(told), as_json(told), last)))
    assert (body["status"], body["exit_code"], body["reasons"]) == ("critical", 2, ["the engine is gone"])
    assert body["report"]["ranks"][0]["used_bytes"] == told.ranks[0].used_bytes
    assert body["last_reset"]["result"]["remedy"] == "release"


def test_what_changed_since_a_mark_is_a_table():
    ranks = [{"rank": 0, "used_bytes": 2**30, "components": {"encoder_cache_bytes": 2**30, "kv_cache_bytes": None}}]
    shown = since_text("before bench", {"ranks": ranks}).splitlines()
    assert shown[0].split() == ["since", "'before", "bench'", "rank", "0"]
    assert shown[2].split() == ["used", "+1.00", "GiB"]
    assert shown[5].split() == ["-", "encoder", "cache", "+1.00", "GiB"]


@pytest.mark.parametrize("since", [None, {}, {"ranks": []}])
def test_nothing_known_since_a_mark_is_said(since):
    """As when no rank could be read then."""
    assert "nothing is known" in since_text("x", since)
