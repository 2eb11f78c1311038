"""Findings from an incident's numbers, and its summary. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from highwater.findings.finding import Finding, possible, weightiest_first
from highwater.findings.rules import RULES
from highwater.incidents.evidence import case_of
from highwater.incidents.incident import Evidence, IncidentKind, LogMessage
from highwater.incidents.messages import KNOWN
from highwater.incidents.rules import INCIDENT_RULES

_WHAT: Final[Mapping[IncidentKind, str]] = {
    "died": "The engine died",
    "hung": "The engine hung",
    "out_of_memory": "The engine ran out of memory",
    "start_failed": "The engine failed to start",
}
# Where memory was not short these explain nothing: they say how it was used.
_OF_MEMORY_IN_USE: Final = frozenset(
    {"unused_reserve", "growth", "over_budget", "encoder_cache", "skew", "unprofiled_encoder", "policy"}
)
# Any of these says that memory was short.
_OF_SHORTAGE: Final = frozenset({"ooms", "device_full", "alloc_retries", "host_memory", "killed_by_kernel"})
_MESSAGES_OF_MEMORY: Final = frozenset(known.name for known in KNOWN if known.of_memory)
_REFUSED: Final = "the engine refused to start: "


def diagnose(evidence: Evidence, messages: Sequence[LogMessage] = ()) -> tuple[Finding, ...]:
    """Return the findings, the weightiest first; advice that this engine cannot follow is left out.

    Args:
        evidence: The numbers.
        messages: Known messages of the engine's log, which may show a shortage that no number shows.
    """
    case = case_of(evidence)
    asked = (*(rule(evidence, case) for rule in INCIDENT_RULES), *(rule(case) for rule in RULES))
    found = [finding for finding in asked if finding is not None]
    if _memory_was_enough(evidence, found, messages):
        found = [replace(each, weight="note") if each.name in _OF_MEMORY_IN_USE else each for each in found]
    return tuple(possible(finding, evidence.engine) for finding in weightiest_first(found))


def summarize(evidence: Evidence, findings: Sequence[Finding], messages: Sequence[LogMessage]) -> str:
    """Return one sentence: what happened, what the log says of it, what is known to be fine, and what the numbers say.

    A clue is part of it only where nothing else is known, and never one about memory that was not short.
    """
    parts = [f"the log says that {messages[0].title.removeprefix(_REFUSED)}"] if messages else []
    parts += [finding.title for finding in findings if finding.weight == "likely"][:2]
    parts += [finding.title for finding in findings if finding.name == "ended_by_signal" and finding.weight != "likely"]
    if _memory_was_enough(evidence, findings, messages):
        parts += [f"memory was not short: {each.title}" for each in findings if each.name == "device_had_room"]
    if not parts:
        parts = [finding.title for finding in findings if finding.weight == "clue"][:1]
    because = f" ({evidence.reason})" if evidence.reason else ""
    return f"{_WHAT[evidence.kind]}{because}: {'; '.join(parts) or 'nothing that is known explains it'}"


def _memory_was_enough(evidence: Evidence, findings: Sequence[Finding], messages: Sequence[LogMessage]) -> bool:
    """Return whether every device had room, and nothing says that memory was short all the same."""
    if evidence.kind == "out_of_memory" or any(message.name in _MESSAGES_OF_MEMORY for message in messages):
        return False
    names = {finding.name for finding in findings}
    return "device_had_room" in names and names.isdisjoint(_OF_SHORTAGE)
