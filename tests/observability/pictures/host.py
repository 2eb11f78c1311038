"""Host memory and verdicts on growth of a simulated server, as its sidecar's exporter gets them."""

from __future__ import annotations

from typing import Final

from highwater.host.reading import ContainerMemory, HostReading, PressureStall, ProcessMemory, Role, ShmMemory, ShmOwner
from highwater.host.report import Outlook, report_of
from highwater.host.watch import HostNow
from highwater.model.components import COMPONENTS
from highwater.model.growth import GrowthKind, GrowthRate, SeriesGrowth
from highwater.model.units import GIB, MIB

# Sizes in bytes.
LIMIT: Final = 64 * GIB
LEAK_PER_REQUEST: Final = 3 * MIB
_SHM: Final = 16 * GIB
_FILE: Final = 400 * MIB
_SHARED: Final = 64 * MIB


def host_now(ranks: int, *, leaked: int = 0, seconds_to_limit: float = 5400.0, waited: float = 0.0) -> HostNow:
    """Return an API server that leaks (so many bytes by now), EngineCore and workers, in a container with a limit.

    `waited` are seconds in which tasks waited for memory.
    """
    sizes: list[tuple[Role, str, int]] = [
        ("api_server", "API server", GIB + leaked),
        ("engine_core", "EngineCore", GIB),
    ]
    sizes += [("worker", f"worker rank {rank}", 4 * GIB) for rank in range(ranks)]
    processes = tuple(
        ProcessMemory(
            role=role,
            name=name,
            pid=10 + number,
            started=number,
            container="c",
            anonymous_bytes=size,
            file_bytes=_FILE,
            shmem_bytes=_SHARED,
            swap_bytes=0,
            peak_bytes=size + _FILE + _SHARED,
            threads=60,
            descriptors=48 + 2 * (leaked // LEAK_PER_REQUEST),
            descriptors_limit=65536,
        )
        for number, (role, name, size) in enumerate(sizes)
    )
    anonymous, rings = sum(size for _, _, size in sizes), (1 + ranks) * 240 * MIB
    used = anonymous + rings + 2 * GIB + 640 * MIB
    container = ContainerMemory(
        key="c",
        version=2,
        used_bytes=used,
        limit_bytes=LIMIT,
        kept_bytes=used - 2 * GIB,
        anonymous_bytes=anonymous,
        shmem_bytes=rings,
        page_cache_bytes=2 * GIB,
        droppable_bytes=2 * GIB,
        kernel_bytes=512 * MIB,
        events={"max": int(waited), "oom_kill": 0},
        pressure=PressureStall(some_seconds=waited, full_seconds=waited / 2),
    )
    shm = ShmMemory(
        size_bytes=_SHM,
        used_bytes=rings,
        free_bytes=_SHM - rings,
        owners=(ShmOwner(owner="rpc_rings", files=1 + ranks, used_bytes=rings, promised_bytes=64 * MIB),),
        promised_bytes=64 * MIB,
    )
    reading = HostReading(taken_at=0.0, processes=processes, container=container, shm=shm)
    return HostNow(report_of(reading, outlook=Outlook(seconds_to_limit=seconds_to_limit)))


def verdicts(ranks: int, *, exhausted_at: float) -> tuple[SeriesGrowth, ...]:
    """Return the leaks of the API server, and that nothing else grows."""
    leaks = (
        _verdict("API server", "anonymous_bytes", "leak", LEAK_PER_REQUEST, exhausted_at),
        _verdict("API server", "descriptors", "leak", 2.0, exhausted_at),
    )
    others = [_verdict("API server", "threads"), *_of_process("EngineCore")]
    for rank in range(ranks):
        others += [_verdict(f"rank {rank}", component.name) for component in COMPONENTS]
        others += _of_process(f"worker rank {rank}")
    return (*leaks, *others)


def _of_process(name: str) -> list[SeriesGrowth]:
    return [_verdict(name, measure) for measure in ("anonymous_bytes", "descriptors", "threads")]


def _verdict(
    owner: str,
    measure: str,
    verdict: GrowthKind = "flat",
    leaks: float | None = None,
    exhausted_at: float | None = None,
) -> SeriesGrowth:
    rate = None if leaks is None else GrowthRate(driver="request", per_driver=leaks, low=0.9 * leaks, high=1.1 * leaks)
    return SeriesGrowth(
        series=f"{owner} {measure}",
        owner=owner,
        measure=measure,
        place="device" if owner.startswith("rank") else "host",
        unit="bytes" if measure.endswith("_bytes") else "count",
        verdict=verdict,
        text="simulated",
        rate=rate,
        exhausted_at=exhausted_at,
    )
