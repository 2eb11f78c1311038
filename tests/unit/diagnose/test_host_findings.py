"""What the rule book finds in a report on host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.rules.host import host_findings
from highwater.host.outlook import Outlook
from highwater.host.reading import ContainerMemory, EndedProcess, PressureStall, ShmMemory, ShmOwner
from highwater.host.report import HostReport, report_of, summary_of
from highwater.host.text import host_text
from highwater.units import MIB
from tests.unit.host.recorded import reading
from tests.unit.host.test_report import SETTINGS, shm_of_a_killed_engine


def judged(given, **known) -> HostReport:
    return report_of(given, judge=host_findings, **known)


def names(report):
    return [one.name for one in report.findings]


def test_a_container_that_is_nearly_full_names_its_largest_parts():
    given = reading()
    full = replace(given.container, limit_bytes=8_500 * MIB)
    report = judged(replace(given, container=full), outlook=Outlook(seconds_to_limit=90.0))
    (finding,) = report.findings
    assert finding.name == "container_nearly_full"
    assert "worker rank 0 2.83 GiB, API server 1.95 GiB" in finding.text
    assert "full in 1 min 30 s" in finding.text
    assert report.room_bytes == 500 * MIB


def test_a_container_with_room_has_no_finding():
    assert names(judged(reading())) == []


def test_kills_and_pressure_are_findings():
    given = reading()
    container = replace(given.container, events={"oom_kill": 2}, pressure=PressureStall(some_avg60=33.0))
    report = judged(replace(given, container=container))
    assert names(report) == ["container_oom_kills", "memory_pressure"]
    assert "events: oom_kill 2; waited for memory in 33.0 %" in host_text(report)


ENDED = EndedProcess(role="engine_core", name="EngineCore", pid=7, container="d", age_seconds=40.0)


def test_a_kill_is_a_warning_when_its_container_is_gone():
    last = ContainerMemory(key="d", events={"oom_kill": 1})
    (finding,) = judged(reading(ended=(replace(ENDED, last_container=last),))).findings
    assert (finding.name, finding.level) == ("container_oom_kills", "warning")
    assert finding.text == (
        "the kernel has killed 1 process of the engine's container for memory; EngineCore was seen last 40 s ago"
    )


def test_a_container_that_ended_full_may_have_been_killed():
    last = ContainerMemory(key="d", limit_bytes=1000, kept_bytes=970)
    (finding,) = judged(reading(ended=(replace(ENDED, last_container=last),))).findings
    assert finding.name == "container_oom_kills"
    assert "ended 97.0 % full; the kernel may have killed it" in finding.text


@pytest.mark.parametrize(
    "ended",
    [
        replace(ENDED, container="c", last_container=ContainerMemory(key="c", limit_bytes=1000, kept_bytes=970)),
        replace(ENDED, last_container=ContainerMemory(key="d", limit_bytes=1000, kept_bytes=500)),
        ENDED,
    ],
)
def test_an_end_with_room_is_no_kill_nor_is_one_in_a_container_that_goes_on(ended):
    assert names(judged(reading(ended=(ended,)))) == []


def test_an_engine_that_was_killed_is_summed_up_though_no_process_runs():
    last = ContainerMemory(key="d", events={"oom_kill": 1})
    gone = reading(processes=(), container=None, ended=(replace(ENDED, last_container=last),))
    assert summary_of(gone, Outlook(), judge=host_findings).warnings == (judged(gone).findings[0].text,)
    assert summary_of(reading(processes=()), Outlook(), judge=host_findings) is None


def test_what_a_dead_engine_left_promises_nothing():
    report = judged(reading(shm=shm_of_a_killed_engine(600 * MIB)))
    assert [(one.name, one.level) for one in report.findings] == [("shm_left_over", "note")]
    text = host_text(report)
    assert "RPC rings of vLLM, left by an engine that is gone" in text
    assert "files in use may still take 100 MiB" in text
    (warning, note) = judged(reading(shm=shm_of_a_killed_engine(60 * MIB))).findings
    assert (warning.name, note.name) == ("shm_promised_too_much", "shm_left_over")
    caveat = "if no other container has this volume mounted"
    assert warning.advice.startswith(f"remove what no process has open there, {caveat}; ")
    assert note.advice == f"they may be removed, {caveat}"


def test_where_it_is_not_known_who_has_files_open_nothing_is_said_to_be_left():
    report = judged(reading(shm=shm_of_a_killed_engine(600 * MIB, "not_known")))
    assert report.findings == ()
    assert "RPC rings of vLLM, not known whether a process has them open" in host_text(report)
    assert "900 MiB?" in host_text(report)


def test_files_that_promise_more_than_is_free_are_a_finding_before_the_sigbus():
    shm = ShmMemory(
        size_bytes=64 * MIB,
        used_bytes=60 * MIB,
        free_bytes=4 * MIB,
        owners=(ShmOwner(owner="rpc_rings", files=1, used_bytes=60 * MIB, promised_bytes=100 * MIB),),
        promised_bytes=100 * MIB,
    )
    (finding,) = judged(reading(shm=shm)).findings
    assert (finding.name, "too small by 96.0 MiB" in finding.text) == ("shm_promised_too_much", True)


def test_caches_that_cannot_fit_are_a_finding():
    report = judged(reading(engine=replace(SETTINGS, api_servers=16, tensor_parallel=1)))
    assert names(report) == ["processor_caches_too_large"]
    assert "64.00 GiB in total" in report.findings[0].text


def test_a_shm_that_is_smaller_than_the_command_line_needs_is_a_finding():
    small = replace(reading().shm, size_bytes=64 * MIB, used_bytes=0, owners=(), promised_bytes=0, free_bytes=64 * MIB)
    assert names(judged(reading(engine=SETTINGS, shm=small))) == ["shm_too_small"]
