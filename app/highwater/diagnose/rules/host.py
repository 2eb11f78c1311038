"""Host memory: the container's limit, at which the kernel ends a process, /dev/shm, and processor caches. Pure."""

from __future__ import annotations

from typing import Final

from highwater.diagnose.case import NOTABLE_BYTES, OLD_SECONDS, Case, given
from highwater.diagnose.finding import Finding, finding
from highwater.host.needs import ProcessorCaches
from highwater.host.past import Fill, containers_of_engine
from highwater.host.reading import ShmMemory
from highwater.host.report import UNKNOWN_CONTAINER, GrownPart
from highwater.model.rank import device_traits
from highwater.model.units import MIB, counted, size_text, span_text

HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
# Beside a look at the engine's container, which every process of it writes, or before the end.
STALE_RANK_SECONDS, STALE_SECONDS = 15.0, 60.0
MAX_LOOKS, MAX_LARGEST = 12, 3
STRANGER_BYTES: Final = 64 * MIB
SOON_SECONDS = 3600.0
# Percent of the last minute in which a task waited for memory.
HIGH_PRESSURE: Final = 10.0
_NO_SHM: Final = ShmMemory()


def host_memory(case: Case) -> Finding | None:
    fill, where = fullest(case)
    if fill is None or fill.ratio < HOST_HIGH_RATIO:
        return None
    host = None if case.evidence is None else case.evidence.host
    suspect = None if host is None else host.suspect
    together = 0 if host is None else host.ended_together
    is_end = case.kind in {"died", "start_failed"}
    return finding(
        "host_memory",
        weight="likely" if is_end and (fill.ratio >= HOST_FULL_RATIO or together) else "clue",
        advice=(*against_full_host(case), *(("last_state",) if is_end and not case.is_killed_by_kernel else ())),
        where=where,
        used=fill.used_bytes,
        whole=fill.whole_bytes,
        spilled=_spilled_bytes(case),
        ratio=fill.ratio,
        limit=_limit(fill),
        age=_age_text(case, fill),
        # Said once in the summary: with the kill, where one was counted.
        grew=suspect.text if suspect is not None and not case.is_killed_by_kernel else None,
        suspect=None if suspect is None else suspect.text,
        together=together,
    )


def host_shortage(case: Case) -> Finding | None:
    failed = next((one for one in case.log.failed if one.memory != "device"), None)
    if failed is None:
        return None
    used, whole = failed.node_gb or (None, None)
    return finding(
        "host_shortage",
        failed=failed,
        used=used,
        whole=whole,
        ratio=used / whole if used and whole else None,
        is_shm=failed.memory == "shm",
    )


def fill_text(case: Case) -> str | None:
    fill, _ = fullest(case)
    return None if fill is None else f"{fill.ratio:.0%} of {_limit(fill)}{_age_text(case, fill)}"


def fullest(case: Case) -> tuple[Fill | None, str]:
    """Return the fullest fresh look, and where: no idle rank's, nor a rank's whose container's fullest is known."""
    evidence, oldest, known = case.evidence, case.at - STALE_SECONDS, set()
    fills: list[tuple[Fill, str]] = []
    host = None if evidence is None else evidence.host
    if host is not None and host.fullest is not None:
        fill, oldest = host.fullest, host.fullest.at - STALE_RANK_SECONDS
        fills.append((fill, "in the engine's container" if fill.is_limited else "on the engine's machine"))
        everyone = (*host.reading.processes, *host.reading.ended)
        known = {(one.host, one.pid) for one in everyone if fill.is_limited and one.container == fill.container}
    for rank in case.ranks:
        used, whole = rank.now.host_memory.share if (rank.now.host, rank.now.pid) not in known else (None, None)
        if used is not None and whole and (evidence is None or rank.now.taken_at >= oldest):
            is_limited = rank.now.host_memory.cgroup_limit_bytes == whole
            fill = Fill(at=rank.now.taken_at, used_bytes=used, whole_bytes=whole, is_limited=is_limited)
            fills.append((fill, f"where {rank.name} runs"))
    return max(fills, key=lambda each: each[0].ratio, default=(None, ""))


def looks_text(case: Case) -> str | None:
    host = None if case.evidence is None else case.evidence.host
    parts = [part for part in host.parts if part.kind == "process"] if host is not None else []
    # A shell, and what an operator calls in it, are beside the engine on a machine without containers.
    parts = [part for part in parts if part.role != "other" or part.bytes >= STRANGER_BYTES]
    freshest = sorted(parts, key=lambda part: -round(part.at))[:MAX_LOOKS]
    said = (f"{part.name} {size_text(part.bytes)} ({span_text(case.at - part.at)} before)" for part in freshest)
    return ", ".join(said) or None


def against_full_host(case: Case) -> tuple[str, ...]:
    trimmed = ("trim_host_budget",) if _spilled_bytes(case) > NOTABLE_BYTES else ()
    host = None if case.evidence is None else case.evidence.host
    if host is None or host.suspect is None:
        queries = case.load.work.images if host is None else host.caches.queries
        return ("memory_limit", *(("mm_processor_cache", "reset_mm_cache") if queries else ()), *trimmed)
    is_worker = host.suspect.role == "worker" and not host.suspect.has_grown
    on_cpu = ("cpu_kvcache_space",) if is_worker and device_traits(case.device_type).is_host_memory else ()
    return (*_against(host.suspect, host.caches), *on_cpu, *trimmed)


def _against(suspect: GrownPart, caches: ProcessorCaches) -> tuple[str, ...]:
    if caches.may_have_grown(suspect.role or suspect.kind):
        return ("memory_limit", "mm_processor_cache", "reset_mm_cache")
    return ("memory_limit", "memray") if suspect.has_grown and suspect.is_python else ("memory_limit",)


def _spilled_bytes(case: Case) -> int:
    return sum(cache.host_bytes for each in case.ranks if (cache := each.now.encoder_cache) is not None)


def _limit(fill: Fill) -> str:
    return "the container's limit" if fill.is_limited else "the machine's memory"


def _age_text(case: Case, fill: Fill) -> str:
    seconds = case.at - fill.at
    return f", {span_text(seconds)} before" if case.evidence is not None and seconds >= OLD_SECONDS else ""


# --- the report on an engine that runs ---


def container_oom_kills(case: Case) -> Finding | None:
    """Report what is known of kills for memory, in containers that have just ended too: a new one counts from 0."""
    reading, told = given(case.host_report).reading, given(case.host_report).oom_kills
    kills: dict[str, int] = {}
    for look in containers_of_engine(reading):
        kills[look.key] = max(look.oom_kills, kills.get(look.key, 0))
    alive = {one.container for one in reading.processes}
    looks = [(one, one.last_container) for one in reading.ended if one.container not in alive]
    gone = [(one, look) for one, look in looks if look is not None and (look.oom_kills or look.is_nearly_full)]
    count = max(sum(kills.values()), told.count)
    if not count and not gone:
        return None
    last = f"; {gone[0][0].name} was seen last {span_text(gone[0][0].age_seconds)} ago" if gone else ""
    if not gone and told.seconds_ago is not None:
        last = f", the last one {span_text(told.seconds_ago)} ago ({told.where})"
    return finding(
        "container_oom_kills",
        oom_kills=count,
        killed=counted(count, "process"),
        ratio=max((look.kept_ratio or 0.0 for _, look in gone), default=0.0),
        last=last,
    )


def container_nearly_full(case: Case) -> Finding | None:
    report = given(case.host_report)
    container, soon = report.reading.container or UNKNOWN_CONTAINER, report.outlook.seconds_to_limit
    is_soon = soon is not None and soon < SOON_SECONDS
    if not container.limit_bytes or container.kept_bytes is None or not (is_soon or container.is_nearly_full):
        return None
    suspect = next(iter(case.host_grown), None)
    growing = suspect if suspect is not None and suspect.has_grown else None
    largest = [row for row in report.parts.rows if not row.can_be_dropped][:MAX_LARGEST]
    return finding(
        "container_nearly_full",
        advice=("memory_limit",) if suspect is None else _against(suspect, report.processor_caches),
        container=container,
        ratio=container.kept_ratio,
        soon=soon,
        grew="" if growing is None else f"; {growing.text}, {growing.pace_text}",
        pid=None if growing is None else growing.pid,
        largest=", ".join(f"{row.name} {size_text(row.bytes)}" for row in largest),
    )


def memory_pressure(case: Case) -> Finding | None:
    container = given(case.host_report).reading.container
    waited = None if container is None or container.pressure is None else container.pressure.some_avg60
    return None if waited is None or waited < HIGH_PRESSURE else finding("memory_pressure", waited=waited)


def shm_promised_too_much(case: Case) -> Finding | None:
    shm = given(case.host_report).reading.shm or _NO_SHM
    return finding("shm_promised_too_much", advice=_for_shm(shm), shm=shm) if shm.short_bytes else None


def shm_too_small(case: Case) -> Finding | None:
    report = given(case.host_report)
    shm, needs = report.reading.shm or _NO_SHM, report.shm_needs
    if report.reading.shm is None or shm.short_bytes or not needs.short_bytes:
        return None
    unknown = ", ".join(row.name for row in needs.unknown)
    return finding("shm_too_small", advice=_for_shm(shm), shm=shm, needs=needs, unknown=unknown)


def _for_shm(shm: ShmMemory) -> tuple[str, ...]:
    return ("shm_left_over", "shm_size") if shm.left_over_bytes else ("shm_size",)


def shm_left_over(case: Case) -> Finding | None:
    shm = given(case.host_report).reading.shm or _NO_SHM
    return finding("shm_left_over", shm=shm) if any(one.state == "left_over" for one in shm.owners) else None


def processor_caches_too_large(case: Case) -> Finding | None:
    report = given(case.host_report)
    caches, room = report.processor_caches, report.room_bytes
    size = (report.reading.container or UNKNOWN_CONTAINER).limit_bytes or report.reading.machine.total_bytes
    if size is None or room is None or (caches.max_bytes or 0) <= max(room, size // 2):
        return None
    return finding("processor_caches_too_large", caches=caches, room=room, why=caches.why)
