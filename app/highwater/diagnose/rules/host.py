"""Host memory: the container's limit, at which the kernel ends a process. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from highwater.diagnose.case import NOTABLE_BYTES, OLD_SECONDS, Case
from highwater.diagnose.finding import Finding, finding
from highwater.host.past import Fill
from highwater.units import size_text, span_text

HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
# Beside a look at the engine's container, which every process of it writes, or before the end.
STALE_RANK_SECONDS, STALE_SECONDS = 15.0, 60.0
MAX_LOOKS = 12


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
        used, whole = rank.now.host_memory.share if (rank.now.host, rank.now.pid) not in known else (None, None)
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
