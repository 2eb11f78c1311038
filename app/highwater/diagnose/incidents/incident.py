"""An incident as frozen values. Bytes are integers, times are Unix seconds; a figure that is not known is ``None``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from highwater.diagnose.evidence import IncidentKind, RankEvidence
from highwater.diagnose.finding import Finding
from highwater.diagnose.log.last_words import QuotedException
from highwater.diagnose.log.messages import LogMessage
from highwater.readings.engine import EngineStatus
from highwater.readings.event import Event
from highwater.readings.growth import Growth
from highwater.readings.policy import PolicyStatus

SCHEMA = 1


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
    notes: tuple[str, ...] = ()
    written_by: str = ""

    @property
    def headline(self) -> Headline:
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})
