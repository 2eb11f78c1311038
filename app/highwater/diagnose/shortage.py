"""Device and host memory as the verdict judges it: whether it is short, what grew, and what gives it back. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from highwater.act.rules import MIN_GAIN_BYTES
from highwater.act.views import NOTHING_HERE
from highwater.diagnose.judgement import (
    Deed,
    Judged,
    VerdictState,
    brief,
    capital,
    free_text,
    has_free_text,
    worst_rank,
)
from highwater.growth.words import leak_line, leaks
from highwater.model.components import BY_NAME, COMPONENT_NAMES
from highwater.model.growth import RankGrowth, SeriesGrowth
from highwater.model.policy import PolicyAct, PolicyStatus, RankPressure, RulePhase, RuleStatus
from highwater.model.rank import RankReading
from highwater.model.remedies import possible_bytes
from highwater.model.report import Report
from highwater.model.units import HOUR_SECONDS, gib_text, span_text, whole_span_text

# Full within that time, or used up by a leak within a day: somebody should look now.
SOON_SECONDS, LEAK_SECONDS = HOUR_SECONDS, 24 * HOUR_SECONDS
# Less is not worth a click, and no growth worth a word.
NOTABLE_BYTES: Final = MIN_GAIN_BYTES
_RHYTHM: Final = 2
_OVER: Final = frozenset[RulePhase]({"short", "urgent", "acting", "resting"})
_PRESSING: Final[tuple[RulePhase, ...]] = ("calm", "held", "short", "urgent", "resting", "acting")


def very_short(report: Report) -> Judged | None:
    is_so = report.policy is not None and report.policy.level == "urgent" and not report.stale
    return _short_of_memory(report, "very_short") if is_so else None


def short(report: Report) -> Judged | None:
    if report.policy is not None and report.policy.level == "short" and not _is_given_back(report):
        return _short_of_memory(report, "short")
    growth, worst, host = report.growth, worst_rank(report), report.host
    seconds = growth.seconds_to_full
    if seconds is not None and seconds <= SOON_SECONDS and worst is not None:
        filling = min(growth.ranks, key=lambda one: one.seconds_to_full or seconds + 1, default=None)
        rank = next((one for one in report.ranks if filling is not None and one.key == filling.key), worst)
        what = f": {_title(growth.component)} grows{_pace(filling)}" if growth.component is not None else ""
        return Judged("short", "growing", f"{has_free_text(report, rank)} and is full in {span_text(seconds)}{what}.")
    if host is not None and host.short is not None:
        deed = Deed(text="Where host memory is", path="memory/host?format=text")
        return Judged("short", "host_memory", f"Host memory: {brief(host.short)}.", None, deed)
    leak = _leak(report)
    if leak is not None and leak.exhausted_at is not None and report.now is not None:
        left = leak.exhausted_at - report.now
        if left < LEAK_SECONDS:
            deed = Deed(text="The rate and its cause", path="memory/growth?format=text")
            text = (
                f"{brief(leak_line(leak).partition(', and at')[0])}; {leak.limit_by} is used up in {span_text(left)}."
            )
            return Judged("short", "leak", text, None, deed)
    return None


def _short_of_memory(report: Report, state: VerdictState) -> Judged:
    pressure = _pressed(report)
    rank = next((one for one in report.ranks if pressure is not None and one.key == pressure.key), worst_rank(report))
    rules = () if report.policy is None else report.policy.rules
    lacks = next((f" ({brief(rule.reason)})" for rule in rules if rule.phase in _OVER and rule.reason), "")
    if pressure is not None and pressure.short_bytes:
        lacks = f", {gib_text(pressure.short_bytes)} too little"
    free = has_free_text(report, rank) if rank is not None else "Memory is short"
    outside, other = _outside(report, rank)
    policy, gain = report.policy, _possible(report)
    if outside >= max(NOTABLE_BYTES, 0 if pressure is None else pressure.short_bytes or 0):
        who = other or "another process, or a library"
        text = f"{free}{lacks}. Outside vLLM {gib_text(outside)} more is in use than at its start: {who}."
        return Judged(state, "outside" if other is None else "neighbour", text)
    if policy is not None and policy.mode == "observe":
        return Judged(state, "observe", f"{free}{lacks}, and Highwater only watches.")
    if gain >= NOTABLE_BYTES or (pressure is not None and gain >= (pressure.short_bytes or 1)):
        return Judged(state, "releasable", f"{free}{lacks}; {gib_text(gain)} in all can be given back.")
    recent = report.growth.recent
    used = f": {_title(recent.component)} {_in_time(recent.bytes, recent.seconds)}" if recent is not None else ""
    return Judged(state, "in_use", f"{free}{lacks}. It is in use{used}; nothing can be given back.")


def kept_up(report: Report) -> Judged | None:
    acts = _reliefs(report)
    if not _is_given_back(report) or not acts:
        return None
    spans = [later.at - earlier.at for later, earlier in pairwise(acts)]
    every = report.growth.refill_seconds or sum(spans) / len(spans)
    sizes = [act.freed_bytes for act in acts if act.freed_bytes]
    each = f", {gib_text(sum(sizes) / len(sizes))} each time" if sizes else ""
    text = f"{free_text(report)}; it fills about every {span_text(every)} and is given back{each}."
    return Judged("keeps_up", "relief", text)


def fine(report: Report) -> Judged:
    paces = [one.bytes_per_second for one in report.growth.ranks]
    free, seconds = free_text(report), report.growth.seconds_to_full
    grows = "; nothing grows" if paces and all(pace == 0 for pace in paces) else ""
    grows = grows if seconds is None else f"; full in {span_text(seconds)} at this pace"
    last = next(iter(() if report.policy is None else report.policy.acts), None)
    acted = ""
    if last is not None and report.now is not None:
        gave = f" and gave back {gib_text(last.freed_bytes)}" if last.freed_bytes else ""
        acted = f" Highwater last acted {span_text(max(report.now - last.at, 0.0))} ago{gave}."
    engine = report.engine
    busy = f"The engine is busy: {brief(engine.hint)}. " if engine.state == "busy" and engine.hint else ""
    memory = f"{free}{grows}." if free else "The engine is ready; what is free is not known."
    return Judged("fine", "none", f"{busy}{memory}{acted}")


# --- figures ---


def _pressed(report: Report) -> RankPressure | None:
    """Return the rank that is short of most, by whatever rule."""
    rules = () if report.policy is None else report.policy.rules
    ranks = [rank for rule in rules for rank in rule.short_ranks]
    return max(ranks, key=lambda rank: rank.short_bytes or 0, default=None)


def _reliefs(report: Report) -> list[PolicyAct]:
    """Return the reliefs of the last minutes that reached their water, newest first; none where they are too few."""
    acts = [] if report.policy is None else [act for act in report.policy.acts if act.reached]
    return acts if len(acts) >= _RHYTHM else []


def _is_given_back(report: Report) -> bool:
    """Return whether relief keeps up: it reached its water more than once, and nothing is in its way now."""
    if report.policy is None or not _reliefs(report):
        return False
    if report.policy.level not in ("short", "urgent"):
        return True
    over = [rule for rule in report.policy.rules if rule.phase in _OVER]
    return all(rule.phase == "acting" or (rule.phase == "short" and _possible(report)) for rule in over)


def _possible(report: Report, remedy: str = "release") -> int:
    """Return what a remedy can give back to devices at most; what it could on CPU is not known."""
    return possible_bytes(remedy, [rank for rank in report.ranks if not rank.device.traits.is_host_memory]) or 0


def _outside(report: Report, rank: RankReading | None) -> tuple[int, str | None]:
    """Return by how much what is outside PyTorch has grown on a rank since the engine was ready, and who holds it."""
    if rank is None or rank.device.traits.is_host_memory:
        return 0, None
    growth = next((one for one in report.growth.ranks if one.key == rank.key), None)
    grown = None if growth is None or growth.grown is None else growth.grown.non_torch_bytes
    return grown or 0, rank.shared_with


def _leak(report: Report) -> SeriesGrowth | None:
    going_on = [one for one in leaks(report.growth.series) if not one.is_over]
    return min(going_on, key=lambda one: one.exhausted_at or float("inf"), default=None)


# --- what grew, what happens next, what to do ---


def _title(component: str) -> str:
    return BY_NAME[component].title


def _pace(growth: RankGrowth | None) -> str:
    pace = None if growth is None else growth.bytes_per_second
    return f" by {gib_text(pace)}/s" if pace else ""


def _in_time(size: int, seconds: float) -> str:
    return f"+{gib_text(size)} in {whole_span_text(max(seconds, 1.0))}"


def grew(report: Report) -> str | None:
    growth, worst = report.growth, worst_rank(report)
    parts = []
    if growth.recent is not None:
        recent = growth.recent
        of_rank = f" on {recent.name}" if len(report.ranks) > 1 else ""
        other = worst.shared_with if worst is not None else None
        is_outside = recent.component == "non_torch_bytes" and other is not None
        title = f"outside vLLM ({other})" if is_outside else _title(recent.component)
        parts.append(f"{title} {_in_time(recent.bytes, recent.seconds)}{of_rank}")
    elif (since := _grown_since_ready(report, worst)) is not None:
        parts.append(since)
    if (leak := _leak(report)) is not None:
        parts.append(leak_line(leak))
    return f"{capital('; '.join(parts))}." if parts else None


def _grown_since_ready(report: Report, worst: RankReading | None) -> str | None:
    growth = next((one for one in report.growth.ranks if worst is not None and one.key == worst.key), None)
    if growth is None or growth.grown is None or worst is None:
        return None
    sizes = {name: getattr(growth.grown, name) or 0 for name in COMPONENT_NAMES}
    most, ready_at = max(sizes, key=lambda name: sizes[name]), report.growth.baseline_taken_at
    if sizes[most] < NOTABLE_BYTES:
        return None
    of_rank = f" on {worst.name}" if len(report.ranks) > 1 else ""
    ago = f" {span_text(report.now - ready_at)} ago" if report.now is not None and ready_at is not None else ""
    return f"{_title(most)} +{gib_text(sizes[most])}{of_rank} since it was ready{ago}"


def next_text(report: Report) -> str | None:
    """Return what Highwater does by itself: now, or when memory is short."""
    policy, running = report.policy, report.relief
    if running is not None:
        return f"{capital(running.text)}{f' ({running.why})' if running.why else ''}."
    if policy is None or policy.level == "unknown":
        return None
    if not policy.rules:
        return "Nothing is given back by itself: the policy has no rules."
    if policy.mode == "observe":
        return "Highwater only watches (mode observe)."
    rule = max(policy.rules, key=lambda one: _PRESSING.index(one.phase))
    if rule.phase != "calm":
        return f"{_rule_next(rule, report)}."
    return _next_when_short(report, policy)


def _next_when_short(report: Report, policy: PolicyStatus) -> str | None:
    refusals = [remedy.unavailable for one in policy.rules for remedy in one.remedies]
    if refusals and None not in refusals:
        return f"Highwater only watches: {brief(str(refusals[0]))}."
    worst = worst_rank(report)
    pressure = None if worst is None else report.pressure_of(worst)
    if pressure is None or pressure.high_free_bytes is None:
        return None
    gain, at = _possible(report), gib_text(pressure.high_free_bytes)
    given = f"{gib_text(gain)}; no request waits" if gain >= NOTABLE_BYTES else "what it can"
    host = ""
    if report.host is not None and report.host.warnings and report.host.short is None:
        host = f" Host: {brief(report.host.warnings[0])}."
    return f"At {at} free Highwater gives back {given}.{host}"


def _rule_next(rule: RuleStatus, report: Report) -> str:
    if rule.phase == "acting" and rule.reason:
        return capital(brief(rule.reason))
    if rule.phase == "held":
        return f"Nothing is given back by itself now: {brief(rule.reason or 'its signal is not known')}"
    if rule.phase == "resting" and rule.rest_until is not None and report.now is not None:
        why = (rule.reason or "").rpartition("; ")[2]
        return f"Highwater tries again in {span_text(max(rule.rest_until - report.now, 0.0))}: {brief(why)}"
    if _possible(report) >= NOTABLE_BYTES:
        return "Highwater gives it back now"
    why = (rule.reason or "").partition("; ")[2]
    is_new = bool(why) and not why.startswith(NOTHING_HERE)
    return f"Highwater acts as soon as there is something to give back{f': {brief(why)}' if is_new else ''}"


def reclaim(report: Report) -> Deed | None:
    """Return the gentlest call that gives much back, and fails no request; ``None`` where none gives much."""
    engine = report.engine
    if not engine.traits.takes_remedies or not engine.capabilities.get("collective_rpc", True):
        return None
    for remedy in ("release", "trim_encoder_cache"):
        size = _possible(report, remedy)
        is_certain = all(rank.trimmable_bytes is not None for rank in report.ranks) or remedy == "release"
        if size >= NOTABLE_BYTES and is_certain:
            body = {"remedies": [remedy], "mode": "safe"}
            return Deed(text=f"Reclaim {gib_text(size)} now", path="memory/reclaim", body=body, bytes=size)
    return None
