"""The engine's end: by whom, and in which of its processes. Pure."""

from __future__ import annotations

import signal

from highwater.diagnose.case import Case, highest
from highwater.diagnose.evidence import Evidence
from highwater.diagnose.finding import Finding, Weight, finding
from highwater.exit_codes import by_signal
from highwater.recorder.progress import LOST

LONG_STEP_SECONDS = 10.0


def killed_by_kernel(case: Case, evidence: Evidence) -> Finding | None:
    """Report that the kernel counted a kill for memory at that time."""
    kills = evidence.oom_kills
    if kills is None or kills.count == 0:
        return None
    weight: Weight = "clue" if case.kind == "out_of_memory" else "likely"
    return finding("killed_by_kernel", weight=weight, oom_kills=kills.count, where=kills.where)


def ended_by_signal(case: Case, evidence: Evidence) -> Finding | None:
    """Report the signal by which a process was ended, where the log says so."""
    number, kills = evidence.ended_by_signal, evidence.oom_kills
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


def stopped_ranks(case: Case, evidence: Evidence) -> Finding | None:
    """Report that processes of ranks, EngineCore or an API server were stopped, and can go on."""
    ranks = [(rank.name, rank.pid) for rank in evidence.ranks if rank.status == "stopped"]
    # A single worker may live in EngineCore's process.
    others = [(one.name, one.pid) for one in evidence.stopped if one.pid not in {pid for _, pid in ranks}]
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


def lost_ranks(case: Case, evidence: Evidence) -> Finding | None:
    """Report that some ranks were lost while others went on."""
    lost = [rank for rank in evidence.ranks if rank.status in LOST]
    if len(lost) == len(evidence.ranks) or all(rank.status == "stopped" for rank in lost):
        return None
    return finding(
        "lost_ranks",
        {rank.name: rank.status for rank in evidence.ranks},
        weight="clue" if case.kind == "out_of_memory" else "likely",
        lost=", ".join(f"{rank.name} was {rank.status}" for rank in lost),
    )


def long_step(case: Case, evidence: Evidence) -> Finding | None:
    """Report that a rank had been in one step for long."""
    seconds, rank = highest(evidence.ranks, lambda each: each.step_seconds) or (0.0, None)
    if rank is None or seconds < LONG_STEP_SECONDS:
        return None
    return finding(
        "long_step",
        {f"{one.name} step_seconds": one.step_seconds for one in evidence.ranks if one.step_seconds is not None},
        weight="likely" if case.kind == "hung" else "clue",
        rank=rank.name,
        seconds=seconds,
        frame=rank.stack[0] if rank.stack and rank.stack[0] else None,
    )


def no_readings(case: Case, evidence: Evidence) -> Finding | None:
    """Report that no rank's memory is known."""
    return None if any(rank.now.used_bytes is not None for rank in case.ranks) else finding("no_readings")
