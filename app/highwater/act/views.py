"""A rule at one report, its reasons in words, and how the report and ``GET /policy`` show both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from highwater.act.pressure import Facts, Pressure, is_reached, possible_gain
from highwater.act.rules import MIN_GAIN_BYTES, Rule
from highwater.act.state import MAX_RELAPSES, RuleMemory
from highwater.model.growth import RankGrowth
from highwater.model.policy import PolicyLevel, PolicyMode, RankPressure, RemedyState, RulePhase, RuleStatus
from highwater.model.rank import RankKey, rank_title
from highwater.model.remedies import TRAITS
from highwater.model.report import Report
from highwater.model.units import gib_text, share_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleView:
    """One rule at one report; ``hindrance`` and ``change`` are as in ``RuleStatus``."""

    rule: Rule
    level: PolicyLevel
    phase: RulePhase
    reason: str | None = None  # None where all is calm
    hindrance: str | None = None
    change: str | None = None
    pressures: tuple[Pressure, ...] = ()
    worst: Pressure | None = None  # None without a known value
    is_helpless: bool = False
    # What an operator should hear of once: that it is helpless, or why the rule can never act here.
    finding: str | None = None
    cooldown_until: float | None = None


# --- reasons ---


def short_text(pressure: Pressure, rule: Rule) -> str:
    where = pressure.reading.name
    missing = gib_text(pressure.need_bytes)
    if rule.traits.is_fill:
        return f"short by {missing} on {where}"
    return f"{rule.signal} is {missing} over low water on {where}"


def reason_text(
    rule: Rule,
    level: PolicyLevel,
    counted: Sequence[Pressure],
    facts: Facts,
    *,
    is_helpless: bool,
    silent: Sequence[RankKey],
    cooldown: str | None,
) -> tuple[str | None, str | None]:
    """Return why the rule is in its phase, and its hindrance."""
    parts, hindrance = [], cooldown
    if level in {"short", "urgent"}:
        needy = sorted(counted, key=lambda pressure: -pressure.need_bytes)
        if needy[0].need_bytes > 0:
            parts.append(short_text(needy[0], rule))
        if is_helpless:
            texts, has_something = _helpless_texts(rule, level, needy, facts)
            parts += texts
            hindrance = cooldown or ("; ".join(texts) if has_something else "")
    if cooldown is not None:
        parts.append(cooldown)
    if silent:
        parts.append(_silence_text(silent))
        hindrance = parts[-1] if hindrance is None else hindrance
    return "; ".join(parts) or None, hindrance


def _helpless_texts(rule: Rule, level: PolicyLevel, needy: Sequence[Pressure], facts: Facts) -> tuple[list[str], bool]:
    """Return why nothing is given back, and whether there is something at all."""
    trimmable = sum(pressure.reading.trimmable_bytes or 0 for pressure in needy) if level == "short" else 0
    if trimmable >= MIN_GAIN_BYTES and rule.is_derived and "trim_encoder_cache" not in facts.unavailable:
        return [
            f"{gib_text(trimmable)} of encoder outputs could be trimmed, and are kept until it is urgent, as vLLM "
            "would want them back; `highwater reclaim trim_encoder_cache` does it now"
        ], True
    texts, blocked = [], []
    for name in rule.ordered_remedies:
        refusal = facts.unavailable.get(name)
        text = _what_it_could_give(name, rule, level, needy)
        if text is not None:
            texts.append(text if refusal is None else f"{text}, and cannot: {refusal}")
        elif refusal is not None:
            blocked.append(f"{name}: {refusal}")
    has_something = bool(texts)
    texts = texts or ["nothing here to give back" + (f" ({'; '.join(blocked)})" if blocked else "")]
    if rule.is_derived and any(pressure.reading.card in facts.shared_cards for pressure in needy):
        texts.append(
            "the device is shared with another engine: trim and reset, which would feed that one, are left to you"
        )
    # No remedy reaches what grew outside PyTorch since the engine became ready.
    earlier = {reading.key: reading.components.non_torch_bytes for reading in facts.baseline}.get(needy[0].key)
    now = needy[0].reading.components.non_torch_bytes
    if now is not None and earlier is not None and now - earlier >= MIN_GAIN_BYTES:
        grown = f"{gib_text(now - earlier)} more than at the start are held outside PyTorch"
        texts.append(f"{grown}, by libraries or by other processes there")
    return texts, has_something


def _what_it_could_give(remedy: str, rule: Rule, level: PolicyLevel, needy: Sequence[Pressure]) -> str | None:
    if rule.signal not in TRAITS[remedy].lowers and not rule.traits.is_of_host:
        return None
    gains = [possible_gain(remedy, rule.signal, pressure.reading) for pressure in needy]
    most = gib_text(sum(gain.size or 0 for gain in gains))
    if any(gain.size is None for gain in gains):
        return f"what {remedy} could give back is not known"
    if not all(gain.is_certain for gain in gains):
        return f"what {remedy} could give back is not known: {most} at most"
    later = level == "short" and rule.is_derived and TRAITS[remedy].default_use == "last_resort"
    why = "once memory is very short" if later else "too little, or less than it said before"
    return f"{remedy} could give back {most}, {why}" if any(gain.size for gain in gains) else None


def cooldown_text(memory: RuleMemory) -> str:
    last = max(memory.runs.values(), key=lambda run: run.at, default=None)
    if last is not None and last.outcome == "observed":
        return "a remedy would have been run and was only observed; the next one is looked for after the cooldown"
    if memory.relapses == MAX_RELAPSES:
        return f"what release gives back was in use again within moments, {MAX_RELAPSES} times running"
    return "the last relief did not reach low water"


def held_text(pressures: Sequence[Pressure], silent: Sequence[RankKey]) -> str:
    notes = dict.fromkeys(pressure.note for pressure in pressures if pressure.note is not None)
    return "; ".join([*notes, *([_silence_text(silent)] if silent else [])]) or "no rank is known"


def _silence_text(silent: Sequence[RankKey]) -> str:
    names = ", ".join(rank_title(*key) for key in silent)
    verb = "rank {} is silent" if len(silent) == 1 else "ranks {} are silent"
    return verb.format(names) + ": the last known level stands"


# --- as shown ---


def rule_status(
    view: RuleView, memory: RuleMemory, report: Report, unavailable: Mapping[str, str], *, to_unix: float
) -> RuleStatus:
    """Return one rule as shown; ``to_unix`` are the seconds that turn the policy's times into Unix time."""
    rule, worst = view.rule, view.worst
    high, low = (worst.high, worst.low) if worst is not None else (rule.high_water, rule.low_water)
    growths = {growth.key: growth for growth in report.growth.ranks}
    ranks = tuple(_rank(rule, pressure, growths.get(pressure.key)) for pressure in view.pressures)

    def remedy(name: str) -> RemedyState:
        state = RemedyState(name=name, unavailable=unavailable.get(name))
        if (run := memory.runs.get(name)) is None:
            return state
        return replace(
            state,
            last_run_at=run.at + to_unix,
            last_outcome=run.judged,
            last_reason=run.reason,
            last_freed_bytes=run.freed_bytes,
            last_freed_ranks=run.ranks,
        )

    is_at_work = not report.stale and report.engine.traits.takes_remedies
    lacks_waters = high is None or low is None
    awake = (reading for reading in report.ranks if not reading.asleep_tags)
    return RuleStatus(
        name=rule.name,
        signal=rule.signal,
        phase=view.phase,
        value=worst.value if worst is not None else None,
        high_water=high,
        low_water=low,
        reason=view.reason,
        hindrance=view.hindrance,
        change=view.change,
        since=memory.since + to_unix if memory.since is not None else None,
        rest_until=view.cooldown_until + to_unix if view.cooldown_until is not None else None,
        ranks=ranks if rule.traits.is_fill else (),
        remedies=tuple(map(remedy, rule.ordered_remedies)),
        is_dormant=view.phase == "held"
        and is_at_work
        and any(not (lacks_waters and reading.device.traits.is_host_memory) for reading in awake),
    )


def summary(views: Sequence[RuleView], level: PolicyLevel, *, mode: PolicyMode = "act") -> str:
    if not views:
        return "there are no rules: nothing is given back by itself"
    view = next(view for view in views if view.level == level)
    rule, worst = view.rule, view.worst
    text = view.reason or f"rule {rule.name} has nothing to do"
    if view.reason is None and worst is not None and worst.value is not None and worst.high is not None:
        value, water = (share_text(one) if rule.traits.is_ratio else gib_text(one) for one in (worst.value, worst.high))
        text = f"{rule.signal} is {value}; acts at {water}"
        if rule.traits.falls:
            text = f"{worst.reading.name} has {value} free; acts at {water} free"
    return f"{text}; observe mode: nothing is done" if mode == "observe" else text


def _rank(rule: Rule, pressure: Pressure, growth: RankGrowth | None) -> RankPressure:
    reading, total = pressure.reading, pressure.reading.total_bytes

    def as_free(water: float | None) -> int | None:
        if water is None:
            return None
        if rule.traits.falls:
            return int(water)
        return int((1 - water) * total) if total is not None else None

    high, free = as_free(pressure.high), reading.free_bytes
    to_high_water: float | None = None
    if growth is not None and high is not None and free is not None and free > high:
        left, pace, cached = growth.seconds_to_full, growth.bytes_per_second, growth.cache_room_bytes or 0
        room = free - high
        to_high_water = room / pace if cached and pace else 0.0
        if room > cached:  # once the encoder cache is full, all else grows alone
            to_high_water = None if left is None else max(left * (room - cached) / (free - cached), to_high_water)
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
