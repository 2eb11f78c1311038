"""Host memory as the sidecar keeps it: read in a thread every few seconds, and when a report is requested."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from highwater.host.needs import NOT_COUNTED, CacheCounts, processor_caches
from highwater.host.past import GrownPart, HostFacts, HostPast, Outlook, OutlookWindow
from highwater.host.process_lives import SilentCores, StoppedEngine
from highwater.host.reader import HostReader
from highwater.host.reading import HostReading, ProcessMemory, Role
from highwater.host.report import HostReport, Judge, report_of, summary_of, unjudged
from highwater.model.report import HostSummary
from highwater.process.clocks import SYSTEM, Clocks
from highwater.process.logs import contained
from highwater.watch.recorder.progress import SilentCore

SECONDS = 5.0
FRESH_SECONDS = 1.0
"""A reading that is younger is reused."""
_SERVING_ROLES: Final[frozenset[Role]] = frozenset({"api_server", "engine_core"})

log = logging.getLogger("highwater")


@dataclass(frozen=True, slots=True)
class HostNow:
    """The last reading, taken at a monotonic time, and figures derived from it.

    Attributes:
        parts: What the container cannot drop; what grows most comes first.
        summary: For ``GET /memory``.
    """

    reading: HostReading
    outlook: Outlook
    parts: tuple[GrownPart, ...] = ()
    read_at: float = 0.0
    summary: HostSummary | None = None


class HostWatch:
    """Keeps the last reading, and the pace of the container's memory.

    ``judge`` finds what is wrong with a report. ``counts`` returns the counters of the engine and its workers, ``life``
    an identifier of the engine's life while it is up: what grew before was its start. ``listeners`` take every reading.
    """

    def __init__(
        self,
        reader: HostReader,
        *,
        judge: Judge = unjudged,
        counts: Callable[[], CacheCounts] = lambda: NOT_COUNTED,
        life: Callable[[], str | None] = lambda: None,
        listeners: Iterable[Callable[[HostReading], None]] = (),
        clocks: Clocks = SYSTEM,
        internal_error: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._judge = judge
        self._counts = counts
        self._life = life
        self._life_seen: str | None = None
        self._monotonic = clocks.monotonic
        self._internal_error = internal_error
        self._sleep = sleep
        self._window = OutlookWindow()
        self._past = HostPast()
        self._lock = asyncio.Lock()
        self._stopped_engine = StoppedEngine(clocks.monotonic)
        self._silent_cores = SilentCores()
        self.listeners = [*listeners]
        self.now: HostNow | None = None

    async def run(self) -> None:
        while True:
            with contained(self._internal_error, log, "host memory could not be read"):
                await self.read()
            await self._sleep(SECONDS)

    async def read(self) -> HostNow:
        """Return a reading that is at most a second old."""
        async with self._lock:
            if self.now is None or self._monotonic() - self.now.read_at >= FRESH_SECONDS:
                return await self._read()
            return self.now

    async def facts(self) -> HostFacts:
        """Read once more, whatever the last reading's age, and return what is known of the last minutes."""
        async with self._lock:
            reading = (await self._read()).reading
            return self._past.facts(reading, processor_caches(reading, self._counts()))

    async def report(self) -> HostReport:
        """Return the report on a reading that is at most a second old."""
        now = await self.read()
        age = round(max(0.0, self._monotonic() - now.read_at), 3)
        # For hundreds of processes it takes milliseconds, and streams pass on this loop.
        return await asyncio.to_thread(
            report_of,
            now.reading,
            judge=self._judge,
            outlook=now.outlook,
            grown=now.parts,
            counts=self._counts(),
            age_seconds=age,
        )

    def kept_bytes(self) -> int | None:
        container = None if self.now is None else self.now.reading.container
        return None if container is None else container.kept_bytes

    @property
    def _processes(self) -> tuple[ProcessMemory, ...]:
        return () if self.now is None else self.now.reading.processes

    def engine_process(self) -> str | None:
        """Return name and pid of an API server of the last reading; the others may outlive it, and load nothing."""
        servers = (one for one in self._processes if one.role in {"api_server", "launcher"})
        return next((f"{one.name}, pid {one.pid}" for one in servers), None)

    def stopped_processes(self) -> tuple[ProcessMemory, ...]:
        """Return the processes of the last reading that are stopped now and every request needs, workers aside."""
        return tuple(one for one in self._processes if one.role in _SERVING_ROLES and self._reader.is_stopped(one))

    def stopped_engine(self) -> str | None:
        """Return in one sentence which stopped processes every request waits for; ``None`` if none. For each poll."""
        return self._stopped_engine.look(self._processes, self.stopped_processes())

    def silent_core(self) -> SilentCore | None:
        if self.now is None:
            return None
        return self._silent_cores.longest(self.now.reading.taken_at + self._monotonic() - self.now.read_at)

    async def _read(self) -> HostNow:
        self.now = now = await asyncio.to_thread(self._read_now, self._monotonic())
        for listener in self.listeners:
            name = getattr(listener, "__qualname__", listener)
            # The others must have it, and whoever requested this reading.
            with contained(self._internal_error, log, "a listener of host readings failed: %s", name):
                listener(now.reading)
        return now

    def _read_now(self, read_at: float) -> HostNow:
        life = self._life()
        if life is not None and life != self._life_seen:
            self._life_seen = life
            self._window.begin()
            self._past.begin()
        reading = self._reader.read()
        outlook = self._window.add(read_at, reading.container)
        self._past.add(reading)
        self._silent_cores.look(reading)
        parts = self._past.present_parts(reading)
        summary = summary_of(reading, outlook, parts, self._counts(), self._judge)
        return HostNow(reading, outlook, parts, read_at, summary)
