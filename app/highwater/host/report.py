"""The report on host memory: a reading, its parts by owner, and the most it can come to. Pure.

The rows of a container sum to the kernel's count: ``sum(rows) + not attributed - counted twice = used``, exactly.
Counted twice are pages that a forked process shares with its parent, and shared memory that is charged to another
container: each of their owners shows them. What is wrong is judged by the rule book (diagnose/rules/host.py), which is
handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from highwater.host.needs import NOT_COUNTED, CacheCounts, ProcessorCaches, ShmNeeds, processor_caches, shm_needs
from highwater.host.reading import SHM, ContainerMemory, HostReading, Role, ShmMemory, ShmOwner, ShmState, of_engine
from highwater.model.rank import RESPONSE_SCHEMA
from highwater.model.report import HostSummary
from highwater.model.units import MIB, size_text, span_text

PartKind: TypeAlias = Literal["process", "shm", "page_cache", "kernel"]

SHM_TITLES = {
    "rpc_rings": "RPC rings of vLLM",
    "processor_cache": "processor cache (shm)",
    "cpu_collectives": "collectives of the CPU backend",
    "kv_offload": "offloaded KV cache",
    "encoder_offload": "offloaded encoder outputs",
    "nccl": "NCCL",
    "hccl": "HCCL",
    "torch": "PyTorch tensors",
    "ray": "Ray",
    "recorder": "recorders of Highwater",
    "semaphores": "semaphores",
    "openmp": "OpenMP",
    "other": "other files",
}


_STATES: Final[dict[ShmState, str]] = {
    "in_use": "",
    "unlinked": ", unlinked and mapped",
    "left_over": ", left by an engine that is gone",
    "not_known": ", not known whether a process has them open",
}


def shm_title(one: ShmOwner) -> str:
    is_anybodys = (one.owner, one.state) == ("other", "left_over")
    state = " that no process has open" if is_anybodys else _STATES[one.state]
    return f"{SHM_TITLES.get(one.owner, one.owner)}{state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row; the kernel drops some before it kills anything."""

    kind: PartKind
    name: str
    bytes: int
    can_be_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All rows of one container, the largest first.

    Attributes:
        used_bytes: The kernel's count; ``None`` where it is not known, and then no sum is made.
        not_attributed_bytes: What no row accounts for.
        counted_twice_bytes: What several rows show, and the kernel counts once.
    """

    used_bytes: int | None
    rows: tuple[Part, ...]
    not_attributed_bytes: int | None
    counted_twice_bytes: int | None


def parts_of(reading: HostReading) -> Parts:
    container = reading.container
    processes = [
        Part(kind="process", name=one.name, bytes=one.anonymous_bytes)
        for one in reading.processes
        if one.anonymous_bytes is not None and (container is None or one.container in (container.key, None))
    ]
    if container is None or container.used_bytes is None:
        return Parts(used_bytes=None, rows=_sorted(processes), not_attributed_bytes=None, counted_twice_bytes=None)
    owners = reading.shm.owners if reading.shm is not None else ()
    shm = [
        Part(kind="shm", name=f"{SHM}: {shm_title(one)}", bytes=one.used_bytes) for one in owners if one.used_bytes > 0
    ]
    if (rest := (container.shmem_bytes or 0) - sum(row.bytes for row in shm)) > 0:
        # A tmpfs volume, an anonymous shared mapping, a file that was removed and is open, but not mapped.
        shm.append(Part(kind="shm", name="other shared memory", bytes=rest))
    cache = _divided(
        "page_cache",
        container.page_cache_bytes,
        "page cache that is locked",
        ("page cache", container.droppable_bytes, True),
    )
    kernel = _divided(
        "kernel",
        container.kernel_bytes,
        "kernel: other",
        ("kernel: slab that can be reclaimed", container.reclaimable_kernel_bytes, True),
        ("kernel: page tables", container.page_tables_bytes, False),
        ("kernel: socket buffers", container.sock_bytes, False),
    )
    rows = [*processes, *shm, *cache, *kernel]
    # Kind by kind, so that too much of one does not hide a lack of another.
    kinds = ((processes, container.anonymous_bytes), (shm, container.shmem_bytes))
    twice = sum(max(0, sum(row.bytes for row in some) - (counted or 0)) for some, counted in kinds)
    missing = container.used_bytes - (sum(row.bytes for row in rows) - twice)
    return Parts(
        used_bytes=container.used_bytes,
        rows=_sorted(rows),
        not_attributed_bytes=max(0, missing),
        counted_twice_bytes=twice + max(0, -missing),
    )


def _divided(kind: PartKind, total: int | None, rest: str, *parts: tuple[str, int | None, bool]) -> Iterator[Part]:
    left = total or 0
    for name, size, can_be_dropped in (*parts, (rest, left, False)):
        part = min(left, size or 0)
        left -= part
        if part:
            yield Part(kind=kind, name=name, bytes=part, can_be_dropped=can_be_dropped)


def _sorted(rows: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))


# A part that has grown by less than both moves by itself.
NOTABLE_BYTES, NOTABLE_RATIO = 64 * MIB, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownPart:
    """A part of the engine's container that the kernel cannot drop: a process's private memory, or another.

    Attributes:
        role: Of a process; ``pid`` as well.
        bytes: Its last value, at ``at`` in Unix seconds.
        grown_bytes: What was added since the engine was ready or it was first seen, in the last ``seconds`` of that.
    """

    kind: PartKind
    name: str
    role: Role | None = None
    pid: int | None = None
    bytes: int
    at: float
    grown_bytes: int = 0
    seconds: float = 0.0

    @property
    def has_grown(self) -> bool:
        return self.grown_bytes > max(NOTABLE_BYTES, NOTABLE_RATIO * (self.bytes - self.grown_bytes))

    @property
    def text(self) -> str:
        if not self.has_grown:
            return f"{self.name} held the most, {size_text(self.bytes)}"
        before = size_text(self.bytes - self.grown_bytes)
        return f"{self.name} grew from {before} to {size_text(self.bytes)} in {span_text(self.seconds)}"

    @property
    def pace_text(self) -> str:
        return f"{size_text(60.0 * self.grown_bytes / max(self.seconds, 1.0), signed=True)} a minute"

    @property
    def is_python(self) -> bool:
        """True of a process of vLLM's, whose allocations memray shows."""
        return self.role not in {None, "other", "resource_tracker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The pace of what the container must keep.

    Attributes:
        bytes_per_second: The slope over the window; ``None`` where the window is too short.
        seconds_to_limit: ``None`` without a limit, or where it is not reached within a week.
        window_seconds: The time between the first and the last value.
    """

    bytes_per_second: float | None = None
    seconds_to_limit: float | None = None
    window_seconds: float = 0.0


NO_OUTLOOK: Final = Outlook()


# --- the report ---

UNKNOWN_CONTAINER: Final = ContainerMemory(key="")
# Of the findings; the others say what was, or what may come.
KILLED_SECONDS: Final = 600.0  # so long after a kill for memory it counts as short still
_SHORT_NOW: Final = frozenset({"container_nearly_full", "memory_pressure", "shm_promised_too_much"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A conclusion: ``warning`` where somebody should act, else ``note``."""

    __pydantic_config__ = RESPONSE_SCHEMA

    name: str
    level: Literal["warning", "note"] = "warning"
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for memory, by the counter of a control group."""

    count: int = 0  # in the time that is asked about; 0 also where the counter was read and has not moved
    where: str = ""  # the place of the counter that rose last, as a clause that can stand within a sentence
    seconds_ago: float | None = None  # since its rise was seen, where that is told


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
    oom_kills: OomKills = OomKills()
    findings: tuple[HostFinding, ...] = ()
    age_seconds: float = 0.0

    @property
    def summary(self) -> HostSummary | None:
        """The few figures that stand in ``GET /memory``; ``None`` where nothing of the engine is or was seen."""
        reading, killed = self.reading, self.oom_kills.seconds_ago
        if not reading.processes and not reading.ended and killed is None:
            return None
        container, shm = reading.container or UNKNOWN_CONTAINER, reading.shm or ShmMemory()
        largest = next((row for row in self.parts.rows if not row.can_be_dropped), None)
        names = _SHORT_NOW if killed is None or killed > KILLED_SECONDS else _SHORT_NOW | {"container_oom_kills"}
        warnings = [one for one in self.findings if one.level == "warning"]
        return HostSummary(
            processes=of_engine(reading.processes),
            used_bytes=container.used_bytes,
            kept_bytes=container.kept_bytes,
            limit_bytes=container.limit_bytes,
            seconds_to_limit=self.outlook.seconds_to_limit,
            largest=None if largest is None else largest.name,
            largest_bytes=None if largest is None else largest.bytes,
            shm_used_bytes=shm.used_bytes,
            shm_size_bytes=shm.size_bytes,
            warnings=tuple(one.text for one in warnings),
            short=next((one.text for one in warnings if one.name in names), None),
        )


Judge: TypeAlias = Callable[[HostReport, Sequence[GrownPart]], tuple[HostFinding, ...]]
"""Judges a report without findings, and what grew, the most first."""


def report_of(
    reading: HostReading,
    *,
    judge: Judge = lambda _report, _grown: (),
    outlook: Outlook = NO_OUTLOOK,
    grown: Sequence[GrownPart] = (),
    counts: CacheCounts = NOT_COUNTED,
    oom_kills: OomKills = OomKills(),
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
        oom_kills=oom_kills,
    )
    return replace(report, findings=judge(report, grown))
