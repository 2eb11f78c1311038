"""An engine's start, and its end: by whom, in which of its processes, and what the policy knew before. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from highwater.diagnose.case import OLD_SECONDS, Case, given
from highwater.diagnose.evidence import highest
from highwater.diagnose.finding import Finding, Weight, finding
from highwater.diagnose.rules.host import against_full_host, fill_text, fullest, looks_text
from highwater.host.past import OWN_END_SECONDS
from highwater.model.engine_budget import EXCLUDED, allocator_options, sets_expandable_segments
from highwater.model.rank import device_traits
from highwater.model.remedies import gains
from highwater.model.units import MIB, size_text
from highwater.process.errors import by_signal
from highwater.watch.recorder.progress import LOST

LONG_STEP_SECONDS = 10.0
ROOMY_RATIO = 0.8


def killed_by_kernel(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    kills = evidence.oom_kills
    if kills is None or kills.count == 0:
        return None
    weight: Weight = "clue" if case.kind == "out_of_memory" else "likely"
    host = evidence.host
    return finding(
        "killed_by_kernel",
        weight=weight,
        advice=against_full_host(case),
        oom_kills=kills.count,
        where=kills.where,
        fill=fill_text(case),
        looks=looks_text(case),
        suspect=None if host is None or host.suspect is None else host.suspect.text,
    )


def kill_not_known(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    if case.kind not in {"died", "start_failed"} or evidence.oom_kills is not None:
        return None
    if evidence.ended_by_signal not in {None, signal.SIGKILL} or _says_why(case):
        return None
    host, (fill, _) = evidence.host, fullest(case)
    together = host.ended_together if host is not None else 0
    is_seen = host is not None and host.fullest is not None and case.at - host.fullest.at < OLD_SECONDS
    had_room = is_seen and fill is not None and fill.ratio < ROOMY_RATIO and not together
    weight: Weight = "note" if had_room else "clue"
    return finding(
        "kill_not_known",
        {"ended_together": together} if together else {},
        weight=weight,
        had_room=had_room,
        together=together,
        fill=fill_text(case),
        looks=looks_text(case),
    )


def cause_not_known(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    is_shown = evidence.ended_by_signal is not None or case.is_killed_by_kernel
    if case.kind not in {"died", "start_failed"} or is_shown or evidence.hang is not None or _says_why(case):
        return None
    return finding("cause_not_known", is_log_read=case.log.lines > 0, unheard=case.log.unheard)


def _says_why(case: Case) -> bool:
    raised, evidence = case.log.exception, case.evidence
    is_killed = evidence is not None and evidence.ended_by_signal == signal.SIGKILL
    if raised is not None and not raised.follows and not raised.before and not is_killed:
        return True
    return case.log.cause is not None


def hang_ended(case: Case) -> Finding | None:
    hang = given(case.evidence).hang
    if hang is None:
        return None
    # A killed worker stops every step, and then the API server ends by itself.
    is_outside = hang.open_seconds >= OWN_END_SECONDS and not case.is_killed_by_kernel and not _says_why(case)
    return finding("hang_ended", weight="likely" if is_outside else "clue", seconds=hang.seconds, is_outside=is_outside)


def ended_by_signal(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    number, kills = evidence.ended_by_signal, evidence.oom_kills
    if number is None:
        return None
    is_kill = number == signal.SIGKILL
    name = "".join(f" ({one.name})" for one in signal.Signals if one == number)  # a real-time signal has none
    return finding(
        "ended_by_signal",
        advice=("who_killed",) if is_kill else (),
        signal=number,
        signal_name=f"signal {number}{name}",
        exit_code=by_signal(number),
        is_kill=is_kill,
        uncounted=kills.where if is_kill and kills is not None and kills.count == 0 else None,
    )


def stopped_ranks(case: Case) -> Finding | None:
    evidence = given(case.evidence)
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


def lost_ranks(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    lost = [rank for rank in evidence.ranks if rank.status in LOST]
    if len(lost) == len(evidence.ranks) or all(rank.status == "stopped" for rank in lost):
        return None
    return finding(
        "lost_ranks",
        {rank.name: rank.status for rank in evidence.ranks},
        weight="clue" if case.kind == "out_of_memory" else "likely",
        lost=", ".join(f"{rank.name} was {rank.status}" for rank in lost),
    )


def long_step(case: Case) -> Finding | None:
    evidence = given(case.evidence)
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


def no_readings(case: Case) -> Finding | None:
    return None if any(rank.now.used_bytes is not None for rank in case.ranks) else finding("no_readings")


# --- the policy: what it knew, and what kept it from helping ---

# Levels at which the policy knows nothing of the memory.
NOTHING_KNOWN: Final = frozenset({"held", "unknown"})


def policy(case: Case) -> Finding | None:
    evidence = given(case.evidence)
    status, before = evidence.policy, evidence.policy_before
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


# --- a start: what its profile missed, and which of its settings contradict one another ---

# A smaller difference between the profile and what followed is no risk.
MISSED_BYTES: Final = 128 * MIB


def not_profiled(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        graphs = rank.part("graphs")
        elsewhere = {"others"} if graphs is None or graphs.bytes >= 0 else {"others", "graphs_uncounted"}
        missed = [part for part in rank.uncounted if part.key not in elsewhere]
        size = sum(part.bytes for part in missed)
        if size >= MISSED_BYTES:
            return finding(
                "not_profiled",
                weight="clue" if rank.left_bytes is None or rank.left_bytes >= 0 else "likely",
                name=rank.name,
                missed_bytes=size,
                outside_bytes=rank.outside_bytes,
                parts=", ".join(f"{part.title} {size_text(part.bytes)}" for part in missed),
                requested=rank.requested_bytes,
            )
    return None


def negative_graphs_estimate(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        estimate, beyond = rank.part("graphs"), rank.part("graphs_uncounted")
        if estimate is not None and estimate.bytes < 0:
            excess = -estimate.bytes if beyond is None else beyond.bytes
            return finding(
                "negative_graphs_estimate",
                name=rank.name,
                excess=excess,
                estimate=estimate.bytes,
                captured=excess + estimate.bytes,
                fully_counted_bytes=rank.fully_counted_bytes,
            )
    return None


def activation_above_profile(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        row = next((row for row in rank.observed if row.key == "activation"), None)
        if row is not None and row.risk_bytes is not None and row.risk_bytes >= MISSED_BYTES:
            return finding("activation_above_profile", name=rank.name, row=row, excess=row.risk_bytes)
    return None


def allocator_environment(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        if problems := contradictions(rank.environment, rank.device.type):
            told = " ".join(f"{problem}." for problem in problems)
            return finding("allocator_environment", name=rank.name, problems=told)
    return None


def contradictions(environment: Mapping[str, str | None], device_type: str | None) -> list[str]:
    names = [name for name in environment if name.endswith("_ALLOC_CONF")]
    has_torch_npu, found = device_traits(device_type).platform == "ascend", []
    for name in names:
        options = allocator_options(environment[name])
        found += [f"{name} sets {key} {len(values)} times ({', '.join(values)})"
                  for key, values in options.items() if len(values) > 1]  # fmt: skip
        excluded = [key for key in EXCLUDED if key in options]
        if sets_expandable_segments(environment[name]) and excluded and has_torch_npu:
            found.append(f"{name} sets expandable_segments:True, which excludes {' and '.join(excluded)} on an NPU")
    if has_torch_npu and {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"} <= set(names):
        found.append("PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set, which torch_npu from 2.13 on refuses")
    for name in names[1:]:
        if environment[name] != environment[names[0]]:
            found.append(
                f"{names[0]} and {name} are both set, to different values: which one counts differs by version"
            )
    blocking, queue = environment.get("ASCEND_LAUNCH_BLOCKING"), environment.get("TASK_QUEUE_ENABLE")
    if blocking == "1" and queue in {"1", "2"}:
        found.append(f"ASCEND_LAUNCH_BLOCKING=1 switches the task queue off: TASK_QUEUE_ENABLE={queue} has no effect")
    return found
