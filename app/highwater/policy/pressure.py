"""Compares each rank with a rule: a reading and a rule in, waters and missing bytes out. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from highwater.policy.rules import FALLING_SIGNALS, FILL_SIGNALS, HOST_SIGNALS, Rule
from highwater.policy.waters import MIN_SLACK_BYTES, at_rest_bytes, derive, slack_bytes
from highwater.readings.rank import RankKey, RankReading
from highwater.readings.report import Report
from highwater.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the engine beside the report.

    Attributes:
        life: The id of its present life: what is remembered of another is dropped.
        baseline: The first readings of that life; empty where unknown.
        unavailable: Remedies that would be refused now, and why.
        encoder_is_profiled: True if the KV pool was sized with the encoder cache's own share in mind.
        shared_cards: Devices (``RankReading.card``) that another engine is known to use as well.
    """

    life: str = ""
    baseline: tuple[RankReading, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    encoder_is_profiled: bool = True
    shared_cards: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One rank by one rule.

    Attributes:
        value: The signal; ``None`` where unknown.
        high: The rule acts here, in the signal's unit; ``None`` without waters.
        low: The rule is satisfied here.
        need_bytes: What must be given back to reach low water.
        gain_bytes: What a remedy must be able to give here to be worth running.
        is_urgent: True if so little is free that nothing may wait.
        note: Why the rank is left out; ``None`` where it counts.
        is_finding: True if an operator should hear of that.
    """

    reading: RankReading
    value: float | None
    high: float | None = None
    low: float | None = None
    need_bytes: int = 0
    gain_bytes: int = 0
    is_urgent: bool = False
    note: str | None = None
    is_finding: bool = False

    @property
    def key(self) -> RankKey:
        return self.reading.key


def pressures(rule: Rule, report: Report, facts: Facts) -> list[Pressure]:
    if rule.is_derived:
        baseline = {reading.key: reading for reading in facts.baseline}
        ranks = [_derived(rule, reading, baseline.get(reading.key)) for reading in report.ranks]
    elif rule.signal in _GROWTH:
        ranks = _growth(rule, report)
    else:
        ranks = [_own(rule, reading) for reading in report.ranks]
    return [
        pressure if (note := _left_out(rule, pressure.reading)) is None else replace(pressure, note=note)
        for pressure in ranks
    ]


def _left_out(rule: Rule, reading: RankReading) -> str | None:
    if reading.asleep_tags:
        return f"asleep: {', '.join(reading.asleep_tags)}"
    if rule.signal in HOST_SIGNALS and not reading.host_memory.cgroup_limit_bytes:
        return "its container has no memory limit: what the whole machine uses is not the engine's to give back"
    return None


def is_reached(rule: Rule, pressure: Pressure) -> bool:
    """Return whether the rank is at high water or beyond. Derived waters are reached under them, not at them."""
    if pressure.value is None or pressure.high is None:
        return False
    if rule.is_derived:
        return pressure.value < pressure.high
    falls = rule.signal in FALLING_SIGNALS
    return pressure.value <= pressure.high if falls else pressure.value >= pressure.high


def is_relieved(rule: Rule, pressure: Pressure) -> bool:
    if pressure.value is None or pressure.low is None:
        return True
    return _relieved(rule.signal, pressure.value, pressure.low)


def _relieved(signal: str, value: float, water: float) -> bool:
    return value >= water if signal in FALLING_SIGNALS else value <= water


# --- the default rule ---


def _derived(rule: Rule, reading: RankReading, baseline: RankReading | None) -> Pressure:
    free = reading.free_bytes
    if reading.device.type == "cpu":
        return Pressure(reading=reading, value=free, note="on CPU there is no device to fill")
    slack = slack_bytes(reading, baseline)
    if free is None or slack is None:
        return Pressure(reading=reading, value=free, note="the device's memory is not known")
    waters = derive(slack)
    if waters is None:
        return Pressure(
            reading=reading,
            value=free,
            note=(
                f"the engine's plan leaves {max(slack, 0) // MIB} MiB of the device; below "
                f"{MIN_SLACK_BYTES // MIB} MiB nothing that the policy gives back could last. "
                "Lower --gpu-memory-utilization (or --kv-cache-memory-bytes)"
            ),
            is_finding=True,
        )
    need = max(waters.low - free, 0)
    return Pressure(
        reading=reading,
        value=free,
        high=waters.high,
        low=waters.low,
        need_bytes=need,
        # On a small device high and low water may be less apart than the least gain.
        gain_bytes=min(rule.min_gain_bytes, waters.low - waters.high),
        is_urgent=free < waters.high / 2,
    )


# --- an operator's rules ---

_GROWTH = frozenset({"device_growth_bytes", "host_growth_bytes"})


def _own(rule: Rule, reading: RankReading) -> Pressure:
    high, low = rule.high_water or 0.0, rule.low_water or 0.0
    value = _VALUES[rule.signal](reading)
    if value is None:
        return Pressure(reading=reading, value=None, high=high, low=low, note=f"{rule.signal} is not known")
    totals = {"device_used_ratio": reading.total_bytes or 0, "host_used_ratio": reading.host_memory.share[1] or 0}
    scale = totals.get(rule.signal, 1)
    is_free = rule.signal == "device_free_bytes"
    free = reading.free_bytes if reading.free_bytes is not None else math.inf
    high_free = high if is_free else (1 - high) * (reading.total_bytes or 0)
    return Pressure(
        reading=reading,
        value=value,
        high=high,
        low=low,
        need_bytes=max(math.ceil((low - value if is_free else value - low) * scale), 0),
        gain_bytes=min(rule.min_gain_bytes, int(abs(high - low) * scale)),
        is_urgent=rule.signal in FILL_SIGNALS and free < high_free / 2,
    )


def _growth(rule: Rule, report: Report) -> list[Pressure]:
    """Return the ranks by growth, which is a sum over them: each has an even share of what is to be given back."""
    growth, count = report.growth, max(len(report.ranks), 1)
    grown = growth.since_ready_bytes if rule.signal == "device_growth_bytes" else growth.host_since_ready_bytes
    high, low = rule.high_water or 0.0, rule.low_water or 0.0
    need = max(-(math.floor(low - grown) // count), 0) if grown is not None else 0
    gain = min(rule.min_gain_bytes, int((high - low) / count))
    note = None if grown is not None else f"{rule.signal} is not known"
    return [
        Pressure(reading=reading, value=grown, high=high, low=low, need_bytes=need, gain_bytes=gain, note=note)
        for reading in report.ranks
    ]


# A rank's value of each signal that is its own.
_VALUES: Mapping[str, Callable[[RankReading], float | None]] = {
    "device_used_ratio": lambda reading: reading.used_ratio,
    "device_free_bytes": lambda reading: reading.free_bytes,
    "encoder_cache_bytes": lambda reading: reading.components.encoder_cache_bytes,
    "host_used_ratio": lambda reading: reading.host_memory.used_ratio,
}


# --- waters that the engine cannot reach ---


def unreachable(rule: Rule, baseline: Sequence[RankReading], ranks: Sequence[RankReading]) -> str | None:
    """Return why the engine at rest, idle and with empty caches, would still be over a water of the rule, or ``None``.

    The baseline is the first readings of the engine's life; without it the parts of the present ranks show what stays.
    """
    if rule.is_derived:
        return None
    at_rest = list(_at_rest(rule.signal, baseline, ranks))
    if not at_rest:
        return None
    falls = rule.signal == "device_free_bytes"
    reading, value = (min if falls else max)(at_rest, key=lambda pair: pair[1])
    for key, water in (("low_water", rule.low_water or 0.0), ("high_water", rule.high_water or 0.0)):
        if _relieved(rule.signal, value, water):
            continue
        has, better = ("has", "or less") if falls else ("uses", "or more")
        shown = f"{value:.4g}" if rule.signal.endswith("_ratio") else f"{value:.0f}"
        other = "free memory on the host" if rule.signal.startswith("host_") else "lower --gpu-memory-utilization"
        where = reading.name
        return (
            f"{rule.name}.{key}: {water:g} of {rule.signal} cannot be reached: {where} {has} {shown} at "
            f"rest, with nothing left to give back. Set low_water to {_rounded(rule.signal, value)} {better}, "
            f"high_water {'below' if falls else 'above'} it, or {other}"
        )
    return None


def _at_rest(
    signal: str, baseline: Sequence[RankReading], ranks: Sequence[RankReading]
) -> Iterator[tuple[RankReading, float]]:
    if signal == "host_used_ratio":
        # Only the first readings show what a host has in use at rest.
        yield from ((reading, ratio) for reading in baseline if (ratio := reading.host_memory.used_ratio) is not None)
        return
    if signal not in FILL_SIGNALS:
        return  # 0 at rest by what they count
    known = {reading.key: reading for reading in (*ranks, *baseline)}
    for reading in known.values():
        size, total = at_rest_bytes(reading), reading.total_bytes
        if size is None or not total or reading.asleep_tags:
            continue
        yield reading, (total - size if signal == "device_free_bytes" else size / total)


def _rounded(signal: str, value: float) -> str:
    if signal == "device_free_bytes":
        return str(math.floor(value / MIB) * MIB)
    return f"{min(math.ceil(value * 100) / 100, 1.0):g}"
