"""Each rule of `check`: what it finds, and what it says to change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.commands import setup_checks as checks
from highwater.commands.check import check_json, check_text
from highwater.commands.setup_checks import SETUP_CHECKS, SetupCheck, SetupFacts, checked, exit_code
from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, RESETS_SINCE, Capabilities
from highwater.host.reading import NO_FILES
from highwater.readings.engine import EngineStatus, MissingRank, Progress
from highwater.readings.policy import RemedyState
from highwater.readings.rank import Note
from highwater.relief.remedies import REMEDIES
from highwater.settings.settings import keys, variable
from tests.unit.commands.reports import CAPABILITIES, DEVICE, HELD, NOW, event, policy, pressure, ranks, report

MOVING = Progress(verdict="progressing", since_seconds=1.0, ranks=(), summary="steps begin and end")
KEPT = {"incidents": [], "folder": "/x"}
NO_PLUGIN = {"reading": {"problems": [NO_FILES]}}
NOTHING = {"dev_mode": False, "extension": None, "collective_rpc": False}
INCIDENT = {"id": "20261121T143233Z-died", "at": NOW - 100, "last_at": None, "summary": "the engine died"}


def facts(url="http://127.0.0.1:8001", **changed) -> SetupFacts:
    """All is as it should be, but for what a test changes; keys that are not of the facts are of the report."""
    own = {
        "policy": {"source": "settings", "kept": False, "kept_in": None},
        "incidents": {"incidents": [], "folder": "/var/lib/highwater", "problem": None},
        "events": [],
        "without_token": "loopback",
        "with_token": None,
        "token_source": "HIGHWATER_ADMIN_TOKEN",
        "sidecar_version": "0.1.0",
        "own_version": "0.1.0",
        "host": {
            "reading": {
                "shm": {"size_bytes": 64 << 30, "free_bytes": 60 << 30, "promised_bytes": 0},
                "engine": {"grpc": False},
            }
        },
    }
    given = {name: changed.pop(name) for name in own if name in changed}
    rules = {"policy": changed.pop("rules")} if "rules" in changed else {}
    can = changed.pop("can", None)
    if can is not None:
        changed["capabilities"] = CAPABILITIES | can
    told = report(**{"progress": MOVING} | changed | rules)
    return SetupFacts(url=url, now=NOW, report=told, **own | given)


def result(name: str, made: SetupFacts) -> SetupCheck:
    (finding,) = [finding for finding in checked(made) if finding.name == name]
    return finding


ODD = replace(DEVICE, ranks=(pressure(0), pressure(1, note="asleep: weights")))
NO_REMEDY = replace(DEVICE, remedies=(RemedyState(name="release", unavailable="not loaded"),))
ONE_LESS = replace(
    DEVICE,
    remedies=(RemedyState(name="release"), RemedyState(name="reset_encoder_cache", unavailable="before vLLM 0.16")),
)
GONE = {"state": "starting", "version": None, "capabilities": {}, "hint": "is vLLM running there?", "ranks": (),
        "taken_at": None, "age_seconds": None, "stale": True, "progress": None, "ranks_expected": None,
        "ranks_reported": 0}  # fmt: skip


def test_all_is_as_it_should_be():
    """No rule has anything to change."""
    findings = checked(facts())
    assert [(finding.name, finding.text) for finding in findings if finding.level != "ok"] == []
    assert exit_code(findings) == 0


def test_an_engine_that_is_only_watched_is_set_up_right():
    """Its recorders show every rank; that nothing can be given back is said, with what would change that."""
    off = {"dev_mode": False, "extension": None, "collective_rpc": False, "server_info": False}
    watched = tuple(replace(rank, source="recorder") for rank in ranks())
    found = checked(facts(can=off, ranks=watched, rules=policy(NO_REMEDY)))
    findings = {finding.name: finding for finding in found}
    assert {name for name, finding in findings.items() if finding.level in {"warn", "fail"}} == set()
    assert exit_code(found) == 0
    assert "memory cannot be given back" in findings["dev mode"].text
    assert findings["dev mode"].change == "to act, start vLLM with VLLM_SERVER_DEV_MODE=1"
    assert findings["policy"].text == "calm (act): where memory is only watched, nothing can be given back"


@pytest.mark.parametrize(
    ("rule", "changed", "level", "text", "change"),
    [
        ("sidecar", {"sidecar_version": None}, "warn", "does not report its version", ""),
        ("sidecar", {"sidecar_version": "0.2.0"}, "warn", "version 0.2.0", "the same version"),
        ("engine", GONE, "fail", "starting", "is vLLM running there?"),
        ("engine", {"state": "starting", "hint": "loads"}, "warn", "starting", "loads"),
        ("engine", {"state": "gone"}, "fail", "gone", "HIGHWATER_ENGINE_URL"),
        ("engine", {"state": "gone", "stopped_at": 1.0}, "warn", "stopped in order at", "start it again"),
        ("engine", {"state": "stuck", "hint": "rank 0 is stuck"}, "fail", "stuck", "rank 0 is stuck"),
        ("engine", {"state": "paused"}, "warn", "paused", "/resume"),
        ("engine", {"state": "sleeping"}, "warn", "sleeping", "/wake_up"),
        ("vLLM", {"version": None}, "warn", "unknown", "GET /version"),
        ("vLLM", {"version": "0.10.2"}, "warn", "none of the versions known, 0.11 to 0.33", "--dry-run"),
        ("vLLM", {"version": "0.34.0"}, "warn", "none of the versions known, 0.11 to 0.33", "--dry-run"),
        ("vLLM", {"version": "0.33.0"}, "note", "the newest that was tested is 0.32", "--dry-run"),
        ("vLLM", {"version": "0.12.0rc1"}, "warn", "no /reset_encoder_cache", "0.16 or newer"),
        ("vLLM", {"version": "0.32.1"}, "ok", "0.32.1", None),
        ("dev mode", {"can": {"dev_mode": False}}, "fail", "off", "VLLM_SERVER_DEV_MODE=1"),
        ("extension", {"can": {"collective_rpc": False, "extension": None}}, "fail", "not loaded", "highwater_worker."),
        ("extension", {"can": {"collective_rpc": False, "extension": None}}, "fail", "records itself", "VLLM_PLUGINS"),
        ("extension", {"can": {"collective_rpc": False, "extension": "x.Y"}}, "fail", "x.Y", "ENGINE_HAS_EXTENSION"),
        ("extension", {"can": {"extension": "x.Y"}}, "ok", "every worker has Highwater's operations", None),
        ("ranks", {"ranks_expected": None}, "warn", "is unknown", None),
        ("ranks", {"ranks_expected": 4, "can": {"data_parallel": 2}, "progress": None}, "fail", "2 of", "RECORDER"),
        (
            "ranks",
            {"ranks_expected": 3, "ranks_missing": (MissingRank(dp_rank=1, pp_rank=0, tp_rank=0, status="dead"),)},
            "fail",
            "2 of 3",
            "dp 1 pp 0 tp 0 (dead)",
        ),
        ("readings", {"stale": True, "hint": "no answer"}, "fail", "0.4 s ago", "no answer"),
        ("readings", {"age_seconds": None}, "fail", "never", "log"),
        (
            "readings",
            {"ranks": (replace(ranks()[0], notes=(Note(name="weights_bytes", reason="not known"),)),)},
            "warn",
            "weights_bytes: not known",
            None,
        ),
        ("recorder", {"progress": None}, "note", "a hang cannot be distinguished", "HIGHWATER_RECORDER_DIR"),
        ("recorder", {"progress": None, "host": NO_PLUGIN}, "note", "vLLM runs without it", "extension --copy-to"),
        ("recorder", {"progress": None, "state": "gone"}, "skip", "not known until", None),
        ("recorder", {"progress": None, "state": "stuck"}, "skip", "not known until", None),
        ("/dev/shm", {"host": {}, "state": "gone"}, "skip", "not known until", None),
        ("recorder", {"progress": replace(MOVING, verdict="stuck", summary="1 step")}, "fail", "1 step", None),
        ("thresholds", {"rules": replace(policy(), rules=())}, "warn", "no rules", "policy.md"),
        ("thresholds", {"rules": policy(HELD)}, "fail", "cannot be reached", "PUT /policy"),
        ("thresholds", {"rules": policy(), "stale": True}, "skip", "not known until", None),
        ("thresholds", {"rules": policy(replace(HELD, is_dormant=False)), "state": "sleeping"}, "ok", "acts at", None),
        ("thresholds", {"rules": policy(ODD)}, "warn", "rank 1: asleep: weights", "policy.md"),
        ("thresholds", {}, "ok", "device acts below 1.52 GiB, stops at 3.05 GiB", None),
        ("policy", {"rules": policy(mode="observe")}, "note", "only observes", "HIGHWATER_POLICY__MODE=act"),
        ("policy", {"rules": policy(NO_REMEDY)}, "warn", "can only observe here: release: not loaded", "relief.md"),
        ("policy", {"rules": policy(NO_REMEDY), **GONE}, "skip", "not known until the problem above is fixed", None),
        ("policy", {"rules": policy(), "state": "gone"}, "skip", "not known until the problem above is fixed", None),
        ("ranks", {"state": "gone"}, "skip", "not known until the problem above is fixed", None),
        ("policy", {"rules": policy(ONE_LESS)}, "ok", "here: reset_encoder_cache: before vLLM 0.16", None),
        ("policy", {}, "ok", "acts; 1 action in the last hour", None),
        ("state file", {"policy": {"source": "put", "kept": False}}, "warn", "ends with", "HIGHWATER_STATE_FILE"),
        ("state file", {"policy": {"source": "put", "kept": True, "kept_in": "/s"}}, "ok", "/s", None),
        ("state file", {"events": [event("/s is /s.corrupt-1", kind="recovery")]}, "warn", "corrupt", "policy.md"),
        ("control", {"without_token": "no_token"}, "warn", "none was found here", "HIGHWATER_ADMIN_TOKEN"),
        ("control", {"without_token": "no_token", "with_token": "token"}, "ok", "the one here is right", None),
        ("control", {"without_token": "no_token", "with_token": "wrong_token"}, "fail", "does not accept", "own"),
        ("control", {"without_token": "closed"}, "fail", "has no admin token", "HIGHWATER_ADMIN_TOKEN_FILE"),
        ("control", {"without_token": "loopback"}, "ok", "trust_loopback is set", None),
        ("control", {"without_token": "unknown"}, "skip", "not known", None),
        ("transport", {"url": "http://gpu-7:8001", "with_token": "token"}, "warn", "in plain HTTP", "TLS__CERT_FILE"),
        ("transport", {"url": "http://gpu-7:8001"}, "ok", "no token is sent", None),
        ("transport", {"url": "https://gpu-7:8001", "with_token": "token"}, "ok", "TLS", None),
        ("exposure", {"can": {}, "engine_url": "http://10.0.0.7:8000"}, "warn", "10.0.0.7", "--host 127.0.0.1"),
        ("exposure", {"can": {"dev_mode": False}}, "ok", "no control paths open", None),
        ("exposure", GONE, "skip", "not known until the problem above is fixed", None),
        ("exposure", {"engine_url": "unix:/run/vllm.sock"}, "ok", "unix:", None),
        ("exposure", {"engine_url": "http://localhost:8000"}, "ok", "localhost", None),
        ("gRPC", {"host": {"reading": {"engine": {"grpc": True}}}}, "warn", "a safe reset may fail", "--grpc-port off"),
        ("gRPC", {"host": {}}, "skip", "not known", None),
        ("incidents", {"incidents": {"incidents": [], "folder": None}}, "note", "in memory only", "INCIDENTS__FOLDER"),
        ("incidents", {"incidents": {**KEPT, "has_engine_log": False}}, "note", "log is not read", "ENGINE_LOG"),
        ("incidents", {"incidents": {"has_engine_log": False}}, "note", "in memory only", "FOLDER and HIGHWATER_ENG"),
        ("incidents", {"incidents": {**KEPT, "has_engine_log": False}, "can": NOTHING}, "ok", "none", None),
        ("incidents", {"incidents": {**KEPT, "has_engine_log": True}}, "ok", "none", None),
        ("incidents", {"incidents": {"problem": "no room"}}, "fail", "no room", "incidents.folder"),
        ("incidents", {"incidents": {"incidents": [INCIDENT], "folder": "/x"}}, "warn", "died", INCIDENT["id"]),
        ("incidents", {"incidents": {"incidents": [INCIDENT | {"at": 1.0}], "folder": "/x"}}, "ok", "none", None),
    ],
)  # fmt: skip
def test_each_rule_finds_what_is_wrong(rule, changed, level, text, change):
    """With the flag, variable or call that mends it."""
    changed = dict(changed)
    engine_url = changed.pop("engine_url", None)
    made = facts(**changed)
    if engine_url is not None:
        engine = replace(made.report.engine, url=engine_url)
        made = replace(made, report=replace(made.report, engine=engine))
    finding = result(rule, made)
    assert finding.level == level
    assert text in finding.text
    assert finding.change is None if change is None else change in (finding.change or "")


def test_statistics_that_the_engine_keeps_to_itself():
    """Then nobody knows when it is quiet."""
    made = facts()
    mute = replace(made.report, engine=replace(made.report.engine, requests_running=None))
    finding = result("statistics", replace(made, report=mute))
    assert (finding.level, "--disable-log-stats" in (finding.change or "")) == ("warn", True)


def test_notes_of_a_cpu_are_as_they_should_be():
    """It has no allocator statistics."""
    rank = ranks()[0]
    cpu = replace(rank, device=replace(rank.device, type="cpu"), notes=(Note(name="torch", reason="none"),))
    assert result("readings", facts(ranks=(cpu,))).level == "ok"


def test_without_an_engine_one_thing_is_wrong():
    """What cannot be told before is not called wrong."""
    findings = checked(facts(**GONE))
    assert [finding.name for finding in findings if finding.level == "fail"] == ["engine"]
    assert {"dev mode", "extension", "ranks", "vLLM"} <= {f.name for f in findings if f.level == "skip"}
    assert exit_code(findings) == 2


def test_the_version_that_has_a_reset_is_the_one_that_its_refusal_names():
    """A user who follows the check's advice finds the remedy there."""
    since, safe_since = RESETS_SINCE["reset_encoder_cache"], EVERY_RESET_SAFE_SINCE
    change = result("vLLM", facts(version="0.12.0")).change
    assert change == f"use vLLM {since} or newer, best {safe_since}, where every remedy is safe"
    old = Capabilities(version="0.10.0")
    status = EngineStatus(url="http://engine", state="ready", version="0.10.0")
    refusals = {remedy.name: remedy.refusal(old, status, "safe") or "" for remedy in REMEDIES}
    for name, version in RESETS_SINCE.items():
        assert f"vLLM {version} and newer" in refusals[name]
    assert {remedy.automatic_since for remedy in REMEDIES} == {None, safe_since}


def test_the_start_is_judged_by_what_explain_shows():
    cause = {"name": "encoder_not_profiled", "title": "the start did not profile the encoder", "text": "It fills."}
    made = replace(facts(), budget={"findings": [cause, {"name": "not_profiled", "title": "x", "text": "y"}]})
    found = result("start", made)
    assert (found.level, found.text) == ("note", "the start did not profile the encoder. It fills.")
    assert "explain" in found.change


def test_every_rule_is_asked_once():
    """And says what it is about."""
    names = [finding.name for finding in checked(facts())]
    assert len(set(names)) == len(names) == len(SETUP_CHECKS)


def test_every_variable_that_is_named_exists():
    """Or the advice would be refused as a typo."""
    known = {variable(key) for key, _ in keys()}
    text = Path(checks.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"HIGHWATER_[A-Z_]+[A-Z]", text)) <= known


def test_the_lines_tell_what_to_change():
    """Beneath what they are about; the last one counts."""
    shown = check_text(checked(facts(rules=policy(mode="observe"))))
    lines = shown.splitlines()
    at = next(index for index, line in enumerate(lines) if "only observes" in line)
    assert "HIGHWATER_POLICY__MODE=act" in lines[at + 1]
    assert lines[-1] == "0 failed, 0 warnings, 18 ok, 1 could be better"


def test_for_programs():
    """Every finding, with its level and what to change."""
    body = check_json(checked(facts(rules=policy(mode="observe"))))
    assert body["exit_code"] == 0
    assert {finding["level"] for finding in body["findings"]} == {"ok", "note"}


@pytest.mark.parametrize(("count", "words"), [(0, "0 warnings"), (1, "1 warning,"), (2, "2 warnings")])
def test_warnings_are_counted_in_words(count, words):
    """One of them is no plural."""
    assert words in check_text([SetupCheck("a", "warn", "text")] * count)
