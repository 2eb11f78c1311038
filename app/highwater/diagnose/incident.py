"""An incident as frozen values: its evidence, as known when it opens, and what is kept of it.

Bytes are integers, times are Unix seconds; a figure that is not known is ``None``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

from gated_proxy.door_items import RequestItems
from highwater.diagnose.finding import Finding
from highwater.diagnose.log.messages import LogMessage
from highwater.diagnose.log.starts import FailedStart
from highwater.diagnose.log.story import QuotedException
from highwater.host.oom_kills import OomKills
from highwater.host.past import HostFacts
from highwater.host.reading import ProcessMemory
from highwater.model.components import MemoryPoint
from highwater.model.engine import EngineStatus
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus
from highwater.model.rank import Ranked, RankReading
from highwater.model.report import Event, MemoryAtEnd

SCHEMA: Final = 1
IncidentKind: TypeAlias = Literal["died", "hung", "out_of_memory", "start_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderEntry:
    """One entry of a rank's encoder cache."""

    mm_hash: str
    bytes: int | None
    residency: str | None = None  # `device` or `host`, where that is known
    age_seconds: float | None = None  # since it was first seen: a lower bound
    embeds: int | None = None  # the number of its embeddings, the unit of the cache's capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(Ranked):
    rank: int | None
    dp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    status: str = "unknown"  # by its recorder: `alive`, `silent`, `stopped`, `dead` or `ended`; else `unknown`
    reading: RankReading | None = None
    doing: str = ""
    step_seconds: float | None = None  # how long its step had lasted; `None` outside of a step
    stack: tuple[str, ...] = ()  # the main thread's frames, innermost first
    series: tuple[MemoryPoint, ...] = ()  # its last minutes, oldest first
    entries: tuple[EncoderEntry, ...] = ()  # the largest entries of its encoder cache, largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class HangBefore:
    """The hang that an engine's death has ended: how long it and its incident lasted, and what was concluded of it."""

    seconds: float
    open_seconds: float
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known when an incident is opened."""

    kind: IncidentKind
    at: float
    engine: EngineStatus  # the engine at that moment, with the last figures that it reported of its requests
    ranks: tuple[RankEvidence, ...] = ()
    ranks_expected: int | None = None  # how many ranks the engine has, whether they were read or not
    baseline: tuple[RankReading, ...] = ()  # the first readings after this engine became ready
    growth: Growth = field(default_factory=Growth)
    policy: PolicyStatus | None = None
    policy_before: PolicyStatus | None = None  # the policy's last status while the engine's memory was known
    events: tuple[Event, ...] = ()
    reason: str = ""  # what was seen, in a few words: `connection refused`
    still_seconds: float = 0.0  # how long an engine that hangs had not moved then
    instance: str | None = None  # the name of its recorders' files; `are_closed`: every worker has closed its own
    are_closed: bool = False
    start: FailedStart | None = None
    # Processes of the engine beside its workers that were stopped then, of those that this machine shows.
    stopped: tuple[ProcessMemory, ...] = ()
    host: HostFacts | None = None  # host memory as read after it happened; `None` where it is not watched
    # Processes that the kernel killed for memory shortly before; `None` where no counter was read since.
    oom_kills: OomKills | None = None
    ended_by_signal: int | None = None  # the signal that ended a process of the engine, where the log says so
    hang: HangBefore | None = None
    # With images or videos, that ran or had just ended; those with the most decoded bytes first.
    requests: tuple[RequestItems, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """An incident in a list; these fields stand on the first line of its file."""

    schema: int | None = SCHEMA
    id: str  # sorts by time
    kind: IncidentKind | None
    at: float | None
    last_at: float | None = None  # when it was reported last
    count: int = 1
    ended_at: float | None = None  # when the engine was ready again; `None` until then
    summary: str = ""
    memory: MemoryAtEnd = "unknown"  # whether memory was short when it happened, as far as is known
    number: int = 1  # 1 for the first of its kind in this folder, and so on; the oldest may have been removed since
    problem: str | None = None  # why it cannot be read, in one sentence; `None` where it can

    @property
    def first_kind(self) -> str:
        """The kind that it began with; its id is a time, that kind and, of several in one second, a number."""
        return self.id.partition("-")[2].rstrip("-0123456789").replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Headline):
    """One incident, whole: of its evidence, and what was concluded from it."""

    engine: EngineStatus
    reason: str = ""
    still_seconds: float = 0.0  # how long an engine that hangs had not moved when that was seen
    start: str | None = None  # the last failed start of those that are counted here
    findings: tuple[Finding, ...] = ()
    messages: tuple[LogMessage, ...] = ()  # the log's known messages, causes before consequences
    exception: QuotedException | None = None  # the last exception of a worker or of EngineCore in the log, known or not
    ranks: tuple[RankEvidence, ...] = ()  # the evidence, thinned
    growth: Growth = field(default_factory=Growth)
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    decisions: tuple[Event, ...] = ()
    requests: tuple[RequestItems, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be known or kept, and why
    written_by: str = ""

    @property
    def headline(self) -> Headline:
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})
