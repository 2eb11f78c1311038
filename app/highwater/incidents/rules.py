"""The rules for an incident beside the rule book: how the engine ended, whether the device was full, the ranks' states.

Each rule returns a finding or ``None``. Pure. A new rule is a function here, a line in ``INCIDENT_RULES`` and its
sentences and figures in findings/findings.toml.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final, TypeAlias

from highwater.accounting.outlook import gains
from highwater.accounting.remedies import reserve_bytes
from highwater.exit_codes import by_signal
from highwater.findings.case import NOTABLE_BYTES, RankCase
from highwater.findings.finding import Finding, Weight, finding
from highwater.findings.rules import highest, is_device_full
from highwater.incidents.incident import IncidentCase
from highwater.policy.waters import derive, slack_bytes
from highwater.recorder.progress import LOST

IncidentRule: TypeAlias = Callable[[IncidentCase], Finding | None]

ROOM_RATIO = 0.10
LONG_STEP_SECONDS = 10.0
# Levels at which the policy knows nothing of the memory.
NOTHING_KNOWN: Final = frozenset({"held", "unknown"})


# --- how it ended ---


def killed_by_kernel(case: IncidentCase) -> Finding | None:
    """Report that the kernel counted a kill for memory at that time."""
    kills = case.evidence.oom_kills
    if kills is None or kills.count == 0:
        return None
    weight: Weight = "clue" if case.kind == "out_of_memory" else "likely"
    return finding("killed_by_kernel", weight=weight, oom_kills=kills.count, where=kills.where)


def ended_by_signal(case: IncidentCase) -> Finding | None:
    """Report the signal by which a process was ended, where the log says so."""
    number, kills = case.evidence.ended_by_signal, case.evidence.oom_kills
    if number is None:
        return None
    is_kill = number == signal.SIGKILL
    return finding(
        "ended_by_signal",
        advice=("who_killed",) if is_kill else (),
        signal=number,
        signal_name=_signal_name(number),
        exit_code=by_signal(number),
        is_kill=is_kill,
        uncounted=kills.where if is_kill and kills is not None and kills.count == 0 else None,
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


# --- the device ---


def device_full(case: IncidentCase) -> Finding | None:
    """Report that a rank's device had next to nothing free."""
    full = [rank for rank in case.ranks if is_device_full(rank)]
    if not full:
        return None
    worst = min(full, key=lambda rank: rank.free_ratio or 0.0)
    is_cpu = worst.device_type == "cpu"
    return finding(
        "device_full",
        weight="clue" if case.kind == "hung" else "likely",
        advice=_against_full(worst),
        rank=worst,
        age_seconds=case.age_seconds(worst),
        age=case.age_text(worst),
        memory="host memory" if is_cpu else "device",
        is_cpu=is_cpu,
        others=", ".join(rank.name for rank in full if rank is not worst),
    )


def device_had_room(case: IncidentCase) -> Finding | None:
    """Report that every rank had much free: the cause lies elsewhere than in the device's memory."""
    if not case.ranks or not all(map(_has_room, case.ranks)):
        return None
    least = min(case.ranks, key=lambda rank: rank.free_ratio or 0.0)
    return finding(
        "device_had_room",
        rank=least,
        age=case.age_text(least),
        is_out_of_memory=case.kind == "out_of_memory",
    )


def _has_room(rank: RankCase) -> bool:
    """Return whether a tenth of the device was free, or as much as the policy is satisfied with there."""
    if rank.failed_allocation_bytes is not None:
        return False
    if rank.free_ratio is None or rank.free_ratio >= ROOM_RATIO:
        return rank.free_ratio is not None
    slack = slack_bytes(rank.now, rank.first) if rank.device_type != "cpu" else None
    waters = derive(slack) if slack is not None else None
    return waters is not None and (rank.now.free_bytes or 0) >= waters.low


def _against_full(rank: RankCase) -> tuple[str, ...]:
    if rank.device_type == "cpu":
        return ("cpu_kvcache_space", "memory_limit")
    unused = ("release",) if (reserve_bytes(rank.now) or 0) > NOTABLE_BYTES else ()
    encoder = ("reset_encoder_cache",) if (rank.now.components.encoder_cache_bytes or 0) > NOTABLE_BYTES else ()
    return (*unused, *encoder, "gpu_memory_utilization", "policy_earlier")


# --- the ranks ---


def stopped_ranks(case: IncidentCase) -> Finding | None:
    """Report that processes of ranks, EngineCore or an API server were stopped, and can go on."""
    ranks = [(rank.name, rank.pid) for rank in case.evidence.ranks if rank.status == "stopped"]
    # A single worker may live in EngineCore's process.
    others = [(one.name, one.pid) for one in case.evidence.stopped if one.pid not in {pid for _, pid in ranks}]
    stopped = [*ranks, *others]
    if not stopped:
        return None
    names = ", ".join(name for name, _ in stopped)
    return finding(
        "stopped_ranks",
        {f"{name} pid": pid for name, pid in stopped},
        weight="likely" if case.kind == "hung" else "clue",
        stopped=f"{names} {'was' if len(stopped) == 1 else 'were'}",
        pids=", ".join("not known" if pid is None else str(pid) for _, pid in stopped),
    )


def lost_ranks(case: IncidentCase) -> Finding | None:
    """Report that some ranks were lost while others went on."""
    lost = [rank for rank in case.evidence.ranks if rank.status in LOST]
    if len(lost) == len(case.evidence.ranks) or all(rank.status == "stopped" for rank in lost):
        return None
    return finding(
        "lost_ranks",
        {rank.name: rank.status for rank in case.evidence.ranks},
        weight="clue" if case.kind == "out_of_memory" else "likely",
        lost=", ".join(f"{rank.name} was {rank.status}" for rank in lost),
    )


def long_step(case: IncidentCase) -> Finding | None:
    """Report that a rank had been in one step for long."""
    seconds, rank = highest(case.evidence.ranks, lambda each: each.step_seconds) or (0.0, None)
    if rank is None or seconds < LONG_STEP_SECONDS:
        return None
    return finding(
        "long_step",
        {f"{one.name} step_seconds": one.step_seconds for one in case.evidence.ranks if one.step_seconds is not None},
        weight="likely" if case.kind == "hung" else "clue",
        rank=rank.name,
        seconds=seconds,
        frame=rank.stack[0] if rank.stack and rank.stack[0] else None,
    )


def no_readings(case: IncidentCase) -> Finding | None:
    """Report that no rank's memory is known."""
    return None if any(rank.now.used_bytes is not None for rank in case.ranks) else finding("no_readings")


# --- the policy ---


def policy(case: IncidentCase) -> Finding | None:
    """Report that the policy knew that memory was short, and what kept it from helping."""
    status, before = case.evidence.policy, case.evidence.policy_before
    if status is None or (status.level in NOTHING_KNOWN and before is not None):
        status = before  # once the engine is gone the policy knows nothing
    short = [] if status is None else [rule for rule in status.rules if rule.is_short(status.level)]
    if status is None or not short:
        return None
    missing = [one for rule in short for one in rule.ranks if one.short_bytes]
    is_helpless = bool(missing) and all(size == 0 for one in missing for size in gains(one).values())
    return finding(
        "policy",
        # Acting earlier helps only where there is something to give back.
        advice=("gpu_memory_utilization",) if is_helpless else ("policy_earlier",),
        status=status,
        rules_short=len(short),
        missing_bytes=max((one.short_bytes or 0 for one in missing), default=None),
        only_observed=status.mode == "observe",
        rules=", ".join(rule.name for rule in short),
        reasons="; ".join(f"{rule.name}: {rule.reason}" for rule in short if rule.reason) or status.summary,
    )


# In the order in which findings of the same weight are shown, before those of the rule book.
INCIDENT_RULES: Final[tuple[IncidentRule, ...]] = (
    killed_by_kernel,
    device_full,
    stopped_ranks,
    lost_ranks,
    long_step,
    ended_by_signal,
    policy,
    device_had_room,
    no_readings,
)
