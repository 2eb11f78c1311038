"""Host memory as the sidecar keeps it: read in a thread every few seconds, and when a report is requested."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from highwater.host.outlook import NO_OUTLOOK, Outlook, OutlookWindow
from highwater.host.processor_cache import NOT_COUNTED, CacheCounts
from highwater.host.reader import HostReader
from highwater.host.reading import HostReading
from highwater.host.report import HostReport, report_of, summary_of
from highwater.readings import HostSummary

SECONDS = 5.0
FRESH_SECONDS = 1.0
"""A reading that is younger is reused."""

log = logging.getLogger("highwater")


class HostWatch:
    """Keeps the last reading, and the pace of the container's memory.

    Attributes:
        summary: The few figures that stand in ``GET /memory``, as of the last reading.
        listeners: Each is called with every reading, on the event loop.

    Args:
        reader: Reads host memory.
        counts: Returns the counters of the engine and its workers.
        monotonic: Monotonic seconds.
        internal_error: Counts an internal error.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        reader: HostReader,
        *,
        counts: Callable[[], CacheCounts] = lambda: NOT_COUNTED,
        monotonic: Callable[[], float] = time.monotonic,
        internal_error: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.listeners: list[Callable[[HostReading], None]] = []
        self._reader = reader
        self._counts = counts
        self._monotonic = monotonic
        self._internal_error = internal_error
        self._sleep = sleep
        self._window = OutlookWindow()
        self._last: tuple[float, HostReading, Outlook] | None = None
        self.summary: HostSummary | None = None
        self._lock = asyncio.Lock()

    @property
    def last(self) -> HostReading | None:
        """The last reading; ``None`` before the first."""
        return None if self._last is None else self._last[1]

    @property
    def outlook(self) -> Outlook:
        """The pace as of the last reading."""
        return NO_OUTLOOK if self._last is None else self._last[2]

    async def run(self) -> None:
        """Read every few seconds, until cancelled."""
        while True:
            try:
                await self.read()
            except Exception:  # what cannot be read now may be readable later; the sidecar goes on without it
                self._internal_error()
                log.exception("host memory could not be read")
            await self._sleep(SECONDS)

    async def read(self) -> HostReading:
        """Return a reading that is at most a second old."""
        async with self._lock:
            now = self._monotonic()
            if self._last is not None and now - self._last[0] < FRESH_SECONDS:
                return self._last[1]
            reading, outlook, summary = await asyncio.to_thread(self._read_now, now)
            self._last = now, reading, outlook
            self.summary = summary
        for listener in self.listeners:
            listener(reading)
        return reading

    async def report(self) -> HostReport:
        """Return the report on a reading that is at most a second old."""
        reading = await self.read()
        read_at = self._last[0] if self._last is not None else self._monotonic()
        age = round(max(0.0, self._monotonic() - read_at), 3)
        # Of hundreds of processes it takes milliseconds, and streams pass on this loop.
        return await asyncio.to_thread(report_of, reading, outlook=self.outlook, counts=self._counts(), age_seconds=age)

    def _read_now(self, now: float) -> tuple[HostReading, Outlook, HostSummary | None]:
        reading = self._reader.read()
        outlook = self._window.add(now, reading.container)
        return reading, outlook, summary_of(reading, outlook)
