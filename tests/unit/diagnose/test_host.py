"""What the rule book finds in a report on host memory; its words stand in golden/findings.txt."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.diagnose.case import Case
from highwater.diagnose.rules.book import RULES, host_findings, judged
from highwater.host.reading import ContainerMemory, EndedProcess, HostReading, PressureStall, ShmMemory, ShmOwner
from highwater.host.report import GrownPart, OomKills, Outlook, report_of
from highwater.http.text.host import host_text
from highwater.http.text.report import engine_facts
from highwater.model.engine import EngineStatus
from highwater.model.report import Report
from highwater.model.units import MIB
from tests.unit.host.recorded import reading
from tests.unit.host.test_report import SETTINGS, shm_of_a_killed_engine


def case(given: HostReading, *grown: GrownPart, seconds_to_limit: float | None = None) -> Case:
    report = report_of(given, outlook=Outlook(seconds_to_limit=seconds_to_limit))
    return Case(kind="host", host_report=report, host_grown=grown)


def within(**changes) -> HostReading:
    given = reading()
    return replace(given, container=replace(given.container, **changes))


def ended(**last) -> HostReading:
    """Another container has gone, and its processes with it."""
    gone = EndedProcess(role="engine_core", name="EngineCore", pid=7, container="d", age_seconds=40.0)
    return reading(ended=(replace(gone, last_container=ContainerMemory(key="d", **last)),))


def shm_with(free: int, promised: int = 100, size: int = 64) -> ShmMemory:
    ring = ShmOwner(owner="rpc_rings", files=1, used_bytes=(size - free) * MIB, promised_bytes=promised * MIB)
    return ShmMemory(
        size_bytes=size * MIB,
        used_bytes=(size - free) * MIB,
        free_bytes=free * MIB,
        owners=(ring,),
        promised_bytes=promised * MIB,
    )


NEARLY_FULL = within(limit_bytes=8_500 * MIB)
LEAKER = GrownPart(
    kind="process",
    name="EngineCore",
    role="engine_core",
    pid=11,
    bytes=2_406 * MIB,
    at=1.0,
    grown_bytes=1_956 * MIB,
    seconds=240.0,
)
FOUND = [
    case(NEARLY_FULL, seconds_to_limit=90.0),
    case(NEARLY_FULL, LEAKER),
    case(within(limit_bytes=8_500 * MIB, events={"oom_kill": 2}, pressure=PressureStall(some_avg60=33.0))),
    case(ended(events={"oom_kill": 1})),
    case(ended(limit_bytes=1000, kept_bytes=970)),
    case(reading(shm=shm_with(4))),
    case(reading(engine=SETTINGS, shm=shm_with(64, 0))),
    case(reading(shm=shm_of_a_killed_engine(60 * MIB))),
    case(reading(engine=replace(SETTINGS, api_servers=16, tensor_parallel=1))),
]


def test_each_is_found_and_nothing_else():
    """With which weight and words: golden/findings.txt."""
    assert [" ".join(one.name for one in judged(given)) for given in FOUND] == [
        "container_nearly_full",
        "container_nearly_full",
        "container_oom_kills container_nearly_full memory_pressure",
        "container_oom_kills",
        "container_oom_kills",
        "shm_promised_too_much",
        "shm_too_small",
        "shm_promised_too_much shm_left_over",
        "processor_caches_too_large",
    ]


@pytest.mark.parametrize(
    "given",
    [
        reading(),
        ended(limit_bytes=1000, kept_bytes=500),
        replace(ended(), ended=(replace(ended().ended[0], last_container=None),)),
        # Its container goes on.
        replace(ended(), ended=(replace(ended(limit_bytes=1000, kept_bytes=970).ended[0], container="c"),)),
        # It is not known who has the files open.
        reading(shm=shm_of_a_killed_engine(600 * MIB, "not_known")),
    ],
)
def test_otherwise_nothing_is(given):
    assert judged(case(given)) == []


def test_what_a_dead_engine_left_promises_nothing():
    given = reading(shm=shm_of_a_killed_engine(600 * MIB))
    assert [one.name for one in judged(case(given))] == ["shm_left_over"]
    text = host_text(report_of(given))
    assert "RPC rings of vLLM, left by an engine that is gone" in text
    assert "files in use may still take 100 MiB" in text
    unknown = host_text(report_of(reading(shm=shm_of_a_killed_engine(600 * MIB, "not_known"))))
    assert "RPC rings of vLLM, not known whether a process has them open" in unknown
    assert "900 MiB?" in unknown


def test_the_part_that_grows_says_what_helps():
    """A process of Python is looked into with memray; where processor caches may have grown, they are lowered."""
    settings = [one.setting for one in judged(case(NEARLY_FULL, LEAKER))[0].advice]
    assert settings == ["resources.limits.memory", "memray attach PID"]
    cached = replace(NEARLY_FULL, engine=replace(SETTINGS, tensor_parallel=1))
    settings = [one.setting for one in judged(case(cached, LEAKER))[0].advice]
    assert "--mm-processor-cache-gb" in settings


def test_the_report_has_them_in_its_own_form():
    gone = replace(ended(events={"oom_kill": 1}), processes=(), container=None)
    (found,) = report_of(gone, judge=host_findings).findings
    assert (found.name, found.level) == ("container_oom_kills", "warning")
    assert found.advice.startswith("resources.limits.memory: Raise the container's memory limit")
    assert report_of(gone, judge=host_findings).summary.warnings == (found.text,)
    assert report_of(reading(processes=()), judge=host_findings).summary is None
    (left,) = report_of(reading(shm=shm_of_a_killed_engine(600 * MIB)), judge=host_findings).findings
    assert left.level == "note"


@pytest.mark.parametrize(("seconds", "is_short"), [(12.0, True), (601.0, False)])
def test_a_kill_that_samples_alone_have_counted_is_found_and_memory_is_short_for_a_while(seconds, is_short):
    """An older worker package writes no files of processes, and nothing else is known of host memory."""
    kill = OomKills(count=1, where="counted where rank 0 runs", seconds_ago=seconds)
    summary = report_of(HostReading(taken_at=1.0), judge=host_findings, oom_kills=kill).summary
    (said,) = summary.warnings
    assert said.startswith("the kernel has killed 1 process of the engine's container for memory, the last one ")
    assert (summary.short == said) is is_short
    assert engine_facts(Report(engine=EngineStatus(url="", state="ready"), host=summary))["host"] == said


def test_the_text_tells_events_and_pressure():
    shown = host_text(report_of(within(events={"oom_kill": 2}, pressure=PressureStall(some_avg60=33.0))))
    assert "events: oom_kill 2; waited for memory in 33.0 %" in shown


def test_every_finding_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "host.md").read_text(encoding="utf-8")
    assert {rule.name for rule in RULES if "host" in rule.where} <= set(re.findall(r"`([a-z_]+)`", page))
