"""The shortage of memory on each rank by a rule, and what a remedy can give there. Pure.

The waters of the default rule are free bytes on each rank, derived from the engine's own plan. A server dies of one
absolute demand (an image's activations, a workspace) that meets too few free bytes while the allocator keeps blocks
that nobody uses. What vLLM holds by design is a share of any size. So the waters are measured in free bytes, in what
the plan leaves over::

    total ──────────────────────────────────────────────────────────────┐
      │◄──────────── planned = max(requested, at rest) ────►│◄─ slack ─►│
                                                            0   high low  free

    slack = total - max(requested, at rest)
    high  = min(max(slack / 4, 512 MiB), slack / 2, 2 GiB)      acts with less free than that
    low   = min(2 x high, 0.9 x slack)                          satisfied with that much free; so it can be reached

*At rest* is what stays in use whatever the policy does: used bytes less encoder outputs, releasable reserve and other
tensors, all processes on the device counted. It is taken from the first readings of the engine's life where those are
known, so that a growing neighbour on the device, or a leak, does not lower the waters step by step. A sidecar that
started later takes the present reading.

``requested`` is what the engine reports, else the total times ``gpu_memory_utilization`` where that sized the KV pool;
where it did not, what is at rest alone counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from highwater.act.rules import Rule
from highwater.model.rank import RankKey, RankReading
from highwater.model.remedies import TRAITS, PossibleGain, reserve_bytes
from highwater.model.report import Report
from highwater.model.units import GIB, MIB

MIN_HIGH_BYTES: Final = 512 * MIB
MAX_HIGH_BYTES: Final = 2 * GIB
MIN_SLACK_BYTES: Final = 256 * MIB
LOW_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the engine beside the report."""

    life: str = ""  # the id of its present life: what is remembered of another is dropped
    baseline: tuple[RankReading, ...] = ()  # the first readings of that life; empty where unknown
    unavailable: Mapping[str, str] = field(default_factory=dict)  # remedies that would be refused now, and why
    encoder_is_profiled: bool = True  # the KV pool was sized with the encoder cache's own share in mind
    shared_cards: frozenset[str] = frozenset()  # devices that another engine is known to use as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One rank by one rule."""

    reading: RankReading
    value: float | None  # the signal; None where unknown
    high: float | None = None  # the rule acts here, in the signal's unit; None without waters
    low: float | None = None  # it is satisfied here
    need_bytes: int = 0  # what must be given back to reach low water
    gain_bytes: int = 0  # the least gain that the rule runs a remedy for, on this device
    is_urgent: bool = False  # so little is free that nothing may wait
    note: str | None = None  # why the rank is left out; None where it counts
    is_finding: bool = False  # an operator should hear of that

    @property
    def key(self) -> RankKey:
        return self.reading.key

    @property
    def required_bytes(self) -> int:
        """The bytes that a remedy must give here to be worth running, and to count as effective."""
        return max(min(self.gain_bytes, self.need_bytes), 1)


def pressures(rule: Rule, report: Report, facts: Facts) -> list[Pressure]:
    if rule.is_derived:
        baseline = {reading.key: reading for reading in facts.baseline}
        ranks = [_derived(rule, reading, baseline.get(reading.key)) for reading in report.ranks]
    elif rule.traits.value is None:
        ranks = _growth(rule, report)
    else:
        ranks = [_own(rule, reading) for reading in report.ranks]
    for number, pressure in enumerate(ranks):
        reading = pressure.reading
        if reading.asleep_tags:
            ranks[number] = replace(pressure, note=f"asleep: {', '.join(reading.asleep_tags)}")
        elif rule.traits.is_of_host and not reading.host_memory.cgroup_limit_bytes:
            note = "its container has no memory limit: what the whole machine uses is not the engine's to give back"
            ranks[number] = replace(pressure, note=note)
    return ranks


def is_reached(rule: Rule, pressure: Pressure) -> bool:
    """Return whether the rank is at high water or beyond. Derived waters are reached under them, not at them."""
    if pressure.value is None or pressure.high is None:
        return False
    if rule.is_derived:
        return pressure.value < pressure.high
    return pressure.value <= pressure.high if rule.traits.falls else pressure.value >= pressure.high


def is_relieved(rule: Rule, pressure: Pressure) -> bool:
    if pressure.value is None or pressure.low is None:
        return True
    return _relieved(rule, pressure.value, pressure.low)


def possible_gain(remedy: str, signal: str, reading: RankReading) -> PossibleGain:
    traits = TRAITS[remedy]
    return traits.can_give(reading) if signal in traits.lowers else PossibleGain(None)


def _relieved(rule: Rule, value: float, water: float) -> bool:
    return value >= water if rule.traits.falls else value <= water


# --- the default rule ---


class Waters(NamedTuple):
    """Free bytes of one rank's device: below ``high`` the rule acts, at ``low`` it is satisfied."""

    high: int
    low: int


def at_rest_bytes(reading: RankReading) -> int | None:
    """Return what stays in use whatever the policy does, by all processes on the device; ``None``: unknown."""
    if reading.used_bytes is None:
        return None
    parts = reading.components
    passing = (parts.encoder_cache_bytes or 0) + (parts.other_tensors_bytes or 0) + (reserve_bytes(reading) or 0)
    return max(reading.used_bytes - passing, 0)


def requested_bytes(reading: RankReading) -> int | None:
    budget, total = reading.budget, reading.total_bytes
    if budget.requested_bytes is not None:
        return budget.requested_bytes
    share = budget.gpu_memory_utilization
    # The workers say nothing where the KV pool's size was given (--kv-cache-memory-bytes, from 0.19 on on an NPU too),
    # and the share is then a default that sized nothing; vllm-ascend up to 0.13 never says it
    # (worker_ext/highwater_worker/memory/engine_budget.py).
    is_old_ascend = reading.device.traits.platform == "ascend" and not reading.launch.kv_cache_given
    if share is None or total is None or not is_old_ascend:
        return None
    return int(total * share)


def slack_bytes(reading: RankReading, baseline: RankReading | None) -> int | None:
    """Return what the engine's plan leaves over on this device; ``None``: unknown.

    The baseline is the rank at the beginning of its engine's life, if known.
    """
    at_rest = at_rest_bytes(baseline) if baseline is not None else None
    if at_rest is None:
        at_rest = at_rest_bytes(reading)
    if at_rest is None or reading.total_bytes is None:
        return None
    return reading.total_bytes - max(requested_bytes(baseline or reading) or 0, at_rest)


def derive(slack: int) -> Waters | None:
    if slack < MIN_SLACK_BYTES:
        return None
    high = min(max(slack // 4, MIN_HIGH_BYTES), slack // 2, MAX_HIGH_BYTES)
    return Waters(high, min(2 * high, int(slack * LOW_SHARE)))


def _derived(rule: Rule, reading: RankReading, baseline: RankReading | None) -> Pressure:
    free = reading.free_bytes
    if reading.device.traits.is_host_memory:
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


def _own(rule: Rule, reading: RankReading) -> Pressure:
    high, low = rule.high_water or 0.0, rule.low_water or 0.0
    value = None if rule.traits.value is None else rule.traits.value(reading)
    if value is None:
        return Pressure(reading=reading, value=None, high=high, low=low, note=f"{rule.signal} is not known")
    totals = {"device_used_ratio": reading.total_bytes or 0, "host_used_ratio": reading.host_memory.share[1] or 0}
    scale = totals.get(rule.signal, 1)
    free = reading.free_bytes if reading.free_bytes is not None else math.inf
    high_free = high if rule.traits.falls else (1 - high) * (reading.total_bytes or 0)
    return Pressure(
        reading=reading,
        value=value,
        high=high,
        low=low,
        need_bytes=max(math.ceil((low - value if rule.traits.falls else value - low) * scale), 0),
        gain_bytes=min(rule.min_gain_bytes, int(abs(high - low) * scale)),
        is_urgent=rule.traits.is_fill and free < high_free / 2,
    )


def _growth(rule: Rule, report: Report) -> list[Pressure]:
    """Return the ranks by growth, which is a sum over them: each has an even share of what is to be given back."""
    growth, count = report.growth, max(len(report.ranks), 1)
    grown = growth.host_since_ready_bytes if rule.traits.is_of_host else growth.since_ready_bytes
    high, low = rule.high_water or 0.0, rule.low_water or 0.0
    need = max(-(math.floor(low - grown) // count), 0) if grown is not None else 0
    gain = min(rule.min_gain_bytes, int((high - low) / count))
    note = None if grown is not None else f"{rule.signal} is not known"
    return [
        Pressure(reading=reading, value=grown, high=high, low=low, need_bytes=need, gain_bytes=gain, note=note)
        for reading in report.ranks
    ]


# --- waters that the engine cannot reach ---


class OutOfReach(NamedTuple):
    """Why a water cannot be reached, and what to change."""

    why: str
    change: str

    @property
    def text(self) -> str:
        return f"{self.why}. {self.change}"


def unreachable(rule: Rule, baseline: Sequence[RankReading], ranks: Sequence[RankReading]) -> OutOfReach | None:
    """Return why the engine at rest, idle and with empty caches, would still be over a water of the rule, or ``None``.

    The baseline is the first readings of the engine's life; without it the parts of the present ranks show what stays.
    """
    if rule.is_derived:
        return None
    at_rest, falls = list(_at_rest(rule, baseline, ranks)), rule.traits.falls
    if not at_rest:
        return None
    reading, value = (min if falls else max)(at_rest, key=lambda pair: pair[1])
    for key, water in (("low_water", rule.low_water or 0.0), ("high_water", rule.high_water or 0.0)):
        if _relieved(rule, value, water):
            continue
        has, better = ("has", "or less") if falls else ("uses", "or more")
        shown = f"{value:.4g}" if rule.traits.is_ratio else f"{value:.0f}"
        rounded = f"{min(math.ceil(value * 100) / 100, 1.0):g}"
        if falls:
            rounded = str(math.floor(value / MIB) * MIB)
        other = "free memory on the host" if rule.traits.is_of_host else "lower --gpu-memory-utilization"
        where = reading.name
        return OutOfReach(
            f"{rule.name}.{key}: {water:g} of {rule.signal} cannot be reached: {where} {has} {shown} at rest, with "
            "nothing left to give back",
            f"Set low_water to {rounded} {better}, high_water {'below' if falls else 'above'} it, or {other}",
        )
    return None


def _at_rest(
    rule: Rule, baseline: Sequence[RankReading], ranks: Sequence[RankReading]
) -> Iterator[tuple[RankReading, float]]:
    if rule.signal == "host_used_ratio":
        # Only the first readings show what a host has in use at rest.
        yield from ((reading, ratio) for reading in baseline if (ratio := reading.host_memory.used_ratio) is not None)
        return
    if not rule.traits.is_fill:
        return  # 0 at rest by what they count
    known = {reading.key: reading for reading in (*ranks, *baseline)}
    for reading in known.values():
        size, total = at_rest_bytes(reading), reading.total_bytes
        if size is None or not total or reading.asleep_tags:
            continue
        yield reading, (total - size if rule.traits.falls else size / total)
