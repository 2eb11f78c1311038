"""What a reading of host memory says for growth: each process by measure with its room, nothing of older figures."""

from __future__ import annotations

from dataclasses import replace

from highwater.growth.host_series import host_series
from highwater.growth.series import Measured
from highwater.host.reading import HostReading, MachineMemory
from highwater.units import MIB
from tests.unit.host.recorded import reading


def series(seen: HostReading, *, rest_seconds: float = 10.0) -> dict[str, Measured]:
    return {one.key.name: one for one in host_series(seen, rest_seconds=rest_seconds)}


def with_files(opened: int | None, limit: int | None) -> HostReading:
    """The API server has so many files open, of so many that it may."""
    seen = reading()
    first = replace(seen.processes[0], descriptors=opened, descriptors_limit=limit)
    return replace(seen, processes=(first, *seen.processes[1:]))


def test_each_process_is_measured_against_the_containers_room() -> None:
    """Twelve thousand MiB are left to its limit; /dev/shm has a room of its own."""
    found = series(reading())
    assert {name: one.value / MIB for name, one in found.items()} == {
        "API server anonymous_bytes": 2_000,
        "EngineCore anonymous_bytes": 1_000,
        "worker rank 0 anonymous_bytes": 2_900,
        "/dev/shm used_bytes": 1_400,
    }
    worker, shm = found["worker rank 0 anonymous_bytes"], found["/dev/shm used_bytes"]
    assert (worker.room, worker.limit_by) == (12_000 * MIB, "the container's memory limit")
    assert (shm.room, shm.limit_by) == (600 * MIB, "the room in /dev/shm")


def test_open_files_are_measured_against_the_processes_own_limit() -> None:
    """Where it is known; a limit that was lowered below what is open leaves no room."""
    name = "API server descriptors"
    known, unlimited, lowered = (series(with_files(60, limit))[name] for limit in (1024, None, 50))
    assert (known.value, known.room, known.limit_by) == (60, 964, "the process's limit of open files")
    assert (unlimited.room, unlimited.limit_by) == (None, None)
    assert lowered.room == 0
    assert name not in series(with_files(None, 1024))


def test_without_a_container_the_machine_is_the_limit() -> None:
    """Where its kernel shows how much is available."""
    bare = replace(reading(), container=None)
    assert series(bare)["EngineCore anonymous_bytes"].limit_by is None
    there = series(replace(bare, machine=MachineMemory(available_bytes=7 * MIB)))["EngineCore anonymous_bytes"]
    assert (there.room, there.limit_by) == (7 * MIB, "the memory of its machine")


def test_figures_from_before_the_rest_do_not_count() -> None:
    """Nor do processes that come and go."""
    seen = reading()
    old, other, new = seen.processes
    seen = replace(seen, processes=(replace(old, age_seconds=10.0), replace(other, role="other"), new))
    assert set(series(seen)) == {"worker rank 0 anonymous_bytes", "/dev/shm used_bytes"}
