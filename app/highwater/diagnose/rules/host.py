"""Host memory: the container's limit, at which the kernel ends a process. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from highwater.accounting.host_share import host_share
from highwater.diagnose.case import NOTABLE_BYTES, OLD_SECONDS, Case
from highwater.diagnose.finding import Finding, finding
from highwater.host.outlook import Outlook
from highwater.host.parts import SHM, Parts
from highwater.host.past import Fill, GrownPart, containers_of_engine
from highwater.host.processor_cache import ProcessorCaches
from highwater.host.reading import ContainerMemory, HostReading, ShmMemory
from highwater.host.report import UNKNOWN_CONTAINER, HostFinding, HostReport
from highwater.host.shm_need import ShmNeeds
from highwater.units import share_text, size_text, span_text

HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
# Beside a look at the engine's container, which every process of it writes, or before the end.
STALE_RANK_SECONDS, STALE_SECONDS = 15.0, 60.0
MAX_LOOKS = 12
SOON_SECONDS = 3600.0
HIGH_PRESSURE = 10.0
"""Percent of the last minute in which a task waited for memory."""
_RAISE_LIMIT: Final = "raise the container's memory limit"
_IF_OURS: Final = "if no other container has this volume mounted"
_SHM_ADVICE: Final = (
    "docker run --shm-size; in Kubernetes a volume of medium Memory at /dev/shm with a larger sizeLimit"
)


def host_memory(case: Case) -> Finding | None:
    fill, where = fullest(case)
    if fill is None or fill.ratio < HOST_HIGH_RATIO:
        return None
    evidence = case.evidence
    host = None if evidence is None else evidence.host
    suspect = None if host is None else host.suspect
    together = 0 if host is None else host.ended_together
    is_counted = evidence is not None and evidence.oom_kills is not None and evidence.oom_kills.count > 0
    is_end = case.kind in {"died", "start_failed"}
    return finding(
        "host_memory",
        weight="likely" if is_end and (fill.ratio >= HOST_FULL_RATIO or together) else "clue",
        advice=(*against_full_host(case), *(("last_state",) if is_end and not is_counted else ())),
        where=where,
        used=fill.used_bytes,
        whole=fill.whole_bytes,
        spilled=_spilled_bytes(case),
        ratio=fill.ratio,
        limit=_limit(fill),
        age=_age_text(case, fill),
        # Said once in the summary: with the kill, where one was counted.
        grew=suspect.text if suspect is not None and not is_counted else None,
        suspect=None if suspect is None else suspect.text,
        together=together,
    )


def fill_text(case: Case) -> str | None:
    fill, _ = fullest(case)
    return None if fill is None else f"{fill.ratio:.0%} of {_limit(fill)}{_age_text(case, fill)}"


def fullest(case: Case) -> tuple[Fill | None, str]:
    return max(_fills(case), key=lambda each: each[0].ratio, default=(None, ""))


def looks_text(case: Case) -> str | None:
    host = None if case.evidence is None else case.evidence.host
    parts = () if host is None else [part for part in host.parts if part.kind == "process"]
    freshest = sorted(parts, key=lambda part: -round(part.at))[:MAX_LOOKS]
    said = (f"{part.name} {size_text(part.bytes)} ({span_text(case.at - part.at)} before)" for part in freshest)
    return ", ".join(said) or None


def against_full_host(case: Case) -> tuple[str, ...]:
    trimmed = ("trim_host_budget",) if _spilled_bytes(case) > NOTABLE_BYTES else ()
    host = None if case.evidence is None else case.evidence.host
    queries = getattr(case.load, "mm_cache_queries", None) if host is None else host.caches.queries
    suspect = None if host is None else host.suspect
    if host is None or suspect is None:
        cached, traced, is_worker = bool(queries), False, False
    else:
        cached = host.caches.may_have_grown(suspect.role or suspect.kind)
        traced = suspect.has_grown and not cached and suspect.is_python
        is_worker = suspect.role == "worker" and not suspect.has_grown
    return (
        "memory_limit",
        *(("memray",) if traced else ()),
        *(("mm_processor_cache", "reset_mm_cache") if cached else ()),
        *(("cpu_kvcache_space",) if is_worker and case.device_type == "cpu" else ()),
        *trimmed,
    )


def _fills(case: Case) -> Iterator[tuple[Fill, str]]:
    """Yield the freshest looks, and where: no idle rank's, nor a rank's whose container's fullest look is known."""
    evidence, oldest, known = case.evidence, case.at - STALE_SECONDS, set()
    host = None if evidence is None else evidence.host
    if host is not None and host.fullest is not None:
        fill, oldest = host.fullest, host.fullest.at - STALE_RANK_SECONDS
        yield fill, "in the engine's container" if fill.is_limited else "on the engine's machine"
        everyone = (*host.reading.processes, *host.reading.ended)
        known = {(one.host, one.pid) for one in everyone if fill.is_limited and one.container == fill.container}
    for rank in case.ranks:
        used, whole = host_share(rank.now) if (rank.now.host, rank.now.pid) not in known else (None, None)
        if used is not None and whole and (evidence is None or rank.now.taken_at >= oldest):
            is_limited = rank.now.host_memory.cgroup_limit_bytes == whole
            fill = Fill(at=rank.now.taken_at, used_bytes=used, whole_bytes=whole, is_limited=is_limited)
            yield fill, f"where {rank.name} runs"


def _spilled_bytes(case: Case) -> int:
    return sum(cache.host_bytes for each in case.ranks if (cache := each.now.encoder_cache) is not None)


def _limit(fill: Fill) -> str:
    return "the container's limit" if fill.is_limited else "the machine's memory"


def _age_text(case: Case, fill: Fill) -> str:
    seconds = case.at - fill.at
    return f", {span_text(seconds)} before" if case.evidence is not None and seconds >= OLD_SECONDS else ""


# --- the report on host memory ---


def host_findings(report: HostReport, grown: Sequence[GrownPart]) -> tuple[HostFinding, ...]:
    reading, caches = report.reading, report.processor_caches
    container = reading.container or UNKNOWN_CONTAINER
    return (
        *_kill_findings(reading),
        *_container_findings(container, report.parts, report.outlook, grown, caches),
        *_shm_findings(reading.shm, report.shm_needs),
        *_cache_findings(container.limit_bytes or reading.machine.total_bytes, report.room_bytes, caches),
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
