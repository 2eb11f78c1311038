"""The rules for an incident beside the rule book: how the engine ended, whether the device was full, what ranks did.

Each rule gives a finding, or nothing. Pure. A new rule is a function here and a line in
``INCIDENT_RULES``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final, TypeAlias

from highwater.findings import advice as known
from highwater.findings.case import NOTABLE_BYTES, Case, RankCase
from highwater.findings.finding import Advice, Finding
from highwater.findings.rules import is_device_full
from highwater.incidents.incident import Evidence
from highwater.policy.waters import derive, slack_bytes
from highwater.readings import RankPressure, RuleStatus
from highwater.units import mib

IncidentRule: TypeAlias = Callable[[Evidence, Case], Finding | None]

ROOM_RATIO = 0.10
LONG_STEP_SECONDS = 10.0
_LOST: Final = ("silent", "dead", "stopped")
_SHORT: Final = frozenset({"short", "urgent"})
_NOTHING_KNOWN: Final = frozenset({"held", "unknown"})


# --- how it ended ---


def killed_by_kernel(evidence: Evidence, case: Case) -> Finding | None:
    """Report that the kernel counted a kill for memory at that time."""
    del case
    kills = evidence.oom_kills
    if kills is None or kills.count == 0:
        return None
    return Finding(
        name="killed_by_kernel",
        weight="clue" if evidence.kind == "out_of_memory" else "likely",
        title="the kernel killed a process of this container for memory",
        text=(
            f"Within the last minute the kernel's counter oom_kill rose by {kills.count} ({kills.where}). It "
            "kills when host memory runs out, at the container's limit or the machine's, and what it kills leaves "
            "no last words."
        ),
        figures={"oom_kills": kills.count},
        advice=(known.MEMORY_LIMIT, known.MM_PROCESSOR_CACHE, known.TRIM_HOST_BUDGET),
    )


def ended_by_signal(evidence: Evidence, case: Case) -> Finding | None:
    """Report the signal by which a process was ended, where the log says so."""
    del case
    number = evidence.ended_by_signal
    if number is None:
        return None
    text = (
        f"The log says that a process was ended by signal {number}; shells and containers show that as {number + 128}."
    )
    if number == signal.SIGKILL:
        text += (
            " Nobody can catch SIGKILL, so there are no last words. The kernel sends it when host memory has run out, "
            "container runtimes when a stop takes too long, and people with kill -9."
        )
        if evidence.oom_kills is not None and evidence.oom_kills.count == 0:
            text += f" The kernel counted no kill for memory ({evidence.oom_kills.where})."
    return Finding(
        name="ended_by_signal",
        weight="clue",
        title=f"a process of it was ended by {_name(number)}",
        text=text,
        figures={"signal": number},
        advice=(known.WHO_KILLED,) if number == signal.SIGKILL else (),
    )


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


# --- the device ---


def device_full(evidence: Evidence, case: Case) -> Finding | None:
    """Report that a rank's device had next to nothing free."""
    full = [rank for rank in case.ranks if is_device_full(rank)]
    if not full:
        return None
    worst = min(full, key=lambda rank: rank.free_ratio or 0.0)
    others = ", ".join(rank.name for rank in full if rank is not worst)
    what = "host memory" if worst.device_type == "cpu" else "device"
    text = (
        f"The last that is known of {worst.name}{case.age_words(worst)}: of {mib(worst.now.total_bytes)} MiB of its "
        f"{what} {mib(worst.now.free_bytes)} were free. Whoever asks for more than that gets none."
    )
    if worst.device_type != "cpu":
        text += " That is PyTorch's allocator, and also what it does not manage: workspaces, collectives, graphs."
    if others:
        text += f" No better: {others}."
    return Finding(
        name="device_full",
        weight="clue" if evidence.kind == "hung" else "likely",
        title=f"{worst.name} had {mib(worst.now.free_bytes)} MiB free of {mib(worst.now.total_bytes)}",
        text=text,
        figures={
            "rank": worst.name,
            "free_bytes": worst.now.free_bytes,
            "total_bytes": worst.now.total_bytes,
            "used_bytes": worst.now.used_bytes,
            "age_seconds": case.age_seconds(worst),
        },
        advice=_against_full(worst),
    )


def device_had_room(evidence: Evidence, case: Case) -> Finding | None:
    """Report that every rank had much free: then the device's memory is not where to look."""
    if not case.ranks or not all(map(_has_room, case.ranks)):
        return None
    least = min(case.ranks, key=lambda rank: rank.free_ratio or 0.0)
    text = (
        f"Of all ranks {least.name} had the least free{case.age_words(least)}: {mib(least.now.free_bytes)} MiB of "
        f"{mib(least.now.total_bytes)}. "
    )
    if evidence.kind == "out_of_memory":
        text += "So it was one very large piece, a rise between two readings, fragments, or not the device's memory."
    else:
        text += "As far as the readings show, the device's memory is not what ended it."
    return Finding(
        name="device_had_room",
        weight="note",
        title=f"every rank had at least {mib(least.now.free_bytes)} MiB free",
        text=text,
        figures={"rank": least.name, "free_bytes": least.now.free_bytes, "total_bytes": least.now.total_bytes},
    )


def _has_room(rank: RankCase) -> bool:
    """Return whether a tenth of the device was free, or as much as the policy is satisfied with there."""
    if rank.free_ratio is None or rank.free_ratio >= ROOM_RATIO:
        return rank.free_ratio is not None
    slack = slack_bytes(rank.now, rank.first) if rank.device_type != "cpu" else None
    waters = derive(slack) if slack is not None else None
    return waters is not None and (rank.now.free_bytes or 0) >= waters.low


def _against_full(rank: RankCase) -> tuple[Advice, ...]:
    if rank.device_type == "cpu":
        return (known.CPU_KVCACHE_SPACE, known.MEMORY_LIMIT)
    unused = (known.RELEASE,) if rank.unused_bytes is not None and rank.unused_bytes > NOTABLE_BYTES else ()
    cached = rank.now.components.encoder_cache_bytes
    encoder = (known.RESET_ENCODER_CACHE,) if cached is not None and cached > NOTABLE_BYTES else ()
    return (*unused, *encoder, known.GPU_MEMORY_UTILIZATION, known.POLICY_EARLIER)


# --- the ranks ---


def lost_ranks(evidence: Evidence, case: Case) -> Finding | None:
    """Report that some ranks were lost while others went on."""
    del case
    lost = [rank for rank in evidence.ranks if rank.status in _LOST]
    if not lost or len(lost) == len(evidence.ranks):
        return None
    named = ", ".join(f"{rank.name} was {rank.status}" for rank in lost)
    return Finding(
        name="lost_ranks",
        weight="clue" if evidence.kind == "out_of_memory" else "likely",
        title=f"{named} while others went on",
        text=f"Not all ranks were in the same state: {named}. A step needs every rank, so the others wait for it.",
        figures={rank.name: rank.status for rank in evidence.ranks},
        advice=(known.LOOK_AT_RANKS, known.RESTART),
    )


def long_step(evidence: Evidence, case: Case) -> Finding | None:
    """Report that a rank had been in one step for long."""
    del case
    steps = [(seconds, rank) for rank in evidence.ranks if (seconds := rank.step_seconds) is not None]
    if not steps:
        return None
    seconds, rank = max(steps, key=lambda each: each[0])
    if seconds < LONG_STEP_SECONDS:
        return None
    where = rank.stack[0] if rank.stack else None
    at_line = f" Its main thread was last seen in {where}." if where else ""
    return Finding(
        name="long_step",
        weight="likely" if evidence.kind == "hung" else "clue",
        title=f"{rank.name} had been in one step for {seconds:.0f} s",
        text=f"{rank.name.capitalize()} had been in one and the same step for {seconds:.0f} s.{at_line}",
        figures={f"{each.name} step_seconds": took for took, each in steps},
        advice=(known.LOOK_AT_RANKS, known.RESTART),
    )


def no_readings(evidence: Evidence, case: Case) -> Finding | None:
    """Report that nothing is known of any rank's memory."""
    del evidence
    if any(rank.now.used_bytes is not None for rank in case.ranks):
        return None
    return Finding(
        name="no_readings",
        weight="note",
        title="no worker's memory is known",
        text=(
            "No worker reported its memory, so the numbers say nothing about it. That is so while the engine starts, "
            "and without the worker extension; `hint` in /memory says which."
        ),
    )


# --- the policy ---


def policy(evidence: Evidence, case: Case) -> Finding | None:
    """Report that the policy knew that memory was short, and what kept it from helping."""
    del case
    status = evidence.policy
    if status is None or (status.level in _NOTHING_KNOWN and evidence.policy_before is not None):
        # Of an engine that is gone nothing is known any more: the last that was known stands.
        status = evidence.policy_before
    if status is None:
        return None
    short = [rule for rule in status.rules if _is_short(rule, status.level)]
    if not short:
        return None
    reasons = "; ".join(f"{rule.name}: {rule.reason}" for rule in short if rule.reason) or status.summary
    names = f" ({', '.join(rule.name for rule in short)})"
    missing = [one for rule in short for one in rule.ranks if one.short_bytes]
    is_helpless = bool(missing) and all(map(_can_give_nothing, missing))
    if status.mode == "observe":
        title = f"the policy saw that memory was short and was set to observe only{names}"
        text = f"In mode observe the policy decides, records, and does nothing. Of the memory it said: {reasons}."
    else:
        title = f"the policy knew that memory was short{names}"
        text = f"{reasons}."
    return Finding(
        name="policy",
        weight="clue",
        title=title,
        text=text,
        figures={
            "mode": status.mode,
            "level": status.level,
            "rules_short": len(short),
            "missing_bytes": max((one.short_bytes or 0 for one in missing), default=None),
        },
        # Acting earlier helps only where there is something to give back.
        advice=(known.GPU_MEMORY_UTILIZATION,) if is_helpless else (known.POLICY_EARLIER,),
    )


def _is_short(rule: RuleStatus, level: str) -> bool:
    if rule.phase == "resting":
        return level in _SHORT
    return rule.phase in _SHORT or rule.phase == "acting"


def _can_give_nothing(one: RankPressure) -> bool:
    """Return whether the workers said that nothing could be given back there."""
    return one.can_release_bytes == 0 and one.can_trim_bytes == 0


# In the order in which findings of the same weight are shown, before those of the rule book.
INCIDENT_RULES: Final[tuple[IncidentRule, ...]] = (
    killed_by_kernel,
    device_full,
    lost_ranks,
    long_step,
    ended_by_signal,
    policy,
    device_had_room,
    no_readings,
)
