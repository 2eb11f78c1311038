"""An incident as frozen values. Bytes are integers, times are Unix seconds; a figure that is not known is ``None``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from highwater.accounting.points import MemoryPoint
from highwater.findings.advice import Advice
from highwater.findings.case import Case, EncoderEntry
from highwater.findings.finding import Finding
from highwater.readings.engine import EngineStatus
from highwater.readings.event import Event
from highwater.readings.growth import Growth
from highwater.readings.policy import PolicyStatus
from highwater.readings.rank import RankReading
from highwater.text.table import rank_title

SCHEMA = 1

IncidentKind: TypeAlias = Literal["died", "hung", "out_of_memory", "start_failed"]

# --- what is known when it happens ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
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

    @property
    def name(self) -> str:
        """The rank's title, such as ``rank 0``."""
        return f"rank {rank_title(self.dp_rank, self.rank)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedProcess:
    """A process of the engine, no rank's, that a signal or a debugger has stopped: its name and pid."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for memory, by a control group's own counter.

    Attributes:
        count: Kills in the last minute; 0 where the counter can be read and did not move.
        where: The place of that counter, as a clause that can stand within a sentence.
    """

    count: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """A known message in the engine's log: its row in messages.toml, how many lines have it, and some of them."""

    name: str
    title: str
    meaning: str
    count: int
    lines: tuple[str, ...]
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A start of the engine that failed; its id differs from start to start. Causes come before consequences."""

    id: str
    messages: tuple[LogMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known when an incident is opened.

    Attributes:
        engine: The engine at that moment, with the last figures that it reported of its requests.
        baseline: The first readings after this engine became ready.
        policy_before: The policy's last status while the engine's memory was known.
        reason: What was seen, in a few words: ``connection refused``.
        stopped: Processes of the engine beside its workers that were stopped then, of those that this machine shows.
        oom_kills: Processes that the kernel killed for memory shortly before; ``None`` where no counter can be read.
        ended_by_signal: The signal that ended a process of the engine, where the log says so.
    """

    kind: IncidentKind
    at: float
    engine: EngineStatus
    ranks: tuple[RankEvidence, ...] = ()
    baseline: tuple[RankReading, ...] = ()
    growth: Growth = field(default_factory=Growth)
    policy: PolicyStatus | None = None
    policy_before: PolicyStatus | None = None
    events: tuple[Event, ...] = ()
    reason: str = ""
    start: FailedStart | None = None
    stopped: tuple[StoppedProcess, ...] = ()
    oom_kills: OomKills | None = None
    ended_by_signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCase(Case):
    """An incident as the rules' input, with its evidence."""

    evidence: Evidence


# --- what is kept ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """An incident in a list; these fields stand on the first line of its file.

    Attributes:
        id: Sorts by time.
        last_at: When it was reported last.
        ended_at: When the engine was ready again; ``None`` until then.
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
    number: int = 1
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Headline):
    """One incident, whole: of its evidence, and what was concluded from it.

    Attributes:
        start: The last failed start of those that are counted here.
        messages: The log's known messages, causes before consequences.
        ranks: The evidence, thinned.
        notes: What could not be known or kept, and why.
    """

    engine: EngineStatus
    reason: str = ""
    start: str | None = None
    findings: tuple[Finding, ...] = ()
    messages: tuple[LogMessage, ...] = ()
    ranks: tuple[RankEvidence, ...] = ()
    growth: Growth = field(default_factory=Growth)
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    decisions: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    written_by: str = ""

    @property
    def headline(self) -> Headline:
        """The fields that a list shows."""
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})
