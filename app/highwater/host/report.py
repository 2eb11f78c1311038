"""The report on host memory: a reading, who has what of it, what it can come to, and what is wrong. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from highwater.host.outlook import NO_OUTLOOK, Outlook
from highwater.host.parts import SHM, Parts, parts_of
from highwater.host.processor_cache import NOT_COUNTED, CacheCounts, ProcessorCaches, processor_caches
from highwater.host.reading import HostReading
from highwater.host.shm_need import ShmNeeds, shm_needs
from highwater.readings import HostSummary
from highwater.units import share_text, size_text, span_text

FULL_RATIO = 0.9
SOON_SECONDS = 3600.0
HIGH_PRESSURE = 10.0
"""Percent of the last minute in which a task waited for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A conclusion.

    Attributes:
        name: A word for programs.
        level: ``warning`` where somebody should act, else ``note``.
        text: In plain words.
        advice: What can be changed; empty where nothing need.
    """

    name: str
    level: Literal["warning", "note"]
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What ``GET /memory/host`` returns.

    Attributes:
        reading: Processes, containers, ``/dev/shm`` and the machine.
        parts: Who has what of the engine's container.
        room_bytes: What can still be taken: until the container's limit, else of the machine.
        outlook: When the container is at its limit.
        shm_needs: What the command line can need of ``/dev/shm``.
        processor_caches: vLLM's caches of prepared images, audio and video.
        findings: What is wrong, warnings first.
        age_seconds: Of the reading.
    """

    schema: int = 1
    reading: HostReading
    parts: Parts
    room_bytes: int | None = None
    outlook: Outlook
    shm_needs: ShmNeeds
    processor_caches: ProcessorCaches
    findings: tuple[HostFinding, ...] = ()
    age_seconds: float = 0.0


def report_of(
    reading: HostReading,
    *,
    outlook: Outlook = NO_OUTLOOK,
    counts: CacheCounts = NOT_COUNTED,
    age_seconds: float = 0.0,
) -> HostReport:
    """Return the report on a reading.

    Args:
        reading: What was read.
        outlook: The pace.
        counts: What is counted elsewhere.
        age_seconds: Of the reading.
    """
    parts, needs = parts_of(reading), shm_needs(reading)
    caches = processor_caches(reading, counts)
    found = [
        *_limit(reading, parts, outlook),
        *_oom(reading),
        *_pressure(reading),
        *_shm(reading, needs),
        *_caches(reading, caches),
    ]
    return HostReport(
        reading=reading,
        parts=parts,
        room_bytes=_room(reading),
        outlook=outlook,
        shm_needs=needs,
        processor_caches=caches,
        findings=tuple(sorted(found, key=lambda one: one.level != "warning")),
        age_seconds=age_seconds,
    )


def summary_of(reading: HostReading, outlook: Outlook) -> HostSummary | None:
    """Return the few figures that stand in ``GET /memory``; ``None`` where no process of the engine is seen.

    Args:
        reading: What was read.
        outlook: The pace.
    """
    if not reading.processes:
        return None
    report = report_of(reading, outlook=outlook)
    container, shm = reading.container, reading.shm
    largest = next((row for row in report.parts.rows if not row.can_be_dropped), None)
    return HostSummary(
        processes=len(reading.processes),
        used_bytes=None if container is None else container.used_bytes,
        kept_bytes=None if container is None else container.kept_bytes,
        limit_bytes=None if container is None else container.limit_bytes,
        seconds_to_limit=outlook.seconds_to_limit,
        largest=None if largest is None else largest.name,
        largest_bytes=None if largest is None else largest.bytes,
        shm_used_bytes=None if shm is None else shm.used_bytes,
        shm_size_bytes=None if shm is None else shm.size_bytes,
        warnings=tuple(one.text for one in report.findings if one.level == "warning"),
    )


def _room(reading: HostReading) -> int | None:
    container, available = reading.container, reading.machine.available_bytes
    room = None if container is None else container.room_bytes
    known = [one for one in (room, available) if one is not None]
    return min(known, default=None)


def _limit(reading: HostReading, parts: Parts, outlook: Outlook) -> list[HostFinding]:
    container = reading.container
    if container is None or not container.limit_bytes or container.kept_bytes is None:
        return []
    ratio, soon = container.kept_bytes / container.limit_bytes, outlook.seconds_to_limit
    is_soon = soon is not None and soon < SOON_SECONDS
    if ratio < FULL_RATIO and not is_soon:
        return []
    largest = [row for row in parts.rows if not row.can_be_dropped][:3]
    who = ", ".join(f"{row.name} {size_text(row.bytes)}" for row in largest)
    when = f"; at this pace it is full in {span_text(soon)}" if soon is not None else ""
    text = (
        f"the engine's container keeps {size_text(container.kept_bytes)} of {size_text(container.limit_bytes)} "
        f"({share_text(ratio)}) that the kernel cannot drop{when}; the largest parts: {who}"
    )
    advice = "lower mm_processor_cache_gb or the number of API servers, or raise the container's memory limit"
    return [HostFinding(name="container_nearly_full", level="warning", text=text, advice=advice)]


def _oom(reading: HostReading) -> list[HostFinding]:
    kills = 0 if reading.container is None else reading.container.events.get("oom_kill", 0)
    if not kills:
        return []
    text = f"the kernel has killed {kills} process{'' if kills == 1 else 'es'} of the engine's container for memory"
    return [HostFinding(name="container_oom_kills", level="warning", text=text, advice="raise its memory limit")]


def _pressure(reading: HostReading) -> list[HostFinding]:
    pressure = None if reading.container is None else reading.container.pressure
    if pressure is None or (pressure.some_avg60 or 0.0) < HIGH_PRESSURE:
        return []
    text = f"tasks of the engine's container waited for memory in {pressure.some_avg60:.0f} % of the last minute"
    return [HostFinding(name="memory_pressure", level="warning", text=text)]


def _shm(reading: HostReading, needs: ShmNeeds) -> list[HostFinding]:
    shm, found = reading.shm, []
    if shm is not None and shm.short_bytes:
        text = (
            f"{SHM} has {size_text(shm.free_bytes)} free, and files in it may still take "
            f"{size_text(shm.promised_bytes)}: too small by {size_text(shm.short_bytes)}; a process that writes there "
            "then ends with SIGBUS"
        )
        found.append(HostFinding(name="shm_promised_too_much", level="warning", text=text, advice=_SHM_ADVICE))
    elif shm is not None and needs.short_bytes:
        text = (
            f"this command line can need {size_text(needs.known_bytes)} of /dev/shm, which has "
            f"{size_text(shm.size_bytes)}: too small by {size_text(needs.short_bytes)} before a SIGBUS"
        )
        found.append(HostFinding(name="shm_too_small", level="warning", text=text, advice=_SHM_ADVICE))
    return found


_SHM_ADVICE = "docker run --shm-size, in Kubernetes a volume of medium Memory at /dev/shm with a larger sizeLimit"


def _caches(reading: HostReading, caches: ProcessorCaches) -> list[HostFinding]:
    room = _room(reading)
    if room is None or not caches.max_bytes:
        return []
    limit = None if reading.container is None else reading.container.limit_bytes
    size = limit if limit is not None else reading.machine.total_bytes
    if size is None or caches.max_bytes <= max(room, size // 2):
        return []
    text = (
        f"the processor caches can take {size_text(caches.max_bytes)} in total, and there is room for "
        f"{size_text(room)}: {caches.why}"
    )
    advice = "lower mm_processor_cache_gb, or use fewer API servers"
    return [HostFinding(name="processor_caches_too_large", level="warning", text=text, advice=advice)]
