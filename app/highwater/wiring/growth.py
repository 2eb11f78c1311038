"""The verdicts on growth: they hear of every report."""

from __future__ import annotations

from pathlib import Path

from highwater.growth.host_series import host_series
from highwater.growth.series import Measured
from highwater.growth.store import FloorFile
from highwater.growth.watch import GrowthWatch
from highwater.host.watch import HostWatch
from highwater.process.internal_errors import InternalErrors
from highwater.settings import Settings
from highwater.wiring.clocks import Clocks
from highwater.wiring.core import Core


def wire_growth(
    settings: Settings, core: Core, host: HostWatch, clocks: Clocks, internal_errors: InternalErrors
) -> GrowthWatch:
    """Wire the watch of growth. Its floors are kept beside the state file."""

    async def read_host(rest_seconds: float) -> list[Measured]:
        now = await host.read()
        return list(host_series(now.reading, rest_seconds=rest_seconds, ranks=core.poller.current().ranks))

    watch = GrowthWatch(
        core.history,
        FloorFile(_beside(settings.state_file)),
        host_series=read_host,
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
        internal_error=internal_errors.counter("growth"),
    )
    core.poller.listeners.append(watch.notice)
    return watch


def _beside(state_file: Path | None) -> Path | None:
    return None if state_file is None else state_file.with_name(f"{state_file.name}.growth")
