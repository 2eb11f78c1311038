"""An incident as no more bytes than allowed: the series are thinned, and the rest is shortened if need be. Pure.

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
MAX_POINTS, MIN_POINTS = 300, 2
# The last of them are all kept: they are of the incident itself.
RECENT_POINTS = 60
MAX_RANKS_LEFT = 8

INCIDENT: Final = TypeAdapter(Incident)
_HEAD: Final = {field.name for field in fields(Headline)} - {"problem"}
# In this order, until the rest fits.
_CUTS: Final[tuple[tuple[str, Callable[[Incident], Incident]], ...]] = (
    (
        "the series and the entries of the encoder caches are",
        lambda one: replace(one, ranks=tuple(replace(rank, series=(), entries=()) for rank in one.ranks)),
    ),
    ("the policy and the events are", lambda one: replace(one, policy=None, decisions=(), events=())),
    ("all but the first ranks are", lambda one: replace(one, ranks=one.ranks[:MAX_RANKS_LEFT])),
)


def to_bytes(incident: Incident) -> bytes:
    """Return one JSON object; its first line holds the headline."""
    head = INCIDENT.dump_json(incident, include=_HEAD)
    rest = INCIDENT.dump_json(incident, exclude=_HEAD)
    return head[:-1] + b",\n" + rest[1:] + b"\n"


def fitted(incident: Incident, max_bytes: int) -> tuple[Incident, bytes]:
    """Return the incident and its bytes, no more than ``max_bytes``.

    First the series are thinned; where that is not enough, the least useful parts are left out one after another, each
    with a note.
    """
    incident = _thinned(incident, MAX_POINTS)
    content = to_bytes(incident)
    points = _points(incident)
    while len(content) > max_bytes and points > MIN_POINTS:
        points = max(min(points // 2, int(points * max_bytes / len(content))), MIN_POINTS)
        incident = _thinned(incident, points)
        content = to_bytes(incident)
    for what, cut in _CUTS:
        if len(content) <= max_bytes:
            break
        note = f"{what} left out: to keep within {max_bytes:,} bytes"
        incident = replace(cut(incident), notes=(*incident.notes, note))
        content = to_bytes(incident)
    return incident, content


def _thinned(incident: Incident, most: int) -> Incident:
    if _points(incident) <= most:
        return incident
    recent = min(RECENT_POINTS, most // 2)
    ranks = (replace(rank, series=thin(rank.series, most, recent=recent)) for rank in incident.ranks)
    return replace(incident, ranks=tuple(ranks))


def _points(incident: Incident) -> int:
    return max((len(rank.series) for rank in incident.ranks), default=0)
