"""The report on host memory as plain text for a terminal."""

from __future__ import annotations

from highwater.host.parts import SHM, SHM_TITLES
from highwater.host.reading import ContainerMemory, ProcessMemory
from highwater.host.report import HostReport
from highwater.text.table import table
from highwater.units import UNKNOWN, share_text, size_text, span_text


def host_text(report: HostReport) -> str:
    """Return headline, processes, parts, ``/dev/shm``, processor caches and findings."""
    parts = [headline(report), _processes(report), _parts(report), _shm(report), _caches(report)]
    parts += [f"{one.level}: {one.text}{f' ({one.advice})' if one.advice else ''}" for one in report.findings]
    parts += [f"note: {one}" for one in report.reading.problems]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(report: HostReport) -> str:
    """Return one line: what the container has of its limit, and when that is reached."""
    container, machine = report.reading.container, report.reading.machine
    if container is None or container.used_bytes is None:
        return (
            f"host memory: {size_text(machine.available_bytes)} of {size_text(machine.total_bytes)} available on the "
            f"machine; {len(report.reading.processes)} processes of the engine"
        )
    limit = _limit(container, report)
    when = report.outlook.seconds_to_limit
    soon = f", full in {span_text(when)} at this pace" if when is not None else ""
    return (
        f"host memory: the engine's container has {size_text(container.used_bytes)}; {limit}{soon}"
        f"{_events(container)}{_pressure(container)}"
    )


def _limit(container: ContainerMemory, report: HostReport) -> str:
    if container.limit_bytes is None:
        return f"it has no limit, and the machine has {size_text(report.reading.machine.available_bytes)} available"
    ratio = None if container.kept_bytes is None else container.kept_bytes / container.limit_bytes
    kept = f"{size_text(container.kept_bytes)} of it cannot be dropped"
    return f"{kept}, {share_text(ratio)} of its limit of {size_text(container.limit_bytes)}"


def _events(container: ContainerMemory) -> str:
    shown = [f"{name} {count}" for name, count in sorted(container.events.items()) if count]
    return f"; events: {', '.join(shown)}" if shown else ""


def _pressure(container: ContainerMemory) -> str:
    pressure = container.pressure
    if pressure is None or pressure.some_avg60 is None:
        return ""
    return f"; waited for memory in {pressure.some_avg60:.1f} % of the last minute"


def _processes(report: HostReport) -> str:
    if not report.reading.processes:
        return ""
    rows = [
        [
            one.name,
            str(one.pid),
            size_text(one.anonymous_bytes),
            size_text(one.file_bytes),
            size_text(one.shmem_bytes),
            size_text(one.swap_bytes),
            size_text(one.peak_bytes),
            _count(one.threads),
            _count(one.descriptors),
            _where(one, report),
        ]
        for one in report.reading.processes
    ]
    headers = ["process", "pid", "anonymous", "file", "shared", "swap", "peak", "threads", "open files", "container"]
    return table(headers, rows, words=1)


def _where(one: ProcessMemory, report: HostReport) -> str:
    main = report.reading.container
    if main is None or one.container is None:
        return UNKNOWN
    return "engine" if one.container == main.key else one.container


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _parts(report: HostReport) -> str:
    parts = report.parts
    if parts.used_bytes is None:
        return ""
    rows = [
        [row.name, size_text(row.bytes), share_text(row.bytes / parts.used_bytes if parts.used_bytes else None), note]
        for row in parts.rows
        for note in ["the kernel drops it when it needs room" if row.can_be_dropped else ""]
    ]
    rows.append(["not attributed", size_text(parts.not_attributed_bytes), _share(report), ""])
    if parts.counted_twice_bytes:
        twice = -parts.counted_twice_bytes
        why = "pages that processes share, and files that others are charged for"
        rows.append(["counted twice above", size_text(twice), "", why])
    rows.append(["sum, as the kernel counts it", size_text(parts.used_bytes), "", ""])
    return table(["part of the container", "size", "share", ""], rows, words=1)


def _share(report: HostReport) -> str:
    parts = report.parts
    if not parts.used_bytes or parts.not_attributed_bytes is None:
        return UNKNOWN
    return share_text(parts.not_attributed_bytes / parts.used_bytes)


def _shm(report: HostReport) -> str:
    shm, needs = report.reading.shm, report.shm_needs
    if shm is None:
        return ""
    owners = [
        [
            SHM_TITLES.get(one.owner, one.owner),
            str(one.files),
            size_text(one.used_bytes),
            size_text(one.promised_bytes),
        ]
        for one in shm.owners
    ]
    head = (
        f"{SHM}: {size_text(shm.used_bytes)} of {size_text(shm.size_bytes)} used, {size_text(shm.free_bytes)} free; "
        f"files in it may still take {size_text(shm.promised_bytes)}"
    )
    lines = [head, table(["owner", "files", "used", "may still take"], owners) if owners else ""]
    if needs.rows:
        known = f"this command line can need {size_text(needs.known_bytes)} of it"
        unknown = ", ".join(row.name for row in needs.unknown)
        lines.append(f"{known}; not known: {unknown}" if unknown else known)
    return "\n".join(line for line in lines if line)


def _caches(report: HostReport) -> str:
    caches = report.processor_caches
    if caches.kind == "unknown":
        return f"processor caches: not known, {caches.why}"
    if caches.kind == "off":
        head = f"processor caches: off, {caches.why}"
    else:
        hits = f"; {share_text(caches.hit_ratio)} of {caches.queries} items found" if caches.queries else ""
        used = f", {size_text(caches.used_bytes)} used" if caches.used_bytes is not None else ""
        head = f"processor caches: at most {size_text(caches.max_bytes)} in total{used}; {caches.why}{hits}"
    spilled = f"\nencoder outputs in host memory: {size_text(caches.spilled_bytes)}" if caches.spilled_bytes else ""
    return head + spilled
