"""Whether the ranks were unlike each other: in what they used, in whether they lived, in what they did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest
from app.table import component_title
from app.units import mib

LONG_STEP_SECONDS = 10.0
_LOST: Final = ("silent", "dead", "stopped")


def skew(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether one rank used much more than another on the same device."""
    del evidence
    told = [(rank.used_bytes, rank) for rank in ranks if rank.used_bytes is not None]
    if len(told) < 2:  # noqa: PLR2004 - one rank is not skewed against anything
        return None
    (least, lightest), (most, heaviest) = (pick(told, key=lambda each: each[0]) for pick in (min, max))
    if most - least <= 2 * heaviest.notable_bytes or heaviest.total_bytes != lightest.total_bytes:
        return None
    parts = {
        name: (getattr(heaviest.components, name) or 0) - (getattr(lightest.components, name) or 0)
        for name in known.COMPONENT_MEANING
        if getattr(heaviest.components, name) is not None and getattr(lightest.components, name) is not None
    }
    where = max(parts, key=lambda name: parts[name]) if parts else None
    mostly = f" Most of the difference is in {component_title(where)}." if where and parts[where] > 0 else ""
    return Finding(
        name="skew",
        weight="clue",
        title=f"{heaviest.name} used {mib(most - least)} MiB more than {lightest.name}",
        text=(
            f"{heaviest.name.capitalize()} used {mib(most)} MiB, {lightest.name} {mib(least)}.{mostly} The fullest "
            "rank runs out first, and takes the others with it; settings hold for all alike, so set them by it."
        ),
        figures={f"{rank.name} used_bytes": used for used, rank in told} | {"difference_bytes": most - least},
        advice=(known.OTHER_PROCESSES, known.GPU_MEMORY_UTILIZATION),
    )


def lost_ranks(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether some ranks were lost while others lived."""
    lost = [rank for rank in ranks if rank.evidence.status in _LOST]
    if not lost or len(lost) == len(ranks):
        return None
    named = ", ".join(f"{rank.name} was {rank.evidence.status}" for rank in lost)
    return Finding(
        name="lost_ranks",
        weight="clue" if evidence.kind == "out_of_memory" else "likely",
        title=f"{named} while others lived",
        text=f"Not all ranks were in the same state: {named}. A step needs every rank, so the others wait for it.",
        figures={rank.name: rank.evidence.status for rank in ranks},
        advice=(known.LOOK_AT_RANKS, known.RESTART),
    )


def long_step(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether a rank had been in one step for long."""
    steps = [(seconds, rank) for rank in ranks if (seconds := rank.evidence.step_seconds) is not None]
    if not steps:
        return None
    seconds, rank = max(steps, key=lambda each: each[0])
    if seconds < LONG_STEP_SECONDS:
        return None
    where = rank.evidence.stack[0] if rank.evidence.stack else None
    at_line = f" Its main thread was last seen in {where}." if where else ""
    return Finding(
        name="long_step",
        weight="likely" if evidence.kind == "hung" else "clue",
        title=f"{rank.name} had been in one step for {seconds:.0f} s",
        text=f"{rank.name.capitalize()} had been in one and the same step for {seconds:.0f} s.{at_line}",
        figures={f"{each.name} step_seconds": took for took, each in steps},
        advice=(known.LOOK_AT_RANKS, known.RESTART),
    )


def no_readings(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether nothing is known of any rank's memory."""
    del evidence
    if any(rank.used_bytes is not None for rank in ranks):
        return None
    return Finding(
        name="no_readings",
        weight="note",
        title="no worker's memory is known",
        text=(
            "No worker told its memory, so the numbers say nothing about it. That is so while the engine starts, and "
            "without the worker extension; `hint` in /memory says which."
        ),
    )
