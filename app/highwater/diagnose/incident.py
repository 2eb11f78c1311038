"""An incident as frozen values: its evidence, as known when it opens, and what is kept of it.

Bytes are integers, times are Unix seconds; a figure that is not known is ``None``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

from gated_proxy.door_items import RequestItems
from highwater.diagnose.finding import Finding
from highwater.diagnose.log.last_words import QuotedException
from highwater.diagnose.log.messages import LogMessage
from highwater.diagnose.log.starts import FailedStart
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
    """One entry of a rank's encoder cache.

    Attributes:
        residency: ``device`` or ``host``, where that is known.
        age_seconds: Since it was first seen: a lower bound.
        embeds: The number of its embeddings, the unit of the cache's capacity.
    """

    mm_hash: str
    bytes: int | None
    residency: str | None = None
    age_seconds: float | None = None
    embeds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(Ranked):
    """The evidence of one rank.

    Attributes:
        status: By its recorder: ``alive``, ``silent``, ``stopped``, ``dead`` or ``ended``; else ``unknown``.
        step_seconds: How long its step had lasted; ``None`` outside of a step.
        stack: The main thread's frames, innermost first.
        series: Its last minutes, oldest first.
        entries: The largest entries of its encoder cache, largest first.
    """

    rank: int | None
    dp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    status: str = "unknown"
    reading: RankReading | None = None
    doing: str = ""
    step_seconds: float | None = None
    stack: tuple[str, ...] = ()
    series: tuple[MemoryPoint, ...] = ()
    entries: tuple[EncoderEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for memory, by a control group's own counter.

    Attributes:
        count: Kills in the last minute; 0 where the counter was read after the engine's end and has not moved.
        where: The place of that counter, as a clause that can stand within a sentence.
    """

    count: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangBefore:
    """The hang that an engine's death has ended: how long it and its incident lasted, and what was concluded of it."""

    seconds: float
    open_seconds: float
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known when an incident is opened.

    Attributes:
        engine: The engine at that moment, with the last figures that it reported of its requests.
        ranks_expected: How many ranks the engine has, whether they were read or not.
        baseline: The first readings after this engine became ready.
        policy_before: The policy's last status while the engine's memory was known.
        reason: What was seen, in a few words: ``connection refused``.
        still_seconds: How long an engine that hangs had not moved then.
        instance: The name of its recorders' files; ``are_closed``: every worker has closed its own.
        stopped: Processes of the engine beside its workers that were stopped then, of those that this machine shows.
        host: Host memory as read after it happened; ``None`` where it is not watched.
        oom_kills: Processes that the kernel killed for memory shortly before; ``None`` where no counter was read since.
        ended_by_signal: The signal that ended a process of the engine, where the log says so.
        requests: With images or videos, that ran or had just ended; those with the most decoded bytes first.
    """

    kind: IncidentKind
    at: float
    engine: EngineStatus
    ranks: tuple[RankEvidence, ...] = ()
    ranks_expected: int | None = None
    baseline: tuple[RankReading, ...] = ()
    growth: Growth = field(default_factory=Growth)
    policy: PolicyStatus | None = None
    policy_before: PolicyStatus | None = None
    events: tuple[Event, ...] = ()
    reason: str = ""
    still_seconds: float = 0.0
    instance: str | None = None
    are_closed: bool = False
    start: FailedStart | None = None
    stopped: tuple[ProcessMemory, ...] = ()
    host: HostFacts | None = None
    oom_kills: OomKills | None = None
    ended_by_signal: int | None = None
    hang: HangBefore | None = None
    requests: tuple[RequestItems, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """An incident in a list; these fields stand on the first line of its file.

    Attributes:
        id: Sorts by time.
        last_at: When it was reported last.
        ended_at: When the engine was ready again; ``None`` until then.
        memory: Whether memory was short when it happened, as far as is known.
        number: 1 for the first of its kind in this folder, and so on; the oldest may have been removed since.
        problem: Why it cannot be read, in one sentence; ``None`` where it can.
    """

    schema: int | None = SCHEMA
    id: str
    kind: IncidentKind | None
    at: float | None
    last_at: float | None = None
    count: int = 1
    ended_at: float | None = None
    summary: str = ""
    memory: MemoryAtEnd = "unknown"
    number: int = 1
    problem: str | None = None

    @property
    def first_kind(self) -> str:
        """The kind that it began with; its id is a time, that kind and, of several in one second, a number."""
        return self.id.partition("-")[2].rstrip("-0123456789").replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Headline):
    """One incident, whole: of its evidence, and what was concluded from it.

    Attributes:
        still_seconds: How long an engine that hangs had not moved when that was seen.
        start: The last failed start of those that are counted here.
        messages: The log's known messages, causes before consequences.
        exception: The last exception of a worker or of EngineCore in the log, known or not.
        ranks: The evidence, thinned.
        notes: What could not be known or kept, and why.
    """

    engine: EngineStatus
    reason: str = ""
    still_seconds: float = 0.0
    start: str | None = None
    findings: tuple[Finding, ...] = ()
    messages: tuple[LogMessage, ...] = ()
    exception: QuotedException | None = None
    ranks: tuple[RankEvidence, ...] = ()
    growth: Growth = field(default_factory=Growth)
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    decisions: tuple[Event, ...] = ()
    requests: tuple[RequestItems, ...] = ()
    notes: tuple[str, ...] = ()
    written_by: str = ""

    @property
    def headline(self) -> Headline:
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})
