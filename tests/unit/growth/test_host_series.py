"""What a reading of host memory says for growth: each process by measure with its room, nothing of older figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from highwater.growth.series import Bound, Measured, host_series
from highwater.host.reading import HostReading, MachineMemory
from highwater.model.components import account
from highwater.model.rank import Device, EncoderCache, RankReading, WorkerMemory
from highwater.model.units import MIB
from tests.unit.host.recorded import reading


def series(seen: HostReading, *, idle_seconds: float = 10.0, ranks: Iterable[RankReading] = ()) -> dict[str, Measured]:
    return {one.key.name: one for one in host_series(seen, idle_seconds=idle_seconds, ranks=ranks)}


def rank_of_worker(device: str, *, spilled_bytes: int = 0, started: int = 12) -> RankReading:
    """The worker of ``reading()``, with a tenth of its encoder cache's budget in use: 10 MiB."""
    cache = EncoderCache(
        entries=2, device_bytes=10 * MIB - spilled_bytes, host_bytes=spilled_bytes, embeds=100, capacity_embeds=1000
    )
    worker = WorkerMemory(
        rank=0,
        host=reading().processes[2].host,
        pid=12,
        pid_started=started,
        taken_at=0.0,
        device=Device(type=device, index=0),
        encoder_cache=cache,
    )
    return account(worker)


def with_files(opened: int | None, limit: int | None) -> HostReading:
    """The API server has so many files open, of so many that it may."""
    seen = reading()
    first = replace(seen.processes[0], descriptors=opened, descriptors_limit=limit)
    return replace(seen, processes=(first, *seen.processes[1:]))


def test_each_process_is_measured_against_the_containers_room() -> None:
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
    name = "API server descriptors"
    known, unlimited, lowered = (series(with_files(60, limit))[name] for limit in (1024, None, 50))
    assert (known.value, known.room, known.limit_by) == (60, 964, "the process's limit of open files")
    assert (unlimited.room, unlimited.limit_by) == (None, None)
    assert lowered.room == 0
    assert name not in series(with_files(None, 1024))


def test_without_a_container_the_machine_is_the_limit() -> None:
    bare = replace(reading(), container=None)
    assert series(bare)["EngineCore anonymous_bytes"].limit_by is None
    there = series(replace(bare, machine=MachineMemory(available_bytes=7 * MIB)))["EngineCore anonymous_bytes"]
    assert (there.room, there.limit_by) == (7 * MIB, "the memory of its machine")


def test_figures_from_before_the_rest_do_not_count() -> None:
    seen = reading()
    old, other, new = seen.processes
    seen = replace(seen, processes=(replace(old, age_seconds=10.0), replace(other, role="other"), new))
    assert set(series(seen)) == {"worker rank 0 anonymous_bytes", "/dev/shm used_bytes"}


@pytest.mark.parametrize(
    ("rank", "own_mib"),
    [
        (rank_of_worker("cpu"), 2_890),
        (rank_of_worker("cpu", spilled_bytes=4 * MIB), 2_890),
        (replace(rank_of_worker("cpu"), encoder_cache=None), 2_900),
        (replace(rank_of_worker("cpu"), age_seconds=10.0), None),
        (rank_of_worker("npu"), 2_900),
        (rank_of_worker("cpu", started=13), 2_900),
    ],
    ids=["on a CPU", "spilled", "no cache", "read before the idle period", "on its device", "another process"],
)
def test_a_worker_on_a_cpu_counts_without_its_encoder_cache(rank: RankReading, own_mib: int | None) -> None:
    found = series(reading(), ranks=[rank])
    assert [one.value / MIB for name, one in found.items() if name == "worker rank 0 anonymous_bytes"] == (
        [] if own_mib is None else [own_mib]
    )
    assert found["EngineCore anonymous_bytes"].value == 1_000 * MIB


def test_spilled_encoder_outputs_are_growth_of_their_worker_by_design() -> None:
    budget = Bound(
        limit=100 * MIB,
        what="the encoder cache's budget",
        drivers=frozenset({"new_image", "image", "1k_tokens"}),
        is_above_start=True,
    )
    spilled = series(with_files(60, None), ranks=[rank_of_worker("npu", spilled_bytes=4 * MIB)])
    assert {name: one.bounds for name, one in spilled.items() if one.bounds} == {
        "worker rank 0 anonymous_bytes": (budget,)
    }
    for other in (rank_of_worker("npu"), rank_of_worker("cpu", spilled_bytes=4 * MIB)):
        assert not any(one.bounds for one in series(with_files(60, None), ranks=[other]).values())
