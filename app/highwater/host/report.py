"""The report on host memory: a reading, its parts by owner, and the most it can come to. Pure.

What is wrong with it is judged by the rule book (diagnose/rules/host.py), which is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from highwater.host.needs import NOT_COUNTED, CacheCounts, ProcessorCaches, ShmNeeds, processor_caches, shm_needs
from highwater.host.parts import Parts, parts_of
from highwater.host.past import NO_OUTLOOK, GrownPart, Outlook
from highwater.host.reading import ContainerMemory, HostReading, ShmMemory, of_engine
from highwater.model.rank import RESPONSE_SCHEMA
from highwater.model.report import HostSummary

UNKNOWN_CONTAINER: Final = ContainerMemory(key="")


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


# Others say what was, or what may come.
_SHORT_NOW: Final = frozenset({"container_nearly_full", "memory_pressure", "shm_promised_too_much"})
Judge: TypeAlias = Callable[[HostReport, Sequence[GrownPart]], tuple[HostFinding, ...]]
"""Judges a report without findings, and what grew, the most first."""


def unjudged(_report: HostReport, _grown: Sequence[GrownPart]) -> tuple[HostFinding, ...]:
    return ()


def report_of(
    reading: HostReading,
    *,
    judge: Judge = unjudged,
    outlook: Outlook = NO_OUTLOOK,
    grown: Sequence[GrownPart] = (),
    counts: CacheCounts = NOT_COUNTED,
    age_seconds: float = 0.0,
) -> HostReport:
    container = reading.container or UNKNOWN_CONTAINER
    known = [size for size in (container.room_bytes, reading.machine.available_bytes) if size is not None]
    report = HostReport(
        reading=reading,
        parts=parts_of(reading),
        room_bytes=min(known, default=None),
        outlook=outlook,
        shm_needs=shm_needs(reading),
        processor_caches=processor_caches(reading, counts),
        age_seconds=age_seconds,
    )
    return replace(report, findings=judge(report, grown))


def summary_of(
    reading: HostReading,
    outlook: Outlook,
    grown: Sequence[GrownPart] = (),
    counts: CacheCounts = NOT_COUNTED,
    judge: Judge = unjudged,
) -> HostSummary | None:
    """Return the few figures that stand in ``GET /memory``; ``None`` where no process of the engine is or was seen."""
    if not reading.processes and not reading.ended:
        return None
    report = report_of(reading, judge=judge, outlook=outlook, grown=grown, counts=counts)
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
        short=next((one.text for one in report.findings if one.name in _SHORT_NOW and one.level == "warning"), None),
    )


"""A reading that is younger is reused."""
