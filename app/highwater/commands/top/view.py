"""What ``highwater top`` knows at one moment: the last report, what was before, and whether the sidecar is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from highwater.accounting.attribution import COMPONENTS, rank_key
from highwater.readings import Event, RankReading, Report

MAX_SAMPLES = 2000
MAX_EVENTS = 100
HISTORY_SECONDS = 900.0
_FIELDS = ("used_bytes", *COMPONENTS)


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one moment: requests, and by rank what each component held.

    Attributes:
        at: In the sidecar's Unix seconds.
        running: Requests that ran.
        ranks: Bytes by rank key and field.
    """

    at: float
    running: float | None
    ranks: Mapping[tuple[int, int], Mapping[str, float | None]]


@dataclass(frozen=True, slots=True)
class View:
    """A moment of ``top``.

    Attributes:
        url: The sidecar's.
        report: The last one.
        received_at: When it came, by our own clock that only goes forward.
        samples: Oldest first.
        events: Newest first.
        problem: Why nothing new comes; None while it does.
        lost_at: Since when, by our own clock.
    """

    url: str
    report: Report
    received_at: float
    samples: tuple[Sample, ...] = ()
    events: tuple[Event, ...] = ()
    problem: str | None = None
    lost_at: float | None = None

    def with_report(self, report: Report, now: float) -> View:
        """With a report that just came."""
        samples = self.samples
        sample = sample_of(report)
        if sample is not None and (not samples or sample.at > samples[-1].at):
            samples = (*samples, sample)[-MAX_SAMPLES:]
        return replace(self, report=report, received_at=now, samples=samples, problem=None, lost_at=None)

    def with_history(self, samples: Iterable[Sample], events: Iterable[Event]) -> View:
        """With what the sidecar remembers; what it has forgotten by a restart stays."""
        mine = {sample.at: sample for sample in (*samples, *self.samples)}
        merged = tuple(mine[at] for at in sorted(mine))[-MAX_SAMPLES:]
        # A sidecar that began anew numbers its events from 1 again.
        known = {(event.id, event.at): event for event in (*events, *self.events)}
        newest = sorted(known.values(), key=lambda event: (event.at, event.id), reverse=True)
        return replace(self, samples=merged, events=tuple(newest[:MAX_EVENTS]))

    def with_event(self, event: Event) -> View:
        """With an event that just came."""
        return self.with_history((), (event,))

    def without_sidecar(self, problem: str, now: float) -> View:
        """With the sidecar gone; what was known stays, and grows old."""
        return replace(self, problem=problem, lost_at=self.lost_at if self.lost_at is not None else now)

    def age_seconds(self, now: float) -> float | None:
        """Return how old the readings are, whichever clock the sidecar has."""
        age = self.report.age_seconds
        return None if age is None else age + max(now - self.received_at, 0.0)

    def points(self, rank: RankReading, name: str) -> list[tuple[float, float | None]]:
        """Return what one field of a rank was, oldest first."""
        key = rank_key(rank)
        return [(sample.at, sample.ranks[key].get(name)) for sample in self.samples if key in sample.ranks]


def sample_of(report: Report) -> Sample | None:
    """The report as a sample; None where it is stale."""
    if report.taken_at is None or report.stale:
        return None
    ranks = {
        rank_key(rank): {"used_bytes": rank.used_bytes} | {name: getattr(rank.components, name) for name in COMPONENTS}
        for rank in report.ranks
    }
    return Sample(report.taken_at, report.engine.requests_running, ranks)


def samples_of(readings: object) -> list[Sample]:
    """The readings of ``GET /memory/history`` as samples; what is not in shape is left out."""
    return [sample for entry in readings if (sample := _sample(entry))] if isinstance(readings, list) else []


def _sample(entry: Any) -> Sample | None:  # noqa: ANN401 - JSON
    try:
        ranks = {
            (int(rank["dp_rank"] or 0), int(rank["rank"] or 0)): {name: _number(rank.get(name)) for name in _FIELDS}
            for rank in entry["ranks"]
        }
        return Sample(float(entry["at"]), _number(entry.get("requests_running")), ranks)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
