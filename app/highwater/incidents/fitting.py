"""An incident as no more bytes than allowed: the series are thinned, and the rest shortened if need be. Pure.

The file is one JSON object whose first line holds the headline, so that a list of many reads the beginning of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final

from pydantic import TypeAdapter

from highwater.accounting.points import thin
from highwater.incidents.incident import Headline, Incident

# Of each rank, whatever the bound: two minutes at ten a second are 1,200, and reading them all holds up the data plane.
MAX_POINTS = 300
# The last of them are kept one and all: there the incident is.
RECENT_POINTS = 60
MIN_POINTS = 2
MAX_RANKS_LEFT = 8

INCIDENT: Final = TypeAdapter(Incident)
HEAD: Final = {field.name for field in fields(Headline)} - {"problem"}


def to_bytes(incident: Incident) -> bytes:
    """One JSON object; its first line holds the headline."""
    head = INCIDENT.dump_json(incident, include=HEAD)
    rest = INCIDENT.dump_json(incident, exclude=HEAD)
    return head[:-1] + b",\n" + rest[1:] + b"\n"


def fitted(incident: Incident, max_bytes: int) -> tuple[Incident, bytes]:
    """The incident and its bytes, no more than ``max_bytes``.

    First the series are thinned; where that is not enough, the least useful parts are left out one after another. What
    was left out stands in its notes.
    """
    incident = thinned(incident, MAX_POINTS)
    content = to_bytes(incident)
    points = _points(incident)
    while len(content) > max_bytes and points > MIN_POINTS:
        points = max(min(points // 2, int(points * max_bytes / len(content))), MIN_POINTS)
        incident = thinned(incident, points)
        content = to_bytes(incident)
    for what, cut in _CUTS:
        if len(content) <= max_bytes:
            break
        note = f"{what} left out: to keep within {max_bytes:,} bytes"
        incident = replace(cut(incident), notes=(*incident.notes, note))
        content = to_bytes(incident)
    return incident, content


def thinned(incident: Incident, most: int) -> Incident:
    """The incident with at most so many points in each rank's series."""
    if _points(incident) <= most:
        return incident
    recent = min(RECENT_POINTS, most // 2)
    ranks = (replace(rank, series=thin(rank.series, most, recent=recent)) for rank in incident.ranks)
    return replace(incident, ranks=tuple(ranks))


def _points(incident: Incident) -> int:
    return max((len(rank.series) for rank in incident.ranks), default=0)


def _ranks_alone(incident: Incident) -> Incident:
    return replace(incident, ranks=tuple(replace(rank, series=(), entries=()) for rank in incident.ranks))


def _no_policy(incident: Incident) -> Incident:
    return replace(incident, policy=None, decisions=(), events=())


def _few_ranks(incident: Incident) -> Incident:
    return replace(incident, ranks=incident.ranks[:MAX_RANKS_LEFT])


_CUTS: Final[tuple[tuple[str, Callable[[Incident], Incident]], ...]] = (
    ("the series and the entries of the encoder caches are", _ranks_alone),
    ("the policy and the events are", _no_policy),
    ("all but the first ranks are", _few_ranks),
)
