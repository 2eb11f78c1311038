"""The black box: what is kept when the engine dies, hangs or has no memory left, and what an operator reads of it.

::

    incident    the frozen values          advice       known messages and settings, and what to do about each
    diagnosis   numbers to plain words     enginelog    the end of the engine's log, held to the known messages
    fitting     thinned to a size          store        files, or memory
    incidents   opens, repeats, closes     text, page   for a terminal, for a browser
"""

from __future__ import annotations

from app.incidents.evidence import from_history, point
from app.incidents.incident import (
    EncoderEntry,
    Evidence,
    Headline,
    Incident,
    IncidentKind,
    Point,
    RankEvidence,
)
from app.incidents.incidents import Incidents
from app.incidents.store import IncidentStore, Unreadable

__all__ = [
    "EncoderEntry",
    "Evidence",
    "Headline",
    "Incident",
    "IncidentKind",
    "IncidentStore",
    "Incidents",
    "Point",
    "RankEvidence",
    "Unreadable",
    "from_history",
    "point",
]
