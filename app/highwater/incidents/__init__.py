"""Incidents: what is kept when the engine dies, hangs or has no memory left, and what an operator reads of it.

::

    incident    the frozen values          messages     known messages of engines, and what to do about each
    diagnosis   numbers to plain words     rules        the rules beside the rule book (app/highwater/findings)
    latest      evidence as a case         enginelog    the end of the engine's log, held to the known messages
    starts      the log's failed starts    fitting      thinned to a size
    store       files, or memory           incidents    opens, repeats, closes
    text        an incident as Markdown
"""

from __future__ import annotations

from highwater.findings.case import EncoderEntry
from highwater.incidents.evidence import from_history
from highwater.incidents.incident import (
    Evidence,
    FailedStart,
    Headline,
    Incident,
    IncidentKind,
    OomKills,
    RankEvidence,
)
from highwater.incidents.incidents import Incidents
from highwater.incidents.store import IncidentStore, UnreadableIncident

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
    "RankEvidence",
    "UnreadableIncident",
    "from_history",
]
