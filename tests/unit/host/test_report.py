"""The report: room, outlook, what the command line can come to, and findings that name who has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.api.text.host import host_text
from highwater.host.outlook import Outlook, OutlookWindow
from highwater.host.processor_cache import CacheCounts, processor_caches
from highwater.host.reading import (
    ContainerMemory,
    EndedProcess,
    EngineMemorySettings,
    MachineMemory,
    PressureStall,
    ProcessMemory,
    ShmMemory,
    ShmOwner,
)
from highwater.host.report import report_of, summary_of
from highwater.host.shm_need import shm_needs
from highwater.units import GIB, MIB
from tests.unit.host.recorded import reading

SETTINGS = EngineMemorySettings(
    version="0.32.0",
    mm_processor_cache_gb=4.0,
    mm_processor_cache_type="lru",
    is_multimodal=True,
    api_servers=1,
    data_parallel=1,
    tensor_parallel=2,
    pipeline_parallel=1,
    executor="mp",
    device="cpu",
)


def names(report):
    return [one.name for one in report.findings]


def test_a_container_that_is_nearly_full_names_its_largest_parts():
    """60 of 64 GiB: page cache does not count, and the largest parts that stay are named."""
    given = reading()
    full = replace(given.container, limit_bytes=8_500 * MIB)
    report = report_of(replace(given, container=full), outlook=Outlook(seconds_to_limit=90.0))
    (finding,) = report.findings
    assert finding.name == "container_nearly_full"
    assert "worker rank 0 2.83 GiB, API server 1.95 GiB" in finding.text
    assert "full in 1 min 30 s" in finding.text
    assert report.room_bytes == 500 * MIB


def test_a_container_with_room_has_no_finding():
    """Half of its limit."""
    assert names(report_of(reading())) == []


def test_without_a_limit_the_machine_says_what_room_there_is():
    """Bare metal: MemAvailable."""
    given = reading(machine=MachineMemory(total_bytes=64 * GIB, available_bytes=5 * GIB))
    report = report_of(replace(given, container=replace(given.container, limit_bytes=None)))
    assert report.room_bytes == 5 * GIB
    assert "no limit, and the machine has 5.00 GiB available" in host_text(report)


def test_kills_and_pressure_are_findings():
    """As the kernel counts them for the container."""
    given = reading()
    container = replace(given.container, events={"oom_kill": 2}, pressure=PressureStall(some_avg60=33.0))
    report = report_of(replace(given, container=container))
    assert names(report) == ["container_oom_kills", "memory_pressure"]
    assert "events: oom_kill 2; waited for memory in 33.0 %" in host_text(report)


ENDED = EndedProcess(role="engine_core", name="EngineCore", pid=7, container="d", age_seconds=40.0)


def test_a_kill_is_a_warning_when_its_container_is_gone():
    """A new container counts from 0, and its processes are others."""
    last = ContainerMemory(key="d", events={"oom_kill": 1})
    (finding,) = report_of(reading(ended=(replace(ENDED, last_container=last),))).findings
    assert (finding.name, finding.level) == ("container_oom_kills", "warning")
    assert finding.text == (
        "the kernel has killed 1 process of the engine's container for memory; EngineCore was seen last 40 s ago"
    )


def test_a_container_that_ended_full_may_have_been_killed():
    """As a whole: nobody was left to read the count."""
    last = ContainerMemory(key="d", limit_bytes=1000, kept_bytes=970)
    (finding,) = report_of(reading(ended=(replace(ENDED, last_container=last),))).findings
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
    assert names(report_of(reading(ended=(ended,)))) == []


def test_an_engine_that_was_killed_is_summed_up_though_no_process_runs():
    """So that `status` and the page say it as well."""
    last = ContainerMemory(key="d", events={"oom_kill": 1})
    gone = reading(processes=(), container=None, ended=(replace(ENDED, last_container=last),))
    assert summary_of(gone, Outlook()).warnings == (report_of(gone).findings[0].text,)
    assert summary_of(reading(processes=()), Outlook()) is None


def shm_of_a_killed_engine(free, state="left_over"):
    rings = ShmOwner(owner="rpc_rings", files=2, used_bytes=10 * MIB, promised_bytes=100 * MIB)
    left = ShmOwner(owner="rpc_rings", state=state, files=9, used_bytes=30 * MIB, promised_bytes=900 * MIB)
    return ShmMemory(
        size_bytes=1024 * MIB, used_bytes=0, free_bytes=free, owners=(rings, left), promised_bytes=100 * MIB
    )


def test_what_a_dead_engine_left_promises_nothing():
    """Nobody writes into it: no bus error is to be expected; the room that it takes is taken."""
    report = report_of(reading(shm=shm_of_a_killed_engine(600 * MIB)))
    assert [(one.name, one.level) for one in report.findings] == [("shm_left_over", "note")]
    text = host_text(report)
    assert "RPC rings of vLLM, left by an engine that is gone" in text
    assert "files in use may still take 100 MiB" in text
    (warning, note) = report_of(reading(shm=shm_of_a_killed_engine(60 * MIB))).findings
    assert (warning.name, note.name) == ("shm_promised_too_much", "shm_left_over")
    caveat = "if no other container has this volume mounted"
    assert warning.advice.startswith(f"remove what no process has open there, {caveat}; ")
    assert note.advice == f"they may be removed, {caveat}"


def test_where_it_is_not_known_who_has_files_open_nothing_is_said_to_be_left():
    report = report_of(reading(shm=shm_of_a_killed_engine(600 * MIB, "not_known")))
    assert report.findings == ()
    assert "RPC rings of vLLM, not known whether a process has them open" in host_text(report)
    assert "900 MiB?" in host_text(report)


def test_left_overs_take_room_from_what_the_command_line_needs():
    """They are none of its own files."""
    shm = replace(shm_of_a_killed_engine(600 * MIB), used_bytes=40 * MIB)
    needs = shm_needs(reading(engine=SETTINGS, shm=replace(shm, size_bytes=680 * MIB)))
    assert needs.short_bytes == (664 + 30 - 680) * MIB


def test_files_that_promise_more_than_is_free_are_a_finding_before_the_sigbus():
    """Sparse files take their pages when they are written."""
    shm = ShmMemory(
        size_bytes=64 * MIB,
        used_bytes=60 * MIB,
        free_bytes=4 * MIB,
        owners=(ShmOwner(owner="rpc_rings", files=1, used_bytes=60 * MIB, promised_bytes=100 * MIB),),
        promised_bytes=100 * MIB,
    )
    (finding,) = report_of(reading(shm=shm)).findings
    assert (finding.name, "too small by 96.0 MiB" in finding.text) == ("shm_promised_too_much", True)


def test_what_the_command_line_needs_of_shm():
    """Two ranks: 160 MiB to the workers, 2 x 240 MiB back, 24 MiB of their group; what is not known is named."""
    needs = shm_needs(reading(engine=SETTINGS))
    assert needs.known_bytes == (160 + 480 + 24) * MIB
    assert [row.name for row in needs.unknown] == ["collectives of the CPU backend"]
    assert needs.short_bytes == 0
    small = replace(reading().shm, size_bytes=64 * MIB, used_bytes=0, owners=(), promised_bytes=0, free_bytes=64 * MIB)
    report = report_of(reading(engine=SETTINGS, shm=small))
    assert report.shm_needs.short_bytes == 600 * MIB
    assert names(report) == ["shm_too_small"]


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"device": "cuda"}, ["NCCL"]),
        ({"device": "npu"}, ["HCCL"]),
        ({"device": "cuda", "tensor_parallel": 1}, []),
        ({"device": "cuda", "executor": "ray"}, ["NCCL", "Ray"]),
        ({"device": "npu", "nodes": 2, "kv_offload": True}, ["HCCL", "several machines", "offloaded KV cache or a"]),
    ],
)
def test_what_no_rule_covers_is_named_as_not_known(changes, unknown):
    """It is never taken for nothing."""
    needs = shm_needs(reading(engine=replace(SETTINGS, **changes)))
    assert len(needs.unknown) == len(unknown)
    assert all(row.name.startswith(name) for row, name in zip(needs.unknown, unknown, strict=True))


@pytest.mark.parametrize(
    ("changes", "kind", "total"),
    [
        ({}, "lru", 4),
        ({"mm_processor_cache_type": "shm"}, "shm", 4),
        ({"api_servers": 4}, "processor_only", 16),
        ({"api_servers": 4, "mm_processor_cache_type": "shm"}, "processor_only", 16),
        ({"data_parallel": 2}, "processor_only", 4),
        ({"data_parallel": 2, "external_lb": True}, "lru", 4),
        ({"mm_processor_cache_gb": 0.0}, "off", 0),
        ({"is_multimodal": False}, "off", 0),
    ],
)
def test_where_the_processor_caches_lie_and_what_they_can_take(changes, kind, total):
    """One copy has the data; with several API servers each keeps its own."""
    caches = processor_caches(reading(engine=replace(SETTINGS, **changes)), CacheCounts(queries=8, hits=2))
    assert (caches.kind, caches.max_bytes, caches.hit_ratio) == (kind, total * GIB, 0.25)


def test_unknown_settings_are_not_taken_for_none():
    """No worker reports them, or this engine does not show the limit."""
    assert processor_caches(reading()).max_bytes is None
    assert processor_caches(reading(engine=replace(SETTINGS, mm_processor_cache_gb=None))).kind == "unknown"
    assert shm_needs(reading()).known_bytes is None


def test_caches_that_cannot_fit_are_a_finding():
    """Sixteen API servers with 4 GiB each in a container of 20."""
    report = report_of(reading(engine=replace(SETTINGS, api_servers=16, tensor_parallel=1)))
    assert names(report) == ["processor_caches_too_large"]
    assert "64.00 GiB in total" in report.findings[0].text


def test_the_pace_of_the_last_minutes_says_when_it_is_full():
    """10 MiB a second with 1,000 MiB of room, once a minute has been seen; another container starts anew."""
    window, base = OutlookWindow(), replace(reading().container, limit_bytes=10_000 * MIB)
    for second in range(0, 61, 5):
        outlook = window.add(float(second), replace(base, kept_bytes=(8_400 + 10 * second) * MIB))
    assert outlook.seconds_to_limit == pytest.approx(100.0)
    assert window.add(65.0, replace(base, key="d")).seconds_to_limit is None


def test_what_does_not_grow_has_no_date():
    """Nor has what shrinks."""
    window = OutlookWindow()
    for second in range(0, 200, 5):
        outlook = window.add(float(second), reading().container)
    assert (outlook.seconds_to_limit, outlook.bytes_per_second) == (None, 0.0)
    assert window.add(201.0, None) == Outlook()


def test_the_text_has_every_part():
    """Processes, parts with their sum, /dev/shm, processor caches."""
    text = host_text(report_of(reading(engine=SETTINGS), counts=CacheCounts(queries=8, hits=2)))
    for line in ("sum, as the kernel counts it", "/dev/shm: 1.37 GiB of 1.95 GiB used", "25.0 % of 8 items found"):
        assert line in text
    assert "worker rank 0" in text
    assert len(text.splitlines()) < 40


def test_processes_of_one_name_are_one_row():
    """Their number, sums, and the largest; what they share is not summed. JSON has each."""
    sizes = (100, 400, 250)
    five = tuple(
        ProcessMemory(
            role="other",
            name=f"other python3 (pid {size})",
            pid=size,
            container="c",
            anonymous_bytes=size * MIB,
            shmem_bytes=size * MIB,
            threads=2,
        )
        for size in sizes
    )
    given = reading()
    report = report_of(replace(given, processes=(*given.processes, *five)))
    lines = [" ".join(line.split()) for line in host_text(report).splitlines() if "python3" in line]
    assert lines == [
        "other python3 x 3 750 MiB, largest 400 MiB - 400 MiB - - 6 - engine",
        "other python3 x 3 750 MiB 7.5 %",
    ]
    assert sum("python3" in row.name for row in report.parts.rows) == 3
    assert "of several of one name" in host_text(report)
    assert "of several of one name" not in host_text(report_of(given))


def test_what_else_runs_in_the_container_is_not_of_the_engine():
    """A browser, the sidecar: each is a process of the container, and none of the engine's."""
    given = reading()
    others = tuple(
        ProcessMemory(role=role, name=name, pid=pid, container="c", anonymous_bytes=MIB)
        for role, name, pid in (("sidecar", "sidecar", 90001), ("other", "other chromium", 90002))
    )
    ours = sum(one.role not in {"sidecar", "other"} for one in given.processes)
    report = report_of(replace(given, processes=(*given.processes, *others)))
    counted = f"{len(given.processes) + 2} processes of the container, {ours} of the engine"
    assert counted in host_text(report)
    assert counted in host_text(replace(report, reading=replace(report.reading, container=None)))
    assert summary_of(report.reading, Outlook()).processes == ours
