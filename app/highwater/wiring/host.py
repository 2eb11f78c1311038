"""The part that watches host memory, for all that show it."""

from __future__ import annotations

from highwater.host.processor_cache import CacheCounts
from highwater.host.reader import HostReader
from highwater.host.watch import HostWatch
from highwater.memory.poller import Poller
from highwater.process.internal_errors import InternalErrors
from highwater.settings import Settings
from highwater.wiring.clocks import Clocks


def wire_host(settings: Settings, poller: Poller, clocks: Clocks, internal_errors: InternalErrors) -> HostWatch:
    """Return the watch of host memory.

    Args:
        settings: All of them.
        poller: Knows the workers, and what the engine's own ``/metrics`` counts.
        clocks: Both of them.
        internal_errors: Counts faults of our own.
    """
    reader = HostReader(
        settings.recorder_dir,
        workers=lambda: poller.current().ranks,
        clock=clocks.wall,
        monotonic=clocks.monotonic,
    )
    return HostWatch(
        reader,
        counts=lambda: _counts(poller),
        monotonic=clocks.monotonic,
        internal_error=internal_errors.counter("host"),
    )


def _counts(poller: Poller) -> CacheCounts:
    """Return what the engine's ``/metrics`` and the workers' recorders count."""
    report, load = poller.current(), poller.last_load
    spilled = [rank.encoder_cache.host_bytes for rank in report.ranks if rank.encoder_cache is not None]
    pinned = [rank.host_memory.pinned_bytes for rank in report.ranks if rank.host_memory.pinned_bytes is not None]
    return CacheCounts(
        queries=load.mm_cache_queries,
        hits=load.mm_cache_hits,
        spilled_bytes=sum(spilled) if spilled else None,
        pinned_bytes=sum(pinned) if pinned else None,
    )
