"""An incident as frozen values, from which every form of it is made. Nothing here reads, decides or formats.

Bytes are integers, times are Unix seconds, ratios are 0 to 1; absent knowledge is ``None``, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from highwater.accounting.points import MemoryPoint
from highwater.findings.advice import Advice
from highwater.findings.case import EncoderEntry
from highwater.findings.finding import Finding
from highwater.readings import EngineLoad, EngineStatus, Event, Growth, PolicyStatus, RankReading
from highwater.text.table import rank_title

SCHEMA = 1

IncidentKind: TypeAlias = Literal["died", "hung", "out_of_memory", "start_failed"]

# --- what is known when it happens ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """The knowledge of one rank.

    Attributes:
        rank: Its number; likewise ``dp_rank``, ``host`` and ``pid``.
        status: One word for whether it runs, such as ``alive``, ``silent``, ``dead`` or ``stopped``.
        reading: The last full reading.
        doing: What it was doing last, in words.
        step_seconds: How long the step it was in had lasted; ``None`` outside of one.
        stack: Where its main thread was, innermost first.
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
        """The rank as an operator calls it."""
        return f"rank {rank_title(self.dp_rank, self.rank)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for memory, as a control group's own counter shows.

    Attributes:
        count: How many in the last minute; 0 where the counter can be read and did not move.
        where: Whose group it is, as a clause that can stand within a sentence.
    """

    count: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known when an incident is opened.

    Attributes:
        kind: What happened.
        at: When.
        engine: The engine at that moment.
        ranks: Each rank that is known of, whether it still answers or not.
        baseline: The first readings after this engine became ready.
        growth: Of the last report.
        load: What the engine reported of its requests last, which may be before the moment.
        policy: The policy as it stood.
        policy_before: The policy as it stood last while the engine's memory was known.
        decisions: What it decided last.
        events: What happened in that span.
        reason: What the one who opens it saw, in a few words: ``connection refused``.
        start: The start that failed, where that is what happened.
        oom_kills: Processes that the kernel killed for memory shortly before, as far as anybody can count them.
        ended_by_signal: The signal that ended a process of the engine, where the log says so.
    """

    kind: IncidentKind
    at: float
    engine: EngineStatus
    ranks: tuple[RankEvidence, ...] = ()
    baseline: tuple[RankReading, ...] = ()
    growth: Growth = field(default_factory=Growth)
    load: EngineLoad = field(default_factory=EngineLoad)
    policy: PolicyStatus | None = None
    policy_before: PolicyStatus | None = None
    decisions: tuple[Event, ...] = ()
    events: tuple[Event, ...] = ()
    reason: str = ""
    start: FailedStart | None = None
    oom_kills: OomKills | None = None
    ended_by_signal: int | None = None


# --- what is made of it ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """A known message in the engine's log.

    Attributes:
        name: A word for programs.
        title: A clause that can stand within a sentence.
        meaning: In plain words.
        count: So many lines had it.
        lines: Some of them, as they stood there but for control characters, cut.
        advice: What can be changed.
    """

    name: str
    title: str
    meaning: str
    count: int
    lines: tuple[str, ...]
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A start of the engine that failed, as its log shows.

    Attributes:
        id: Of another start it is another.
        messages: What the log says of it, causes before consequences.
    """

    id: str
    messages: tuple[LogMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """An incident in a list; these fields stand on the first line of its file.

    Attributes:
        schema: Of the incident.
        id: Sorts by time.
        kind: What happened.
        at: When.
        last_at: When it was reported last.
        count: How often.
        ended_at: When the engine was ready again; ``None`` until then.
        summary: One sentence.
        number: 1 for the first of its kind in this folder, and so on; the oldest may be gone by now.
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
    """One incident, whole.

    Attributes:
        engine: The engine at that moment, with what it last reported of its requests.
        reason: What the one who opened it saw.
        start: Which start failed last, of those that are counted here.
        findings: What the numbers say, the weightiest first.
        messages: What the engine's log says, causes before consequences.
        ranks: The evidence, thinned.
        growth: Of the last report.
        events: What happened in that span, oldest first.
        policy: The policy as it stood (``/memory`` shows its form).
        decisions: What it decided last, oldest first.
        notes: What could not be known or kept, and why.
        written_by: The version of Highwater.
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
        """Return what a list shows of it."""
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})
