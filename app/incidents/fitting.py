"""An incident as bytes that are no more than allowed: the series are thinned, and the rest shortened if need be. Pure.

The file is one JSON object whose first line holds the headline, so that a list of many reads the beginning of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Final

from pydantic import TypeAdapter

from app.incidents.incident import Headline, Incident, Point, RankEvidence

# Of each rank, whatever the bound: two minutes at ten a second are 1,200, and reading them all holds up the data plane.
POINTS_MOST = 300
# The last of them are kept one and all: there the incident is.
RECENT_POINTS = 60
POINTS_LEAST = 2
EVENTS_LEFT, ENTRIES_LEFT, RANKS_LEFT = 20, 3, 8

INCIDENT: Final = TypeAdapter(Incident)
HEAD: Final = {field.name for field in fields(Headline)} - {"problem"}


def to_bytes(incident: Incident) -> bytes:
    """One JSON object; its first line holds the headline."""
    head = INCIDENT.dump_json(incident, include=HEAD)
    rest = INCIDENT.dump_json(incident, exclude=HEAD)
    return head[:-1] + b",\n" + rest[1:] + b"\n"


def fitted(incident: Incident, max_bytes: int) -> tuple[Incident, bytes]:
    """The incident and its bytes, no more than ``max_bytes``.

    First the series are thinned; where that is not enough, the least telling parts go one after another. What was
    left out stands in its notes.
    """
    incident = thinned(incident, POINTS_MOST)
    content = to_bytes(incident)
    points = _points(incident)
    while len(content) > max_bytes and points > POINTS_LEAST:
        points = max(min(points // 2, int(points * max_bytes / len(content))), POINTS_LEAST)
        incident = thinned(incident, points)
        content = to_bytes(incident)
    for what, cut in _CUTS:
        if len(content) <= max_bytes:
            break
        incident = _noted(cut(incident), f"{what}: to keep within {max_bytes:,} bytes")
        content = to_bytes(incident)
    return incident, content


def thinned(incident: Incident, most: int) -> Incident:
    """The incident with at most so many points in each rank's series."""
    if _points(incident) <= most:
        return incident
    return replace(incident, ranks=tuple(replace(rank, series=thin(rank.series, most)) for rank in incident.ranks))


def thin(series: tuple[Point, ...], most: int) -> tuple[Point, ...]:
    """At most so many points: the last ones all, of each stretch before them the one with the most used bytes.

    A rise that lasted for one point is what an incident is about: it must not fall between two that are kept.
    """
    if len(series) <= most:
        return series
    recent = min(RECENT_POINTS, most // 2)
    earlier, last = series[: len(series) - recent], series[len(series) - recent :]
    room = most - recent
    bounds = [index * len(earlier) // room for index in range(room + 1)]
    highest = (max(earlier[start:end], key=lambda point: point.used_bytes or 0) for start, end in pairwise(bounds))
    return (*highest, *last)


def _points(incident: Incident) -> int:
    return max((len(rank.series) for rank in incident.ranks), default=0)


def _noted(incident: Incident, note: str) -> Incident:
    return replace(incident, notes=(*incident.notes, note))


def _each_rank(incident: Incident, cut: Callable[[RankEvidence], RankEvidence]) -> Incident:
    return replace(incident, ranks=tuple(cut(rank) for rank in incident.ranks))


def _shorter_lists(incident: Incident) -> Incident:
    return replace(incident, events=incident.events[-EVENTS_LEFT:], decisions=incident.decisions[-EVENTS_LEFT:])


def _few_entries(incident: Incident) -> Incident:
    return _each_rank(incident, lambda rank: replace(rank, entries=rank.entries[:ENTRIES_LEFT]))


def _no_series(incident: Incident) -> Incident:
    return _each_rank(incident, lambda rank: replace(rank, series=()))


def _no_policy(incident: Incident) -> Incident:
    return replace(incident, policy=None, decisions=())


def _no_events(incident: Incident) -> Incident:
    return replace(incident, events=())


def _few_ranks(incident: Incident) -> Incident:
    return replace(incident, ranks=incident.ranks[:RANKS_LEFT])


_CUTS: Final[tuple[tuple[str, Callable[[Incident], Incident]], ...]] = (
    ("old events are left out", _shorter_lists),
    ("most entries of the encoder caches are left out", _few_entries),
    ("the series are left out", _no_series),
    ("the policy is left out", _no_policy),
    ("the events are left out", _no_events),
    ("all but the first ranks are left out", _few_ranks),
)
