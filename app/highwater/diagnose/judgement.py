"""The parts of a judgement and their words: a state, its reason, a sentence, the next act, the thing to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.model.policy import RuleStatus
from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.model.units import MIB, gib_text, whole_span_text

VerdictState: TypeAlias = Literal[
    "fine",
    "keeps_up",
    "short",
    "very_short",
    "slow",
    "paused",
    "sleeping",
    "starting",
    "stuck",
    "silent",
    "dead",
    "unknown",
    "cannot_act",
]
# Why it is in that state, for programs: the names of the tables in verdict.toml.
Reason: TypeAlias = Literal[
    "none",
    "relief",
    "grown_outside",
    "growing",
    "releasable",
    "neighbour",
    "outside",
    "in_use",
    "observe",
    "leak",
    "host_memory",
    "slow",
    "paused",
    "sleeping",
    "loading",
    "start_failed",
    "unreachable",
    "hung",
    "starved",
    "replica_starved",
    "no_answer",
    "stopped",
    "kernel_oom",
    "device_memory",
    "not_memory",
    "unknown",
    "not_read",
    "ranks_missing",
    "rule_held",
]
_WORDS: Final = 24  # of what others say, within a sentence
# Up to the first semicolon that stands in no parentheses; and what stands in them.
_CLAUSE: Final = re.compile(r"(?:\([^()]*\)|(?!; ).)*", re.DOTALL)
_ASIDE: Final = re.compile(r" \([^()]*\)")
_MIXED_BYTES: Final = 1024 * MIB  # ranks that differ by more are not alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing to do now.

    Attributes:
        path: Where to send ``body``; with no body, the page that says how; ``None``: nothing that a sidecar can do.
        bytes: What that gives back, over all ranks.
    """

    text: str
    path: str | None = None
    body: Mapping[str, Any] | None = None
    bytes: int | None = None


class Judged(NamedTuple):
    state: VerdictState
    reason: Reason
    sentence: str
    next: str | None = None
    do: Deed | None = None


def lasting(report: Report, since: float | None) -> str:
    if since is None or report.now is None:
        return ""
    return f" for {whole_span_text(max(report.now - since, 0.0))}"


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def brief(text: str) -> str:
    """Return the first clause of what another part says, without its full stop, of about two dozen words.

    Of a longer one what stands in parentheses goes first, and then what comes after a comma or a colon.
    """
    found = _CLAUSE.match(text)
    clause = found.group() if found is not None else text
    if len(clause.split()) > _WORDS:
        clause = _ASIDE.sub("", clause)
    words = clause.split()
    if len(words) <= _WORDS:
        return " ".join(words).rstrip(".,:")
    end = max((place for place, word in enumerate(words[:_WORDS], 1) if word[-1] in ",:"), default=_WORDS)
    return f"{' '.join(words[:end]).rstrip('.,:')} …"


def rules_of(report: Report) -> tuple[RuleStatus, ...]:
    return () if report.policy is None else report.policy.rules


# --- free memory ---


def worst_rank(report: Report) -> RankReading | None:
    return next((rank for rank in report.worst_first if rank.free_bytes is not None), None)


def free_text(report: Report) -> str | None:
    """Return what is free on the worst rank; ``None`` where nothing is known."""
    worst = worst_rank(report)
    if worst is None:
        return None
    had = "had" if report.stale else "has"
    sizes = [rank.free_bytes for rank in report.ranks if rank.free_bytes is not None]
    if len(report.ranks) > 1 and len(sizes) == len(report.ranks) and max(sizes) - min(sizes) < _MIXED_BYTES:
        return f"Each of {len(sizes)} ranks {had} at least {gib_text(min(sizes))} free of {gib_text(worst.total_bytes)}"
    if len(report.ranks) > 1:
        size = f"{gib_text(worst.free_bytes)} of {gib_text(worst.total_bytes)}"
        least = "the least free" if worst.free_bytes == min(sizes) else "too little free"
        return f"{worst.name.capitalize()} of {len(report.ranks)} {had} {least}, {size}"
    return has_free_text(report, worst)


def has_free_text(report: Report, rank: RankReading) -> str:
    had = "had" if report.stale else "has"
    owner = "The host" if rank.device.traits.is_host_memory else "The device"
    name = rank.name.capitalize() if max(len(report.ranks), report.ranks_expected or 0) > 1 else owner
    return f"{name} {had} {gib_text(rank.free_bytes)} free of {gib_text(rank.total_bytes)}"
