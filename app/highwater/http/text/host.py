"""The report on host memory as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Final

from highwater.host.reading import SHM, bare_name, of_engine
from highwater.host.report import UNKNOWN_CONTAINER, HostReport, shm_title
from highwater.model.units import UNKNOWN, counted, share_text, size_text, span_text, table

MAX_ENDED = 8
# Files and shared memory count in each process that maps them: their sum would be of no use.
_SIZES: Final = (("file_bytes", max), ("shmem_bytes", max), ("swap_bytes", sum), ("peak_bytes", max))


def host_text(report: HostReport) -> str:
    ended = []
    for one in report.reading.ended[:MAX_ENDED]:
        end = "has ended; its last look was" if one.is_known else "is silent, its last look was"
        size = f"{size_text(one.anonymous_bytes)} anonymous"
        line = f"{one.name} (pid {one.pid}) {end} {span_text(one.age_seconds)} ago: {size}"
        container = one.last_container
        if container is not None and container.kept_ratio is not None:
            line += f", its container at {share_text(container.kept_ratio)} of {size_text(container.limit_bytes)}"
        if container is not None and container.oom_kills:
            line += f", oom_kill {container.oom_kills}"
        ended.append(line)
    if (beyond := len(report.reading.ended) - MAX_ENDED) > 0:
        ended.append(f"and {beyond} more that have ended in the last minutes")
    caches = report.processor_caches
    if caches.kind in ("unknown", "off"):
        cached = f"processor caches: {'off' if caches.kind == 'off' else 'not known'}, {caches.why}"
    else:
        hits = f"; {share_text(caches.hit_ratio)} of {caches.queries} items found" if caches.queries else ""
        used = f", {size_text(caches.used_bytes)} used" if caches.used_bytes is not None else ""
        cached = f"processor caches: at most {size_text(caches.max_bytes)} in total{used}; {caches.why}{hits}"
    if caches.kind != "unknown" and caches.spilled_bytes:
        cached += f"\nencoder outputs in host memory: {size_text(caches.spilled_bytes)}"
    parts = [
        _headline(report),
        _processes(report),
        "\n".join(ended),
        _parts(report),
        _shm(report),
        cached,
    ]
    parts += [f"{one.level}: {one.text}{f' ({one.advice})' if one.advice else ''}" for one in report.findings]
    parts += [f"note: {one}" for one in report.reading.problems]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(report: HostReport) -> str:
    container, machine = report.reading.container, report.reading.machine
    if container is None or container.used_bytes is None:
        return (
            f"host memory: {size_text(machine.available_bytes)} of {size_text(machine.total_bytes)} available on the "
            f"machine; {_counted(report)}"
        )
    limit, kept = container.limit_bytes, container.kept_bytes
    if limit is None:
        stays = f"it has no limit, and the machine has {size_text(machine.available_bytes)} available"
    else:
        share = share_text(container.kept_ratio)
        stays = f"{size_text(kept)} of it cannot be dropped, {share} of its limit of {size_text(limit)}"
    when = report.outlook.seconds_to_limit
    soon = f", full in {span_text(when)} at this pace" if when is not None else ""
    events = ", ".join(f"{name} {count}" for name, count in sorted(container.events.items()) if count)
    waited = None if container.pressure is None else container.pressure.some_avg60
    return (
        f"host memory: the engine's container has {size_text(container.used_bytes)}; {stays}{soon}"
        f"{f'; events: {events}' if events else ''}"
        f"{f'; waited for memory in {waited:.1f} % of the last minute' if waited is not None else ''}"
    )


def _counted(report: HostReport) -> str:
    processes = report.reading.processes
    return f"{counted(len(processes), 'process')} of the container, {of_engine(processes)} of the engine"


def _processes(report: HostReport) -> str:
    main = (report.reading.container or UNKNOWN_CONTAINER).key
    rows, has_several = [], False
    for name, named in groupby(report.reading.processes, key=lambda one: bare_name(one.name)):
        group = list(named)
        own = [one.anonymous_bytes for one in group]
        others = [size_text(_joined((getattr(one, field) for one in group), join)) for field, join in _SIZES]
        title, pid, anonymous = group[0].name, str(group[0].pid), size_text(_joined(own, sum))
        if len(group) > 1:
            title, pid, has_several = f"{name} x {len(group)}", "", True
            anonymous = f"{anonymous}, largest {size_text(_joined(own, max))}"
        counts = [_joined((getattr(one, field) for one in group), sum) for field in ("threads", "descriptors")]
        cells = (UNKNOWN if count is None else str(count) for count in counts)
        places = {"engine" if one.container == main else one.container for one in group}
        place = places.pop() if main and len(places) == 1 else None
        rows.append([title, pid, anonymous, *others, *cells, place or UNKNOWN])
    headers = ["process", "pid", "anonymous", "file", "shared", "swap", "peak", "threads", "open files", "container"]
    note = "; of several of one name: the sums, but of file, shared and peak the largest" if has_several else ""
    return f"{table(headers, rows, words=1)}\n{_counted(report)}{note}" if rows else ""


def _joined(values: Iterable[int | None], join: Callable[[list[int]], int]) -> int | None:
    known = [value for value in values if value is not None]
    return join(known) if known else None


def _parts(report: HostReport) -> str:
    parts = report.parts
    used = parts.used_bytes
    if used is None:
        return ""

    def share(size: int | None) -> str:
        return share_text(size / used if used and size is not None else None)

    dropped = "the kernel drops it when it needs room"
    groups: dict[tuple[str, str], list[int]] = {}
    for row in parts.rows:
        groups.setdefault((bare_name(row.name), dropped if row.can_be_dropped else ""), []).append(row.bytes)
    rows = [
        [name if len(sizes) == 1 else f"{name} x {len(sizes)}", size_text(sum(sizes)), share(sum(sizes)), how]
        for (name, how), sizes in sorted(groups.items(), key=lambda group: -sum(group[1]))
    ]
    rows.append(["not attributed", size_text(parts.not_attributed_bytes), share(parts.not_attributed_bytes), ""])
    if parts.counted_twice_bytes:
        why = "pages that processes share, and files that others are charged for"
        rows.append(["counted twice above", size_text(-parts.counted_twice_bytes), "", why])
    rows.append(["sum, as the kernel counts it", size_text(used), "", ""])
    return table(["part of the container", "size", "share", ""], rows, words=1)


def _shm(report: HostReport) -> str:
    shm, needs = report.reading.shm, report.shm_needs
    if shm is None:
        return ""
    promised = (f"{size_text(one.promised_bytes)}{'' if one.is_in_use else '?'}" for one in shm.owners)
    rows = [
        [shm_title(one), str(one.files), size_text(one.used_bytes), "" if one.state == "left_over" else promise]
        for one, promise in zip(shm.owners, promised, strict=True)
    ]
    head = (
        f"{SHM}: {size_text(shm.used_bytes)} of {size_text(shm.size_bytes)} used, {size_text(shm.free_bytes)} free; "
        f"files in use may still take {size_text(shm.promised_bytes)}"
    )
    lines = [head, table(["owner", "files", "used", "may still take"], rows) if rows else ""]
    if needs.rows:
        known = f"this command line can need {size_text(needs.known_bytes)} of it"
        unknown = ", ".join(row.name for row in needs.unknown)
        lines.append(f"{known}; not known: {unknown}" if unknown else known)
    return "\n".join(line for line in lines if line)
