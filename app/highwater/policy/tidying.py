"""Decides on one release in each idle period, if it gives back much, such as what a benchmark left behind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from highwater.policy.gains import possible_gain
from highwater.policy.memory import LifeMemory, RuleMemory
from highwater.policy.pressure import Facts, Pressure
from highwater.policy.rules import Rule
from highwater.readings.rank import RankKey
from highwater.readings.report import Report
from highwater.units import MIB

IDLE_SECONDS: Final = 30.0
MIN_TIDY_BYTES: Final = 1024 * MIB
TIDY_SHARE: Final = 0.02


def with_idleness(memory: LifeMemory, report: Report, now: float) -> LifeMemory:
    engine = report.engine
    is_idle = not report.stale and engine.requests_running == 0 and engine.requests_waiting == 0
    # A short request may come and go between two readings; it leaves its tokens in the counters.
    has_worked = None not in {engine.work_done, memory.work_done} and engine.work_done != memory.work_done
    memory = replace(memory, work_done=engine.work_done if engine.work_done is not None else memory.work_done)
    if not is_idle:
        return replace(memory, idle_since=None, is_tidied=False)
    if has_worked:
        return replace(memory, idle_since=now, is_tidied=False)
    return memory if memory.idle_since is not None else replace(memory, idle_since=now)


def may_tidy(rule: Rule, memory: LifeMemory, report: Report, facts: Facts, now: float) -> bool:
    if not rule.is_derived or "release" not in rule.ordered_remedies or "release" in facts.unavailable:
        return False
    if memory.is_tidied or memory.idle_since is None or now - memory.idle_since < IDLE_SECONDS or report.stale:
        return False
    return report.engine.traits.takes_remedies and not any(reading.asleep_tags for reading in report.ranks)


def tidying_ranks(rule: Rule, pressures: Sequence[Pressure], memory: RuleMemory) -> Mapping[RankKey, tuple[int, int]]:
    """Return the ranks where a release gives back much: the bytes, and those that it must give to be effective."""
    able: dict[RankKey, tuple[int, int]] = {}
    for pressure in pressures:
        reading = pressure.reading
        if reading.device.type == "cpu" or not reading.total_bytes:
            continue
        gain, wait = possible_gain("release", rule.signal, reading), memory.wait("release", pressure.key)
        enough = max(MIN_TIDY_BYTES, int(TIDY_SHARE * reading.total_bytes), (wait and wait.figure_bytes) or 0)
        # An upper bound is tried once: that one release may teach the worker its own figure.
        if gain.size is not None and gain.size >= enough and (gain.is_certain or "release" not in memory.runs):
            able[pressure.key] = (gain.size, rule.min_gain_bytes)
    return able


def tidying_text(ranks: Mapping[RankKey, tuple[int, int]]) -> str:
    most = max(size for size, _ in ranks.values())
    return f"no request for {IDLE_SECONDS:.0f} s and {most // MIB:,} MiB that nobody uses"
