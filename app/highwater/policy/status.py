"""The decision as the report and ``GET /policy`` show it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from highwater.policy.core import RuleView
from highwater.policy.gains import possible_gain
from highwater.policy.memory import LastRun, RuleMemory
from highwater.policy.pressure import Pressure, is_reached
from highwater.policy.rules import FILL_SIGNALS, RATIO_SIGNALS, Rule
from highwater.readings.growth import RankGrowth
from highwater.readings.policy import PolicyLevel, PolicyMode, RankPressure, RemedyState, RuleStatus
from highwater.readings.report import Report
from highwater.units import MIB


def rule_status(
    view: RuleView, memory: RuleMemory, report: Report, unavailable: Mapping[str, str], *, to_unix: float
) -> RuleStatus:
    """Return one rule as shown; ``to_unix`` are the seconds that turn the policy's times into Unix time."""
    rule, worst = view.rule, view.worst
    growths = {growth.key: growth for growth in report.growth.ranks}
    ranks = tuple(_rank(rule, pressure, growths.get(pressure.key)) for pressure in view.pressures)
    rest_until = view.cooldown_until + to_unix if view.cooldown_until is not None else None
    status = RuleStatus(
        name=rule.name,
        signal=rule.signal,
        phase=view.phase,
        value=worst.value if worst is not None else None,
        high_water=worst.high if worst is not None else rule.high_water,
        low_water=worst.low if worst is not None else rule.low_water,
        reason=view.reason,
        since=memory.since + to_unix if memory.since is not None else None,
        rest_until=rest_until,
        ranks=ranks if rule.signal in FILL_SIGNALS else (),
        remedies=tuple(
            _remedy(name, memory.runs.get(name), unavailable.get(name), rest_until, to_unix)
            for name in rule.ordered_remedies
        ),
    )
    return replace(status, is_dormant=_is_dormant(status, report))


def _is_dormant(rule: RuleStatus, report: Report) -> bool:
    if rule.phase != "held" or report.stale or not report.engine.traits.takes_remedies:
        return False
    lacks_waters = rule.high_water is None or rule.low_water is None
    return any(
        not reading.asleep_tags and not (lacks_waters and reading.device.type == "cpu") for reading in report.ranks
    )


def summary(views: Sequence[RuleView], level: PolicyLevel, *, mode: PolicyMode = "act") -> str:
    if not views:
        return "there are no rules: nothing is given back by itself"
    view = next(view for view in views if view.level == level)
    return (view.reason or _calm(view)) + ("; observe mode: nothing is done" if mode == "observe" else "")


def _calm(view: RuleView) -> str:
    worst = view.worst
    if worst is None or worst.value is None or worst.high is None:
        return f"rule {view.rule.name} is calm"
    value, water = (_value(view.rule.signal, number) for number in (worst.value, worst.high))
    rank = worst.reading.label
    if view.rule.signal == "device_free_bytes":
        return f"rank {rank} has {value} free, the least of all for its size; below {water} memory is given back"
    return f"{view.rule.signal} is {value}; from {water} on memory is given back"


def _value(signal: str, value: float) -> str:
    return f"{value:.3f}" if signal in RATIO_SIGNALS else f"{value / MIB:,.0f} MiB"


def _rank(rule: Rule, pressure: Pressure, growth: RankGrowth | None) -> RankPressure:
    reading, total = pressure.reading, pressure.reading.total_bytes

    def as_free(water: float | None) -> int | None:
        if water is None:
            return None
        if rule.signal == "device_free_bytes":
            return int(water)
        return int((1 - water) * total) if total is not None else None

    high, free = as_free(pressure.high), reading.free_bytes
    to_high_water = None
    if growth is not None and high is not None and free is not None and free > high:
        to_high_water = _seconds_until(free - high, free, growth)
    trim = possible_gain("trim_encoder_cache", rule.signal, reading)
    return RankPressure(
        rank=reading.rank,
        dp_rank=reading.dp_rank,
        free_bytes=free,
        high_free_bytes=high,
        low_free_bytes=as_free(pressure.low),
        short_bytes=None if pressure.high is None else pressure.need_bytes if is_reached(rule, pressure) else 0,
        can_release_bytes=reading.releasable_bytes,
        can_trim_bytes=trim.size if trim.is_certain else None,
        seconds_to_high_water=to_high_water,
        note=pressure.note,
    )


def _seconds_until(room: int, free: int, growth: RankGrowth) -> float | None:
    """Return when so much of what is free is used up; once the encoder cache is full, all else grows alone."""
    left, pace, cached = growth.seconds_to_full, growth.bytes_per_second, growth.cache_room_bytes or 0
    together = room / pace if cached and pace else 0.0
    if room <= cached:
        return together
    return None if left is None else max(left * (room - cached) / (free - cached), together)


def _remedy(
    name: str, run: LastRun | None, unavailable: str | None, rest_until: float | None, to_unix: float
) -> RemedyState:
    state = RemedyState(name=name, unavailable=unavailable)
    if run is None:
        return state
    return replace(
        state,
        last_run_at=run.at + to_unix,
        last_outcome=run.judged,
        last_reason=run.reason,
        last_freed_bytes=run.freed_bytes,
        last_freed_ranks=run.ranks,
        rest_until=rest_until,
    )
