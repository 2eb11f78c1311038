"""The report on host memory: a reading, its parts by owner, the most it can come to, and findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from highwater.host.needs import NOT_COUNTED, CacheCounts, ProcessorCaches, ShmNeeds, processor_caches, shm_needs
from highwater.host.parts import SHM, Parts, parts_of
from highwater.host.past import NO_OUTLOOK, GrownPart, Outlook, containers_of_engine
from highwater.host.reading import ContainerMemory, HostReading, ShmMemory, of_engine
from highwater.readings.report import HostSummary
from highwater.readings.schema import RESPONSE_SCHEMA
from highwater.units import share_text, size_text, span_text

SOON_SECONDS = 3600.0
HIGH_PRESSURE = 10.0
"""Percent of the last minute in which a task waited for memory."""
UNKNOWN_CONTAINER: Final = ContainerMemory(key="")
_RAISE_LIMIT = "raise the container's memory limit"
_IF_OURS = "if no other container has this volume mounted"
_SHM_ADVICE = "docker run --shm-size; in Kubernetes a volume of medium Memory at /dev/shm with a larger sizeLimit"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A conclusion: ``warning`` where somebody should act, else ``note``."""

    __pydantic_config__ = RESPONSE_SCHEMA

    name: str
    level: Literal["warning", "note"] = "warning"
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The response to ``GET /memory/host``.

    ``room_bytes`` can still be taken: until the container's limit, else of the machine. ``shm_needs`` is the most that
    the command line can need of ``/dev/shm``.
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
    grown: Sequence[GrownPart] = (),
    counts: CacheCounts = NOT_COUNTED,
    age_seconds: float = 0.0,
) -> HostReport:
    parts, needs, caches = parts_of(reading), shm_needs(reading), processor_caches(reading, counts)
    container = reading.container or UNKNOWN_CONTAINER
    known = [size for size in (container.room_bytes, reading.machine.available_bytes) if size is not None]
    room = min(known, default=None)
    findings = (
        *_kill_findings(reading),
        *_container_findings(container, parts, outlook, grown, caches),
        *_shm_findings(reading.shm, needs),
        *_cache_findings(container.limit_bytes or reading.machine.total_bytes, room, caches),
    )
    return HostReport(
        reading=reading,
        parts=parts,
        room_bytes=room,
        outlook=outlook,
        shm_needs=needs,
        processor_caches=caches,
        findings=findings,
        age_seconds=age_seconds,
    )


def summary_of(
    reading: HostReading, outlook: Outlook, grown: Sequence[GrownPart] = (), counts: CacheCounts = NOT_COUNTED
) -> HostSummary | None:
    """Return the few figures that stand in ``GET /memory``; ``None`` where no process of the engine is or was seen."""
    if not reading.processes and not reading.ended:
        return None
    report = report_of(reading, outlook=outlook, grown=grown, counts=counts)
    container, shm = reading.container or UNKNOWN_CONTAINER, reading.shm or ShmMemory()
    largest = next((row for row in report.parts.rows if not row.can_be_dropped), None)
    return HostSummary(
        processes=of_engine(reading.processes),
        used_bytes=container.used_bytes,
        kept_bytes=container.kept_bytes,
        limit_bytes=container.limit_bytes,
        seconds_to_limit=outlook.seconds_to_limit,
        largest=None if largest is None else largest.name,
        largest_bytes=None if largest is None else largest.bytes,
        shm_used_bytes=shm.used_bytes,
        shm_size_bytes=shm.size_bytes,
        warnings=tuple(one.text for one in report.findings if one.level == "warning"),
    )


def _container_findings(
    container: ContainerMemory, parts: Parts, outlook: Outlook, grown: Sequence[GrownPart], caches: ProcessorCaches
) -> Iterator[HostFinding]:
    limit, kept, soon = container.limit_bytes, container.kept_bytes, outlook.seconds_to_limit
    is_soon = soon is not None and soon < SOON_SECONDS
    if limit and kept is not None and (is_soon or container.is_nearly_full):
        largest = [row for row in parts.rows if not row.can_be_dropped][:3]
        who = ", ".join(f"{row.name} {size_text(row.bytes)}" for row in largest)
        when = f"; at this pace it is full in {span_text(soon)}" if soon is not None else ""
        growing = next((part for part in grown if part.has_grown), None)
        which = f"; {growing.text}, {growing.pace_text}" if growing is not None else ""
        text = (
            f"the engine's container keeps {size_text(kept)} of {size_text(limit)} "
            f"({share_text(container.kept_ratio)}) that the kernel cannot drop{when}{which}; the largest parts: {who}"
        )
        suspect = growing or next(iter(grown), None)
        yield HostFinding(name="container_nearly_full", text=text, advice=_against_full(suspect, caches))
    waited = None if container.pressure is None else container.pressure.some_avg60
    if waited is not None and waited >= HIGH_PRESSURE:
        text = f"tasks of the engine's container waited for memory in {waited:.0f} % of the last minute"
        yield HostFinding(name="memory_pressure", text=text)


def _kill_findings(reading: HostReading) -> Iterator[HostFinding]:
    """Yield what is known of kills for memory, in containers that have just ended too: a new one counts from 0."""
    kills: dict[str, int] = {}
    for look in containers_of_engine(reading):
        kills[look.key] = max(look.oom_kills, kills.get(look.key, 0))
    alive = {one.container for one in reading.processes}
    looks = [(one, one.last_container) for one in reading.ended if one.container not in alive]
    gone = [(one, look) for one, look in looks if look is not None and (look.oom_kills or look.is_nearly_full)]
    last = f"; {gone[0][0].name} was seen last {span_text(gone[0][0].age_seconds)} ago" if gone else ""
    if count := sum(kills.values()):
        text = f"the kernel has killed {count} process{'' if count == 1 else 'es'} of the engine's container for memory"
        yield HostFinding(name="container_oom_kills", text=f"{text}{last}", advice=_RAISE_LIMIT)
    elif gone:
        full = share_text(max(look.kept_ratio or 0.0 for _, look in gone))
        text = f"the engine's last container ended {full} full; the kernel may have killed it for memory{last}"
        yield HostFinding(name="container_oom_kills", text=text, advice=_RAISE_LIMIT)


def _against_full(suspect: GrownPart | None, caches: ProcessorCaches) -> str:
    if suspect is not None and caches.may_have_grown(suspect.role or suspect.kind):
        return f"lower mm_processor_cache_gb or the number of API servers, or {_RAISE_LIMIT}"
    if suspect is not None and suspect.is_python and suspect.has_grown:
        who = f"`memray attach {suspect.pid}` names the functions that hold it (docs/host.md)"
        return f"{who}; {_RAISE_LIMIT} meanwhile"
    return _RAISE_LIMIT


def _shm_findings(shm: ShmMemory | None, needs: ShmNeeds) -> Iterator[HostFinding]:
    if shm is None:
        return
    size, free = size_text(shm.size_bytes), size_text(shm.free_bytes)
    advice = f"remove what no process has open there, {_IF_OURS}; {_SHM_ADVICE}" if shm.left_over_bytes else _SHM_ADVICE
    if shm.short_bytes:
        text = (
            f"{SHM} has {free} of {size} free, and files in use may still take {size_text(shm.promised_bytes)}: too "
            f"small by {size_text(shm.short_bytes)}; a process that writes there then ends with SIGBUS"
        )
        yield HostFinding(name="shm_promised_too_much", text=text, advice=advice)
    elif needs.short_bytes:
        text = (
            f"this command line can need {size_text(needs.known_bytes)} of {SHM}, which has {size}, {free} free: too "
            f"small by {size_text(needs.short_bytes)} before a SIGBUS"
        )
        yield HostFinding(name="shm_too_small", text=text, advice=advice)
    if any(one.state == "left_over" for one in shm.owners):
        text = f"files in {SHM} with {size_text(shm.left_over_bytes)} are open in no process that is seen"
        yield HostFinding(name="shm_left_over", level="note", text=text, advice=f"they may be removed, {_IF_OURS}")


def _cache_findings(size: int | None, room: int | None, caches: ProcessorCaches) -> Iterator[HostFinding]:
    if size is not None and room is not None and (caches.max_bytes or 0) > max(room, size // 2):
        text = (
            f"the processor caches can take {size_text(caches.max_bytes)} in total, and there is room for "
            f"{size_text(room)}: {caches.why}"
        )
        advice = "lower mm_processor_cache_gb, or use fewer API servers"
        yield HostFinding(name="processor_caches_too_large", text=text, advice=advice)
