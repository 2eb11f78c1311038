"""The black box: what is kept when the engine dies, hangs or has no memory left, and what an operator reads of it.

::

    incident    the frozen values          advice       known messages and settings, and what to do about each
    diagnosis   numbers to plain words     enginelog    the end of the engine's log, held to the known messages
    starts      the log's failed starts
    fitting     thinned to a size          store        files, or memory
    incidents   opens, repeats, closes     text, page   for a terminal, for a browser
"""

from __future__ import annotations

from app.incidents.evidence import from_history, kept, point
from app.incidents.incident import (
    EncoderEntry,
    Evidence,
    FailedStart,
    Headline,
    Incident,
    IncidentKind,
    OomKills,
    Point,
    RankEvidence,
)
from app.incidents.incidents import Incidents
from app.incidents.store import IncidentStore, Unreadable

__all__ = [
    "EncoderEntry",
    "Evidence",
    "FailedStart",
    "Headline",
    "Incident",
    "IncidentKind",
    "IncidentStore",
    "Incidents",
    "OomKills",
    "Point",
    "RankEvidence",
    "Unreadable",
    "from_history",
    "kept",
    "point",
]
