"""Findings from the numbers of an incident, in plain words. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from highwater.findings.finding import Finding, possible, weightiest_first
from highwater.findings.rules import RULES
from highwater.incidents.incident import Evidence, IncidentKind, LogMessage
from highwater.incidents.latest import case_of
from highwater.incidents.messages import KNOWN
from highwater.incidents.rules import INCIDENT_RULES

_WHAT: Final[Mapping[IncidentKind, str]] = {
    "died": "The engine died",
    "hung": "The engine hung",
    "out_of_memory": "The engine ran out of memory",
    "start_failed": "The engine failed to start",
}
# Where memory was not short they explain nothing: they say how it was used.
_OF_MEMORY_IN_USE: Final = frozenset(
    {"unused_reserve", "growth", "over_budget", "encoder_cache", "skew", "unprofiled_encoder", "policy"}
)
# Any of them says that memory was short.
_OF_SHORTAGE: Final = frozenset({"ooms", "device_full", "alloc_retries", "host_memory", "killed_by_kernel"})
_MESSAGES_OF_MEMORY: Final = frozenset(known.name for known in KNOWN if known.of_memory)
_REFUSED: Final = "the engine refused to start: "


def diagnose(evidence: Evidence, messages: Sequence[LogMessage] = ()) -> tuple[Finding, ...]:
    """Return everything that the numbers say, the weightiest first; advice that this engine cannot follow is left out.

    Args:
        evidence: The numbers.
        messages: What the engine's log says, which may know of a shortage that no number shows.
    """
    case = case_of(evidence)
    asked = (*(rule(evidence, case) for rule in INCIDENT_RULES), *(rule(case) for rule in RULES))
    found = [finding for finding in asked if finding is not None]
    if _memory_was_enough(evidence, found, messages):
        found = [replace(each, weight="note") if each.name in _OF_MEMORY_IN_USE else each for each in found]
    return tuple(possible(finding, evidence.engine) for finding in weightiest_first(found))


def summarize(evidence: Evidence, findings: Sequence[Finding], messages: Sequence[LogMessage]) -> str:
    """Return one sentence: what happened, what the log says of it, what is known to be fine, and what the numbers say.

    Only where nothing else is known a clue stands in it, and never one about memory that was not short.
    """
    said = [f"the log says that {messages[0].title.removeprefix(_REFUSED)}"] if messages else []
    said += [finding.title for finding in findings if finding.weight == "likely"][:2]
    said += [finding.title for finding in findings if finding.name == "ended_by_signal" and finding.weight != "likely"]
    if _memory_was_enough(evidence, findings, messages):
        said += [f"memory was not short: {each.title}" for each in findings if each.name == "device_had_room"]
    if not said:
        said = [finding.title for finding in findings if finding.weight == "clue"][:1]
    because = f" ({evidence.reason})" if evidence.reason else ""
    return f"{_WHAT[evidence.kind]}{because}: {'; '.join(said) or 'nothing that is known explains it'}"


def _memory_was_enough(evidence: Evidence, findings: Sequence[Finding], messages: Sequence[LogMessage]) -> bool:
    """Return whether every device had room, and nothing says that memory was short all the same."""
    if evidence.kind == "out_of_memory" or any(message.name in _MESSAGES_OF_MEMORY for message in messages):
        return False
    names = {finding.name for finding in findings}
    return "device_had_room" in names and names.isdisjoint(_OF_SHORTAGE)
