"""The report: all that is known at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from highwater.readings.door import DoorState
from highwater.readings.engine import EngineStatus, MissingRank, Progress, StartFailure
from highwater.readings.growth import Growth
from highwater.readings.policy import PolicyStatus
from highwater.readings.rank import EncoderCacheTotals, RankReading
from highwater.readings.schema import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """Host memory in a few figures; ``GET /memory/host`` has all of it. ``None``: could not be read."""

    processes: int = 0  # the number of the engine's processes that are seen
    used_bytes: int | None = None  # charged to the engine's container, page cache included
    kept_bytes: int | None = None  # the part of it that the kernel cannot drop, of the group whose limit is met first
    limit_bytes: int | None = None  # that limit; `None`: unlimited
    # When it is reached at the rate of the last minutes; `None`: not within a week.
    seconds_to_limit: float | None = None
    largest: str | None = None  # the largest part that the kernel cannot drop
    largest_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None
    warnings: tuple[str, ...] = ()  # one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLoad:
    requests_ended: int  # since the sidecar started, health checks left out
    requests_under_way: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    schema: int = SCHEMA
    sidecar_started_at: float | None = None  # what it knows in memory begins then
    # When the oldest of the workers' readings was taken, by this machine's clock; `None` until the first.
    taken_at: float | None = None
    age_seconds: float | None = None  # since then
    stale: bool = True  # whether that is too long ago to act on
    engine: EngineStatus
    ranks_expected: int | None = None
    ranks_reported: int = 0
    ranks: tuple[RankReading, ...] = ()
    ranks_missing: tuple[MissingRank, ...] = ()
    progress: Progress | None = None  # `None` without recorders
    start_failure: StartFailure | None = None  # the last start that failed; `None` once the engine is up
    encoder_cache: EncoderCacheTotals | None = None
    growth: Growth = Growth()  # noqa: RUF009 - frozen
    policy: PolicyStatus | None = None
    host: HostSummary | None = None  # `None` where no process of the engine is seen, nor one that has just ended
    proxy: ProxyLoad | None = None  # `None` where no traffic passes the sidecar
    door: DoorState | None = None  # likewise

    @property
    def are_workers_hidden(self) -> bool:
        """True if nothing could show a worker: it is not missing, for all that is known."""
        return not self.ranks and self.progress is None and not self.engine.capabilities.get("collective_rpc")
