"""What the numbers of an incident say, in plain words. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from app.incidents.advice import RESET_ENCODER_CACHE
from app.incidents.incident import Evidence, Finding, IncidentKind, LogMessage, Weight
from app.incidents.latest import latest
from app.incidents.questions import QUESTIONS

_WHAT: Final[Mapping[IncidentKind, str]] = {
    "died": "The engine died",
    "hung": "The engine hung",
    "out_of_memory": "The engine ran out of memory",
}
_WEIGHTS: Final[tuple[Weight, ...]] = ("likely", "clue", "note")


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Everything that the numbers say, the weightiest first; advice that this engine cannot follow is left out."""
    ranks = tuple(latest(rank) for rank in evidence.ranks)
    found = [finding for question in QUESTIONS if (finding := question(evidence, ranks)) is not None]
    return tuple(_possible(finding, evidence) for finding in sorted(found, key=_rank_of_weight))


def summarize(evidence: Evidence, findings: Sequence[Finding], messages: Sequence[LogMessage]) -> str:
    """One sentence: what happened, what the log says of it, and what the numbers say."""
    said = [f"the log says that {messages[0].title}"] if messages else []
    said += [finding.title for finding in findings if finding.weight == "likely"][:2]
    if not said:
        said = [finding.title for finding in findings if finding.weight == "clue"][:1]
    because = f" ({evidence.reason})" if evidence.reason else ""
    return f"{_WHAT[evidence.kind]}{because}: {'; '.join(said) or 'nothing that is known explains it'}"


def _rank_of_weight(finding: Finding) -> int:
    return _WEIGHTS.index(finding.weight)


def _possible(finding: Finding, evidence: Evidence) -> Finding:
    # Before an engine was asked what it can do, everything stands at False, and no version is known.
    was_asked = evidence.engine.version is not None
    if was_asked and evidence.engine.capabilities.get("reset_encoder_cache") is False:
        return replace(finding, advice=tuple(each for each in finding.advice if each is not RESET_ENCODER_CACHE))
    return finding
