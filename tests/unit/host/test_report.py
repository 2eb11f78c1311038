"""The report: room, outlook, and what the command line can come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.host.needs import CacheCounts, processor_caches, shm_needs
from highwater.host.past import OutlookWindow
from highwater.host.reading import (
    EngineMemorySettings,
    MachineMemory,
    ProcessMemory,
    ShmMemory,
    ShmOwner,
)
from highwater.host.report import Outlook, report_of
from highwater.http.text.host import host_text
from highwater.model.units import GIB, MIB
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


def test_without_a_limit_the_machine_says_what_room_there_is():
    given = reading(machine=MachineMemory(total_bytes=64 * GIB, available_bytes=5 * GIB))
    report = report_of(replace(given, container=replace(given.container, limit_bytes=None)))
    assert report.room_bytes == 5 * GIB
    assert "no limit, and the machine has 5.00 GiB available" in host_text(report)


def shm_of_a_killed_engine(free, state="left_over"):
    rings = ShmOwner(owner="rpc_rings", files=2, used_bytes=10 * MIB, promised_bytes=100 * MIB)
    left = ShmOwner(owner="rpc_rings", state=state, files=9, used_bytes=30 * MIB, promised_bytes=900 * MIB)
    return ShmMemory(
        size_bytes=1024 * MIB, used_bytes=0, free_bytes=free, owners=(rings, left), promised_bytes=100 * MIB
    )


def test_left_overs_take_room_from_what_the_command_line_needs():
    shm = replace(shm_of_a_killed_engine(600 * MIB), used_bytes=40 * MIB)
    needs = shm_needs(reading(engine=SETTINGS, shm=replace(shm, size_bytes=680 * MIB)))
    assert needs.short_bytes == (664 + 30 - 680) * MIB


def test_what_the_command_line_needs_of_shm():
    needs = shm_needs(reading(engine=SETTINGS))
    assert needs.known_bytes == (160 + 480 + 24) * MIB
    assert [row.name for row in needs.unknown] == ["collectives of the CPU backend"]
    assert needs.short_bytes == 0
    small = replace(reading().shm, size_bytes=64 * MIB, used_bytes=0, owners=(), promised_bytes=0, free_bytes=64 * MIB)
    assert shm_needs(reading(engine=SETTINGS, shm=small)).short_bytes == 600 * MIB


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
    caches = processor_caches(reading(engine=replace(SETTINGS, **changes)), CacheCounts(queries=8, hits=2))
    assert (caches.kind, caches.max_bytes, caches.hit_ratio) == (kind, total * GIB, 0.25)


def test_unknown_settings_are_not_taken_for_none():
    """No worker reports them, or this engine does not show the limit."""
    assert processor_caches(reading()).max_bytes is None
    assert processor_caches(reading(engine=replace(SETTINGS, mm_processor_cache_gb=None))).kind == "unknown"
    assert shm_needs(reading()).known_bytes is None


def test_the_pace_of_the_last_minutes_says_when_it_is_full():
    window, base = OutlookWindow(), replace(reading().container, limit_bytes=10_000 * MIB)
    for second in range(0, 61, 5):
        outlook = window.add(float(second), replace(base, kept_bytes=(8_400 + 10 * second) * MIB))
    assert outlook.seconds_to_limit == pytest.approx(100.0)
    assert window.add(65.0, replace(base, key="d")).seconds_to_limit is None


def test_what_does_not_grow_has_no_date():
    window = OutlookWindow()
    for second in range(0, 200, 5):
        outlook = window.add(float(second), reading().container)
    assert (outlook.seconds_to_limit, outlook.bytes_per_second) == (None, 0.0)
    assert window.add(201.0, None) == Outlook()


def test_the_text_has_every_part():
    text = host_text(report_of(reading(engine=SETTINGS), counts=CacheCounts(queries=8, hits=2)))
    for line in ("sum, as the kernel counts it", "/dev/shm: 1.37 GiB of 1.95 GiB used", "25.0 % of 8 items found"):
        assert line in text
    assert "worker rank 0" in text
    assert len(text.splitlines()) < 40


def test_processes_of_one_name_are_one_row():
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
    assert report.summary.processes == ours
