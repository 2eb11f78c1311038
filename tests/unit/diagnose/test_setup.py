"""Each question of `check`: what it finds, by its finding's name, and where it is as it should be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.act.remedies import REMEDIES
from highwater.diagnose import finding as wording
from highwater.diagnose.case import Case, Setup, of_report
from highwater.diagnose.evidence import Headline
from highwater.diagnose.rules.setup import CHECKS, SetupCheck, checked
from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, RESETS_SINCE, Capabilities
from highwater.host.reading import NO_FILES, EngineMemorySettings, HostReading, ShmMemory, ShmOwner
from highwater.host.report import HostReport, report_of
from highwater.model.engine import EngineStatus, MissingRank, Progress
from highwater.model.policy import RemedyState
from highwater.model.rank import Note
from highwater.model.units import MIB
from highwater.server.settings import keys, variable
from tests.unit.host.recorded import reading
from tests.unit.terminal.reports import CAPABILITIES, DEVICE, HELD, NOW, event, policy, pressure, ranks, report

MOVING = Progress(verdict="progressing", since_seconds=1.0, ranks=(), summary="steps begin and end")
ROOMY = ShmMemory(size_bytes=64 << 30, free_bytes=60 << 30, promised_bytes=0)
HOST = report_of(replace(reading(), shm=ROOMY, engine=EngineMemorySettings(grpc=False)))
NO_PLUGIN = replace(HOST, reading=replace(HOST.reading, problems=(NO_FILES,)))
UNSEEN = replace(HOST, reading=HostReading(taken_at=NOW))
SERVES_GRPC = replace(HOST, reading=replace(HOST.reading, engine=EngineMemorySettings(grpc=True)))
NOTHING = {"dev_mode": False, "extension": None, "collective_rpc": False}
INCIDENT = Headline(id="20261121T143233Z-died", kind="died", at=NOW - 100, summary="the engine died")


def facts(**changed) -> Case:
    """All is as it should be, but for what a test changes; keys that are not of the set-up are of the report."""
    own = {"incidents_folder": "/var/lib/highwater", "has_engine_log": True}
    given = own | {name: changed.pop(name) for name in Setup.__dataclass_fields__ if name in changed}
    host = changed.pop("host", HOST)
    explanation = changed.pop("explanation", None)
    rules = {"policy": changed.pop("rules")} if "rules" in changed else {}
    can = changed.pop("can", None)
    if can is not None:
        changed["capabilities"] = CAPABILITIES | can
    told = report(**{"progress": MOVING} | changed | rules)
    setup = Setup(now=NOW, report=told, **given)
    return of_report("set-up", told, explanation=explanation, host=host, setup=setup)


def result(name: str, made: Case) -> SetupCheck:
    (one,) = [one for one in checked(made) if one.name == name]
    return one


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
    assert [(one.name, one.text) for one in checked(facts()) if one.level != "ok"] == []


def test_an_engine_that_is_only_watched_is_set_up_right():
    """Its recorders show every rank; that nothing can be given back is said, with what would change that."""
    off = {"dev_mode": False, "extension": None, "collective_rpc": False, "server_info": False}
    watched = tuple(replace(rank, source="recorder") for rank in ranks())
    found = {one.name: one for one in checked(facts(can=off, ranks=watched, rules=policy(NO_REMEDY)))}
    assert {name for name, one in found.items() if one.level in {"warn", "fail"}} == set()
    assert "memory cannot be given back (to act, start vLLM with VLLM_SERVER_DEV_MODE=1)" in found["dev mode"].text
    assert found["policy"].text == "fine (act): where memory is only watched, nothing can be given back"


def shm_of(size: int, free: int, promised: int, engine: EngineMemorySettings | None = None) -> HostReport:
    """A `/dev/shm` of so many MiB, and an engine with these settings."""
    owner = ShmOwner(owner="other", files=1, used_bytes=0, promised_bytes=promised * MIB)
    held = ShmMemory(
        size_bytes=size * MIB, used_bytes=0, free_bytes=free * MIB, owners=(owner,), promised_bytes=promised * MIB
    )
    return report_of(replace(reading(), shm=held, engine=engine))


NEEDS_664_MIB = EngineMemorySettings(tensor_parallel=2, pipeline_parallel=1, executor="mp", device="cuda")
NO_RPC = {"collective_rpc": False, "extension": None}
DEAD = MissingRank(dp_rank=1, pp_rank=0, tp_rank=0, status="dead")
UNREAD = (replace(ranks()[0], notes=(Note(name="weights_bytes", reason="not known"),)),)

# Topic, what is changed, the answer's level and its finding.
FOUND: list[tuple[str, dict, str, str]] = [
    ("engine", GONE, "warn", "engine_not_ready"),
    ("engine", {"state": "starting", "hint": "loads"}, "warn", "engine_not_ready"),
    ("engine", {"state": "gone"}, "fail", "engine_not_ready"),
    ("engine", {"state": "gone", "stopped_at": 1.0}, "warn", "engine_not_ready"),
    ("engine", {"state": "stuck", "hint": "rank 0 is stuck"}, "fail", "engine_not_ready"),
    ("engine", {"state": "paused"}, "warn", "engine_not_ready"),
    ("engine", {"state": "sleeping"}, "warn", "engine_not_ready"),
    ("vLLM", {"version": None}, "warn", "version_unknown"),
    ("vLLM", {"version": "0.10.2"}, "warn", "version_never_read"),
    ("vLLM", {"version": "0.34.0"}, "warn", "version_never_read"),
    ("vLLM", {"version": "0.33.0"}, "note", "version_untested"),
    ("vLLM", {"version": "0.12.0rc1"}, "warn", "no_encoder_reset"),
    ("dev mode", {"can": {"dev_mode": False}}, "fail", "dev_mode_off"),
    ("extension", {"can": NO_RPC}, "fail", "no_extension"),
    ("extension", {"can": NO_RPC | {"extension": "x.Y"}}, "fail", "no_extension"),
    ("ranks", {"ranks_expected": None}, "warn", "ranks_expected_unknown"),
    ("ranks", {"ranks_expected": 4, "can": {"data_parallel": 2}, "progress": None}, "fail", "ranks_missing"),
    ("ranks", {"ranks_expected": 3, "ranks_missing": (DEAD,)}, "fail", "ranks_missing"),
    ("readings", {"stale": True, "hint": "no answer"}, "fail", "readings_stale"),
    ("readings", {"age_seconds": None}, "fail", "readings_stale"),
    ("readings", {"ranks": UNREAD}, "warn", "readings_incomplete"),
    ("recorder", {"progress": None}, "note", "no_recorder"),
    ("recorder", {"progress": None, "host": NO_PLUGIN}, "note", "no_recorder"),
    ("recorder", {"progress": None, "recorder_problem": "recorder_dir: /x"}, "warn", "recorders_not_read"),
    ("recorder", {"progress": replace(MOVING, verdict="stuck", summary="1 step")}, "fail", "engine_stuck"),
    ("/dev/shm", {"host": shm_of(64, 4, 100, NEEDS_664_MIB)}, "fail", "shm_promised_too_much"),
    ("/dev/shm", {"host": shm_of(64, 64, 0, NEEDS_664_MIB)}, "warn", "shm_too_small"),
    ("thresholds", {"rules": replace(policy(), rules=())}, "warn", "no_rules"),
    ("thresholds", {"rules": policy(HELD)}, "fail", "rules_cannot_act"),
    ("thresholds", {"rules": policy(ODD)}, "warn", "ranks_left_out"),
    ("policy", {"rules": policy(mode="observe")}, "note", "policy_observes"),
    ("policy", {"rules": policy(NO_REMEDY)}, "warn", "policy_cannot_act"),
    ("state file", {"policy_source": "put"}, "warn", "policy_not_kept"),
    ("state file", {"events": [event("/s is /s.corrupt-1", kind="recovery")]}, "warn", "state_file_corrupt"),
    ("exposure", {"can": {}, "url": "http://10.0.0.7:8000"}, "warn", "engine_exposed"),
    ("gRPC", {"host": SERVES_GRPC}, "warn", "grpc_served"),
    ("incidents", {"incidents_folder": None}, "note", "incidents_in_memory"),
    ("incidents", {"has_engine_log": False}, "note", "no_engine_log"),
    ("incidents", {"has_engine_log": False, "incidents_folder": None}, "note", "incidents_in_memory"),
    ("incidents", {"incidents_problem": "no room"}, "fail", "incidents_not_kept"),
    ("incidents", {"incidents": [INCIDENT]}, "note", "recent_incidents"),
    ("incidents", {"log_problem": "engine_log: /x"}, "warn", "engine_log_not_read"),
]

# Nothing to change, or not known.
NOT_FOUND: list[tuple[str, dict, str, str]] = [
    ("vLLM", {"version": "0.32.1"}, "ok", "0.32.1"),
    ("vLLM", {"version": "0.16.0"}, "ok", "0.16.0"),
    ("extension", {"can": {"extension": "x.Y"}}, "ok", "every worker has Highwater's operations"),
    ("recorder", {"progress": None, "state": "gone"}, "skip", "not known until"),
    ("recorder", {"progress": None, "state": "stuck"}, "skip", "not known until"),
    ("/dev/shm", {"host": UNSEEN, "state": "gone"}, "skip", "not known until"),
    ("/dev/shm", {"host": UNSEEN}, "skip", "HIGHWATER_RECORDER_DIR"),
    ("/dev/shm", {"host": shm_of(2000, 1900, 100, NEEDS_664_MIB)}, "ok", "can need 664 MiB, and what NCCL need is not"),
    ("/dev/shm", {"host": shm_of(2000, 1900, 100)}, "ok", "no worker reports its settings"),
    ("thresholds", {"rules": policy(), "stale": True}, "skip", "not known until"),
    ("thresholds", {"rules": policy(replace(HELD, is_dormant=False)), "state": "sleeping"}, "ok", "acts at"),
    ("thresholds", {}, "ok", "device acts below 1.52 GiB, stops at 3.05 GiB"),
    ("policy", {"rules": policy(NO_REMEDY), **GONE}, "skip", "not known until the problem above is fixed"),
    ("policy", {"rules": policy(), "state": "gone"}, "skip", "not known until the problem above is fixed"),
    ("ranks", {"state": "gone"}, "skip", "not known until the problem above is fixed"),
    ("policy", {"rules": policy(ONE_LESS)}, "ok", "here: reset_encoder_cache: before vLLM 0.16"),
    ("policy", {}, "ok", "acts; 1 action in the last hour"),
    ("state file", {"policy_source": "put", "policy_kept_in": "/s"}, "ok", "/s"),
    ("exposure", {"can": {"dev_mode": False}}, "ok", "no control paths open"),
    ("exposure", GONE, "skip", "not known until the problem above is fixed"),
    ("exposure", {"url": "unix:/run/vllm.sock"}, "ok", "unix:"),
    ("exposure", {"url": "http://localhost:8000"}, "ok", "localhost"),
    ("gRPC", {"host": UNSEEN}, "skip", "not known"),
    ("incidents", {"has_engine_log": False, "can": NOTHING}, "ok", "none"),
    ("incidents", {"incidents": [replace(INCIDENT, at=1.0)]}, "ok", "none"),
]


def test_what_a_change_costs_is_said_by_that_word():
    change = result("/dev/shm", facts(host=shm_of(64, 64, 0, NEEDS_664_MIB))).change
    assert change.endswith(f" Cost: {wording.ADVICE['shm_size'].cost}")


@pytest.mark.parametrize(("topic", "changed", "level", "name"), FOUND)
def test_what_is_wrong_is_found(topic, changed, level, name):
    found = result(topic, facts(**changed))
    assert (found.finding, found.level) == (name, level), found
    assert "None" not in f"{found.text} {found.change or ''}"


@pytest.mark.parametrize(("topic", "changed", "level", "words"), NOT_FOUND)
def test_what_is_right_or_not_known_is_not(topic, changed, level, words):
    found = result(topic, facts(**changed))
    assert (found.level, found.finding, found.change) == (level, None, None), found
    assert words in found.text


def test_statistics_that_the_engine_keeps_to_itself():
    made = facts()
    mute = replace(made, engine=replace(made.engine, requests_running=None))
    assert result("statistics", mute).finding == "no_statistics"


def test_notes_of_a_cpu_are_as_they_should_be():
    rank = ranks()[0]
    cpu = replace(rank, device=replace(rank.device, type="cpu"), notes=(Note(name="torch", reason="none"),))
    assert result("readings", facts(ranks=(cpu,))).level == "ok"


def test_without_an_engine_one_thing_is_to_be_looked_at():
    found = checked(facts(**GONE))
    assert [one.name for one in found if one.level in {"warn", "fail"}] == ["engine"]
    assert {"dev mode", "extension", "ranks", "vLLM"} <= {one.name for one in found if one.level == "skip"}


def test_the_version_that_has_a_reset_is_the_one_that_its_refusal_names():
    since, safe_since = RESETS_SINCE["reset_encoder_cache"], EVERY_RESET_SAFE_SINCE
    change = result("vLLM", facts(version="0.12.0")).change
    assert change == f"use vLLM {since} or newer, best {safe_since}, where every remedy is safe"
    old = Capabilities(version="0.10.0")
    status = EngineStatus(url="http://engine", state="ready", version="0.10.0")
    refusals = {remedy.name: remedy.refusal(old, status, "safe") or "" for remedy in REMEDIES}
    for name, version in RESETS_SINCE.items():
        assert f"vLLM {version} and newer" in refusals[name]
    assert {remedy.automatic_since for remedy in REMEDIES} == {None, safe_since}


def test_every_rule_is_asked_once():
    assert [one.name for one in checked(facts())] == list(CHECKS)


def test_every_variable_that_is_named_exists():
    """Or the advice would be refused as a typo."""
    known = {variable(key) for key, _ in keys()}
    text = Path(wording.__file__).with_name("findings.toml").read_text(encoding="utf-8")
    assert set(re.findall(r"HIGHWATER_[A-Z_]+[A-Z]", text)) <= known
