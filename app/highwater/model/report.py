"""The report: all that is known at one moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from highwater.model.engine import EngineState, EngineStatus, MissingRank, Progress, StartFailure
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus, RankPressure
from highwater.model.rank import EncoderCacheTotals, RankReading
from highwater.model.remedies import RemedyResult

SCHEMA: Final = 1
"""Of every response of the sidecar, the report among them, of a worker's, and of what a command prints as JSON."""

# What is known of memory when the engine ended; `not_short`: of the device, and the kernel killed nothing; `had_room`:
# the device, and no more is known.
MemoryAtEnd: TypeAlias = Literal["killed_by_kernel", "device_full", "not_short", "had_room", "unknown"]
EventKind: TypeAlias = Literal[
    "reset", "refusal", "mark", "state", "policy", "baseline", "recovery", "incident", "snapshot", "growth"
]
Trigger: TypeAlias = Literal["policy", "reclaim", "drop-in"]
# The reason why a control call was allowed: the admin token, or a loopback address where trust_loopback is set.
Credential: TypeAlias = Literal["token", "loopback"]


@dataclass(frozen=True, slots=True)
class Caller:
    address: str  # the peer's, as the socket shows it: a reverse proxy's own, where the call came through one
    by: Credential  # why the call was allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event; ``caller``: whose control call it was, ``None`` where the sidecar acted, or saw it, by itself."""

    id: int
    at: float
    kind: EventKind
    summary: str
    trigger: Trigger | None = None
    rule: str | None = None
    result: RemedyResult | None = None
    caller: Caller | None = None
    why: str | None = None  # why the policy did it, as a clause
    incident: str | None = None  # the incident's id
    state_before: EngineState | None = None  # the engine's, where it changed
    state_after: EngineState | None = None


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
    short: str | None = None  # the one of them that says that memory is short now


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLoad:
    requests_ended: int  # since the sidecar started, health checks left out
    requests_under_way: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorFigure:
    taken: int
    limit: int | None = None  # `None`: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorState:
    """Images and videos in flight, and the number of requests that wait for room."""

    mode: Literal["off", "observe", "on"]
    why: str  # the reason for the mode
    held_for: str | None = None  # why nobody is let in just now; `None` where requests are
    requests_waiting: int
    decoded_bytes: DoorFigure  # once decoded; for `encoder_tokens` and `items` likewise: of what is in flight
    encoder_tokens: DoorFigure
    items: DoorFigure
    # The most decoded bytes that one request may bring, whatever room there is, and the encoder tokens of one that the
    # device has memory for just now. `None`: no limit.
    request_decoded_bytes: int | None = None
    device_tokens: int | None = None
    bytes_per_token: int | None = None  # of device memory, at most, while it is encoded; `None`: not known
    # An image makes a token for each square of so many pixels; by the engine's own processor, or by a common one.
    token_side_pixels: int = 28
    uses_engines_rule: bool = False
    requests_total: int = 0  # with images or videos, since the sidecar started
    waits_total: int = 0
    refused_total: int = 0  # in mode `observe`: that would have been, as `waits_total`


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """The last incident that is not over: the engine has not been ready since."""

    id: str
    kind: str  # as in `GET /memory/incidents`
    at: float  # in Unix seconds
    summary: str
    memory: MemoryAtEnd = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefNow:
    """The remedy that runs now."""

    remedy: str
    trigger: Trigger
    state: str  # where it stands (app/highwater/act/quiescer.py)
    seconds: float  # since it began
    requests_running: int = 0  # those that it waits for; `requests_held`: new ones that wait for it
    requests_held: int = 0
    text: str  # all of it as a clause
    why: str | None = None  # why the policy runs it, as a clause


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    schema: int = SCHEMA
    now: float | None = None  # when this was said, by this machine's clock; `None` where it is passed on within
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
    relief: ReliefNow | None = None  # `None` while no remedy runs
    incident: OpenIncident | None = None

    @property
    def are_workers_hidden(self) -> bool:
        """True if nothing could show a worker: it is not missing, for all that is known."""
        return not self.ranks and self.progress is None and not self.engine.capabilities.get("collective_rpc")

    def pressure_of(self, rank: RankReading) -> RankPressure | None:
        """Return the rank's pressure by the rule that acts first on its device; ``None`` without such a rule."""
        pressures = [
            pressure
            for rule in (self.policy.rules if self.policy is not None else ())
            for pressure in rule.ranks
            if pressure.key == rank.key and pressure.high_free_bytes is not None
        ]
        return max(pressures, key=lambda pressure: pressure.high_free_bytes or 0, default=None)

    @property
    def worst_first(self) -> list[RankReading]:
        return [self.ranks[place] for place in self.worst_places]

    @property
    def worst_places(self) -> tuple[int, ...]:
        """Places in ``ranks``, of the one that is short of most first, then by what is free; not known stands last."""

        def key(place: int) -> tuple[int, float]:
            rank = self.ranks[place]
            pressure = self.pressure_of(rank)
            short = 0 if pressure is None else pressure.short_bytes or 0
            return -short, math.inf if rank.free_bytes is None else rank.free_bytes

        return tuple(sorted(range(len(self.ranks)), key=key))

    def high_water_of(self, rank: RankReading) -> float | None:
        """Return the share of its device that a rank uses at high water."""
        pressure = self.pressure_of(rank)
        if pressure is None or pressure.high_free_bytes is None or not rank.total_bytes:
            return None
        return 1.0 - pressure.high_free_bytes / rank.total_bytes

    @property
    def seconds_to_high_water(self) -> float | None:
        """Seconds until the first rank reaches high water; ``None`` if not within a day, or if one is there already."""
        pressures = [pressure for rank in self.ranks if (pressure := self.pressure_of(rank)) is not None]
        if self.stale or any(pressure.short_bytes for pressure in pressures):
            return None
        seconds = (pressure.seconds_to_high_water for pressure in pressures)
        return min((left for left in seconds if left is not None), default=None)
