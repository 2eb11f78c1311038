"""The policy's reasons in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from highwater.accounting.remedies import TRAITS
from highwater.policy.gains import possible_gain
from highwater.policy.memory import MAX_RELAPSES, RuleMemory
from highwater.policy.pressure import Facts, Pressure
from highwater.policy.rules import FILL_SIGNALS, HOST_SIGNALS, MIN_GAIN_BYTES, Rule
from highwater.readings.policy import PolicyLevel
from highwater.readings.rank import RankKey, rank_title
from highwater.units import MIB


def short_text(pressure: Pressure, rule: Rule) -> str:
    where = pressure.reading.name
    missing = f"{math.ceil(pressure.need_bytes / MIB):,} MiB"
    if rule.signal in FILL_SIGNALS:
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
) -> str | None:
    parts = []
    if level in {"short", "urgent"}:
        needy = sorted(counted, key=lambda pressure: -pressure.need_bytes)
        if needy[0].need_bytes > 0:
            parts.append(short_text(needy[0], rule))
        if is_helpless:
            parts += _helpless_texts(rule, level, needy, facts)
    if cooldown is not None:
        parts.append(cooldown)
    if silent:
        parts.append(_silence_text(silent))
    return "; ".join(parts) or None


def _helpless_texts(rule: Rule, level: PolicyLevel, needy: Sequence[Pressure], facts: Facts) -> list[str]:
    trimmable = sum(pressure.reading.trimmable_bytes or 0 for pressure in needy) if level == "short" else 0
    if trimmable >= MIN_GAIN_BYTES and rule.is_derived and "trim_encoder_cache" not in facts.unavailable:
        return [
            f"{trimmable // MIB:,} MiB of encoder outputs could be trimmed, and are kept until it is urgent, as vLLM "
            "would want them back; `highwater reclaim trim_encoder_cache` does it now"
        ]
    texts, blocked = [], []
    for name in rule.ordered_remedies:
        refusal = facts.unavailable.get(name)
        text = _left_text(name, rule, level, needy)
        if text is not None:
            texts.append(text if refusal is None else f"{text}, and cannot: {refusal}")
        elif refusal is not None:
            blocked.append(f"{name}: {refusal}")
    texts = texts or ["nothing here to give back" + (f" ({'; '.join(blocked)})" if blocked else "")]
    if rule.is_derived and any(pressure.reading.card in facts.shared_cards for pressure in needy):
        texts.append(
            "the device is shared with another engine: trim and reset, which would feed that one, are left to you"
        )
    # No remedy reaches what grew outside PyTorch since the engine became ready.
    earlier = {reading.key: reading.components.non_torch_bytes for reading in facts.baseline}.get(needy[0].key)
    now = needy[0].reading.components.non_torch_bytes
    if now is not None and earlier is not None and now - earlier >= MIN_GAIN_BYTES:
        grown = f"{(now - earlier) // MIB:,} MiB more than at the start are held outside PyTorch"
        texts.append(f"{grown}, by libraries or by other processes there")
    return texts


def _left_text(remedy: str, rule: Rule, level: PolicyLevel, needy: Sequence[Pressure]) -> str | None:
    if rule.signal not in TRAITS[remedy].lowers and rule.signal not in HOST_SIGNALS:
        return None
    gains = [possible_gain(remedy, rule.signal, pressure.reading) for pressure in needy]
    most = f"{math.ceil(sum(gain.size or 0 for gain in gains) / MIB):,} MiB"
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
        return f"what release gives back was in use again within moments, {MAX_RELAPSES} times running: cooldown"
    return "the last relief did not reach low water: cooldown"


def held_text(pressures: Sequence[Pressure], silent: Sequence[RankKey]) -> str:
    notes = dict.fromkeys(pressure.note for pressure in pressures if pressure.note is not None)
    return "; ".join([*notes, *([_silence_text(silent)] if silent else [])]) or "no rank is known"


def _silence_text(silent: Sequence[RankKey]) -> str:
    names = ", ".join(rank_title(*key) for key in silent)
    verb = "rank {} is silent" if len(silent) == 1 else "ranks {} are silent"
    return verb.format(names) + ": the last known level stands"
