"""The verdict: one state, one sentence with the figure that decides, what grew, the next act, and one thing to do.

It is made of what the report already says, and of nothing else: no reading, no clock. Every face shows it and judges
nothing itself. Only what is so now decides: an incident counts while the engine is down, and never after.

====================== =========================== ============ =================
engine                 memory is fine              short        very short
====================== =========================== ============ =================
ready, busy            ``fine``, ``keeps_up``: 0   ``short``: 1 ``very_short``: 2
slow, paused, sleeping ``slow`` ...: 1             the same     ``very_short``: 2
starting               ``starting``: 1             the same     the same
nothing ever answered  ``unknown``: 1              the same     the same
stuck, ..., gone       ``stuck``, ``silent``,      the same     the same
                       ``dead``: 2; ``dead`` for
                       ``stopped``: 1
nothing read           ``unknown``: 1              the same     the same
ranks are missing      ``unknown``: 1              ``short``: 1 ``very_short``: 2
the policy cannot act  ``cannot_act``: 1           ``short``: 1 ``very_short``: 2
====================== =========================== ============ =================
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Final

from highwater.act.rules import MIN_GAIN_BYTES
from highwater.diagnose import engine_verdict
from highwater.diagnose.engine_verdict import (
    Deed,
    Judged,
    Reason,
    VerdictState,
    brief,
    free_text,
    has_free_text,
    rules_of,
    worst_rank,
)
from highwater.diagnose.finding import capital
from highwater.growth.words import leak_line, leaks
from highwater.model.components import BY_NAME, COMPONENT_NAMES
from highwater.model.growth import RankGrowth, RecentGrowth, SeriesGrowth
from highwater.model.policy import PolicyAct, PolicyStatus, RankPressure, RulePhase, RuleStatus
from highwater.model.rank import RankReading
from highwater.model.remedies import possible_bytes
from highwater.model.report import Report
from highwater.model.units import HOUR_SECONDS, MIB, gib_text, span_text, whole_span_text
from highwater.process.errors import ATTENTION, CRITICAL, OK

__all__ = ["Deed", "JudgedReport", "Reason", "Verdict", "VerdictState", "verdict"]

_STEPS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_EXIT: Final[Mapping[VerdictState, int]] = {
    **dict.fromkeys(("fine", "keeps_up"), OK),
    **dict.fromkeys(("very_short", "stuck", "silent", "dead"), CRITICAL),
}
_OUTSIDE: Final = frozenset[Reason]({"outside", "neighbour", "grown_outside"})
_OF_MEMORY: Final = frozenset[VerdictState]({"fine", "keeps_up", "short", "very_short"})
# Full within that time, or used up by a leak within a day: somebody should look now.
SOON_SECONDS, LEAK_SECONDS = HOUR_SECONDS, 24 * HOUR_SECONDS
# Less is not worth a click, and no growth worth a word.
NOTABLE_BYTES: Final = MIN_GAIN_BYTES
_OUTSIDE_BYTES: Final = 1024 * MIB  # of growth outside vLLM is said although memory is not short
_UNWATCHED_BYTES: Final = 512 * MIB  # the least at which a rule that is derived acts
_RHYTHM: Final = 2
_OVER: Final = frozenset[RulePhase]({"short", "urgent", "acting", "resting"})
_PRESSING: Final[tuple[RulePhase, ...]] = ("calm", "held", "short", "urgent", "resting", "acting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``exit_status`` is that of `highwater status`; ``next`` is what happens by itself."""

    state: VerdictState
    exit_status: int
    reason: Reason
    sentence: str
    grew: str | None = None
    next: str | None = None
    do: Deed | None = None
    # The first thing to look at or do in this very state, in one sentence; `runbook`: its whole page.
    step: str | None = None
    runbook: str | None = None

    @property
    def with_step(self) -> str:
        return f"{self.sentence} {self.step or ''}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReport(Report):
    """A report as it is shown; ``rank_order``: places in ``ranks``, the worst off first."""

    verdict: Verdict
    rank_order: tuple[int, ...] = ()

    @classmethod
    def of(cls, report: Report) -> JudgedReport:
        known = {field.name: getattr(report, field.name) for field in fields(Report)}
        return cls(**known, verdict=verdict(report), rank_order=report.worst_places)


def verdict(report: Report) -> Verdict:
    judged = next(found for rule in _IN_ORDER if (found := rule(report)) is not None)
    said, is_stopped = _STEPS[judged.reason], judged.reason == "stopped"
    page = f"docs/runbooks/{said['runbook']}.html" if "runbook" in said else None
    is_known = not report.stale and not report.engine.traits.is_absent
    deed = judged.do or (reclaim(report) if judged.state in _OF_MEMORY and is_known else None)
    if deed is None and page is not None and judged.state not in ("fine", "keeps_up"):
        deed = Deed(text="What to do", path=page)
    return Verdict(
        state=judged.state,
        exit_status=ATTENTION if is_stopped else _EXIT.get(judged.state, ATTENTION),
        reason=judged.reason,
        sentence=judged.sentence,
        grew=grew(report, is_outside_said=judged.reason in _OUTSIDE) if is_known else None,
        next=judged.next or (next_text(report) if is_known else None),
        do=deed,
        step=judged.step or said.get("step"),
        runbook=page,
    )


# --- whether memory is short ---


def very_short(report: Report) -> Judged | None:
    is_so = report.policy is not None and report.policy.level == "urgent" and not report.stale
    return _short_of_memory(report, "very_short") if is_so else None


def short(report: Report) -> Judged | None:
    if report.policy is not None and report.policy.level == "short" and not _is_given_back(report):
        return _short_of_memory(report, "short")
    growth, worst, host = report.growth, worst_rank(report), report.host
    is_host = all(rank.device.traits.is_host_memory for rank in report.ranks)
    is_watched = any(rule.signal.startswith("device_") for rule in rules_of(report))
    is_unwatched = report.policy is not None and not is_host and not is_watched  # no rule would say that it is short
    if worst is not None and is_unwatched and (worst.free_bytes or 0) < _UNWATCHED_BYTES:
        return Judged("short", "in_use", f"{has_free_text(report, worst)}, and no rule watches it.")
    seconds = growth.seconds_to_full
    if seconds is not None and seconds <= SOON_SECONDS and worst is not None:
        filling = _first_full(report)
        rank = next((one for one in report.ranks if filling is not None and one.key == filling.key), worst)
        pace = f" by {gib_text(filling.bytes_per_second)}/s" if filling and filling.bytes_per_second else ""
        what = f": {_title(growth.component)} grows{pace}" if growth.component is not None else ""
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
    pressure, rank = _pressed(report), _decisive(report)
    lacks = next((f" ({brief(rule.reason)})" for rule in rules_of(report) if rule.phase in _OVER and rule.reason), "")
    if pressure is not None and pressure.short_bytes:
        lacks = f", {gib_text(pressure.short_bytes)} too little"
    free = has_free_text(report, rank) if rank is not None else "Memory is short"
    if pressure is not None and all(one.key != pressure.key for one in report.ranks):
        text = f"{capital(pressure.name)} was short when it was last read, and is not read now. {free}."
        return Judged(state, "ranks_missing", text)
    outside, when, other = _outside(report, rank)
    policy, gain = report.policy, 0  # what can be given back there without failing a request
    if rank is not None and not rank.device.traits.is_host_memory:
        gain = (rank.releasable_bytes or 0) + (rank.trimmable_bytes or 0)
    there = " there" if len(report.ranks) > 1 else ""
    if outside >= max(NOTABLE_BYTES, 0 if pressure is None else pressure.short_bytes or 0):
        who = other or "another process, or a library"
        text = f"{free}{lacks}. Outside vLLM +{gib_text(outside)} {when}: {who}."
        return Judged(state, "outside" if other is None else "neighbour", text)
    if policy is not None and policy.mode == "observe":
        return Judged(state, "observe", f"{free}{lacks}, and Highwater only watches.")
    if gain >= NOTABLE_BYTES or (pressure is not None and gain >= (pressure.short_bytes or 1)):
        only = "only " if pressure is not None and gain < (pressure.short_bytes or 0) else ""
        return Judged(state, "releasable", f"{free}{lacks}; {only}{gib_text(gain)} can be given back{there}.")
    recent = report.growth.recent
    is_there = recent is not None and rank is not None and recent.key == rank.key
    used = f": {_title(recent.component)} {_in_time(recent.bytes, recent.seconds)}" if recent and is_there else ""
    least = f"only {gib_text(gain)}" if gain >= MIB else "nothing"
    return Judged(state, "in_use", f"{free}{lacks}. It is in use{used}; {least} can be given back{there}.")


def kept_up(report: Report) -> Judged | None:
    acts = _reliefs(report)
    if not _is_given_back(report) or not acts:
        return None
    spans = [later.at - earlier.at for later, earlier in pairwise(acts)]
    every = report.growth.refill_seconds or sum(spans) / len(spans)
    sizes = [act.freed_bytes for act in acts if act.freed_bytes]
    each = f", {_a_rank(sum(sizes) / len(sizes), report)} each time" if sizes else ""
    text = f"{free_text(report)}; it fills about every {span_text(every)} and is given back{each}."
    return Judged("keeps_up", "relief", text)


def fine(report: Report) -> Judged:
    # Where memory goes from here, on the rank with the least free.
    growth, worst, filling = report.growth, worst_rank(report), _first_full(report)
    of_worst, course = _growth_of(report, worst), ""
    if growth.seconds_to_full is not None:
        is_other = filling is not None and worst is not None and filling.key != worst.key
        first = f"{filling.name} is full first," if filling is not None and is_other else "full"
        course = f"; {first} in {span_text(growth.seconds_to_full)} at this pace"
    elif of_worst is not None and of_worst.cache_room_bytes:
        course = f"; the encoder cache grows up to its budget, {gib_text(of_worst.cache_room_bytes)} more"
    elif growth.ranks and all(one.bytes_per_second == 0 for one in growth.ranks):
        has_grown = grew(report) is not None or any(_outside(report, rank)[0] >= NOTABLE_BYTES for rank in report.ranks)
        course = "" if has_grown else "; nothing grows"
    free = free_text(report)
    last = next(iter(() if report.policy is None else report.policy.acts), None)
    acted = ""
    if last is not None and report.now is not None:
        gave = f" and gave back {_a_rank(last.freed_bytes, report)}" if last.freed_bytes else ""
        acted = f" Highwater last acted {span_text(max(report.now - last.at, 0.0))} ago{gave}."
    engine = report.engine
    busy = f"The engine is busy: {brief(engine.hint)}. " if engine.state == "busy" and engine.hint else ""
    memory = f"{free}{course}." if free else "The engine is ready; what is free is not known."
    fullest = max(report.ranks, key=lambda rank: _outside(report, rank)[0], default=None)
    outside, when, other = _outside(report, fullest)
    if fullest is None or outside < _OUTSIDE_BYTES:
        return Judged("fine", "none", f"{busy}{memory}{acted}")
    of_rank, who = _of_rank(fullest, report), f": {other}" if other else ""
    text = f"Outside vLLM +{gib_text(outside)}{of_rank} {when}{who}."
    return Judged("fine", "grown_outside", f"{busy}{memory} {text}")


# --- figures ---


def _pressed(report: Report) -> RankPressure | None:
    """Return the rank that is short of most, by whatever rule."""
    ranks = [rank for rule in rules_of(report) for rank in rule.short_ranks]
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
    return bool(over) and all(
        rule.phase == "acting" or (rule.phase == "short" and rule.hindrance is None) for rule in over
    )


def _decisive(report: Report) -> RankReading | None:
    """Return the rank that decides: the one that is short of most, else the one with the least free."""
    pressure = _pressed(report)
    return next((one for one in report.ranks if pressure is not None and one.key == pressure.key), worst_rank(report))


def _a_rank(size: float, report: Report) -> str:
    """Return a sum over all ranks as what it is on each, about: beside one device's free memory a sum misleads."""
    count = max(len(report.ranks), 1)
    return gib_text(size) if count == 1 else f"{gib_text(size / count)} a rank"


def _of_rank(rank: RankReading | RecentGrowth, report: Report) -> str:
    return f" on {rank.name}" if len(report.ranks) > 1 else ""


def _growth_of(report: Report, rank: RankReading | None) -> RankGrowth | None:
    return next((one for one in report.growth.ranks if rank is not None and one.key == rank.key), None)


def _first_full(report: Report) -> RankGrowth | None:
    """Return the rank that is full first; ``None`` where none is foretold to be."""
    ending = [one for one in report.growth.ranks if one.seconds_to_full is not None]
    return min(ending, key=lambda one: one.seconds_to_full or 0.0, default=None)


def _outside(report: Report, rank: RankReading | None) -> tuple[int, str, str | None]:
    """Return by how much what is outside PyTorch has grown on a rank, since when, and who holds it.

    Since the engine was ready; where that is not known, within the last minutes.
    """
    growth, recent = _growth_of(report, rank), report.growth.recent
    if rank is None or rank.device.traits.is_host_memory:
        return 0, "", None
    if growth is not None and growth.grown is not None:
        return growth.grown.non_torch_bytes or 0, f"since it was ready{_ready_ago(report)}", rank.shared_with
    if recent is not None and recent.key == rank.key and recent.component == "non_torch_bytes":
        return recent.bytes, f"in {whole_span_text(max(recent.seconds, 1.0))}", rank.shared_with
    return 0, "", None


def _leak(report: Report) -> SeriesGrowth | None:
    going_on = [one for one in leaks(report.growth.series) if not one.is_over]
    return min(going_on, key=lambda one: one.exhausted_at or float("inf"), default=None)


# --- what grew, what happens next, what to do ---


def _title(component: str) -> str:
    return BY_NAME[component].title


def _in_time(size: int, seconds: float) -> str:
    return f"+{gib_text(size)} in {whole_span_text(max(seconds, 1.0))}"


def grew(report: Report, *, is_outside_said: bool = False) -> str | None:
    """Return what grew; not again what is outside vLLM, where the sentence says that."""
    worst, parts = worst_rank(report), []
    recent = report.growth.recent
    if recent is not None and not (is_outside_said and recent.component == "non_torch_bytes"):
        of_rank = _of_rank(recent, report)
        other = next((one.shared_with for one in report.ranks if one.key == recent.key), None)
        is_outside = recent.component == "non_torch_bytes" and other is not None
        title = f"outside vLLM ({other})" if is_outside else _title(recent.component)
        parts.append(f"{title} {_in_time(recent.bytes, recent.seconds)}{of_rank}")
    elif (since := _grown_since_ready(report, worst, but_outside=is_outside_said)) is not None:
        parts.append(since)
    if (leak := _leak(report)) is not None:
        parts.append(leak_line(leak))
    return f"{capital('; '.join(parts))}." if parts else None


def _grown_since_ready(report: Report, worst: RankReading | None, *, but_outside: bool) -> str | None:
    growth = _growth_of(report, worst)
    if growth is None or growth.grown is None or worst is None:
        return None
    names = [name for name in COMPONENT_NAMES if not (but_outside and name == "non_torch_bytes")]
    sizes = {name: getattr(growth.grown, name) or 0 for name in names}
    most = max(sizes, key=lambda name: sizes[name])
    if sizes[most] < NOTABLE_BYTES:
        return None
    return f"{_title(most)} +{gib_text(sizes[most])}{_of_rank(worst, report)} since it was ready{_ready_ago(report)}"


def _ready_ago(report: Report) -> str:
    ready_at = report.growth.baseline_taken_at
    return f" {span_text(report.now - ready_at)} ago" if report.now is not None and ready_at is not None else ""


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
    # How much that will be depends on what nobody uses then: what could be given back now says little of it.
    at = gib_text(pressure.high_free_bytes)
    host = ""
    if report.host is not None and report.host.warnings and report.host.short is None:
        host = f" Host: {brief(report.host.warnings[0])}."
    return f"At {at} free Highwater gives back what nobody uses.{host}"


def _rule_next(rule: RuleStatus, report: Report) -> str:
    if rule.phase == "acting" and rule.reason:
        return capital(brief(rule.reason))
    if rule.phase == "held":
        return f"Nothing is given back by itself now: {brief(rule.reason or 'its signal is not known')}"
    if rule.phase == "resting" and rule.rest_until is not None and report.now is not None:
        left = span_text(max(rule.rest_until - report.now, 0.0))
        return f"Highwater tries again in {left}: {brief(rule.hindrance or '')}"
    if rule.hindrance is None:
        return "Highwater gives it back now"
    why = f": {brief(rule.hindrance)}" if rule.hindrance else ""
    return f"Highwater acts as soon as there is enough to give back{why}"


def reclaim(report: Report) -> Deed | None:
    """Return the gentlest call that gives much back, and fails no request; ``None`` where none gives much."""
    engine, rank = report.engine, _decisive(report)
    if rank is None or not engine.traits.takes_remedies or not engine.capabilities.get("collective_rpc", True):
        return None
    devices = [one for one in report.ranks if not one.device.traits.is_host_memory]
    for remedy in ("release", "trim_encoder_cache"):
        size, total = possible_bytes(remedy, [rank]) or 0, possible_bytes(remedy, devices) or 0
        is_certain = all(one.trimmable_bytes is not None for one in report.ranks) or remedy == "release"
        if min(size, total) >= NOTABLE_BYTES and is_certain:
            body = {"remedies": [remedy], "mode": "safe"}
            is_alike = abs(total - size * len(devices)) < NOTABLE_BYTES
            where = f" on each of {len(devices)} ranks" if is_alike and len(devices) > 1 else _of_rank(rank, report)
            return Deed(text=f"Reclaim {gib_text(size)}{where} now", path="memory/reclaim", body=body, bytes=total)
    return None


# --- in order: the first that applies ---

_IN_ORDER: Final[tuple[Callable[[Report], Judged | None], ...]] = (
    *(engine_verdict.ended, engine_verdict.hung, engine_verdict.starting, very_short),
    *(engine_verdict.late_or_held, engine_verdict.unread, short),
    *(engine_verdict.missing, engine_verdict.held, kept_up, fine),
)
