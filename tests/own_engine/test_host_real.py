"""Host memory of a real engine by process, against what the kernel counts for a memory cgroup of its own.

The engine is that of test_watch_real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from highwater.host.needs import processor_caches, shm_needs
from highwater.host.reading import HostReading
from highwater.host.report import parts_of
from highwater.host.watch import HostReader
from highwater.model.units import GIB, MIB
from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.traffic import send_images
from highwater_worker.wire import PROCESS_NAME, process_body
from tests.own_engine.conftest import Watched
from tests.patience import wait_until

EXACT = 0.02


class Host(NamedTuple):
    """An engine in a memory cgroup of its own, and a reader of its process files."""

    engine: DemoEngine
    reader: HostReader
    rings: Path
    group: Path


@pytest.fixture(scope="module")
def host(watched_alone: Watched) -> Host:
    engine, _, rings, group = watched_alone
    if group is None:
        pytest.skip("a memory cgroup cannot be made here: not root, no cgroup file system, or memory not delegated")
    return Host(engine, HostReader(rings), rings, group)


def reading_with(host: Host, wanted: Callable[[HostReading], bool], seconds: float = 120.0) -> HostReading:
    """The first reading that is as wanted; fails with the last one."""
    deadline = time.monotonic() + seconds
    while True:
        reading = host.reader.read()
        if wanted(reading):
            return reading
        assert time.monotonic() < deadline, reading
        time.sleep(0.5)


def shm_of_others(group: Path) -> int:
    """The bytes in `/dev/shm` that no process of the group has mapped: engines beside this one, and killed ones."""
    own: set[int] = set()
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            own |= {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith("/dev/shm/")}
    size = 0
    for path in Path("/dev/shm").rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            size += 0 if status.st_ino in own else status.st_blocks * 512
    return size


def missing_share(host: Host, reading: HostReading) -> float:
    """What nobody has and what is counted twice, of all. A container has no others' files in its `/dev/shm`."""
    parts = parts_of(reading)
    assert parts.used_bytes
    twice = (parts.counted_twice_bytes or 0) - shm_of_others(host.group)
    return ((parts.not_attributed_bytes or 0) + abs(twice)) / parts.used_bytes


def test_every_process_is_there_by_role(host):
    reading = reading_with(host, lambda one: "resource_tracker" in {process.role for process in one.processes})
    by_role = {process.role: process for process in reading.processes}
    assert {"api_server", "engine_core", "worker"} <= set(by_role)
    assert by_role["worker"].name == "worker rank 0"
    for role in ("api_server", "engine_core", "worker"):
        process = by_role[role]
        assert process.source == "file"
        assert process.anonymous_bytes > 100 * MIB
        assert process.peak_bytes >= process.anonymous_bytes + process.file_bytes + process.shmem_bytes
        assert process.threads > 1
        assert process.descriptors > 10
        assert process.age_seconds < 15.0
    assert reading.problems == ()


def test_the_parts_sum_to_what_the_kernel_counts(host):
    """Within 2 %: what nobody has, and what is counted twice, together; also under images."""
    reading = reading_with(host, lambda one: missing_share(host, one) <= EXACT)
    assert reading.container.used_bytes > 500 * MIB
    asyncio.run(send_images(host.engine.url, host.engine.served_model, images=range(70_000, 70_004)))
    reading_with(host, lambda one: missing_share(host, one) <= EXACT)


def test_a_file_in_shared_memory_is_attributed(host):
    before = {one.owner: one for one in host.reader.read().shm.owners}
    path = Path(f"/dev/shm/nccl-highwater-{os.getpid()}")
    try:
        path.write_bytes(bytes(8 * MIB))
        os.truncate(path, 24 * MIB)
        reading = reading_with(host, lambda one: any(owner.owner == "nccl" for owner in one.shm.owners))
        nccl = {one.owner: one for one in reading.shm.owners}["nccl"]
        was = before.get("nccl")
        assert nccl.used_bytes - (was.used_bytes if was else 0) == 8 * MIB
        assert nccl.promised_bytes - (was.promised_bytes if was else 0) == 16 * MIB
    finally:
        path.unlink(missing_ok=True)


def test_the_rings_are_no_larger_than_the_rules_say(host):
    reading = reading_with(host, lambda one: one.engine is not None)
    needs = shm_needs(reading)
    expected = (160 + 240) * MIB if reading.engine.executor == "mp" else 0
    assert (needs.known_bytes, needs.unknown) == (expected, ())
    caches = processor_caches(reading)
    assert (caches.kind, caches.max_bytes) == ("lru", 4 * GIB)


def test_that_no_grpc_port_is_open_is_known_by_the_command_line(host):
    assert reading_with(host, lambda one: one.engine is not None).engine.grpc is False


def written(folder: Path) -> dict[int, dict[str, Any]]:
    """What each process wrote of itself last, by pid."""
    bodies = (process_body(path.read_bytes()) for path in folder.iterdir() if PROCESS_NAME.fullmatch(path.name))
    said = [json.loads(body) for body in bodies if body is not None]
    return {one["pid"]: one for one in said}


def test_it_costs_the_processes_next_to_nothing(host):
    before = written(host.rings)
    now = before

    def have_run_on() -> bool:
        nonlocal now
        now = {pid: one for pid, one in written(host.rings).items() if pid in before}
        return len(now) == len(before) and all(one["mono"] - before[pid]["mono"] >= 10.0 for pid, one in now.items())

    wait_until(have_run_on, pause_seconds=0.5)
    shares = {
        one["role"]: (one["cpu_seconds"] - before[pid]["cpu_seconds"]) / (one["mono"] - before[pid]["mono"])
        for pid, one in now.items()
    }
    assert len(shares) == 3
    assert max(shares.values()) < 0.02, shares
